"""The law of mechanisms. A new mechanism is one row of `CONFIGS`."""

import contextlib
import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms import (
    MECHANISMS,
    ABCConfig,
    AttentionConfig,
    DeltaNetConfig,
    ElasticCellConfig,
    ElasticMemoryConfig,
    GatedDeltaNetConfig,
    GDN2Config,
    GLAConfig,
    GSAConfig,
    HybridConfig,
    InfiniConfig,
    KDAConfig,
    LatticeConfig,
    LinearAttentionConfig,
    Mamba2Config,
    MambaConfig,
    MechanismConfig,
    MelodiConfig,
    MemorizingConfig,
    ParallelConfig,
    RecurrentStyle,
    RGLRUConfig,
    ShortConvConfig,
    SlidingWindowConfig,
    TrellisConfig,
    TTTLinearConfig,
    kda_style,
)
from memjax.mechanisms.hybrid import HybridParams
from tests import light
from tests.mechanisms.slopes import check_slopes, flat, slope

B, T, D = 2, 12, 16
# Of a call: a compilation, so one for all tests. Over two ends of chunks at least.
LENGTH = 6
HEADS: dict[str, Any] = dict(model_dim=D, num_heads=4, num_kv_heads=2, head_dim=4)
BLOCK: dict[str, Any] = dict(model_dim=D, num_heads=2, key_dim=4, value_dim=6)
SLOTS: dict[str, Any] = dict(model_dim=D, num_heads=2, slots=4, value_dim=6)
WINDOW = SlidingWindowConfig(**HEADS, window=4, sinks=2)
# Two groups of two heads, as Granite 4 H has Mamba-2.
PUBLISHED_MAMBA2 = Mamba2Config(
    D,
    num_heads=4,
    key_dim=5,
    value_dim=6,
    pace_limits=(0.02, 1.0),
    style=RecurrentStyle(
        num_key_heads=2,
        conv_value=True,
        conv_bias=True,
        unit_norm=False,
        norm="group",
        gate="silu",
        gate_first=True,
        value_multiplier=0.7,
        cell_multiplier=1.2,
    ),
)
PLAIN = RecurrentStyle(
    conv_width=0, query_silu=True, key_silu=False, unit_norm=False, gate="silu"
)
CONFIGS: dict[str, MechanismConfig] = {
    "attention": AttentionConfig(**HEADS, capacity=T + 1),
    "attention_full": AttentionConfig(**HEADS, capacity=T),
    "elastic_memory": ElasticMemoryConfig(**HEADS, block=3, order=6),
    "elastic_memory_bank": ElasticMemoryConfig(
        **HEADS,
        block=4,
        order=6,
        bank_blocks=2,
        sampling="exponential",
        positions="stream",
    ),
    "melodi": MelodiConfig(**HEADS, block=3, memory_tokens=2),
    "melodi_long": MelodiConfig(
        **HEADS, block=4, memory_tokens=2, long_tokens=2, long_blocks=2
    ),
    "memorizing": MemorizingConfig(**HEADS, block=4, queue=5),
    "memorizing_nearest": MemorizingConfig(**HEADS, block=3, queue=4, top_k=2),
    "sliding_window": SlidingWindowConfig(**HEADS, window=4),
    "sliding_window_sinks": WINDOW,
    "hybrid": HybridConfig(
        WINDOW, LatticeConfig(16, 4, slots=5, value_dim=6, chunk_size=4)
    ),
    "hybrid_elastic": HybridConfig(
        WINDOW, ElasticCellConfig(4, 2, 4, order=6, block=3)
    ),
    "hybrid_infini": HybridConfig(
        WINDOW, InfiniConfig(4, 2, 4, 4, norm=True), gate="head"
    ),
    "linear_attention": LinearAttentionConfig(**BLOCK),
    "mamba2": Mamba2Config(**BLOCK),
    "gla": GLAConfig(**BLOCK),
    # As RetNet, HGRN2 and GSA of flash-linear-attention have it.
    "retention": LinearAttentionConfig(**BLOCK, retention=True, style=PLAIN),
    "gla_tied": GLAConfig(**BLOCK, tied_keys=True, lower_bound=True, style=PLAIN),
    "gsa_published": GSAConfig(
        **BLOCK,
        slots=5,
        style=dataclasses.replace(
            PLAIN, value_silu=True, read_silu=True, norm="all", gate="none"
        ),
    ),
    "deltanet": DeltaNetConfig(**BLOCK),
    "gated_deltanet": GatedDeltaNetConfig(**BLOCK),
    # As Qwen3.5 and OLMo Hybrid have it.
    "gated_deltanet_published": GatedDeltaNetConfig(
        **BLOCK,
        max_rate=2.0,
        style=RecurrentStyle(
            num_key_heads=1, conv_value=True, query_scale=0.5, gate="silu"
        ),
    ),
    "kda": KDAConfig(**BLOCK, style=kda_style(4, 6)),
    "gdn2": GDN2Config(**BLOCK, decay_rank=3),
    "parallel": ParallelConfig(
        AttentionConfig(D, 4, 2, 4, capacity=64, rope_dim=2, output_gate=True),
        PUBLISHED_MAMBA2,
        attention_multiplier=0.5,
        memory_multiplier=1.5,
    ),
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
        readout="phi",
    ),
    "mamba": MambaConfig(D, inner_dim=20, state_dim=3, dt_rank=2),
    "falcon_mamba": MambaConfig(
        D, 20, 3, 2, conv_bias=False, bias=True, norm_epsilon=1e-3
    ),
    "rg_lru": RGLRUConfig(D, width=12, num_blocks=3),
    # One tap more than LFM2 has, so that the first changed token reaches the last.
    "short_conv": ShortConvConfig(D, conv_width=4),
    "lattice": LatticeConfig(**SLOTS, chunk_size=4),
    "lattice_unnormalised": LatticeConfig(
        **SLOTS, variant="enc", chunk_size=4, normalize=False, forget="l2"
    ),
    "lattice_sparse": LatticeConfig(**SLOTS, variant="sim", chunk_size=1, forget="l1"),
}
# Other options of mechanisms that have a row: not among the fast tests.
VARIANTS = (
    "attention_full",
    "elastic_memory_bank",
    "melodi_long",
    "memorizing_nearest",
    "sliding_window",
    "gated_deltanet_published",
    "hybrid_elastic",
    "hybrid_infini",
    "trellis_nonlinear",
    "falcon_mamba",
    "retention",
    "gla_tied",
    "gsa_published",
    "lattice_unnormalised",
    "lattice_sparse",
)
# One of each kind, for laws that need a compilation of their own.
KINDS = ("sliding_window_sinks", "gated_deltanet", "trellis")
# For these laws among the slow tests: all whose flow of a segment is their own. The
# others differ by an op, whose own tests have its gradients and types, or by a style;
# Mamba-2 is in "parallel", and Lattice in "hybrid".
FLOWS = {*CONFIGS} - {*VARIANTS, "linear_attention", "deltanet", "abc", "gdn2"}
FLOWS = FLOWS - {"melodi", "memorizing"} | {"melodi_long", "memorizing_nearest"}
FLOWS = FLOWS - {"mamba2", "lattice"}


