"""The Trellis op: token loop and chunks against a float64 loop from the paper."""

import dataclasses
import functools
import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels import (
    TrellisState,
    delta_rule,
    trellis,
    trellis_init_state,
    trellis_state,
    trellis_step,
)
from memjax_kernels._src.trellis import functions
from memjax_kernels._src.trellis.state import empty_memory
from tests.kernels.trellis.against_xla import draw as draw_tokens
from tests.kernels.trellis.against_xla import opened

B, H, K, V, M, C = 2, 2, 6, 5, 4, 4
# Without the annotations' own check.
unchecked = inspect.unwrap(trellis)


@functools.cache
def draw(length, seed=0, dtype=jnp.float32, gates=(2,)) -> Any:
    """q, k, v, alpha, gamma, g; the gates strong enough to matter."""
    return draw_tokens(B, length, H, K, V, M, dtype, gates, seed)


@functools.cache
def draw_state(seed=3, position=(3, 0)) -> TrellisState:
    """A state with rows at different places; where 0, no chunk is open."""
    draws = np.random.default_rng(seed)
    keys, values = (
        jnp.asarray(0.5 * draws.standard_normal((B, H, M, width), np.float32))
        for width in (K, V)
    )
    return opened(trellis_state(keys, values, C), draw(C, seed=seed + 20), position)


def resized(state, size):
    """The same memories and open tokens, of another chunk size."""
    if size == 1:
        return trellis_state(state.keys, state.values, 1)
    tokens = jax.tree.map(
        lambda x: np.pad(x, [(0, 0)] * 2 + [(0, size - C)] + [(0, 0)] * (x.ndim - 3)),
        state.tokens,
    )
    return dataclasses.replace(state, tokens=tokens, chunk_size=size)


def mask(length, *places):
    found = np.zeros((B, length), bool)
    found[tuple(zip(*places, strict=True))] = True
    return jnp.asarray(found)


def silu(z):
    return z / (1 + np.exp(-z))


NUMPY = {
    "identity": lambda z: z,
    "silu": silu,
    "l2_silu": lambda z: silu(z) / np.sqrt(np.sum(silu(z) ** 2) + 1e-6),
    "ln_silu": lambda z: (silu(z) - silu(z).mean()) / np.sqrt(silu(z).var() + 1e-6),
    "softmax": lambda z: np.exp(z) / np.exp(z).sum(),
}


def jacobian(function, z, h=1e-5):
    """By central differences: [i, j] is the slope of output i along input j."""

    def moved(j, by):
        return function(z + by * np.eye(len(z))[j])

    columns = [(moved(j, h) - moved(j, -h)) / (2 * h) for j in range(len(z))]
    return np.stack(columns, axis=1)


def numpy_loop(tokens, state, size, phi, activation, reset=None, empty: Any = None):
    """Eqs. 8, 9, 13 and 14 in float64, one row, head and token after the other."""
    tokens = [np.array(x, np.float64) for x in tokens]
    memory = [np.array(x, np.float64) for x in (state.keys, state.values)]
    y, position = np.zeros_like(tokens[2]), np.array(state.position)
    left = [np.zeros((B, H, size, *x.shape[3:])) for x in tokens[1:]]
    for b, h in np.ndindex(B, H):
        place, start = position[b], [x[b, h] for x in memory]
        whole = [x[b, :, h] for x in tokens]
        if place:
            k, v, alpha, *gates = (np.array(x[b, h, :place]) for x in state.tokens)
            before = k, v, alpha, np.stack(gates[:2], -1), np.stack(gates[2:], -1)
            # No query: what it reads is not looked at.
            before = (np.zeros_like(k), *before)
            whole = [np.concatenate(x) for x in zip(before, whole, strict=True)]
        running = start
        for t, (q, k, v, alpha, gamma, g) in enumerate(zip(*whole, strict=True)):
            if reset is not None and t >= place and reset[b, t - place]:
                running = [np.array(x[b, h]) for x in (empty.keys, empty.values)]
            if t % size == 0:
                start = running
            running = list(running)
            for i, x in enumerate((k, v)):
                z = start[i] @ x
                u = jacobian(NUMPY[phi], z).T @ (NUMPY[phi](z) - alpha)
                running[i] = np.exp(g[i]) * running[i] - gamma[i] * np.outer(u, x)
            if t >= place:
                read = NUMPY[activation](running[0] @ q)
                y[b, t - place, h] = running[1].T @ read
        rest = len(whole[0]) % size
        for x, now, then in zip(memory, running, start, strict=True):
            x[b, h] = then if rest else now
        for x, of in zip(left, whole[1:], strict=True):
            x[b, h, :rest] = of[len(of) - rest :]
    k, v, alpha, gamma, g = left
    gates = gamma[..., 0], gamma[..., 1], g[..., 0], g[..., 1]
    return (*memory, *((k, v, alpha, *gates) if size > 1 else ())), y


