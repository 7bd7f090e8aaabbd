"""The HiPPO op: every form against the reference and against float64 on the host."""

import functools
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from memjax_kernels._src.hippo import bank, on_demand
from memjax_kernels._src.hippo.pallas_tpu import legendre_tpu
from tests.kernels import hippo_recurrence
from tests.kernels.on_tpu import INTERPRETER, needs_libtpu

# The package re-exports the function under the folder's name.
op = importlib.import_module("memjax_kernels._src.hippo")

B, BLOCKS, L, X, N, M = 3, 3, 4, 2, 6, 5
# Fewer than the tokens of a block, which is then written in another way.
LOW = 3
READ = bank.hippo_reconstruction(N, bank.hippo_sample_points(M, "exponential", 0.7))
BANK = bank.build_hippo_bank(N, L, 4)
FORMS = [
    ("scan", False),
    ("scan", True),
    ("associative", True),
    ("direct", False),
]
# Starts and counts by name: batch elements apart; together inside a block; together at
# the start of a block inside the bank, at its end and beyond it.
EDGES = {
    "ragged": ([0, 4, 7], [3, 1, 0]),
    "ragged counts": ([4, 4, 4], [3, 2, 3]),
    "inside a block": ([5, 5, 5], [3, 3, 3]),
    "empty": ([0, 0, 0], [3, 3, 3]),
    "end of the bank": ([4, 4, 4], [2, 2, 2]),
    "beyond the bank": ([8, 8, 8], [3, 3, 3]),
    "far": ([123_456_789, 40, 1_000_003], [3, 3, 2]),
}
int32: Any = functools.partial(np.asarray, dtype=np.int32)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


FEATURES: Any = draw(B, BLOCKS, L, X)
# Rows that start at 0 must not read theirs.
STATE: Any = draw(B, N, X, seed=1)
WEIGHTS = draw(B, N, X, seed=2), draw(B, BLOCKS, M, X, seed=3)


@functools.cache
def with_gradients(form):
    """Values and gradients of one form, compiled once; the bank is an argument."""

    def both(features, state, start, count, tables):
        def call(features, state):
            return op.hippo(
                features,
                jnp.asarray(READ[:, : state.shape[1]], jnp.float32),
                state,
                start=start,
                count=count,
                bank=tables,
                implementation=form,
            )

        values, pull = jax.vjp(call, features, state)
        to_state, to_memory = (jnp.asarray(w) for w in WEIGHTS)
        return values, pull((to_state[:, : state.shape[1]], to_memory))

    return jax.jit(both)


def oracle(features, state, start, count):
    """Blocks one by one in float64, by the matrices of the bank."""
    coefficients, memory = [], []
    order = state.shape[1]
    for element, c, t, full in zip(features, state, start, count, strict=True):
        c, reads = np.float64(c) * (t > 0), []
        for j, f in enumerate(element):
            reads.append(READ[:, :order] @ c)
            if j < full:
                c = bank.transition(order, t / (t + L)) @ c
                c = c + bank.block_kernel(order, t, t + L) @ f
                t += L
        coefficients.append(c)
        memory.append(reads)
    return np.array(coefficients), np.array(memory)