def rows(names, fast):
    slow = pytest.mark.slow
    marked = [pytest.param(n, marks=() if n in fast else slow) for n in CONFIGS]
    return [row for row in marked if row.values[0] in names]


FAST = {*CONFIGS} - {*VARIANTS}
ROWS = rows(CONFIGS, FAST)
of_each_kind = pytest.mark.parametrize("case", rows(FLOWS, KINDS), indirect=True)


def make_case(config):
    """The mechanism, jitted once for all tests of a shape; its params, state and x."""
    mechanism = config.build()
    mechanism = mechanism._replace(
        step=jax.jit(mechanism.step), apply=jax.jit(mechanism.apply)
    )
    # Not jitted: mechanisms share the programs that draw, a shape each.
    params = mechanism.init_params(jax.random.key(0))
    if isinstance(params, HybridParams):
        # Initialised to its window alone, it would hide the memory.
        amount = params.balance.amount
        amount = None if amount is None else jnp.full_like(amount, 0.7)
        params = params._replace(balance=params.balance._replace(amount=amount))
    x = np.asarray(jax.random.normal(jax.random.key(1), (B, T, D)))
    return mechanism, params, mechanism.init_state(B), x


def make_stepped(case):
    """The states before and after every token, and the outputs."""
    mechanism, params, state, x = case
    states, outputs = [state], []
    for t in range(T):
        state, y = mechanism.step(params, state, x[:, t])
        states.append(state)
        outputs.append(y)
    return states, np.stack(outputs, axis=1)


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
    return state, np.stack(outputs, axis=1)


def assert_close(a, b, tolerance=1e-5):
    chex.assert_trees_all_close(a, b, rtol=tolerance, atol=tolerance)


def test_every_mechanism_has_a_row():
    assert {config.name for config in CONFIGS.values()} == {*MECHANISMS}


def test_apply_equals_steps(case, stepped):
    mechanism, params, state, x = case
    states, y = stepped
    after = mechanism.apply(params, state, x[:, :LENGTH])
    assert_close(after, (states[LENGTH], y[:, :LENGTH]))


@of_each_kind
def test_whole_equals_apply_of_the_empty_state(case):
    mechanism, params, state, x = case
    if mechanism.whole is None:
        return
    x = x[:, :LENGTH]
    _, y = mechanism.apply(params, state, x)
    assert_close(jax.jit(mechanism.whole)(params, x, None), y)


def test_apply_continues_at_every_token(case, stepped):
    """At all positions in a block or a chunk."""
    continues_at_every_token(case, stepped, LENGTH)


@of_each_kind
def test_one_token_continues_at_every_token(case, stepped):
    continues_at_every_token(case, stepped, 1)


def continues_at_every_token(case, stepped, length):
    mechanism, params, _, x = case
    states, y = stepped
    for t in range(T - length + 1):
        result = mechanism.apply(params, states[t], x[:, t : t + length])
        assert_close(result, (states[t + length], y[:, t : t + length]))


def test_no_reading_ahead_and_no_forgetting_at_once(case):
    mechanism, params, state, x = case
    x = x[:, :LENGTH]
    y = np.asarray(mechanism.apply(params, state, x)[1])
    for at in range(2, LENGTH):
        other = x.copy()
        other[:, at] += 1.0
        changed = np.asarray(mechanism.apply(params, state, other)[1])
        np.testing.assert_array_equal(y[:, :at], changed[:, :at])
        assert not np.allclose(y[:, at:], changed[:, at:])
        assert np.all(np.abs(y[:, -1] - changed[:, -1]).max(axis=-1) > 0), at


def test_batch_rows_are_independent(case):
    mechanism, params, state, x = case
    x = x[:, :LENGTH]

    def swap(leaf):
        return np.asarray(leaf)[::-1]

    other = x.copy()
    other[0] += 1.0
    after, y = jax.tree.map(np.asarray, mechanism.apply(params, state, x))
    changed = np.asarray(mechanism.apply(params, state, other)[1])
    np.testing.assert_array_equal(y[1:], changed[1:])
    swapped = mechanism.apply(params, jax.tree.map(swap, state), swap(x))
    assert_close(jax.tree.map(swap, swapped), (after, y))


def test_reset_row_equals_the_empty_state(case, stepped):
    mechanism, params, empty, x = case
    states, whole = stepped
    for at in (2, 4):
        state = mechanism.reset(states[at], jnp.array([True, False]))
        rest = x[:, at : at + LENGTH]
        after, y = jax.tree.map(np.asarray, mechanism.apply(params, state, rest))
        _, expected = mechanism.apply(params, empty, rest)
        assert_close(y[0], np.asarray(expected)[0])
        assert_close(y[1], whole[1, at : at + LENGTH])
        # The rows are at different positions of a chunk: steps continue both.
        assert_close(run_steps(mechanism, params, state, rest), (after, y))
        chex.assert_tree_all_finite(after)


def trace(case, monkeypatch, *settings):
    """Traces `apply` and `step` for all platforms, as users do: no type may change.

    A setting: parameters, type of the input, context.
    """
    all_forms = light.platform_dependent
    monkeypatch.setattr(jax.lax, "platform_dependent", all_forms)
    mechanism, _, state, _ = case
    # Without what jit keeps of other tests' traces.
    apply, step = (f.__wrapped__ for f in (mechanism.apply, mechanism.step))
    for params, dtype, setting in settings:
        with setting:
            for call, shape in ((apply, (B, LENGTH, D)), (step, (B, D))):
                x = jax.ShapeDtypeStruct(shape, dtype)
                after, y = jax.eval_shape(call, params, state, x)
                # Weak types too: another one would be traced again.
                assert jax.tree.map(_type, after) == jax.tree.map(_type, state)
                assert (y.shape, y.dtype) == (shape, dtype)


@pytest.mark.parametrize("case", rows(FAST | FLOWS, FAST), indirect=True)
def test_state_is_a_fixed_point_of_shape_and_float32(case, monkeypatch):
    _, params, state, _ = case
    strict = jax.numpy_dtype_promotion("strict")
    settings = (
        (params, jnp.float32, strict),
        (params, jnp.bfloat16, contextlib.nullcontext()),
    )
    trace(case, monkeypatch, *settings)
    floats = [
        x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert floats and all(leaf.dtype == jnp.float32 for leaf in floats)
    assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(state))


