"""TTT-linear: token loop against float64, mini-batches against the token loop."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax_kernels
from memjax_kernels import TTTLinearState, ttt_linear_init_state, ttt_linear_state
from memjax_kernels._src.ttt_linear.state import TTTLinearTokens

# Any: called with unpacked tokens.
ttt_linear: Any = memjax_kernels.ttt_linear
step: Any = memjax_kernels.ttt_linear_step

B, H, D, C = 2, 2, 5, 4
LENGTH = 19
# Batch elements 1 and 3 tokens into a mini-batch.
POSITIONS = np.array([1, 3], np.int32)
WHOLE = np.zeros((B, LENGTH), bool)
# Documents of 3, 8 and 8 tokens, and of 1, 4 and 14: all end with a mini-batch.
PACKED = np.array(WHOLE)
PACKED[0, [3, 11]] = PACKED[1, [1, 5]] = True


def draw(length=LENGTH, seed=0) -> Any:
    """Tokens, rates, layer norm, and the memory in the middle of a mini-batch."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype("f4")

    q, k, v = (normal(B, length, H, D) for _ in range(3))
    eta = (0.2 / (1 + np.exp(-normal(B, length, H)))).astype("f4")
    scale, bias = 1 + 0.2 * normal(H, D), 0.2 * normal(H, D)
    weights, offset = normal(B, H, D, D), normal(B, H, D)
    opened = (
        normal(B, H, C, D),
        normal(B, H, C, D),
        0.1 * np.abs(normal(B, H, C)),
    )
    return (q, k, v, eta, scale, bias), (weights, offset, *opened)


def open_state(memory, positions=POSITIONS):
    """A state of these arrays, in the middle of a mini-batch."""
    weights, bias, *opened = map(jnp.asarray, memory)
    here = jnp.arange(C)[None] < jnp.asarray(positions)[:, None]
    tokens = TTTLinearTokens(
        *(jnp.where(here.reshape(B, 1, C, *[1] * (x.ndim - 3)), x, 0) for x in opened)
    )
    return TTTLinearState(weights, bias, tokens, jnp.asarray(positions), C)


def other_start(seed=7):
    """The memory after a reset: not the zeros that it is by default."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return ttt_linear_state(normal(B, H, D, D), normal(B, H, D), C)


EMPTY = other_start()


@functools.cache
def forward(how):
    def call(tokens, memory, positions, reset):
        state = open_state(memory, positions)
        return ttt_linear(
            *tokens, state, chunk_size=C, reset=reset, empty=EMPTY, implementation=how
        )

    return jax.jit(call)


@functools.cache
def both(how):
    """Values, and gradients under cotangents of the reads and of the last memory."""

    def pull_both(tokens, memory, positions, reset, weights):
        def values(tokens, memory):
            after, y = forward(how)(tokens, memory, positions, reset)
            return leaves(after), y

        out, pull = jax.vjp(values, tokens, memory)
        return out, pull(weights)

    return jax.jit(pull_both)


def leaves(state):
    return state.weights, state.bias, *state.tokens


def normalised(x, scale, bias):
    centred = x - x.mean()
    return centred / np.sqrt((centred**2).mean() + 1e-6) * scale + bias


def slope(x, target, scale, bias):
    """Gradient of the loss in x, by the matrix of the layer norm's derivatives."""
    width, centred = len(x), x - x.mean()
    deviation = np.sqrt((centred**2).mean() + 1e-6)
    mean_free = np.eye(width) - 1 / width
    jacobian = mean_free / deviation - np.outer(centred, centred) / width / deviation**3
    return jacobian.T @ (scale * (normalised(x, scale, bias) - target))


def numpy_loop(tokens, memory, positions=POSITIONS, reset=WHOLE):
    """The recurrence in float64, a token, batch element and head at a time."""
    q, k, v, eta, scale, bias = (np.array(x, np.float64) for x in tokens)
    memory = [np.array(x, np.float64) for x in memory]
    fresh = [np.array(x, np.float64) for x in leaves(EMPTY)[:2]]
    reads, after = np.zeros_like(v), [np.zeros_like(x) for x in memory]
    for b, h in np.ndindex(B, H):
        place, (w, c) = positions[b], (m[b, h] for m in memory[:2])
        opened = [
            np.concatenate([m[b, h, :place], x[b, :, h]])
            for m, x in zip(memory[2:], (k, v, eta), strict=True)
        ]
        (w0, c0), norm = (w, c), (scale[h], bias[h])
        for i, (key, value, rate) in enumerate(zip(*opened, strict=True)):
            t = i - place
            if t >= 0 and reset[b, t]:
                w, c = (m[b, h] for m in fresh)
            if i % C == 0:
                w0, c0 = w, c
            update = rate * slope(w0.T @ key + c0, value - key, *norm)
            w, c = w - np.outer(key, update), c - update
            if t >= 0:
                query = q[b, t, h]
                reads[b, t, h] = query + normalised(w.T @ query + c, *norm)
        rest = len(opened[0]) % C
        after[0][b, h], after[1][b, h] = (w0, c0) if rest else (w, c)
        for m, x in zip(after[2:], opened, strict=True):
            m[b, h, :rest] = x[len(x) - rest :]
    return after, reads