def close(actual, expected, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


@jax.jit
def absorb(features, state, start, count):
    return op.hippo_update(features, state, start, count)


@pytest.mark.parametrize("name", EDGES)
def test_the_reference_computes_the_float64_oracle(name):
    start, count = EDGES[name]
    values, _ = with_gradients("reference")(
        FEATURES, STATE, int32(start), int32(count), None
    )
    close(values, oracle(FEATURES, STATE, start, count))


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize(
    "form,banked,order",
    [
        # Beyond the bank there are no other matrices than without it.
        *((*form, N) for form in FORMS[1:]),
        ("scan", False, LOW),
        ("associative", False, LOW),
    ],
)
def test_every_form_agrees_with_the_oracle_and_the_gradients_of_the_reference(
    form, banked, order, name
):
    start, count = EDGES[name]
    tables = BANK if banked else None
    state = STATE[:, :order]
    arguments = FEATURES, state, int32(start), int32(count)
    values, gradients = jax.device_get(with_gradients(form)(*arguments, tables))
    close(values, oracle(FEATURES, state, start, count))
    expected_values, expected_gradients = with_gradients("reference")(*arguments, None)
    close(values, expected_values)
    close(gradients, expected_gradients)
    assert np.abs(gradients[0]).max() > 0.01
    new = np.array(start) == 0
    assert np.all(gradients[1][new] == 0) and np.all(gradients[1][~new] != 0)


@pytest.mark.parametrize("form", ["scan", "associative"])
def test_a_bank_is_looked_up_exactly_where_it_covers_all_batch_elements(form):
    doubled = BANK._replace(kernel=2 * BANK.kernel)
    changed = {}
    for name, (start, count) in EDGES.items():
        arguments = FEATURES, STATE, int32(start), int32(count)
        (state, _), _ = with_gradients(form)(*arguments, BANK)
        (other, _), _ = with_gradients(form)(*arguments, doubled)
        changed[name] = bool(np.abs(state - other).max() > 1e-3)
    covered = {"empty", "end of the bank"}
    assert changed == {name: name in covered for name in EDGES}


@pytest.mark.parametrize(
    "in_step,names",
    [(True, ["end of the bank", "inside a block"]), (False, ["ragged"])],
)
def test_in_step_shares_matrices_at_trace_time(in_step, names):
    def call(start, count, in_step=in_step):
        return op.hippo(
            jnp.asarray(FEATURES),
            jnp.asarray(READ, jnp.float32),
            jnp.asarray(STATE),
            start=start,
            count=count,
            in_step=in_step,
            bank=BANK,
            implementation="scan",
        )

    jitted = jax.jit(call)
    for start, count in map(EDGES.__getitem__, names):
        close(jitted(int32(start), int32(count)), oracle(FEATURES, STATE, start, count))

    def branches(in_step):
        traced = jax.make_jaxpr(functools.partial(call, in_step=in_step))
        text = str(traced(int32([0] * B), int32([3] * B)))
        # Others ask for the platform, or are inside a TPU's kernel.
        others = map(text.count, ("platform_index[", "pallas_call["))
        return text.count("cond[") - sum(others)

    # Whether batch elements agree, and then whether the bank covers them.
    assert (branches(None), branches(True), branches(False)) == (2, 1, 0)


def test_defaults_are_empty_memory_and_all_blocks():
    state, memory = op.hippo(
        jnp.asarray(FEATURES), jnp.asarray(READ, jnp.float32), bank=BANK
    )
    close((state, memory), oracle(FEATURES, STATE, [0] * B, [BLOCKS] * B))
    assert np.all(np.asarray(memory[:, 0]) == 0)


def test_the_state_is_that_of_the_papers_recurrence():
    """Matrix exponentials, token by token, in float64."""
    whole = np.asarray(FEATURES[0].reshape(-1, X), np.float64)
    state, _ = op.hippo(
        jnp.asarray(FEATURES), jnp.asarray(READ, jnp.float32), bank=None
    )
    close(state[0], hippo_recurrence.compress(whole, N))


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 1, 100, 1_000_003, 123_456_789, 2**31 - 64])
def test_on_demand_matrices_equal_bank_at_any_offset(start):
    order, length = 64, 32
    stop = start + length
    jitted = jax.jit(on_demand.kernel, static_argnums=(0, 3))
    kernel = jitted(order, int32([start]), int32([stop]), length)[0]
    expected = bank.block_kernel(order, start, stop)
    assert np.abs(kernel - expected).max() <= 1e-6 * np.abs(expected).max()
    eye = np.eye(order, dtype=np.float32)[None]
    transition = jax.jit(on_demand.advance)(int32([start]), int32([stop]), eye)[0]
    expected = bank.transition(order, start / stop)
    assert np.linalg.norm(transition - expected, 2) <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "length", "start"),
    [
        *((64, 64, start) for start in (0, 1, 2048, 1_000_003, 2**30)),
        (256, 256, 2**30),
    ],
)
def test_block_at_nodes_equals_kernel_at_any_offset(order, length, start):
    eye = np.eye(length, dtype=np.float32)[None]
    empty = np.zeros((1, order, length), np.float32)
    written = absorb(eye, empty, int32([start]), None)[0]
    expected = bank.block_kernel(order, start, start + length)
    assert np.linalg.norm(written - expected, 2) <= 2e-6 * np.linalg.norm(expected, 2)


