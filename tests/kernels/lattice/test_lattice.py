"""Lattice: token loop and chunks against the equations, and the paper's own facts."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels import lattice, lattice_init_state, lattice_step
from memjax_kernels._src.common.products import multiplier
from memjax_kernels._src.lattice import chunk as one_chunk
from memjax_kernels._src.lattice.memory import Rule
from tests.kernels.lattice.against_xla import open_state

B, H, M, V = 2, 2, 5, 6
# C, variant, normalize, forget.
CASES = [
    (1, "dec", True, None),
    (1, "enc", True, "l2"),
    (1, "sim", True, "l1"),
    (1, "enc", False, None),
    (4, "dec", True, None),
    (4, "enc", True, None),
    (4, "sim", True, "l2"),
    (4, "dec", False, "l2"),
]
run_jit: Any = jax.jit(
    lattice,
    static_argnames=("variant", "chunk_size", "normalize", "forget", "implementation"),
)
step_jit: Any = jax.jit(
    lattice_step, static_argnames=("variant", "normalize", "forget")
)


@functools.cache
def draw(time, seed=0, forget=None, dtype=jnp.float32) -> Any:
    """Queries, keys, values, step sizes, and log gates or None."""
    draws = np.random.default_rng(seed)

    def normal(width):
        return draws.standard_normal((B, time, H, width), np.float32)

    q, k, v = normal(M), np.exp(normal(M)), normal(V)
    gamma, g = (draws.uniform(0, most, (B, time, H)) for most in (0.8, 0.2))
    tokens = (jnp.asarray(x, dtype) for x in (q, k / k.sum(-1, keepdims=True), v))
    gates = None if forget is None else jnp.asarray(-g, jnp.float32)
    return *tokens, jnp.asarray(gamma, jnp.float32), gates


def options(case):
    return dict(
        zip(("chunk_size", "variant", "normalize", "forget"), case, strict=True)
    )


@functools.cache
def memory(case, seed=1):
    """A state at a chunk's start: unit rows, or rows of any norm."""
    size, _, normalize, _ = case
    rows = np.random.default_rng(seed).standard_normal((B, H, M, V), np.float32)
    if normalize:
        rows /= np.linalg.norm(rows, axis=-1, keepdims=True)
    state = lattice_init_state(B, H, M, V, size)
    return dataclasses.replace(state, start=jnp.asarray(rows))


def column_loop(tokens, start, case):
    """Reads and the last memory, from eqs. 13, 14, 16 and 18 for columns s_i of S."""
    size, variant, normalize, forget = case
    g = tokens[4]
    arrays = (*tokens[:4], start)
    q, k, v, gamma, start = (np.asarray(x, np.float64) for x in arrays)
    reads, last = np.zeros(v.shape), np.zeros(start.shape)
    for b, h in np.ndindex(v.shape[0], v.shape[2]):
        state = frozen = seen = start[b, h].T.copy()
        for t in range(v.shape[1]):
            if t % size == 0:
                frozen = state / np.linalg.norm(state, axis=0) if normalize else state
                state = frozen.copy()
            norms = np.linalg.norm(frozen, axis=0)
            phi = frozen / norms
            key, value, rate = k[b, t, h], v[b, t, h], gamma[b, t, h]
            match variant:
                case "dec":
                    out, code = phi @ key - value, key
                case "enc":
                    out, code = value, phi.T @ value - key
                case _:
                    out, code = -value, key
            gate = 0.0 if g is None else float(g[b, t, h])
            for i in range(state.shape[1]):
                across = np.eye(len(value)) - np.outer(phi[:, i], phi[:, i])
                gradient = code[i] * across @ out / norms[i]
                decay = np.exp(gate) if forget == "l2" else 1.0
                state[:, i] = decay * state[:, i] - rate * gradient
            if forget == "l1":
                state = np.sign(state) * np.maximum(np.abs(state) + gate, 0)
            seen = state / np.linalg.norm(state, axis=0) if normalize else state
            reads[b, t, h] = seen @ q[b, t, h]
        last[b, h] = seen.T
    return reads, last


def distance(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.sqrt(np.mean((actual - expected) ** 2) / (np.mean(expected**2) + 1e-30))


def close(actual, expected, tolerance=1e-5):
    actual = jax.tree_util.tree_leaves_with_path(actual)
    for (path, a), b in zip(actual, jax.tree.leaves(expected), strict=True):
        assert distance(a, b) <= tolerance, (jax.tree_util.keystr(path), distance(a, b))


@pytest.mark.parametrize(
    ("implementation", "case"),
    [
        # The rule of a token is one function; chunks freeze the memory.
        *(("reference", CASES[i]) for i in (0, 1, 2, 3, 4, 7)),
        *(("xla", CASES[i]) for i in (1, 2, 4, 5, 6, 7)),
    ],
    ids=str,
)
def test_values_are_those_of_the_equations(case, implementation):
    tokens = draw(8, forget=case[3])
    start = memory(case)
    state, y = run_jit(*tokens, start, implementation=implementation, **options(case))
    reads, last = column_loop(tokens, start.start, case)
    close((y, state.start), (reads, last))
    assert state.chunk_size == case[0] and state.position.tolist() == [0, 0]


def pulled(case, implementation, arguments, reset):
    """Results and gradients of all arguments, for random cotangents of all results."""
    tokens, state, empty = arguments

    def forward(tokens, start, opened, empty_start):
        # Zeros behind the open tokens are no arguments.
        opened = jax.tree.map(lambda x, y: x * (y != 0), opened, state.tokens)
        before = dataclasses.replace(state, start=start, tokens=opened)
        q, k, v, gamma, g = tokens
        after, y = lattice(
            q,
            k,
            v,
            gamma,
            g,
            before,
            reset=reset,
            empty=dataclasses.replace(empty, start=empty_start),
            implementation=implementation,
            **options(case),
        )
        return y, after.start, after.tokens

    def both(*arguments):
        values, back = jax.vjp(forward, *arguments)
        draws = np.random.default_rng(9)
        return values, back(
            jax.tree.map(
                lambda x: draws.standard_normal(x.shape).astype(x.dtype), values
            )
        )

    return jax.jit(both)(tokens, state.start, state.tokens, empty.start)


@pytest.mark.parametrize(
    "case",
    [
        CASES[4],
        pytest.param(CASES[2], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_of_chunks_are_those_of_the_token_loop(case):
    size = case[0]
    tokens, state = draw(7, forget=case[3]), memory(case)
    if size > 1:
        state = open_state(state.start, [0, 3], size)
    reset = jnp.asarray(np.eye(7, dtype=bool)[[4, 1]])
    arguments = tokens, state, memory(case, seed=3)
    expected = pulled(case, "reference", arguments, reset)
    close(pulled(case, "xla", arguments, reset), expected, 2e-5)
    _, (d_tokens, d_start, opened, d_empty) = expected
    moving = (d_tokens, d_start, d_empty, opened and opened[: 3 + bool(case[3])])
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(moving))


@pytest.mark.slow
def test_one_token_in_chunk_form_is_the_exact_form_with_gradients():
    q, k, v, gamma, _ = jax.tree.map(np.asarray, draw(1))
    tokens = [x[:, 0][:, :, None] for x in (q, k, v)]
    gamma = gamma[:, 0, :, None, None]
    start, weights = memory(CASES[0]).start, memory(CASES[0], seed=5).start
    multiply = multiplier(jnp.dtype(jnp.float32))
    for variant in ("dec", "enc", "sim"):
        rule = Rule(variant)

        def in_chunk(q, k, v, gamma, start, rule=rule):
            given = one_chunk.Tokens(q, k, v, gamma, None)
            return one_chunk.advance(given, start, rule, multiply)

        def exact(q, k, v, gamma, start, rule=rule):
            given = one_chunk.Tokens(q, k, v, gamma, None)
            return one_chunk.token(given, start, rule)

        def both(form, *arguments):
            values, back = jax.vjp(form, *arguments)
            return values, back((weights, jnp.ones_like(values[1])))

        arguments = (*tokens, gamma, start)
        expected = jax.jit(functools.partial(both, exact))(*arguments)
        close(jax.jit(functools.partial(both, in_chunk))(*arguments), expected)


def test_split_invariance_with_rows_out_of_phase():
    """Tokens one by one up to any place of a chunk, then five at once, then one."""
    case = CASES[6]
    whole = jax.tree.map(np.asarray, draw(14, forget=case[3]))
    reads, _ = column_loop(whole, memory(case).start, case)
    rule = {
        name: value for name, value in options(case).items() if name != "chunk_size"
    }

    def at(tokens, t):
        return [None if x is None else x[:, t] for x in tokens]

    states = [jax.tree.map(np.asarray, memory(case))]
    for t in range(8):
        state, y = step_jit(*at(whole, t), states[-1], **rule)
        close(y, reads[:, t])
        states.append(jax.tree.map(np.asarray, state))
    for first in range(8):
        # Row 1 comes from three tokens later: another place of its chunk.
        rows = [first, (first + 3) % 8]
        state = jax.tree.map(
            lambda a, b: np.stack([a[0], b[1]]), *(states[row] for row in rows)
        )
        part = [
            None
            if x is None
            else np.stack([x[b, r : r + 5] for b, r in enumerate(rows)])
            for x in whole
        ]
        state, y = run_jit(*part, state, **options(case))
        close(y, np.stack([reads[b, r : r + 5] for b, r in enumerate(rows)]))
        token = [
            None if x is None else np.stack([x[b, r + 5] for b, r in enumerate(rows)])
            for x in whole
        ]
        _, y = step_jit(*token, state, **rule)
        close(y, np.stack([reads[b, r + 5] for b, r in enumerate(rows)]))


@pytest.mark.slow
def test_segments_shorter_than_a_chunk_start_from_the_empty_memory():
    """One token, two that do not fill the chunk either, and two that do."""
    tokens = jax.tree.map(np.asarray, draw(5))
    start = lattice_init_state(B, H, M, V).start
    reads, _ = column_loop(tokens, start, CASES[4])
    state = None
    for first, last in ((0, 1), (1, 3), (3, 5)):
        part = [x[:, first:last] for x in tokens[:4]]
        state, y = run_jit(*part, None, state, chunk_size=4)
        close(y, reads[:, first:last])
        assert state.position.tolist() == [last % 4] * B
        if last < 4:
            np.testing.assert_array_equal(state.start, start)


@pytest.mark.slow
def test_reset_equals_new_call():
    tokens = jax.tree.map(np.asarray, draw(10))
    reset = np.arange(10)[None].repeat(B, 0) == 4
    _, y = run_jit(*tokens[:4], reset=reset, chunk_size=4, variant="enc")
    start = lattice_init_state(B, H, M, V).start
    for part in (slice(0, 4), slice(4, 10)):
        alone = [None if x is None else x[:, part] for x in tokens]
        expected, _ = column_loop(alone, start, CASES[5])
        close(y[:, part], expected)


def test_reset_inside_chunk_raises_or_gives_nan():
    tokens = draw(6)[:4]
    reset = np.zeros((B, 6), bool)
    reset[1, 3] = True
    with pytest.raises(ValueError, match="reset"):
        lattice(*draw(3)[:4], reset=jnp.asarray(reset[:, 1:4]), chunk_size=4)
    found = run_jit(*tokens, reset=reset, chunk_size=4)
    state, y = jax.tree.map(np.asarray, found)
    assert np.isfinite(y[0]).all() and np.isfinite(state.start[0]).all()
    assert np.isfinite(y[1, :3]).all() and np.isnan(y[1, 3:]).all()
    assert np.isnan(state.start[1]).all() and np.isnan(state.tokens.k[1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
def test_bfloat16_tokens_have_float32_memory(size):
    case = (size, "dec", True, None)
    tokens = draw(9, dtype=jnp.bfloat16)
    state, y = run_jit(*tokens, memory(case), chunk_size=size)
    assert (y.dtype, state.start.dtype) == (jnp.bfloat16, jnp.float32)
    rounded = [None if x is None else x.astype(jnp.float32) for x in tokens]
    reads, _ = column_loop(rounded, memory(case).start, case)
    close(y.astype(jnp.float32), reads, 1e-2)
    np.testing.assert_allclose(np.linalg.norm(state.start, axis=-1), 1, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 16])
def test_norms_stay_one_over_a_hundred_thousand_tokens(size):
    time = 100_000
    q, k, v, gamma = (x[:1, :, :1] for x in draw(time)[:4])
    state, y = run_jit(q, k, 3 * v, 2 * gamma, chunk_size=size)
    norms = np.linalg.norm(state.start, axis=-1)
    np.testing.assert_allclose(norms, 1, atol=1e-5)
    assert np.isfinite(y).all()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dec", "enc", "sim"])
def test_write_is_tangential_gradient_of_objective(variant):
    """Equations 7, 10 and 12 are half the gradients of 6, 9 and 11."""
    objectives = {
        "dec": lambda phi, k, v: jnp.sum((k @ phi - v) ** 2) / 2,
        "enc": lambda phi, k, v: jnp.sum((phi @ v - k) ** 2) / 2,
        "sim": lambda phi, k, v: -jnp.vdot(phi @ v, k),
    }
    state = memory((1, variant, False, None))
    q, k, v, gamma, _ = jax.tree.map(np.asarray, draw(1))
    token = (*(x[:, 0] for x in (q, k, v, gamma)), None)
    after, _ = step_jit(*token, state, variant=variant, normalize=False)

    def objective(slots, k, v):
        phi = slots / jnp.linalg.norm(slots, axis=-1, keepdims=True)
        return objectives[variant](phi, k, v)

    gradient = jax.jit(jax.vmap(jax.vmap(jax.grad(objective))))
    rate = gamma[:, 0, :, None, None]
    moved = (np.asarray(state.start) - after.start) / rate
    close(moved, gradient(state.start, k[:, 0], v[:, 0]), 1e-5)
    unit = memory((1, variant, True, None))
    after, _ = step_jit(*token, unit, variant=variant, normalize=False)
    along = np.sum((np.asarray(after.start) - unit.start) * unit.start, axis=-1)
    assert np.abs(along).max() <= 1e-6


@pytest.mark.slow
def test_zeroed_slot_is_filled_by_next_write():
    q, k, v, gamma, _ = jax.tree.map(np.asarray, draw(2))
    g = np.zeros((B, 2, H), np.float32)
    g[:, 0] = -10.0
    once = {"chunk_size": 1, "forget": "l1", "implementation": "xla"}
    first = [x[:, :1] for x in (q, k, v, gamma)]
    state, y = run_jit(*first, g[:, :1], **once)
    assert not np.any(state.start) and not np.any(y)
    second = [x[:, 1:] for x in (q, k, v, gamma)]
    state, _ = run_jit(*second, g[:, 1:], state, **once)
    np.testing.assert_allclose(np.linalg.norm(state.start, axis=-1), 1, atol=1e-6)


def test_the_empty_memory_has_orthonormal_slots_while_they_fit():
    slots = np.asarray(lattice_init_state(2, 3, 4, 8).start)
    overlaps = slots @ slots.swapaxes(2, 3)
    np.testing.assert_allclose(overlaps, 0 * overlaps + np.eye(4), atol=1e-6)
    np.testing.assert_array_equal(slots[0], slots[1])
    assert np.abs(slots[0, 0] - slots[0, 1]).max() > 0.1
    wide = lattice_init_state(1, 1, 9, 8).start
    np.testing.assert_allclose(np.linalg.norm(wide, axis=-1), 1, atol=1e-6)
    with pytest.raises(
        ValueError, match="value_dim=8, got slots=9.*'normalised' takes"
    ):
        lattice_init_state(1, 1, 9, 8, initial="orthonormal")
    with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
        lattice_init_state(1, 0, 9, 8)


def test_bad_arguments_are_refused_by_name():
    q, k, v, gamma, g = draw(3, forget="l2")

    def refuse(match, *a, **o):
        return (
            pytest.raises(ValueError, match=match),
            functools.partial(inspect.unwrap(lattice), *a, **o),
        )

    ok = (q, k, v, gamma)
    state = memory(CASES[4])
    long = dataclasses.replace(state, start=2 * state.start)
    late = dataclasses.replace(state, position=jnp.full(B, 4, jnp.int32))
    cases = [
        refuse("state.position must lie in", *ok, None, late, chunk_size=4),
        refuse("empty.position must lie in", *ok, chunk_size=4, empty=late),
        refuse("k must have shape", q, k[:, :2], v, gamma),
        refuse("gamma must lie in", q, k, v, -gamma),
        refuse("g must lie in", *ok, -g, forget="l2"),
        refuse("g must be given if and only if", *ok, g),
        refuse("g must be given if and only if", *ok, forget="l2"),
        refuse("chunk_size=1 only, got chunk_size=16", *ok, g, forget="l1"),
        refuse("variant must be one of .*'dec'", *ok, variant="decode"),
        refuse("forget must be one of", *ok, g, forget="l3"),
        refuse("chunk_size must be at least 1, got 0", *ok, chunk_size=0),
        refuse("chunk_size=16, got one of chunk_size=4", *ok, None, state),
        refuse("empty must be of chunk_size=16", *ok, empty=state),
        refuse(
            "state.start must hold slots of unit norm", *ok, None, long, chunk_size=4
        ),
        refuse("must be None or one of .*'reference', 'xla'", *ok, implementation="c"),
        refuse("cannot run here: it needs a tpu", *ok, implementation="pallas_tpu"),
        refuse("state.start must be", *(x[:1] for x in ok), None, state, chunk_size=4),
    ]
    for raises, call in cases:
        with raises:
            call()
