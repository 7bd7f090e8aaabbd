"""The implementations of M+ that are timed: ours and the authors'.

Weights are random, and so is the initial memory.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.hmt.speed.implementations import backbone_config
from experiments.hmt.speed.operations import Shape
from experiments.mplus.speed import official
from memjax.models import LanguageModel
from memjax.models.mplus import store as long_term_store
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.read import ReadOptions
from memjax.models.mplus.state import LayerStore, MPlusState

Implementation = Literal["official", "official_fused", "ours"]
# The attention that the authors' program is run with.
ATTENTION: dict[str, Literal["eager", "sdpa"]] = {
    "official": "eager",
    "official_fused": "sdpa",
}
Part = Literal["rounds", "growth", "search"]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Sizes of a memory, as in `MPlusConfig`; the defaults are the paper's.

    Attributes:
        store: memory tokens in the long-term store, and those dropped since the last
            merge.
        merge_every: updates between two merges of the authors' program.
    """

    tokens: int = 256
    chunk: int = 512
    pool: int = 10_240
    retrieved: int = 2_560
    store: int = 153_600
    key_dim: int = 256
    merge_every: int = 60

    def merging(self, held: int) -> "Merging":
        """What makes each merge of the authors' program drop the oldest of `held` rows.

        A store then stays as large as it is; one that is empty grows.
        """
        batch = self.merge_every * self.tokens
        ages = np.arange(held)[::-1]
        merges = -(-held // batch) or 10**9
        recalls = (merges - ages // batch).astype(float)
        return Merging(merges + 1.0, ages + self.pool, recalls)

    @property
    def config(self) -> MPlusConfig:
        """Ours, with as many rows."""
        fields = dataclasses.asdict(self)
        del fields["merge_every"]
        return MPlusConfig(**fields)


class Merging(NamedTuple):
    """Ages and recall frequencies of a store's rows, for programs that merge.

    Attributes:
        first_recalls: of a row when it is merged.
        ages: of the rows held.
        recalls: what is left to each of them.
    """

    first_recalls: float
    ages: np.ndarray
    recalls: np.ndarray


class Subject(NamedTuple):
    """What can be timed of an implementation; each returns when it is done.

    Attributes:
        inject: writes tokens [1, T], whole chunks.
        read: logits of tokens [1, T] that follow the memory.
        search: one layer's retrieval for queries [T, key_dim].
    """

    inject: Callable[[np.ndarray], None]
    read: Callable[[np.ndarray], None]
    search: Callable[[np.ndarray], None]


def filled(state: MPlusState, held: int) -> MPlusState:
    """The state of one text, its pool full and `held` rows in its store, all random."""
    random = np.random.default_rng(0)
    normal = lambda x: jnp.asarray(random.standard_normal(x.shape, np.float32))
    store, rows = state.store, state.pool.shape[2]
    assert store is not None

    def layer(old):
        # Every layer has its own, so that all can be donated.
        born = jnp.arange(old.born.shape[1], dtype=jnp.int32)[None] - (held + rows - 1)
        new = LayerStore(normal(old.rows), normal(old.keys), born)
        # Or the peak of the memory would be that of both.
        jax.tree.map(lambda x: x.delete(), old)
        return new

    ages = jnp.arange(rows - 1, -1, -1, dtype=jnp.int32)[None, None]
    return state._replace(
        pool=normal(state.pool),
        ages=jnp.broadcast_to(ages, state.ages.shape),
        num_valid=jnp.full_like(state.num_valid, rows),
        store=store._replace(
            layers=tuple(map(layer, store.layers)),
            num_valid=jnp.full_like(store.num_valid, held),
        ),
    )


def ours(shape: Shape, memory: Memory, held: int) -> Subject:
    """Our model, `held` rows in its store; compiled when it is first called."""
    config = memory.config
    backbone = LanguageModel(backbone_config(shape), key=jax.random.key(0))
    model = add_mplus(backbone, config, key=jax.random.key(1))
    graph, params = nnx.split(model)
    merged: Callable[[Any], MPlus] = lambda params: nnx.merge(graph, params)
    holder = [filled(model.init_state(1), held)]
    inject = jax.jit(lambda p, s, ids: merged(p).inject(s, ids), donate_argnums=1)

    def read_all(p, s, ids):
        # As in the authors' program, every token takes part in the search.
        options = ReadOptions(prompt_length=ids.shape[1])
        return merged(p).read(s, ids, options)[1]

    read = jax.jit(read_all)

    def search(s, queries):
        mask = jnp.ones(queries.shape[:2], bool)
        found = long_term_store.retrieve(config, s.store, 0, queries, mask)
        return found.rows

    search = jax.jit(search)

    def inject_all(ids):
        holder[0] = jax.block_until_ready(inject(params, holder[0], jnp.asarray(ids)))

    return Subject(
        inject_all,
        lambda ids: jax.block_until_ready(read(params, holder[0], jnp.asarray(ids))),
        lambda queries: jax.block_until_ready(search(holder[0], queries[None])),
    )


def authors(
    checkout: pathlib.Path,
    attention: Literal["eager", "sdpa"],
    shape: Shape,
    memory: Memory,
    held: int,
) -> Subject:
    """The authors' program, `held` rows in its store; after a search nothing else."""
    # Optional, and no other implementation's process should load it.
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = official.build(checkout, attention, shape, memory, held)
    long = lambda ids: torch.from_numpy(ids).long()

    def inject(ids):
        with torch.no_grad():
            for start in range(0, ids.shape[1], memory.chunk):
                chunk = long(ids[:, start : start + memory.chunk])
                model.inject_memory(chunk, update_memory=True)

    def read(ids):
        with torch.no_grad():
            model(input_ids=long(ids), use_cache=True, return_dict=True)

    def search(queries):
        layer = model.model.layers[0]
        # It makes the queries itself: let it make them of themselves.
        layer.input_layernorm = layer.self_attn.query_proj = torch.nn.Identity()
        model.get_ltm(0, torch.from_numpy(queries)[None])

    return Subject(inject, read, search)


def make(
    implementation: Implementation,
    part: Part,
    shape: Shape,
    memory: Memory,
    chunks: int,
    prompt: int,
    checkout: pathlib.Path | None = None,
) -> Callable[[], dict[str, float]]:
    """A round of an implementation, which returns the seconds of each act in it."""
    held = 0 if part == "growth" else memory.store
    if implementation == "ours":
        subject = ours(shape, memory, held)
    else:
        if part == "rounds":
            # The rows dropped since the last merge wait beside the store.
            held -= memory.merge_every * memory.tokens
        assert checkout is not None
        attention = ATTENTION[implementation]
        subject = authors(checkout, attention, shape, memory, held)
    random = np.random.default_rng(1)
    tokens = lambda t: random.integers(0, shape.vocab, (1, t), dtype=np.int32)
    if part == "rounds":
        text, question = tokens(chunks * memory.chunk), tokens(prompt)
        acts = {
            "inject": lambda: subject.inject(text),
            "read": lambda: subject.read(question),
        }
    elif part == "growth":
        chunk = tokens(memory.chunk)
        acts = {"inject": lambda: subject.inject(chunk)}
    else:
        queries = random.standard_normal((prompt, memory.key_dim), np.float32)
        acts = {"search": lambda: subject.search(queries)}
    return lambda: {name: _seconds(act) for name, act in acts.items()}


def _seconds(act: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin
