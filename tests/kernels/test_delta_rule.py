"""Delta rules: references against float64, chunks against both."""

import functools
import inspect
import json
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax_kernels

FROM_FLA = Path(__file__).with_name("golden") / "fla_delta_rules.json"
B, H, K, V = 2, 2, 4, 3
LENGTH = 37
#: The axes of the gates of each op.
GATES = {
    "delta_rule": ("BTH",),
    "gated_delta_rule": ("BTH", "BTH"),
    "kda": ("BTH", "BTHK"),
    "gdn2": ("BTHK", "BTHV", "BTHK"),
}
OPS = [*GATES]
WHOLE = np.zeros((B, LENGTH), bool)
# A batch element that starts anew, and one with documents of 1, 19 and 17 tokens.
PACKED = np.array(WHOLE)
PACKED[0, 0] = PACKED[1, [1, 20]] = True
# 37 tokens are 10 chunks of 4, in two groups.
SMALL = 4
every_op = pytest.mark.parametrize("op", OPS)
# Of the first are the others: fewer gates in the same chunks and the same step.
widest_op = pytest.mark.parametrize("op", ["kda", "gdn2"])


def with_options(op, **options):
    return functools.partial(getattr(memjax_kernels, op), **options)


def draw(op, length=LENGTH, seed=0) -> Any:
    """Queries, unit keys, values, rates, log gates and a memory that is not empty."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype("f4")

    q, k, v = (normal(B, length, H, width) for width in (K, K, V))
    sizes = {"B": B, "T": length, "H": H, "K": K, "V": V}
    gates = [normal(*(sizes[a] for a in axes)) for axes in GATES[op]]
    gates = [1 / (1 + np.exp(-x)) for x in gates]
    if op != "delta_rule":
        gates[-1] = np.log(gates[-1])
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return q, k, v, *gates, normal(B, H, K, V)


@functools.cache
def forward(op, how):
    """An implementation by name, or chunks of a size: values."""
    options: dict[str, Any] = {"implementation": how}
    if isinstance(how, int):
        options = {"implementation": "xla", "chunk_size": how}
    return jax.jit(lambda *a: with_options(op, reset=a[-1], **options)(*a[:-1]))


@functools.cache
def both(op, how):
    """Values, and gradients under cotangents of the reads and of the last memory."""

    def pull_both(arguments, reset, weights):
        values, pull = jax.vjp(lambda *a: forward(op, how)(*a, reset), *arguments)
        return values, pull(weights)

    return jax.jit(pull_both)


def gradients(op, how, arguments, reset=WHOLE):
    other = draw(op, arguments[0].shape[1], seed=1)
    return both(op, how)(arguments, reset, (other[-1], other[2]))


def numpy_loop(*arguments, reset=WHOLE):
    """S <- S diag(exp(g)) (I - (e k) k^T) + (w v) k^T, in float64 and matrix form."""
    q, k, v, *gates, state = (np.array(x, np.float64) for x in arguments)
    gates = [x[..., None] if x.ndim == 3 else x for x in gates]
    if len(gates) < 3:
        gates.insert(1, gates[0])
    reads = np.zeros_like(v)
    for b, h in np.ndindex(B, H):
        s = state[b, h].T
        for t in range(q.shape[1]):
            key, (erase, write, *g) = k[b, t, h], (x[b, t, h] for x in gates)
            s = np.zeros_like(s) if reset[b, t] else s
            s = s * np.exp(g[0]) if g else s
            s = s @ (np.eye(K) - np.outer(erase * key, key))
            s = s + np.outer(write * v[b, t, h], key)
            reads[b, t, h] = s @ q[b, t, h]
        state[b, h] = s.T
    return state, reads


def error(actual, expected):
    """Relative root mean square."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


def close(actual, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert error(a, b) <= tolerance


@pytest.mark.slow
@every_op
def test_values_are_those_of_the_recurrence(op):
    arguments = draw(op)
    expected = numpy_loop(*arguments, reset=PACKED)
    # In small chunks and token by token: with their gradients.
    close(forward(op, "xla")(*arguments, PACKED), expected)


@pytest.mark.parametrize("op", OPS[1:])
def test_values_and_gradients_of_chunks_and_reference_agree(op):
    arguments = draw(op)
    values, actual = gradients(op, SMALL, arguments, PACKED)
    reference, expected = gradients(op, "reference", arguments, PACKED)
    close(values, numpy_loop(*arguments, reset=PACKED))
    close(reference, values)
    # The initial memory of the first element is never read.
    assert not np.any(actual[-1][0]) and np.any(actual[-1][1])
    close(actual, expected)
    assert all(np.abs(g).max() > 1e-3 for g in actual)


@pytest.mark.slow
def test_one_token_has_the_gradients_of_the_reference():
    op = "gdn2"
    arguments, none = draw(op, 1), WHOLE[:, :1]
    actual = gradients(op, "xla", arguments, none)
    close(actual, gradients(op, "reference", arguments, none))


@pytest.mark.slow
def test_chunks_of_one_token_are_chunks():
    arguments = draw("gated_delta_rule")
    close(forward("gated_delta_rule", 1)(*arguments, None), numpy_loop(*arguments))


@pytest.mark.slow
@widest_op
def test_split_invariance(op):
    *tokens, state = draw(op, 6)
    expected = numpy_loop(*tokens, state)
    run = forward(op, SMALL)
    for split in (2, 4):
        middle, first = run(*(x[:, :split] for x in tokens), state, None)
        last, second = run(*(x[:, split:] for x in tokens), middle, None)
        close((last, np.concatenate([first, second], axis=1)), expected)


@every_op
def test_a_step_is_one_token(op):
    *tokens, state = draw(op, 1)
    after, read = jax.jit(getattr(memjax_kernels, f"{op}_step"))(
        *(x[:, 0] for x in tokens), state
    )
    close((after, read[:, None]), numpy_loop(*tokens, state))


@every_op
def test_the_first_memory_is_empty(op):
    found = getattr(memjax_kernels, f"{op}_init_state")(B, H, K, V)
    np.testing.assert_array_equal(found, np.zeros((B, H, K, V), np.float32))


@pytest.mark.slow
def test_defaults_are_empty_memory_and_fastest_form():
    *tokens, state = draw("gdn2")
    # A small memory on a CPU is looped over.
    found = jax.jit(with_options("gdn2"))(*tokens)
    expected = forward("gdn2", "reference")(*tokens, np.zeros_like(state), WHOLE)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_rate_one_recalls_last_value_of_key():
    _, k, v, beta, state = draw("delta_rule", 9)
    _, reads = jax.jit(with_options("delta_rule"))(k, k, v, np.ones_like(beta), state)
    close(reads, v)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "keys"),
    [(1.3, "one"), (1.3, "two"), (1.3, "all"), (1.0, "one"), (0.05, "all")],
)
def test_solve_is_stable_for_repeated_and_unnormalised_keys(norm, keys):
    """Powers of the system's matrix reach 1e18 here. rate |k|² = 2 is the limit."""
    q, k, v, beta, state = draw("delta_rule", 129)
    match keys:
        case "one":
            k = np.broadcast_to(k[:, :1], k.shape)
        case "two":
            k = k[:, np.arange(129) % 2]
        case _:
            k = k * np.random.default_rng(2).uniform(0.1, 1, (B, 129, H, 1))
    arguments = (q, np.float32(norm) * k.astype("f4"), v, np.ones_like(beta), state)
    reset = np.zeros((B, 129), bool)
    actual = forward("delta_rule", "xla")(*arguments, reset)
    close(actual, numpy_loop(*arguments, reset=reset))


@pytest.mark.slow
@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
@pytest.mark.parametrize("strong", [-1e3, -1e30, -np.inf])
def test_strong_gates_clear_memory_and_later_tokens_stay_exact(op, strong):
    arguments = draw(op)
    g = arguments[-2]
    g[:, ::5] = strong
    g[0, 6:8] = strong
    values, grads = gradients(op, SMALL, arguments)
    close(values, numpy_loop(*arguments))
    expected = gradients(op, "reference", arguments)[1]
    close(grads[:-1], expected[:-1])
    assert not np.any(grads[-1])


def test_channels_that_forget_all_leave_others_exact():
    """Of the same token and head, behind gates of -50 and before none at all."""
    arguments = draw("kda")
    g = arguments[-2]
    g[..., 0], g[..., 1], g[:, ::3, :, 2] = -50, 0, -1e4
    (state, reads), grads = gradients("kda", SMALL, arguments)
    close((state, reads), numpy_loop(*arguments))
    close(grads, gradients("kda", "reference", arguments)[1])


@pytest.mark.parametrize("op", ["kda", "gdn2"])
def test_values_are_those_of_flash_linear_attention(op):
    """Its naive recurrence of version 0.6.0, run in float32 on the same numbers."""

    def waves(i, *shape):
        return np.sin(1 + i + np.arange(np.prod(shape)) * (0.7 + i)).reshape(shape)

    axes = {"BTH": (1, 6, 2), "BTHK": (1, 6, 2, 4), "BTHV": (1, 6, 2, 3)}
    q, k, v = waves(0, 1, 6, 2, 4), waves(1, 1, 6, 2, 4), waves(2, 1, 6, 2, 3)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gates = [0.5 + waves(3 + i, *axes[a]) / 2 for i, a in enumerate(GATES[op])]
    gates[-1] = -3 * gates[-1]
    arguments = (q, k, v, *gates, waves(6, 1, 2, 4, 3))
    found = forward(op, SMALL)(*(x.astype("f4") for x in arguments), None)
    golden = json.loads(FROM_FLA.read_text())[op]
    close(found, tuple(np.array(golden[name]) for name in ("state", "reads")), 1e-6)


@pytest.mark.slow
@widest_op
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_bfloat16_tokens_have_float32_memory(op, implementation):
    *tokens, state = draw(op)
    low = [jnp.asarray(x, jnp.bfloat16) for x in tokens[:3]]
    gates = tokens[3:]
    run = forward(op, implementation)
    after, reads = run(*low, *gates, state, WHOLE)
    assert (after.dtype, reads.dtype) == (jnp.float32, jnp.bfloat16)
    # What remains is the rounding of the tokens and of the reads alone.
    rounded = [x.astype(jnp.float32) for x in low]
    expected_state, expected = numpy_loop(*rounded, *gates, state)
    close(after, expected_state)
    close(reads, expected, 1e-2)


@every_op
def test_bad_input_is_refused_by_name(op):
    q, k, v, *gates, state = draw(op, 3)
    # Without the annotations' own check.
    run = functools.partial(inspect.unwrap(getattr(memjax_kernels, op)))
    bad: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        (r"k must have shape", (q, k[:, :2], v, *gates), {}),
        (r"H a multiple of the 2 heads of q", (q, k, v[:, :, :1], *gates), {}),
        (r"state must have shape", (q, k, v, *gates, state[:, :, :2]), {}),
        (r"state must be float32", (q, k, v, *gates, state.astype("f2")), {}),
        (r"must lie in \[0.0, 2.0\]", (q, k, v, gates[0] * 9, *gates[1:]), {}),
        (
            r"reset must be bool",
            (q, k, v, *gates),
            {"reset": jnp.zeros((2, 2), bool)},
        ),
        (
            r"one of \('xla', 'reference'.*\), got 'cuda'",
            (q, k, v, *gates),
            {"implementation": "cuda"},
        ),
    ]
    if op != "delta_rule":
        given = (q, k, v, *gates[:-1], -gates[-1])
        bad.append((r"g must lie in \[-inf, 0.0\]", given, {}))
    for message, arguments, options in bad:
        with pytest.raises(ValueError, match=message):
            run(*map(jnp.asarray, arguments), **options)


