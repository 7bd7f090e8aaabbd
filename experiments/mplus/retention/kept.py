"""Which tokens does SnapKV keep? Does it do more than drop the oldest?

    python -m experiments.mplus.retention.kept

Facts are injected as in `knowledge_retention`, and after every chunk the positions are
counted that are left in the cache: of every chunk, and of the sentence with the answer.
It is done twice. "streamed" compresses the cache behind every chunk, whose last tokens
vote, as a memory of bounded size has to. "question" keeps everything until the question
is asked, whose tokens vote, as SnapKV is published: full attention's memory until then.
A choice at random would keep the share of all tokens that has room.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Array, Float64, Int

from experiments.lab.results import RESULTS, settings, show, write_report
from experiments.mplus.retention import models
from experiments.mplus.retention.config import Config as RetentionConfig
from experiments.mplus.retention.samples import Samples, make_samples
from memjax.checks import check_sizes
from memjax.mechanisms import Mechanism
from memjax.mechanisms.attention import AttentionState
from memjax.mechanisms.base import reset
from memjax.models import LanguageModel
from memjax.models.language_model.rebuilt import with_mechanisms
from memjax.models.language_model.snapkv import SnapKVConfig, compact, vote
from memjax.models.language_model.windowed import with_capacity


@dataclasses.dataclass(frozen=True)
class Config:
    """What is counted.

    Attributes:
        backbone: "smollm2", or what `memjax finetune` takes as a backbone.
        cache: tokens of the cache, with the chunk that is read.
        window: last tokens that vote.
        samples: facts, a multiple of `batch`.
        batch: facts side by side.
        after: count after these numbers of chunks, rising.
        chunk: tokens of a chunk.
        seed: of the draws.
        output: where .json goes, without the ending.
    """

    backbone: str = "smollm2"
    cache: int = 2785
    window: int = 32
    samples: int = 8
    batch: int = 4
    after: tuple[int, ...] = (0, 4, 8, 12)
    chunk: int = 512
    seed: int = 0
    output: Path = RESULTS / "mplus" / "snapkv_kept"

    def __post_init__(self):
        check_sizes(batch=self.batch, chunk=self.chunk, window=self.window)
        # The rest is refused as there.
        RetentionConfig(after=self.after, samples=self.samples)


class Tracked(NamedTuple):
    """A cache, and where its tokens stood in the text.

    Attributes:
        cache: of attention.
        origins: position in the text of each slot's token.
        length: tokens read.
    """

    cache: AttentionState
    origins: Int[Array, "B S G"]
    length: Int[Array, " B"]


def main(config: Config) -> None:
    """Reads, counts, prints and writes."""
    found = RetentionConfig(backbone=config.backbone, split="test")
    model, tokenizer, _ = models.load(found)
    batches = make_samples(
        models.facts_of(found),
        models.passages(found),
        tokenizer,
        samples=config.samples,
        batch=config.batch,
        num_chunks=config.after[-1],
        chunk=config.chunk,
        lengths=1,
        seed=config.seed,
    )
    snapkv = SnapKVConfig(config.cache - config.chunk, config.chunk, config.window)
    rows = {
        "streamed": [
            streamed(model.backbone, b, snapkv, config.after) for b in batches
        ],
        "question": [asked(model.backbone, b, snapkv, config.after) for b in batches],
    }
    means = {name: np.mean(found, axis=0) for name, found in rows.items()}
    tokens = config.chunk * (np.asarray(config.after) + 1)
    room = np.minimum(1.0, snapkv.keep / tokens)
    results = {
        "keep": snapkv.keep,
        "distances": [config.chunk * count for count in config.after],
        "share_at_random": room.tolist(),
        "answer_sentence": {name: x[:, 0].tolist() for name, x in means.items()},
        "fact_chunk": {name: x[:, 1].tolist() for name, x in means.items()},
        "newest_chunk": {name: x[:, 2].tolist() for name, x in means.items()},
    }
    question = "which tokens does SnapKV keep?"
    write_report(config.output, question, settings(config), results)
    shown = {"at random": results["share_at_random"]} | {
        f"{part}, {name}": results[part][name]
        for part in ("answer_sentence", "fact_chunk", "newest_chunk")
        for name in rows
    }
    columns = [f"{distance:,}" for distance in results["distances"]]
    show("Share of tokens kept, of each head of each layer", columns, shown)


def streamed(
    backbone: LanguageModel,
    batch: Samples,
    config: SnapKVConfig,
    after: tuple[int, ...],
) -> Float64[np.ndarray, "n 3"]:
    """Shares kept where the cache is compressed behind every chunk.

    Returns:
        After each of these numbers of chunks, of the answer's sentence, of the chunk
        with the fact and of the newest chunk, the mean over facts, layers and heads.
    """
    model = tracking(backbone, config, config.keep + config.room)
    state, shares = _empty(model, len(batch.facts)), []
    for count, chunk in enumerate([batch.context, *batch.chunks][: after[-1] + 1]):
        state = _read(*nnx.split(model), state, jnp.asarray(chunk))
        if count in after:
            shares.append(_shares(state, batch, count))
    return np.stack(shares)


def asked(
    backbone: LanguageModel,
    batch: Samples,
    config: SnapKVConfig,
    after: tuple[int, ...],
) -> Float64[np.ndarray, "n 3"]:
    """Shares kept where all is kept until the question votes; as `streamed`."""
    prompt = jnp.asarray(batch.prompts)
    chunk = batch.context.shape[1]
    # The question's own tokens are kept besides, all of which vote.
    tokens = prompt.shape[1]
    size = dataclasses.replace(config, keep=config.keep + tokens, window=tokens)
    # Room for everything, so that nothing is compressed before.
    everything = dataclasses.replace(config, keep=chunk * (after[-1] + 1), room=chunk)
    shares = []
    capacity = everything.keep + everything.room
    keeping, choosing = (tracking(backbone, x, capacity) for x in (everything, size))
    state = _empty(keeping, len(batch.facts))
    for count, text in enumerate([batch.context, *batch.chunks][: after[-1] + 1]):
        state = _read(*nnx.split(keeping), state, jnp.asarray(text))
        if count in after:
            copied = jax.tree.map(jnp.copy, state)
            end = _read(*nnx.split(choosing), copied, prompt)
            shares.append(_shares(end, batch, count))
    return np.stack(shares)


def tracking(
    backbone: LanguageModel, config: SnapKVConfig, capacity: int
) -> LanguageModel:
    """The backbone with SnapKV's cache, whose state says which tokens it has."""
    model = with_capacity(backbone, capacity)
    layers = zip(model.blocks, model.config.layers, strict=True)
    built = [_tracking(block.functions, heads, config) for block, heads in layers]
    return with_mechanisms(model, model.config, built)