def error(actual, expected):
    """Relative root mean square."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    return np.sqrt(np.mean((actual - expected) ** 2) / (np.mean(expected**2) or 1.0))


def close(actual, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert error(a, b) <= tolerance


def test_loss_gradient_equals_autodiff():
    rng = np.random.default_rng(3)
    x, target, scale, bias = rng.normal(size=(4, D))

    def loss(x):
        return ((normalised(x, scale, bias) - target) ** 2).sum() / 2

    numeric = [(loss(x + d) - loss(x - d)) / 2e-6 for d in 1e-6 * np.eye(D)]
    np.testing.assert_allclose(slope(x, target, scale, bias), numeric, rtol=1e-7)


@pytest.mark.parametrize("reset", [WHOLE, PACKED], ids=["whole", "packed"])
def test_values_and_gradients_of_mini_batches_and_reference_agree(reset):
    tokens, memory = draw()
    other, weights = draw(seed=1)
    (values, actual), (others, expected) = (
        both(how)(tokens, memory, POSITIONS, reset, (weights, other[2]))
        for how in ("xla", "reference")
    )
    right = numpy_loop(tokens, memory, reset=reset)
    close((values, others), (right, right))
    if reset is PACKED:
        close(actual[0], expected[0])
    else:
        close(actual, expected)
        assert all(np.abs(g).max() > 1e-3 for g in jax.tree.leaves(actual))


def split_tokens(tokens, split):
    def part(which):
        return (*(x[:, which] for x in tokens[:4]), *tokens[4:])

    return part(slice(None, split)), part(slice(split, None))


@pytest.mark.slow
def test_split_invariance():
    tokens, memory = draw(6)
    expected = numpy_loop(tokens, memory)
    state = jax.tree.map(np.asarray, open_state(memory))
    run = jax.jit(functools.partial(ttt_linear, chunk_size=C))
    for split in (2, 4):
        first, second = split_tokens(tokens, split)
        middle, before = run(*first, state)
        last, after = run(*second, middle)
        np.testing.assert_array_equal(last.position, (POSITIONS + 6) % C)
        close((leaves(last), np.concatenate([before, after], axis=1)), expected)


def test_steps_are_the_recurrence():
    tokens, memory = draw(6)
    run, state, reads = (
        jax.jit(functools.partial(step, chunk_size=C)),
        open_state(memory),
        [],
    )
    for t in range(6):
        state, y = run(*(x[:, t] for x in tokens[:4]), *tokens[4:], state)
        reads.append(y)
    expected = numpy_loop(tokens, memory)
    close((leaves(state), np.stack(reads, axis=1)), expected)


@pytest.mark.slow
def test_no_state_is_the_start_of_a_mini_batch_of_zero_weights():
    tokens, _ = draw(9)
    run = jax.jit(functools.partial(ttt_linear, chunk_size=C))
    after, reads = run(*tokens)
    zeros = leaves(ttt_linear_init_state(B, H, D, C))
    close((leaves(after), reads), numpy_loop(tokens, zeros, np.zeros(B, int)), 2e-5)
    given = run(*tokens, ttt_linear_init_state(B, H, D, C))
    close((leaves(given[0]), given[1]), (leaves(after), reads))
    from_empty = run(*tokens, empty=EMPTY)
    expected = numpy_loop(tokens, leaves(EMPTY), np.zeros(B, int))
    close((leaves(from_empty[0]), from_empty[1]), expected)


def test_the_default_is_the_fast_form():
    tokens, memory = draw()

    def jaxpr(how):
        return str(jax.make_jaxpr(forward(how))(tokens, memory, POSITIONS, WHOLE))

    assert jaxpr(None) == jaxpr("xla") != jaxpr("reference")


def test_misplaced_reset_raises_or_gives_nan():
    tokens, memory = draw()
    reset = np.array(WHOLE)
    reset[1, [1, 7]] = True  # A mini-batch of batch element 1 starts at 1, none at 7.
    other, weights = draw(seed=1)
    for how in ("xla", "reference"):
        # The program of the test of gradients.
        (after, reads), _ = both(how)(
            tokens, memory, POSITIONS, reset, (weights, other[2])
        )
        reset_well = np.array(WHOLE)
        reset_well[1, 1] = True
        expected, well = numpy_loop(tokens, memory, reset=reset_well)
        close(reads[0], well[0])
        close(reads[1, :7], well[1, :7])
        assert np.isnan(reads[1, 7:]).all()
        for leaf, right in zip(after, expected, strict=True):
            close(leaf[0], right[0])
            assert np.isnan(leaf[1]).all()
    message = "of 4 starts, got one in batch element 1 before token 2, 1 into it"
    known = [*map(jnp.asarray, draw(3)[0]), open_state(memory)]
    late = jnp.asarray(np.arange(3)[None] == [[3], [2]])
    with pytest.raises(ValueError, match=message):
        ttt_linear(*known, chunk_size=C, reset=late)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reference", "xla"])
def test_bfloat16_tokens_have_float32_memory(how):
    tokens, memory = draw()
    low = [jnp.asarray(x, jnp.bfloat16) for x in tokens[:3]]
    after, reads = forward(how)((*low, *tokens[3:]), memory, POSITIONS, WHOLE)
    assert (after.weights.dtype, reads.dtype) == (jnp.float32, jnp.bfloat16)
    # What remains is the rounding of the tokens and of the reads alone.
    rounded = (*(x.astype(jnp.float32) for x in low), *tokens[3:])
    expected, right = numpy_loop(rounded, memory)
    close(leaves(after), expected)
    close(reads, right, 5e-3)


def test_states_are_pytrees_with_static_chunk_size():
    state = open_state(draw()[1])
    shapes = jax.tree.map(lambda x: x.shape, state)
    assert shapes.bias == (B, H, D) and shapes.chunk_size == C
    mapped = jax.vmap(lambda s: s.weights.sum() + s.position)(state)
    assert mapped.shape == (B,)
    assert jax.tree.structure(state) != jax.tree.structure(
        ttt_linear_init_state(B, H, D, C + 1)
    )


def test_bad_input_is_refused_by_name():
    tokens, memory = draw(3)
    q, k, v, eta, scale, bias = map(jnp.asarray, tokens)
    good, state = (q, k, v, eta, scale, bias), open_state(memory)

    replace = dataclasses.replace
    bad: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("eta must have shape", (q, k, v, eta[:, :2], scale, bias), {}),
        ("ln_scale must have shape", (q, k, v, eta, scale[:, :2], bias), {}),
        (
            "one width, got K = 5 and V = 4",
            (q, k, v[..., :4], eta, scale[:, :4], bias[:, :4]),
            {},
        ),
        (r"eta must lie in \[0.0, inf\]", (q, k, v, -eta, scale, bias), {}),
        ("chunk_size must be at least 1, got 0", good, {"chunk_size": 0}),
        (
            "state must be of chunk_size=8, got one of chunk_size=4",
            (*good, state),
            {"chunk_size": 8},
        ),
        (
            "empty must be of chunk_size=8, got one of chunk_size=4",
            good,
            {"empty": EMPTY, "chunk_size": 8},
        ),
        (
            r"state.position must lie in \[0.0, 3.0\]",
            (*good, replace(state, position=jnp.full(B, C))),
            {},
        ),
        (
            r"empty.position must lie in \[0.0, 0.0\]",
            good,
            {"empty": replace(EMPTY, position=jnp.asarray(POSITIONS))},
        ),
        (
            "state.weights must be float32",
            (*good, replace(state, weights=state.weights.astype(jnp.bfloat16))),
            {},
        ),
        (
            r"state.bias must be float32\[2, 2, 5\]",
            (*good, replace(state, bias=state.bias[:1])),
            {},
        ),
        (r"'reference', 'xla', 'pallas_tpu'\)", good, {"implementation": "cuda"}),
    ]
    for message, arguments, options in bad:
        with pytest.raises(ValueError, match=message):
            # Without the annotations' own check.
            inspect.unwrap(ttt_linear)(*arguments, **({"chunk_size": C} | options))
    with pytest.raises(ValueError, match="state must be of chunk_size=16"):
        step(*(x[:, 0] for x in good[:4]), *good[4:], state)