@pytest.mark.parametrize("op", ["gla", "gated_delta_rule", "kda", "gdn2"])
@pytest.mark.parametrize("how", ["reference", "xla"])
def test_an_op_of_logits_has_the_gates_of_decay(op, how):
    q, k, v, *rates, g, state = map(jnp.asarray, draw("kda" if op == "gla" else op))
    given = (q, k, v, *rates[: 0 if op == "gla" else None])
    z, function = 3 * g + 2, getattr(memjax_kernels, op)
    bias, log_rate = g[0, 0] - 1, jnp.array([-1.0, 1.0])

    def sizes(z, bias, log_rate, by_logits):
        decay = memjax_kernels.Decay(log_rate, bias)
        if not by_logits:
            rate = jnp.exp(log_rate).reshape(-1, *(1,) * (bias.ndim - 1))[None, None]
            z, decay = -rate * jax.nn.softplus(z + bias[None, None]), None
        options: Any = dict(implementation=how, reset=jnp.asarray(PACKED), decay=decay)
        after, y = function(*given, z, state, **options)
        return jnp.sum(after**2) + jnp.sum(jnp.sin(y))

    run = jax.jit(jax.value_and_grad(sizes, (0, 1, 2)), static_argnums=3)
    found, wanted = (run(z, bias, log_rate, x) for x in (True, False))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, 2e-5, 2e-5), found, wanted
    )


def test_a_decay_of_other_heads_is_refused():
    q, k, v, beta, g, state = map(jnp.asarray, draw("kda"))
    decay = memjax_kernels.Decay(jnp.zeros(H + 1), jnp.zeros((H, K)))
    with pytest.raises(ValueError, match=r"log_rate must have shape \[H\] = \[2\]"):
        memjax_kernels.kda(q, k, v, beta, g, state, decay=decay)
    decay = memjax_kernels.Decay(jnp.zeros(H), jnp.zeros(H))
    with pytest.raises(ValueError, match=r"bias must have shape \[H, K\] = \[2, 4\]"):
        memjax_kernels.kda(q, k, v, beta, g, state, decay=decay)


@pytest.mark.parametrize(
    ("message", "z", "log_rate", "bias"),
    [
        ("g must lie in", np.nan, 0.0, 0.0),
        ("log_rate must lie in", 0.0, np.nan, 0.0),
        ("log_rate must lie in", -200.0, 88.0, 0.0),
        ("log_rate must lie in", np.inf, -200.0, 0.0),
        ("bias must lie in", 0.0, 0.0, np.nan),
        ("bias must lie in", -np.inf, 0.0, np.inf),
        (None, np.inf, -87.0, -1e38),
        (None, -np.inf, 87.0, 1e38),
    ],
)
def test_numbers_that_make_no_gates_are_refused(message, z, log_rate, bias):
    """Or else gates are not NaN."""
    q, k, v, beta, g, state = map(jnp.asarray, draw("kda"))
    decay = memjax_kernels.Decay(jnp.full(H, log_rate), jnp.full((H, K), bias))
    run = functools.partial(memjax_kernels.kda, q, k, v, beta, decay=decay)
    if message is None:
        assert all(jnp.all(jnp.isfinite(x)) for x in run(jnp.full(g.shape, z), state))
        return
    with pytest.raises(ValueError, match=message):
        run(jnp.full(g.shape, z), state)


@pytest.mark.usefixtures("unchecked_annotations")
def test_what_is_no_decay_is_refused():
    q, k, v, beta, g, state = map(jnp.asarray, draw("kda"))
    decay = memjax_kernels.Decay(jnp.zeros(H), jnp.zeros((H, K)))
    for other in (tuple(decay), decay.bias, True):
        with pytest.raises(ValueError, match="decay must be a Decay, got "):
            memjax_kernels.kda(q, k, v, beta, g, state, decay=cast(Any, other))
    for bad in (decay._replace(log_rate=jnp.zeros(1)), decay._replace(bias=g[0])):
        with pytest.raises(ValueError, match="z must end with the axes of bias"):
            bad.log_gates(g)
    with pytest.raises(ValueError, match="z must end with the axes of bias"):
        decay.log_gates(g[..., :1])
