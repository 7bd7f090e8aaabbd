"""The law that every mechanism keeps. A new mechanism joins by one row below."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax import mechanisms
from memjax.mechanisms import (
    ABCConfig,
    AttentionConfig,
    DeltaNetConfig,
    ElasticMemoryConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    GSAConfig,
    LatticeConfig,
    LinearAttentionConfig,
    Mamba2Config,
    MixerConfig,
    SlidingWindowConfig,
    TrellisConfig,
    TTTLinearConfig,
)

B, T, D = 2, 9, 16
HEADS: dict[str, Any] = dict(model_dim=D, num_heads=4, num_kv_heads=2, head_dim=4)
BLOCK: dict[str, Any] = dict(model_dim=D, num_heads=2, key_dim=4, value_dim=6)
CONFIGS: dict[str, MixerConfig] = {
    "attention": AttentionConfig(**HEADS, capacity=T + 1),
    "attention_full": AttentionConfig(**HEADS, capacity=T),
    "elastic_memory": ElasticMemoryConfig(**HEADS, block=4, order=6),
    "elastic_memory_bank": ElasticMemoryConfig(
        **HEADS,
        block=3,
        order=6,
        bank_blocks=3,
        sampling="exponential",
        positions="stream",
    ),
    "sliding_window": SlidingWindowConfig(**HEADS, window=4),
    "linear_attention": LinearAttentionConfig(**BLOCK),
    "mamba2": Mamba2Config(**BLOCK),
    "gla": GLAConfig(**BLOCK),
    "deltanet": DeltaNetConfig(**BLOCK),
    "gated_deltanet": GatedDeltaNetConfig(**BLOCK),
    "gsa": GSAConfig(**BLOCK, slots=5),
    "abc": ABCConfig(**BLOCK, slots=5),
    "ttt_linear": TTTLinearConfig(D, 2, key_dim=6, value_dim=6, chunk_size=4),
    "trellis": TrellisConfig(**BLOCK, slots=5, chunk_size=4),
    "trellis_nonlinear": TrellisConfig(
        **BLOCK,
        slots=5,
        chunk_size=1,
        phi="softmax",
        activation="softmax",
        forget=False,
        shared_gates=False,
    ),
    "lattice": LatticeConfig(**BLOCK, chunk_size=4),
    "lattice_unnormalised": LatticeConfig(
        **BLOCK, variant="enc", chunk_size=4, normalize=False, forget="l2"
    ),
    "lattice_sparse": LatticeConfig(**BLOCK, variant="sim", chunk_size=1, forget="l1"),
}
# Other options of mechanisms that have a row: not among the fast tests.
VARIANTS = (
    "attention_full",
    "elastic_memory_bank",
    "trellis_nonlinear",
    "lattice_unnormalised",
    "lattice_sparse",
)
ROWS = [
    pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name
    for name in CONFIGS
]


def make_case(config):
    """The mechanism, jitted once for all tests of a shape; its params, state and x."""
    mechanism = config.build()
    mechanism = mechanism._replace(
        step=jax.jit(mechanism.step), apply=jax.jit(mechanism.apply)
    )
    params = mechanism.init_params(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (B, T, D))
    return mechanism, params, mechanism.init_state(B), x


def make_stepped(case):
    """The states before and after every token, and the outputs."""
    mechanism, params, state, x = case
    states, outputs = [state], []
    for t in range(T):
        state, y = mechanism.step(params, state, x[:, t])
        states.append(state)
        outputs.append(y)
    return states, jnp.stack(outputs, axis=1)


@pytest.fixture(params=ROWS, name="case", scope="module")
def _case(request):
    return make_case(CONFIGS[request.param])


@pytest.fixture(name="stepped", scope="module")
def _stepped(case):
    return make_stepped(case)


def run_steps(mechanism, params, state, x):
    outputs = []
    for t in range(x.shape[1]):
        state, y = mechanism.step(params, state, x[:, t])
        outputs.append(y)
    return state, jnp.stack(outputs, axis=1)


def assert_close(a, b, tolerance=1e-5):
    chex.assert_trees_all_close(a, b, rtol=tolerance, atol=tolerance)


def test_apply_equals_steps(case, stepped):
    mechanism, params, state, x = case
    states, y = stepped
    assert_close(mechanism.apply(params, state, x), (states[-1], y))


@pytest.mark.parametrize("length", [1, 4])
def test_apply_takes_over_at_every_token(case, stepped, length):
    """So that any split of a sequence gives what its steps give.

    Few lengths, because each is a compilation; all places in a block or a chunk.
    """
    mechanism, params, _, x = case
    states, y = stepped
    for t in range(T - length + 1):
        result = mechanism.apply(params, states[t], x[:, t : t + length])
        assert_close(result, (states[t + length], y[:, t : t + length]))


def test_no_reading_ahead(case):
    mechanism, params, state, x = case
    _, y = mechanism.apply(params, state, x)
    _, changed = mechanism.apply(params, state, x.at[:, 6].add(1.0))
    np.testing.assert_array_equal(y[:, :6], changed[:, :6])
    assert not np.allclose(y[:, 6:], changed[:, 6:])


def test_a_token_is_not_forgotten_at_once(case):
    mechanism, params, state, x = case
    _, y = mechanism.apply(params, state, x)
    for at in range(T - 4, T):
        _, changed = mechanism.apply(params, state, x.at[:, at].add(1.0))
        assert np.all(np.abs(y[:, -1] - changed[:, -1]).max(axis=-1) > 0), at


def test_batch_rows_are_independent(case):
    mechanism, params, state, x = case
    swap = lambda leaf: leaf[::-1]
    after, y = mechanism.apply(params, state, x)
    _, changed = mechanism.apply(params, state, x.at[0].add(1.0))
    np.testing.assert_array_equal(y[1:], changed[1:])
    swapped = mechanism.apply(params, jax.tree.map(swap, state), swap(x))
    assert_close(jax.tree.map(swap, swapped), (after, y))


@pytest.mark.parametrize("at", [2, 4])
def test_reset_row_starts_afresh_and_leaves_the_other(case, stepped, at):
    mechanism, params, empty, x = case
    states, whole = stepped
    state = mechanisms.reset(states[at], empty, jnp.array([True, False]))
    rest = x[:, at : at + 4]
    after, y = mechanism.apply(params, state, rest)
    _, fresh = mechanism.apply(params, empty, rest)
    assert_close(y[0], fresh[0])
    assert_close(y[1], whole[1, at : at + 4])
    # Rows now stand at different places; steps must carry both on alike.
    assert_close(run_steps(mechanism, params, state, rest), (after, y))
    chex.assert_tree_all_finite(after)


def test_state_is_a_fixed_point_of_shape_and_float32(case):
    mechanism, params, state, x = case
    for dtype in (jnp.float32, jnp.bfloat16):
        for call, inputs in ((mechanism.apply, x), (mechanism.step, x[:, 0])):
            after, y = jax.eval_shape(call, params, state, inputs.astype(dtype))
            # Weak types too: another one would be traced again.
            assert jax.tree.map(_type, after) == jax.tree.map(_type, state)
            assert (y.shape, y.dtype) == (inputs.shape, dtype)
    floats = [
        x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert floats and all(leaf.dtype == jnp.float32 for leaf in floats)
    assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(state))


def test_bfloat16_is_close_to_float32(case):
    mechanism, params, state, x = case
    _, y = mechanism.apply(params, state, x[:, :4])
    _, low = mechanism.apply(params, state, x[:, :4].astype(jnp.bfloat16))
    error = jnp.linalg.norm(low.astype(jnp.float32) - y) / jnp.linalg.norm(y)
    assert error < 2e-2


def test_gradients_are_finite_and_those_of_steps(case, stepped):
    mechanism, params, _, x = case
    floats, rest = _split_floats(stepped[0][4])

    def loss(run, params, floats, x):
        # The first token reaches the others through the state alone.
        state, _ = mechanism.step(params, _join(floats, rest), x[:, 0])
        after, y = run(params, state, x[:, 1:])
        kept, _ = _split_floats(after)
        return (y**2).sum() + sum((leaf**2).sum() for leaf in kept if leaf is not None)

    def steps(params, state, x):
        body = lambda state, x: mechanism.step(params, state, x)
        final, y = jax.lax.scan(body, state, jnp.moveaxis(x, 1, 0))
        return final, jnp.moveaxis(y, 0, 1)

    def gradient(run):
        run = jax.jit(jax.grad(functools.partial(loss, run), argnums=(0, 1, 2)))
        return run(params, floats, x[:, 4:])

    by_apply, by_steps = gradient(mechanism.apply), gradient(steps)
    chex.assert_tree_all_finite((by_apply, by_steps))
    # Leaves of a state may be bound to each other, so of theirs only the sum counts,
    # which is in the gradient of the first token.
    assert_close((by_apply[0], by_apply[2]), (by_steps[0], by_steps[2]), 2e-4)
    assert all(np.abs(by_apply[2][:, t]).max() > 0 for t in range(T - 4))


@pytest.mark.parametrize("shape", [(B + 1, T, D), (B, T, D + 1)])
def test_input_of_another_shape_is_refused(case, shape):
    mechanism, params, state, _ = case
    with pytest.raises(
        ValueError, match=rf"x must be .* {B} batch elements.*{D} channels"
    ):
        mechanism.apply(params, state, jnp.zeros(shape))
    with pytest.raises(ValueError, match="x must be"):
        mechanism.step(params, state, jnp.zeros((shape[0], shape[2])))


def _type(leaf):
    return leaf.shape, leaf.dtype, leaf.weak_type


def _split_floats(state):
    leaves, treedef = jax.tree.flatten(state)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    floats = [x if f else None for x, f in zip(leaves, is_float, strict=True)]
    rest = [None if f else x for x, f in zip(leaves, is_float, strict=True)]
    return floats, (rest, treedef)


def _join(floats, rest):
    others, treedef = rest
    leaves = [a if b is None else b for a, b in zip(floats, others, strict=True)]
    return jax.tree.unflatten(treedef, leaves)