@pytest.mark.slow
# Few points and a degree, and more than a tile of points and a block of degrees hold.
@pytest.mark.parametrize("order,count", [(1, 3), (130, 530)])
def test_the_kernel_of_polynomials_has_the_precision_of_float64(order, count):
    draws = np.random.default_rng(order).uniform(-1, 1, (3, count))
    points = np.concatenate([draws, [np.linspace(1 - 1e-9, 1, count)]])
    high = points.astype(np.float32)
    low = (points - high).astype(np.float32)
    by = INTERPRETER if count == 530 else True
    found = jax.jit(lambda *pair: legendre_tpu(order, *pair, interpret=by))(high, low)
    plain = (bank.legendre(order, (1 + z) / 2) for z in points)
    norms = np.sqrt(2 * np.arange(order) + 1)[:, None]
    expected = np.stack([rows / norms for rows in plain])
    # Without the second of each pair it is 1e-4 at the last points.
    assert np.abs(found - expected).max() < 4e-7


@needs_libtpu
def test_matrices_compile_for_a_mesh_with_the_kernel_in_them():
    devices = topologies.get_topology_desc("v5e:2x2", "tpu").devices
    kinds = (jax.sharding.AxisType.Auto,) * 2
    shape = (2, len(devices) // 2)
    mesh = Mesh(np.array(devices).reshape(shape), ("data", "tensor"), kinds)

    def place(*axes):
        return NamedSharding(mesh, P(*axes))

    struct = jax.ShapeDtypeStruct
    arguments = (
        struct(
            (4, 2, 16, 8), jnp.float32, sharding=place("data", None, None, "tensor")
        ),
        struct((4, 8, 8), jnp.float32, sharding=place("data", None, "tensor")),
        struct((4,), jnp.int32, sharding=place("data")),
    )
    basis = jnp.asarray(np.asarray(READ[:, :1] * np.ones(8)), jnp.float32)

    def loss(features, state, start):
        options = dict(start=start, in_step=True, implementation="scan")
        return sum(x.sum() for x in op.hippo(features, basis, state, **options))

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile()
    assert "legendre" in (compiled.as_text() or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("matrices", "batch", "width"), [(1, 1, 512), (1, 2, 384), (2, 2, 512), (1, 2, 96)]
)
def test_products_by_columns_are_whole_ones(matrices, batch, width):
    """The form of TPUs, and its gradient."""
    draws = np.random.default_rng(0)
    matrix, signal, weight = (
        jnp.asarray(draws.normal(size=shape), jnp.float32)
        for shape in ((matrices, 3, 5), (batch, 5, width), (batch, 3, width))
    )

    def run(form):
        y, pull = jax.vjp(lambda x: form(matrix, x), signal)
        return y, *pull(weight)

    found, expected = map(run, (on_demand._by_columns, on_demand._at_once))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_on_demand_matrices_change_after_a_million_tokens():
    """300 blocks late in a stream: rounding the ratio to float32 would lose 1%."""
    order, length, steps, begin = 64, 4, 300, 1_000_000
    state, signal = draw(order, X), draw(steps * length, X, seed=1)
    blocks = jnp.asarray(signal.reshape(steps, 1, length, X))

    def one_block(c, item):
        features, start = item
        return op.hippo_update(features, c, start[None]), None

    starts = begin + length * jnp.arange(steps, dtype=jnp.int32)
    after, _ = jax.lax.scan(one_block, jnp.asarray(state)[None], (blocks, starts))
    end = begin + steps * length
    expected = bank.transition(order, begin / end) @ np.float64(state)
    expected += bank.block_kernel(order, begin, end) @ signal
    assert np.abs(expected - state).max() > 0.4
    assert np.abs(after[0] - expected).max() < 5e-4


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, 39), min_size=2, max_size=12))
def test_any_cuts_give_coefficients_of_one_block(cuts):
    signal, size = draw(40, X, seed=5), 40
    state, edges = jnp.zeros((1, N, X)), [0, *sorted(cuts), 40]
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        # Beyond the count stand tokens that must not be read.
        padded = np.full((1, size, X), 1e6, np.float32)
        padded[0, : stop - start] = signal[start:stop]
        state = absorb(padded, state, int32([start]), int32([stop - start]))
    close(state[0], bank.block_kernel(N, 0, 40) @ np.float64(signal))