def distance(actual, expected):
    """Relative root mean square of the difference."""
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.sqrt(np.mean((a - b) ** 2) / (np.mean(b**2) or 1.0))


def close(actual, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        assert distance(a, b) <= tolerance


def memories(state):
    """All arrays of a state but its position."""
    return state.keys, state.values, *(state.tokens or ())


@functools.cache
def jitted(**options):
    return jax.jit(functools.partial(trellis, **options))


@functools.cache
def both(implementation, chunk_size=C):
    """Value and gradients of a loss that sees reads and final memories."""

    def loss(arguments, weights, reset):
        tokens, state, empty = arguments
        # Zeros behind the open tokens are no arguments.
        tokens_only = jax.tree.map(lambda x: x * (x != 0), state.tokens)
        after, y = trellis(
            *tokens,
            state=dataclasses.replace(state, tokens=tokens_only),
            reset=reset,
            empty=empty,
            chunk_size=chunk_size,
            implementation=implementation,
        )
        pairs = zip((*memories(after), y), weights, strict=True)
        return sum(jnp.sum(a * b) for a, b in pairs)

    return jax.jit(jax.grad(loss, allow_int=True))


@pytest.mark.parametrize("name", functions.TRELLIS_PHIS)
def test_functions_and_their_gradients(name):
    rng = np.random.default_rng(0)
    for z in (rng.normal(size=7), 0.01 * rng.normal(size=7), 5 * rng.normal(size=7)):
        target = rng.normal(size=7)
        expected = NUMPY[name](z)
        close(functions.apply(name, jnp.float32(z)), expected)
        u = jacobian(NUMPY[name], z).T @ (expected - target)
        actual = functions.error_gradient(name, jnp.float32(z), jnp.float32(target))
        close(actual, u, 2e-5)


@pytest.mark.parametrize(
    "implementation, phi, activation, size",
    [
        ("reference", "l2_silu", "ln_silu", C),
        ("reference", "softmax", "l2_silu", 1),
        ("xla", "l2_silu", "ln_silu", C),
        ("xla", "softmax", "l2_silu", 1),
        ("xla", "ln_silu", "softmax", 32),
    ],
)
def test_values(implementation, phi, activation, size):
    tokens, empty = draw(9), draw_state(4, (0, 0))
    state = draw_state(position=(3, 0) if size > 1 else (0, 0))
    state, empty = (resized(s, size) for s in (state, empty))
    # The first row stands 3 tokens into a chunk, the second starts one.
    reset = {C: mask(9, (0, 1), (1, 4)), 1: mask(9, (0, 3)), 32: mask(9, (1, 0))}[size]
    options = {"chunk_size": size, "phi": phi, "activation": activation}
    run = jitted(implementation=implementation, **options)
    after, y = run(*tokens, state, reset=reset, empty=empty)
    expected = numpy_loop(tokens, state, size, phi, activation, reset, empty)
    close((memories(after), y), expected)
    np.testing.assert_array_equal(after.position, (state.position + 9) % size)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_bfloat16_tokens_have_float32_memory(implementation):
    tokens, state = draw(9, seed=9, dtype=jnp.bfloat16), draw_state()
    after, y = jitted(chunk_size=C, implementation=implementation)(*tokens, state)
    assert {x.dtype.name for x in memories(after)} == {"float32"}
    assert y.dtype == jnp.bfloat16
    expected_state, expected = numpy_loop(tokens, state, C, "l2_silu", "ln_silu")
    # Products of bfloat16 operands round the memories, too: 8 bits, RMS 1.1e-3 each.
    close((memories(after), y), (expected_state, expected), 8e-3)


@pytest.mark.slow
def test_gradients_of_chunks_are_those_of_the_token_loop():
    arguments = (draw(14), draw_state(), draw_state(4, (0, 0)))
    weights = (*memories(draw_state(5, (3, 3))), draw(14, seed=1)[2])
    reset = mask(14, (0, 5), (1, 8))
    actual = both("xla")(arguments, weights, reset)
    expected = both("reference")(arguments, weights, reset)
    tokens, state, empty = actual
    # Nothing is without a gradient, but the tokens that `empty` has not.
    used = (*tokens, *memories(state), empty.keys, empty.values)
    assert all(np.abs(x).max() > 1e-3 for x in used)
    for got, wanted in zip(actual, expected, strict=True):
        got, wanted = (
            x if isinstance(x, tuple) else memories(x) for x in (got, wanted)
        )
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_segments_join():
    """Of one and of three tokens, they begin at all places of chunks of 4."""
    tokens, state = jax.tree.map(np.asarray, draw(14)), draw_state()
    run, reads = jitted(chunk_size=C, implementation="xla"), []
    expected = numpy_loop(tokens, state, C, "l2_silu", "ln_silu")
    edges = [0, 1, 4, 7, 10, 11, 14]
    for start, end in itertools.pairwise(edges):
        state, y = run(*(x[:, start:end] for x in tokens), state)
        reads.append(y)
    close((memories(state), np.concatenate(reads, 1)), expected)


def test_step_is_one_token():
    tokens, state = jax.tree.map(np.asarray, draw(6)), draw_state()
    expected = numpy_loop(tokens, state, C, "l2_silu", "ln_silu")
    one, reads = jax.jit(trellis_step), []
    for t in range(6):
        state, y = one(*(x[:, t] for x in tokens), state)
        reads.append(y)
    close((memories(state), np.stack(reads, 1)), expected)


@pytest.mark.slow
def test_reset_equals_new_call():
    tokens = jax.tree.map(np.asarray, draw(11))
    run = jitted(chunk_size=C, implementation="xla")
    _, first = run(*(x[:, :8] for x in tokens))
    state, second = run(*(x[:, 8:] for x in tokens))
    actual = run(*tokens, reset=mask(11, (0, 8), (1, 8)))
    close(actual, (state, np.concatenate([first, second], 1)))


def test_misplaced_reset_raises_or_gives_nan():
    tokens = draw(9)
    with pytest.raises(ValueError, match="reset must be where a chunk of 4 starts"):
        trellis(*draw(3), reset=mask(3, (1, 1)), chunk_size=C)
    run = jitted(chunk_size=C, implementation="xla")
    resets = mask(9, (1, 5)), np.zeros((B, 9), bool)
    both = [run(*tokens, reset=reset) for reset in resets]
    (state, y), (whole_state, whole) = jax.tree.map(np.asarray, both)
    close(y[0], whole[0])
    close(y[1, :5], whole[1, :5])
    assert np.isnan(y[1, 5:]).all()
    for a, b in zip(memories(state), memories(whole_state), strict=True):
        close(a[0], b[0])
        assert np.isnan(a[1]).all()


def test_a_linear_phi_is_the_delta_rule():
    """The key memory, whose targets are alpha."""
    q, k, v, alpha, gamma, _ = draw(9, gates=())
    state = trellis_init_state(B, H, M, K, V, chunk_size=1)
    run = functools.partial(trellis, chunk_size=1, phi="identity")
    after, _ = jax.jit(run)(q, k, v, alpha, gamma, None, state)
    before = state.keys.swapaxes(2, 3)
    memory, _ = jax.jit(delta_rule)(q, k, alpha, gamma, before)
    close(after.keys.swapaxes(2, 3), memory)


@pytest.mark.slow
def test_shared_gates_and_none():
    q, k, v, alpha, gamma, g = draw(5, gates=())

    def twice(x):
        return np.stack([x, x], -1)

    # What is shared is the same for all implementations.
    run = jitted(chunk_size=C, implementation="xla")
    one = run(q, k, v, alpha, gamma, g)
    close(one, run(q, k, v, alpha, twice(gamma), twice(g)))
    one = run(q, k, v, alpha, twice(gamma), None)
    close(one, run(q, k, v, alpha, gamma, 0 * g))


def test_strong_gates_clear_memory_and_later_tokens_stay_exact():
    q, k, v, alpha, gamma, g = draw(9)
    g = np.array(g)
    g[:, 2], g[:, 5] = -np.inf, -1e5
    tokens = (q, k, v, alpha, gamma, g)
    state = resized(draw_state(position=(0, 0)), 32)
    for implementation in ("reference", "xla"):
        after, y = jitted(chunk_size=32, implementation=implementation)(*tokens, state)
        expected = numpy_loop(tokens, state, 32, "l2_silu", "ln_silu")
        # Without the tokens, of which a gate is -inf.
        close((after.keys, after.values, y), (*expected[0][:2], expected[1]), 2e-5)


@pytest.mark.parametrize("slots, width", [(4, 9), (9, 4), (5, 5)])
def test_the_empty_memory_has_singular_values_of_one(slots, width):
    close(np.linalg.svd(empty_memory(slots, width))[1], np.ones(min(slots, width)))


@pytest.mark.slow
def test_no_state_is_the_empty_state():
    tokens = draw(5)
    run = jitted(chunk_size=C, implementation="xla")
    close(run(*tokens), run(*tokens, trellis_init_state(B, H, M, K, V, C)))
    # And the default implementation here is the chunk form.
    close(jitted(chunk_size=C)(*tokens), run(*tokens))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda: {"phi": "tanh"}, "phi must be one of .*'l2_silu'.*, got 'tanh'"),
        (lambda: {"activation": "gelu"}, "activation must be one of .*, got 'gelu'"),
        (lambda: {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        (lambda: {"implementation": "cuda"}, "None or one of .*'xla'.*, got 'cuda'"),
        (lambda: {"implementation": "pallas_tpu"}, "cannot run here: it needs a tpu"),
        (lambda: {"gamma": -jnp.ones((B, 3, H))}, "gamma must lie in"),
        (lambda: {"g": 0.1 * jnp.ones((B, 3, H))}, "g must lie in"),
        (lambda: {"gamma": jnp.ones((B, 3, H, 3)), "g": None}, "each pass, got 3"),
        (lambda: {"k": jnp.ones((B, 3, H, K + 1))}, "k must have shape"),
        (lambda: {"alpha": jnp.ones((B, 3, 1, M))}, "alpha must have shape"),
        (lambda: {"reset": jnp.zeros((B, 2), bool)}, "reset must be bool"),
        (
            lambda: {"state": trellis_init_state(B, H, M, K, V, 8)},
            "state must be of chunk_size=4, got one of chunk_size=8",
        ),
        (
            lambda: {"state": trellis_init_state(B, H, M + 1, K, V, C)},
            "state.keys must be",
        ),
        (lambda: {"state": draw(3)[0]}, "state must be a TrellisState, got ArrayImpl"),
        (lambda: {"state": draw_state(position=(4, 0))}, "state.position must lie in"),
        (lambda: {"empty": draw_state(position=(1, 0))}, "empty.position must lie in"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, message):
    names = ("q", "k", "v", "alpha", "gamma", "g")
    call = dict(zip(names, draw(3), strict=True)) | {"chunk_size": C} | change()
    with pytest.raises(ValueError, match=message):
        unchecked(**call)


def test_sizes_of_a_state_are_positive():
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        trellis_init_state(B, H, 0, K, V, C)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        trellis_init_state(B, H, M, K, V, 0)


@pytest.mark.slow
def test_mild_gates_stay_exact_next_to_strong_ones():
    """Sums of 62 gates of -104 lose four digits of the mild gates after them."""
    q, k, v, alpha, gamma, g = draw(64, gates=())
    strong = np.array([-104.0, -30.0, -np.inf], np.float32)[np.arange(64) % 3]
    mild = np.float32(0.01) * np.asarray(g)
    g = np.where(np.arange(64)[:, None] % 8 < 5, strong[:, None], mild)
    read = jax.jit(unchecked, static_argnames=("chunk_size", "implementation"))
    _, loop = read(q, k, v, alpha, gamma, g, implementation="reference", chunk_size=64)
    _, y = read(q, k, v, alpha, gamma, g, implementation="xla", chunk_size=64)
    np.testing.assert_allclose(y, loop, atol=1e-5 * np.abs(loop).max())
