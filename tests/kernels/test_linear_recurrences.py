"""Linear recurrences: references against float64 on the host, chunks against both."""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax_kernels
from memjax_kernels._src.common import implementations

B, H, K, V, M = 2, 2, 5, 3, 4
LENGTH = 37
WHOLE = np.zeros((B, LENGTH), bool)
# A batch element that starts anew, and one with documents of 1, 19 and 17 tokens.
PACKED = np.array(WHOLE)
PACKED[0, 0] = PACKED[1, [1, 20]] = True
FAST, SLOW = "xla", "reference"


class Case(NamedTuple):
    """An op and the axes of its inputs."""

    op: str
    axes: tuple[str | None, ...]


QKV = ("BTHK", "BTHK", "BTHV")
CASES = {
    "linear_attention": Case("linear_attention", QKV),
    "ssd": Case("ssd", (*QKV, "BTH")),
    "gla": Case("gla", (*QKV, "BTHK")),
    "gsa": Case("gated_slots", (*QKV, "BTHM", "BTHM")),
    "abc": Case("gated_slots", (*QKV, "BTHM", None)),
}
GATED = ["ssd", "gla", "gsa"]
# 37 tokens are 10 chunks of 4, in two groups.
SMALL = 4
every_case = pytest.mark.parametrize("name", CASES)
# Of these are the others: fewer gates in the same chunks and the same step.
widest_case = pytest.mark.parametrize("name", ["gla", "gsa"])
gated_case = pytest.mark.parametrize("name", GATED)


def draw(name, length=LENGTH, seed=0) -> Any:
    """Tokens, log gates about -0.7, and a memory that is not empty."""
    case, sizes = CASES[name], {"B": B, "T": length, "H": H, "K": K, "V": V, "M": M}
    rng = np.random.default_rng(seed)

    def normal(axes):
        return rng.normal(size=[sizes[a] for a in axes]).astype("f4")

    tokens: list[Any] = [axes and normal(axes) for axes in case.axes]
    if name in GATED:
        tokens[-1] = -np.log1p(np.exp(tokens[-1]))
    state: Any = normal("BHKV")
    if case.op == "gated_slots":
        tokens[3] = np.abs(tokens[3])
        slots: Any = memjax_kernels.GatedSlotsState
        state = slots(normal("BHMK"), normal("BHMV"))
    return *tokens, state


def numpy_loop(name, *arguments, reset=None):
    """The recurrences of the papers in float64, matrices written out."""
    *tokens, state = jax.tree.map(lambda x: np.asarray(x, np.float64), arguments)
    q, k, v, *gates = tokens
    memories = [np.array(s) for s in jax.tree.leaves(state)]
    reads = np.zeros_like(v)
    for b, t, h in np.ndindex(q.shape[:3]):
        now = [memory[b, h] for memory in memories]
        if reset is not None and reset[b, t]:
            now = [np.zeros_like(s) for s in now]
        query, key, value = q[b, t, h], k[b, t, h], v[b, t, h]
        if CASES[name].op == "gated_slots":
            alpha, g = gates
            keep = np.diag(np.ones(M) if g is None else np.exp(g[b, t, h]))
            now[0] = keep @ now[0] + np.outer(alpha[b, t, h], key)
            now[1] = keep @ now[1] + np.outer(alpha[b, t, h], value)
            weights = np.exp(now[0] @ query)
            reads[b, t, h] = now[1].T @ (weights / weights.sum())
        else:
            keep = np.exp(gates[0][b, t, h]) * np.ones(len(key)) if gates else 1.0
            keep = np.diag(keep * np.ones(len(key)))
            now[0] = keep @ now[0] + np.outer(key, value)
            reads[b, t, h] = now[0].T @ query
        for memory, new in zip(memories, now, strict=True):
            memory[b, h] = new
    return jax.tree.unflatten(jax.tree.structure(state), memories), reads