def test_zero_count_leaves_state_unchanged():
    features = FEATURES[:2, 0]
    after = np.asarray(absorb(features, STATE[:2], int32([0, 9]), int32([0, L])))
    np.testing.assert_array_equal(after[0], STATE[0])
    assert np.abs(after[1] - STATE[1]).max() > 0.1


def test_operations_counted_by_hand():
    # N=2, L=3, M=2, 2 blocks, 1 channel. Writes 2*(2*3), reads 2*(2*2).
    write, read = 12, 8
    assert op.cost(2, 3, 2, 2, 1, True) == {
        "scan": 2 * 4 + write + read,
        "associative": 2 * 2 * (8 + 4) + write + read,
        # Each block: R K 2*2*6 and R times a factor of the move 2*2*2, onto the signal
        # 2*6 and the carried state 2*2. The last state: 2*6 and a move's two factors.
        "direct": 2 * (24 + 8 + 12 + 4) + 12 + 2 * 4,
    }
    unbanked = op.cost(2, 3, 2, 2, 1, False)
    # On demand a block is written in two products, the second N x N.
    write += 2 * 2 * 2
    assert unbanked["scan"] == 2 * 8 + write + read
    assert op.cost(4, 3, 2, 2, 1, False)["scan"] == 2 * 2 * 16 + 2 * 12 + 2 * 8
    assert unbanked["associative"] == 2 * 2 * 8 + 2 * 2 * 12 + write + read


@pytest.mark.parametrize(
    ("sizes", "cheapest"),
    [
        ((540, 2048, 540, 16, 1536, False), "scan"),
        ((1080, 2048, 16, 16, 3072, False), "direct"),
        ((8640, 2048, 2048, 16, 24_576, False), "direct"),
        ((8640, 2048, 2048, 16, 24_576, True), "scan"),
    ],
)
def test_cheapest_form_by_size(sizes, cheapest):
    assert op.cheapest(*sizes) == cheapest


@pytest.mark.parametrize("order", [1, 64, 8640])
@pytest.mark.parametrize("banked", [False, True])
@pytest.mark.parametrize("samples,channels", [(1, 1), (64, 12_288)])
def test_the_cheapest_has_the_fewest_operations(order, banked, samples, channels):
    sizes = (order, 2048, samples, 16, channels, banked)
    costs = op.cost(*sizes)
    assert costs[op.cheapest(*sizes)] == min(costs.values())


@pytest.mark.slow
def test_the_default_runs_the_cheapest(monkeypatch):
    asked = []
    monkeypatch.setattr(op, "cheapest", lambda *sizes: asked.append(sizes) or "direct")
    sizes = N, L, M, BLOCKS, B * X, True

    def jaxpr(**options):
        return str(
            jax.make_jaxpr(
                lambda f: op.hippo(
                    f, jnp.asarray(READ, jnp.float32), bank=BANK, **options
                )
            )(FEATURES)
        )

    chosen = jaxpr()
    assert asked == [sizes]
    assert chosen == jaxpr(implementation="direct") != jaxpr(implementation="scan")


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(implementation="pallas"), "implementation must be one of"),
        (dict(state=jnp.zeros((B, N + 1, X))), "state must have shape"),
        (dict(features=jnp.zeros((B, 0, L, X))), "features must have shape"),
        (dict(features=jnp.zeros((B, 1, 0, X))), "features must have shape"),
        (dict(bank=bank.build_hippo_bank(N, L + 1, 1)), "build it for these"),
    ],
)
def test_mismatched_arguments_are_refused(options, message):
    sizes = dict[str, Any](features=jnp.asarray(FEATURES)) | options
    unchecked = inspect.unwrap(op.hippo)  # without the annotations' own check
    with pytest.raises(ValueError, match=message):
        unchecked(sizes.pop("features"), jnp.asarray(READ, jnp.float32), **sizes)