def _tracking(attention: Mechanism, heads: Any, config: SnapKVConfig) -> Mechanism:
    def init_state(batch):
        empty = attention.init_state(batch)
        origins = jnp.zeros(empty.visible.shape + (heads.num_kv_heads,), jnp.int32)
        return Tracked(empty, origins, jnp.zeros(batch, jnp.int32))

    def apply(params, state, x):
        at = state.cache.length
        cache, y = attention.apply(params, state.cache, x)
        new = state.length[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        new = jnp.broadcast_to(new[..., None], (*new.shape, heads.num_kv_heads))
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        origins = jax.vmap(put)(state.origins, new, at)
        slots = vote(heads, params, config, cache, x)
        chosen = jnp.take_along_axis(origins, slots, axis=1)
        fill = ((0, 0), (0, origins.shape[1] - chosen.shape[1]), (0, 0))
        small = Tracked(compact(heads, cache, slots), jnp.pad(chosen, fill), at)
        longer = cache.length > config.keep
        kept = reset(Tracked(cache, origins, at), small, longer)
        return kept._replace(length=state.length + x.shape[1]), y

    return attention._replace(
        init_state=init_state, apply=apply, apply_masked=None, cache=None, can_pad=False
    )


def _empty(model: LanguageModel, batch: int) -> tuple[Tracked, ...]:
    return tuple(block.functions.init_state(batch) for block in model.blocks)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read(graph, params, state, tokens):
    model = nnx.merge(graph, params)
    return model.read(state, model.embed(tokens))[0]


def _shares(state, batch, count) -> Float64[np.ndarray, " 3"]:
    """Of the answer's sentence, the fact's chunk and the newest; see `streamed`."""
    chunk = batch.context.shape[1]
    last = count * chunk
    shares = []
    for layer in state:
        held = int(layer.cache.length[0])
        origins = np.asarray(layer.origins[:, :held])
        for row, (begin, end) in enumerate(batch.answers):
            spans = ((begin, end), (0, chunk), (last, last + chunk))
            shares.append(
                [
                    ((origins[row] >= a) & (origins[row] < b)).sum()
                    / ((b - a) * origins.shape[2])
                    for a, b in spans
                ]
            )
    return np.mean(shares, axis=0)


if __name__ == "__main__":
    main(tyro.cli(Config))
