"""Bad input to M+ and MemoryLLM is refused by name, before any compute."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memjax.mechanisms import AttentionConfig, SlidingWindowConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.mplus.build import add_memoryllm, add_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.read import ReadOptions
from tests import tiny

B, V, D, L, K, N, C, R, M = 2, 19, 8, 2, 2, 6, 4, 3, 8
# The pool is full after three chunks; three more put six rows into the store.
T = 6 * C + 3
SIZES = ModelConfig(
    mechanisms=(AttentionConfig(D, 2, 1, 4, capacity=64),),
    num_layers=L,
    vocab_size=V,
    model_dim=D,
    hidden_dim=12,
    dtype="float32",
    tied_head=False,
    remat=False,
)
MEMORY: Any = dict(
    num_memory_tokens=K,
    pool_size=N,
    chunk_size=C,
    min_chunk_size=2,
    num_retrieved=R,
    store_size=M,
)
CONFIG = MPlusConfig(**MEMORY, key_dim=5, rank=2, alpha=4.0)
TOKENS = jax.random.randint(jax.random.key(1), (B, T), 0, V)


@functools.cache
def build(kind="mplus", **backbone):
    sizes, key = dataclasses.replace(SIZES, **backbone), jax.random.key(0)
    make = add_memoryllm if kind == "memoryllm" else add_mplus
    return tiny.drawn(lambda: make(LanguageModel(sizes, key=key), CONFIG, key=key))


NEW = jnp.zeros((B, L, K, D), jnp.float32)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda m, s: m(s, TOKENS.at[1, 3].set(V)), r"tokens must be in \[0, 19\)"),
        (lambda m, s: m(s, TOKENS.at[1, 3].set(-1)), "tokens must be in .* got -1"),
        (lambda m, s: m(s, TOKENS[:1]), "tokens must be integers .* 2 rows"),
        (lambda m, s: m(s, TOKENS[:, :0]), "T >= 1"),
        (lambda m, s: m.inject(s, TOKENS.at[1, 3].set(V)), "tokens must be in"),
        (lambda m, s: m.inject(s, TOKENS[:, :0]), "T >= 1"),
        (lambda m, s: m.compress(s, TOKENS[:, :5]), "at most chunk_size=4 .* got 5"),
        (lambda m, s: m.compress(s, TOKENS[:, :0]), "T >= 1"),
        (
            lambda m, s: m.compress(s, TOKENS[:, :4], NEW[:, :, 1:]),
            r"memory must be memory tokens \[2, 2, 2, 8\], got \[2, 2, 1, 8\]",
        ),
        (lambda m, s: m.update(s, NEW[:1]), "new must be memory tokens"),
        (lambda m, s: m.read(s, TOKENS.at[0, 0].set(V)), "tokens must be in"),
        (
            lambda m, s: m.read(s, TOKENS[:, :3], ReadOptions(prompt_length=0)),
            r"prompt_length must be in \[1, T=3",
        ),
        (
            lambda m, s: m.read(s, TOKENS[:, :3], ReadOptions(prompt_length=4)),
            "prompt_length must be .* got 4",
        ),
        (
            lambda m, s: m.read(s, TOKENS[:, :3], ReadOptions(max_new_tokens=-1)),
            "max_new_tokens must be at least 0",
        ),
        (
            lambda m, s: m.read(s, TOKENS[:, :3], ReadOptions(beside_pool=True)),
            "needs new memory",
        ),
        (
            lambda m, s: m.read(s, TOKENS[:, :3], ReadOptions(new=NEW[:, :1])),
            "new must be memory tokens",
        ),
        (
            lambda m, s: m.read(
                s,
                TOKENS[:, :3],
                ReadOptions(new=jnp.zeros((B, L, N + 1, D), jnp.float32)),
            ),
            "new must have 1 to N=6 rows, got 7",
        ),
        (
            lambda m, s: m.read(
                s,
                TOKENS[:, :3],
                ReadOptions(new=NEW, kept_rows=jnp.zeros((B, L, N - K), jnp.int32)),
            ),
            "kept_rows must be .* with beside_pool",
        ),
        (
            lambda m, s: m.read(
                s,
                TOKENS[:, :3],
                ReadOptions(NEW, True, jnp.zeros((B, L, N), jnp.int32)),
            ),
            r"kept_rows must be \[B, L, N - n\] = \[2, 2, 4\]",
        ),
        (
            lambda m, s: m.generate(s, TOKENS[:, :3], 0, key=jax.random.key(0)),
            "max_new_tokens must be at least 1",
        ),
        (
            lambda m, s: m.generate(s, TOKENS + V, 2, key=jax.random.key(0)),
            "tokens must be in",
        ),
    ],
)
def test_every_bad_input_is_refused(call, message):
    model = build()
    with pytest.raises(ValueError, match=message):
        call(model, model.init_state(B))


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(num_memory_tokens=0), "num_memory_tokens must be at least 1, got 0"),
        (
            dict(pool_size=7),
            "pool_size must be a multiple of num_memory_tokens=2, got 7",
        ),
        (dict(chunk_size=1), "chunk_size must be at least num_memory_tokens=2, got 1"),
        (
            dict(min_chunk_size=5),
            r"min_chunk_size must be in \[1, chunk_size=4\], got 5",
        ),
        (dict(min_chunk_size=0), "min_chunk_size must be at least 1, got 0"),
        (dict(num_retrieved=-1), "num_retrieved must be at least 0, got -1"),
        (dict(store_size=2), "store_size must be at least 3"),
        (dict(legacy=True), "store_size must be at least 1200"),
        (dict(key_dim=0), "key_dim must be at least 1"),
        (dict(rank=0), "rank must be at least 1"),
        (dict(alpha=0.0), "alpha must be positive, got 0.0"),
        (dict(decay=float("nan")), "decay must be positive, got nan"),
        (dict(recalls=float("inf")), "recalls must be positive, got inf"),
        (dict(merge_every=0), "merge_every must be at least 1"),
    ],
)
def test_every_bad_size_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **options)


def test_other_backbones_are_refused():
    windows = SlidingWindowConfig(**vars(SIZES.heads), window=4)
    sizes = dataclasses.replace(
        SIZES, mechanisms=(*SIZES.mechanisms, windows), num_layers=2
    )
    plain = tiny.drawn(lambda: LanguageModel(sizes, key=jax.random.key(0)))
    with pytest.raises(
        ValueError, match="attention in every layer.*SlidingWindowConfig"
    ):
        add_mplus(plain, CONFIG, key=jax.random.key(0))