def error(actual, expected):
    """Relative root mean square."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    return np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))


def close(actual, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert error(a, b) <= tolerance


@functools.cache
def forward(name, how):
    """An implementation by name, or chunks of a size: values."""
    case = CASES[name]
    options: dict[str, Any] = {"implementation": how}
    if isinstance(how, int):
        options = {"implementation": "xla", "chunk_size": how}
    op = getattr(memjax_kernels, case.op)
    return jax.jit(lambda *a: op(*a[:-1], reset=a[-1], **options))


@functools.cache
def both(name, how):
    """Values, and gradients under cotangents of reads and of the last memory."""

    def pull_both(arguments, reset, weights):
        values, pull = jax.vjp(lambda *a: forward(name, how)(*a, reset), *arguments)
        return values, pull(weights)

    return jax.jit(pull_both)


def with_gradients(name, how, arguments, reset=WHOLE):
    weights = draw(name, seed=1)
    return both(name, how)(arguments, reset, (weights[-1], weights[2]))


@pytest.mark.slow
@every_case
def test_values_are_those_of_the_recurrence(name):
    arguments = draw(name)
    expected = numpy_loop(name, *arguments, reset=PACKED)
    # In small chunks and token by token: with their gradients.
    for how in (FAST, SLOW) if name == "abc" else (FAST,):
        close(forward(name, how)(*arguments, PACKED), expected)


@pytest.mark.parametrize("name", [name for name in CASES if name != "abc"])
def test_values_and_gradients_of_chunks_and_reference_agree(name):
    arguments = draw(name)
    values, actual = with_gradients(name, SMALL, arguments, PACKED)
    reference, expected = with_gradients(name, SLOW, arguments, PACKED)
    close(values, numpy_loop(name, *arguments, reset=PACKED))
    close(reference, values)
    close(actual, expected, 2e-5)
    assert all(np.abs(x).max() > 1e-2 for x in jax.tree.leaves(expected))
    # What a reset forgot has none.
    assert all(np.all(x[0] == 0) for x in jax.tree.leaves(expected[-1]))


@every_case
def test_one_token_is_a_step(name):
    *tokens, state = arguments = draw(name, 1)
    expected = numpy_loop(name, *arguments)
    close(forward(name, FAST)(*arguments, None), expected)
    step = jax.jit(getattr(memjax_kernels, f"{CASES[name].op}_step"))
    after, y = step(*jax.tree.map(lambda x: x[:, 0], tokens), state)
    close((after, y[:, None]), expected)


@pytest.mark.slow
@widest_case
def test_split_invariance(name):
    length = SMALL + 2
    *tokens, state = draw(name, length)

    def cut(start, stop):
        return jax.tree.map(lambda x: x[:, start:stop], tokens)

    whole = numpy_loop(name, *tokens, state)
    for place in (2, SMALL):
        middle, first = forward(name, SMALL)(*cut(0, place), state, None)
        after, second = forward(name, SMALL)(*cut(place, length), middle, None)
        close((after, np.concatenate([first, second], axis=1)), whole)


@pytest.mark.slow
@gated_case
def test_strong_gates_clear_memory_and_later_tokens_stay_exact(name):
    *tokens, g, state = draw(name)
    gates = np.array([0, -1e-3, -0.3, -30, -1e4, -np.inf], "f4")
    chosen = np.random.default_rng(3).integers(0, len(gates), g.shape)
    # Stretches of strong gates sum to -100 and far beyond, with weak ones between.
    weak = np.arange(LENGTH) % 12 > 5
    chosen[:, weak] = np.minimum(chosen[:, weak], 1)
    arguments = (*tokens, gates[chosen], state)
    expected = numpy_loop(name, *arguments)
    close(forward(name, FAST)(*arguments, WHOLE), expected)
    (values, actual), (others, gradients) = (
        with_gradients(name, how, arguments) for how in (SMALL, SLOW)
    )
    close((values, others), (expected, expected))
    close(actual, gradients, 2e-5)


@pytest.mark.slow
@gated_case
def test_mild_gates_stay_exact_next_to_a_strong_one(name):
    """A difference of sums of about -1e6 would have lost gates of -1e-3."""
    *tokens, g, state = draw(name)
    g = np.full_like(g, -1e-3)
    g[:, 5] = -1e6
    arguments = (*tokens, g, state)
    expected = numpy_loop(name, *arguments)
    close(forward(name, FAST)(*arguments, WHOLE), expected, 2e-6)


@pytest.mark.slow
@widest_case
@pytest.mark.parametrize("how", [SLOW, FAST])
def test_bfloat16_tokens_have_float32_memory(name, how):
    *tokens, state = draw(name)
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tokens)
    after, y = forward(name, how)(*low, state, WHOLE)
    assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype("float32")}
    assert y.dtype == jnp.bfloat16
    expected_after, expected = numpy_loop(name, *low, state)
    close(after, expected_after, 5e-3)
    assert error(y, expected) <= 5e-3


@pytest.mark.parametrize("name", ["ssd", "gsa"])
def test_reset_at_the_start_empties_even_a_memory_of_nan(name):
    *tokens, state = draw(name)
    starts = np.zeros((B, len(tokens[0][0])), bool)
    starts[:, 0] = True
    spoilt = jax.tree.map(lambda x: np.full_like(x, np.nan), state)
    empty = jax.tree.map(np.zeros_like, state)
    run = forward(name, FAST)
    close(run(*tokens, spoilt, starts), run(*tokens, empty, starts))


@every_case
def test_the_first_memory_is_empty(name):
    sizes = (B, H, M, K, V) if CASES[name].op == "gated_slots" else (B, H, K, V)
    actual = getattr(memjax_kernels, f"{CASES[name].op}_init_state")(*sizes)
    empty = jax.tree.map(np.zeros_like, draw(name, 1)[-1])
    jax.tree.map(np.testing.assert_array_equal, actual, empty)


@pytest.mark.slow
@widest_case
def test_defaults_are_empty_memory_and_fastest_form(name):
    *tokens, state = draw(name)
    op = getattr(memjax_kernels, CASES[name].op)
    empty = jax.tree.map(np.zeros_like, state)
    # A small memory on a CPU is looped over.
    given = (*tokens, empty, WHOLE)
    found = jax.jit(op)(*tokens)
    close(found, numpy_loop(name, *tokens, empty))
    jax.tree.map(np.testing.assert_array_equal, found, forward(name, SLOW)(*given))


@pytest.mark.slow
def test_gradient_of_the_default_is_that_of_chunks():
    """Of any linear op: `table.run` chooses for all."""
    arguments = draw("ssd")
    close(
        with_gradients("ssd", None, arguments),
        with_gradients("ssd", SMALL, arguments),
        2e-5,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("k", "v", "m"), [(16, 256, 8), (256, 16, 256)])
def test_heads_and_slots_of_all_widths(k, v, m):
    rng = np.random.default_rng(0)

    def normal(*sizes):
        return rng.normal(size=sizes).astype("f4") / 4

    q, key, value = normal(1, 7, 1, k), normal(1, 7, 1, k), normal(1, 7, 1, v)
    alpha, g = np.abs(normal(1, 7, 1, m)), -np.abs(normal(1, 7, 1, m))
    state = memjax_kernels.gated_slots_init_state(1, 1, m, k, v)
    arguments = (q, key, value, alpha, g, state, None)
    close(forward("gsa", FAST)(*arguments), forward("gsa", SLOW)(*arguments))


@pytest.mark.slow
def test_backward_memory_is_linear_in_time():
    def held(length):
        arguments = [jax.ShapeDtypeStruct((1, length, 1, 32), jnp.float32)] * 3
        compiled = jax.jit(
            jax.grad(
                lambda *a: memjax_kernels.linear_attention(*a)[1].sum(),
                argnums=(0, 1, 2),
            )
        ).lower(*arguments)
        memory = compiled.compile().memory_analysis()
        return memory.temp_size_in_bytes if memory else 0

    # Keeping the memory of every token would take 4 KB a token.
    short, long = held(1024), held(4096)
    assert 0 < long - short <= 3072 * 32 * 32


@pytest.mark.parametrize(
    ("name", "index", "change", "message"),
    [
        ("linear_attention", 1, lambda k: k[:, :, :1], r"k must have .*got \[2, 3, 1"),
        ("linear_attention", 2, lambda v: v[:, :0], r"v must .*no axis empty"),
        ("linear_attention", 0, lambda q: q.astype(int), "q must be floating, got int"),
        ("linear_attention", 3, lambda s: s[:, :1], "state must have shape"),
        ("ssd", 4, lambda s: s.astype(jnp.bfloat16), "state must be float32, got bf"),
        ("ssd", 3, lambda g: g[..., None], r"g must have shape \[B, T, H\]"),
        ("ssd", 3, lambda g: -g, r"g must lie in \[-inf, 0.0\], got values from"),
        ("ssd", 3, lambda g: g * jnp.nan, "g must lie in"),
        ("gla", 3, lambda g: g[..., 0], r"g must have shape \[B, T, H, K\]"),
        ("gla", 3, lambda g: -g, "g must lie in"),
        ("gsa", 3, lambda a: a[..., :2], "g must have shape"),
        ("gsa", 4, lambda g: -g, "g must lie in"),
        (
            "gsa",
            5,
            lambda s: tuple(s),
            "state must be None or a GatedSlotsState, got tuple",
        ),
        ("gsa", 5, lambda s: s._replace(keys=s.values), "state.keys must have shape"),
        ("abc", 5, lambda s: s._replace(values=s.values[:1]), "state.values must have"),
        (
            "abc",
            5,
            lambda s: s._replace(keys=s.keys.astype("f2")),
            "state.keys must be",
        ),
    ],
)
def test_mismatched_arguments_are_refused(name, index, change, message):
    arguments = jax.tree.map(jnp.asarray, draw(name, 3))
    op = inspect.unwrap(getattr(memjax_kernels, CASES[name].op))
    with pytest.raises(ValueError, match=message):
        op(*(change(x) if i == index else x for i, x in enumerate(arguments)))


@every_case
def test_unknown_options_and_reset_shapes_are_refused(name):
    arguments = jax.tree.map(jnp.asarray, draw(name, 3))
    # Without the annotations' own check.
    op = inspect.unwrap(getattr(memjax_kernels, CASES[name].op))
    with pytest.raises(ValueError, match="one of .*'xla', 'reference'.* got 'cuda'"):
        op(*arguments, implementation="cuda")
    with pytest.raises(ValueError, match=r"reset must be bool of shape .* \[2, 3\]"):
        op(*arguments, reset=jnp.zeros((B, 2), bool))
    for size in (0, 3, -4):
        with pytest.raises(ValueError, match=f"chunk_size must be .*two, got {size}"):
            op(*arguments, chunk_size=size)


@every_case
def test_chunk_size_selects_chunks_and_is_refused_by_kernels(name, monkeypatch):
    arguments = jax.tree.map(jnp.asarray, draw(name, 9))
    op = getattr(memjax_kernels, CASES[name].op)
    # Not the loop over tokens that a CPU prefers.
    text = str(jax.make_jaxpr(functools.partial(op, chunk_size=4))(*arguments))
    of_chunks = functools.partial(op, chunk_size=4, implementation="xla")
    assert text == str(jax.make_jaxpr(of_chunks)(*arguments))
    monkeypatch.setattr(implementations, "needs", lambda platform: "")
    with pytest.raises(ValueError, match="its chunks have 64 tokens, not 32"):
        op(*arguments, chunk_size=32, implementation="pallas_tpu")