@of_each_kind
def test_state_keeps_its_types_with_bfloat16_parameters_and_x64(case, monkeypatch):
    mechanism, params, _, _ = case
    low = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), params)
    with jax.enable_x64(True):
        drawn = jax.eval_shape(mechanism.init_params, jax.random.key(0))
    settings = (
        (low, jnp.float32, contextlib.nullcontext()),
        (drawn, jnp.float32, jax.enable_x64(True)),
    )
    trace(case, monkeypatch, *settings)


@of_each_kind
def test_bfloat16_is_close_to_float32(case):
    mechanism, params, state, x = case
    x = x[:, :LENGTH]
    y = np.asarray(mechanism.apply(params, state, x)[1])
    low = np.asarray(mechanism.apply(params, state, x.astype(jnp.bfloat16))[1])
    error = np.linalg.norm(low.astype(np.float32) - y) / np.linalg.norm(y)
    assert error < 2e-2


@pytest.mark.parametrize("case", rows(FLOWS, KINDS[:2]), indirect=True)
def test_gradients_equal_differences(case, stepped):
    """Of the squares of the outputs and of the last state, by finite differences.

    Differences run the programs of the tests above: to compile a gradient takes longer
    than all of them.
    """
    mechanism, params, _, x = case
    states, y = stepped
    first = T - LENGTH
    # The first output is left out: its token reaches the others through the state.
    seen = (np.arange(LENGTH) > 0).astype(np.float32)[None, :, None]
    by_y = 2 * y[:, first:] * seen
    last = jax.tree.map(lambda a: 2 * np.asarray(a), _floats(states[T]))
    given = x[:, first:]
    by_params, by_state, by_x = _vjp(
        mechanism.apply, params, states[first], given, last, by_y
    )
    chex.assert_tree_all_finite((by_params, by_state, by_x))
    assert np.all(np.abs(by_x).max(axis=(0, 2)) > 0)

    def total(params, state, x):
        after, y = mechanism.apply(params, state, x)
        parts = [*jax.tree.leaves(_floats(after)), y * seen]
        return sum(np.square(part, dtype=np.float64).sum() for part in parts)

    check_slopes(
        lambda at: total(at[0], states[first], at[1]),
        (params, given),
        (by_params, by_x),
    )

    # Leaves of a state may depend on each other: they are moved by the token before.
    along = np.random.default_rng(0).standard_normal((B, D))
    along = (along / np.linalg.norm(along)).astype(np.float32)

    def stepped_by(by):
        token = x[:, first - 1] + by * along
        return mechanism.step(params, states[first - 1], token)[0]

    slopes = slope(lambda by: flat(_floats(stepped_by(by))), 0.02)
    expected = np.vdot(slopes, flat(by_state))
    found = slope(lambda by: total(params, stepped_by(by), given), 0.02)
    np.testing.assert_allclose(found, expected, rtol=5e-3, atol=2e-4)

    unused = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree_util.tree_leaves_with_path(by_params)
        if not np.asarray(leaf).any()
    }
    # These have gradients where a text begins; `layers` has that test.
    initial = {"slots", "keys", "values", "weights", "bias"}
    assert unused <= {f"{at}/{x}" for at in ("cell", "memory") for x in initial}


def test_input_of_another_shape_is_refused(case):
    mechanism, params, state, _ = case
    for shape in ((B + 1, T, D), (B, T, D + 1)):
        with pytest.raises(
            ValueError, match=rf"x must be .* {B} batch elements.*{D} channels"
        ):
            mechanism.apply(params, state, np.zeros(shape, np.float32))
        with pytest.raises(ValueError, match="x must be"):
            mechanism.step(params, state, np.zeros((shape[0], shape[2]), np.float32))


def _type(leaf):
    return leaf.shape, leaf.dtype, leaf.weak_type


@functools.partial(jax.jit, static_argnums=0)
def _vjp(run, params, state, x, by_state, by_y):
    """Gradients of params, floats of the state and x, by those of what `run` gives."""

    def forward(params, floats, x):
        def keep(new, old):
            return old if new is None else new

        given = jax.tree.map(keep, floats, state, is_leaf=lambda leaf: leaf is None)
        after, y = run(params, given, x)
        return _floats(after), y

    return jax.vjp(forward, params, _floats(state), x)[1]((by_state, by_y))


def _floats(state):
    """The state with None in place of counts, which have no gradients."""

    def keep_floats(leaf):
        return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None

    return jax.tree.map(keep_floats, state)
