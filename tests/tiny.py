"""One tiny Llama, and what tests draw and compare: shapes and programs are shared.

Everything is made when it is first asked for, never when a test module is imported.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig

LLAMA = ModelConfig(
    mixers=(AttentionConfig(16, 4, 2, 4, capacity=64),),
    num_layers=2,
    vocab_size=31,
    model_dim=16,
    hidden_dim=24,
    tied_head=False,
    dtype="float32",
    remat=False,
)


@functools.cache
def llama(**changes: Any) -> LanguageModel:
    """The tiny Llama, with these changes of its config; do not change it in place."""
    return LanguageModel(dataclasses.replace(LLAMA, **changes), key=jax.random.key(0))


def draw(seed: int, *shape: int) -> Array:
    """Normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape)


def tokens(seed: int, batch: int, length: int) -> Array:
    """Tokens of the tiny Llama's vocabulary, [batch, length]."""
    key = jax.random.key(seed)
    return jax.random.randint(key, (batch, length), 0, LLAMA.vocab_size, jnp.int32)


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
