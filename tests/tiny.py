"""One tiny Llama, and what tests draw and compare: shapes and programs are shared.

Everything is made when it is first asked for, never when a test module is imported.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from jaxtyping import Array, PyTree

from memjax.data.documents.tokenizer import JsonTokenizer, parse_tokenizer
from memjax.mechanisms import AttentionConfig
from memjax.models import (
    HMTConfig,
    LanguageModel,
    ModelConfig,
    MPlusConfig,
    ReReadWindow,
    add_hmt,
    add_mplus,
    add_rmt,
)

LLAMA = ModelConfig(
    mechanisms=(AttentionConfig(16, 4, 2, 4, capacity=64),),
    num_layers=2,
    vocab_size=31,
    model_dim=16,
    hidden_dim=24,
    tied_head=False,
    dtype="float32",
    remat=False,
)
HMT = HMTConfig(segment_length=4, num_sensory_tokens=1, num_memories=3)
MPLUS = MPlusConfig(
    num_memory_tokens=2,
    pool_size=4,
    chunk_size=4,
    min_chunk_size=1,
    num_retrieved=2,
    store_size=8,
    key_dim=2,
    rank=2,
)


def make_config(vocab_size: int, capacity: int, num_layers: int = 2) -> ModelConfig:
    """A tiny model whose two query heads share their keys and values."""
    return dataclasses.replace(
        LLAMA,
        mechanisms=(AttentionConfig(16, 2, 1, 8, capacity=capacity),),
        num_layers=num_layers,
        vocab_size=vocab_size,
        hidden_dim=16,
        tied_head=True,
    )


def make_llama(**changes: Any) -> LanguageModel:
    """The tiny Llama, with these changes of its config, anew: for `drawn`."""
    return LanguageModel(dataclasses.replace(LLAMA, **changes), key=jax.random.key(0))


@functools.cache
def llama(**changes: Any) -> LanguageModel:
    """The tiny Llama, with these changes of its config; do not change it in place."""
    return drawn(lambda: make_llama(**changes))


def make_model(kind: str, *, hmt: HMTConfig = HMT, **changes: Any) -> Any:
    """A model of each kind around the tiny Llama with these changes of its config."""
    backbone, key = make_llama(**changes), jax.random.key(1)
    match kind:
        case "language model":
            return backbone
        case "hmt":
            return add_hmt(backbone, hmt, key=key)
        case "rmt":
            return add_rmt(backbone, 4, key=key)
        case "reread":
            return ReReadWindow(backbone, reread=5, segment=4)
        case "mplus":
            return add_mplus(backbone, MPLUS, key=key)
        case _:
            raise ValueError(f"no model of kind {kind!r}")


def drawn(make: Callable[[], Any], seed: int = 0) -> Any:
    """The model of `make`, with parameters drawn by numpy, which compiles nothing.

    Vectors, as the scales of norms, are about 1; matrices are scaled by all their axes
    but the last. No part begins as no change at all, as adapters otherwise do.
    """
    graph, variables = nnx.split(nnx.eval_shape(make))

    def number(path, x):
        # By its name: models that share parts have the same parameters there.
        name = zlib.crc32(jax.tree_util.keystr(path).encode())
        normal = np.random.default_rng([seed, name]).standard_normal(x.shape)
        scale = np.prod(x.shape[:-1]) ** -0.5
        return jnp.asarray(1 + 0.1 * normal if x.ndim == 1 else scale * normal, x.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(number, variables))


@functools.cache
def tokenizer(size: int = 27, eos: str = "<end>") -> JsonTokenizer:
    """Letters as tokens, behind `eos` as 0; further ids up to `size` are numbers."""
    letters = [chr(ord("a") + i) for i in range(26)]
    names = [eos, *letters, *map(str, range(size))][:size]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [])
    )
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens([eos])
    return parse_tokenizer(made.to_str().encode(), "tiny")


def parameters(model: nnx.Module) -> PyTree:
    """The parameters of a model, as a tree of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def draw(seed: int, *shape: int) -> Array:
    """Normal numbers, of numpy: to draw by jax compiles a program for each shape."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def tokens(seed: int, batch: int, length: int) -> Array:
    """Tokens of the tiny Llama's vocabulary, [batch, length]."""
    drawn = np.random.default_rng(seed).integers(0, LLAMA.vocab_size, (batch, length))
    return jnp.asarray(drawn, jnp.int32)


def method(model: Any, name: str, *args: Any) -> Any:
    """`model.<name>(*args)` in a compiled program: eagerly each operation is one."""
    graph, variables = nnx.split(model)
    return _method(graph, name, variables, *args)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _method(graph, name, variables, *args):
    return getattr(nnx.merge(graph, variables), name)(*args)


def assert_close(found: PyTree, expected: PyTree, tolerance: float = 1e-5) -> None:
    """Equal trees, numbers up to the tolerance, absolute and relative."""
    chex.assert_trees_all_close(found, expected, atol=tolerance, rtol=tolerance)


def assert_equal(found: PyTree, expected: PyTree) -> None:
    """Equal trees, bit by bit."""
    chex.assert_trees_all_equal(found, expected)
