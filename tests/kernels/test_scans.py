"""Gated scans: each form against float64 on the host."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import memjax_kernels as ops
from memjax.aot.cycles.program import read_program
from memjax_kernels._src.scans import forms
from tests.kernels.on_tpu import needs_libtpu

# More tokens than a group of the loop, and no multiple of a chunk.
B, T, I, N = 2, 70, 5, 3
WHOLE = np.zeros((B, T), bool)
RESET = np.array(WHOLE)
RESET[0, [0, 64]] = RESET[1, [1, 20]] = True
OPS = ("gated_scan", "selective_scan")
FORMS = {
    "reference": {"gated_scan": forms.gated_scan_reference}
    | {"selective_scan": forms.selective_scan_reference},
    "xla": {"gated_scan": forms.gated_scan_xla}
    | {"selective_scan": forms.selective_scan_xla},
    "parallel": {"gated_scan": forms.gated_scan_parallel}
    | {"selective_scan": forms.selective_scan_parallel},
}
of_each_op = pytest.mark.parametrize("name", OPS)
whole_and_packed = pytest.mark.parametrize(
    "reset", [WHOLE, RESET], ids=["whole", "packed"]
)
of_each_form = pytest.mark.parametrize("how", FORMS)


def draw(name, length=T, seed=0) -> Any:
    """Arguments up to a memory that is not empty; decays from 0.99 to 0.1."""
    rng = np.random.default_rng(seed)
    u = rng.normal(size=(B, length, I)).astype("f4")
    rates = np.exp(rng.uniform(-4, 1, size=(B, length, I))).astype("f4")
    if name == "gated_scan":
        return u, -rates, rng.normal(size=(B, I)).astype("f4")
    b, c = rng.normal(size=(2, B, length, N)).astype("f4")
    a = -np.exp(rng.normal(size=(N, I))).astype("f4")
    return u, rates, a, b, c, rng.normal(size=(B, N, I)).astype("f4")


def numpy_loop(name, *arguments, reset=None):
    """The recurrences in float64, channel by channel."""
    arguments = [np.asarray(x, np.float64) for x in arguments]
    u, *_, state = arguments
    state, y = np.array(state), np.zeros_like(u)
    for n, t, i in np.ndindex(u.shape):
        now = state[n, ..., i]
        if reset is not None and reset[n, t]:
            now = np.zeros_like(now)
        if name == "gated_scan":
            now = np.exp(arguments[1][n, t, i]) * now + u[n, t, i]
            y[n, t, i] = now
        else:
            _, delta, a, b, c, _ = arguments
            step = delta[n, t, i]
            now = np.exp(step * a[:, i]) * now + step * b[n, t] * u[n, t, i]
            y[n, t, i] = now @ c[n, t]
        state[n, ..., i] = now
    return state, y


def close(actual, expected, tolerance=1e-5):
    """Relative root mean squares."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape and np.isfinite(a).all()
        assert np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)) <= tolerance


@functools.cache
def both(name, how):
    """Values, and gradients under cotangents of the last memory and of the reads."""

    def pull_both(arguments, reset, weights):
        values, pull = jax.vjp(lambda *x: FORMS[how][name](*x, reset), *arguments)
        return values, pull(weights)

    return jax.jit(pull_both)


def with_gradients(name, how, arguments, reset):
    u, *_, state = draw(name, arguments[0].shape[1], seed=1)
    return both(name, how)(arguments, reset, (state, u))


@of_each_op
@of_each_form
@whole_and_packed
def test_values_are_those_of_the_recurrence(name, how, reset):
    values, gradients = with_gradients(name, how, draw(name), reset)
    close(values, numpy_loop(name, *draw(name), reset=reset))
    assert all(np.abs(x).max() > 1e-2 for x in gradients)


@of_each_op
@pytest.mark.parametrize("how", ["xla", "parallel"])
@whole_and_packed
def test_gradients_are_those_of_the_token_loop(name, how, reset):
    _, expected = with_gradients(name, "reference", draw(name), reset)
    _, actual = with_gradients(name, how, draw(name), reset)
    close(actual, expected)


@of_each_op
def test_what_a_reset_forgets_has_no_gradient(name):
    for how in FORMS:
        _, gradients = with_gradients(name, how, draw(name), RESET)
        by_state = np.asarray(gradients[-1])
        # Batch element 0 is emptied before its first token, 1 after it.
        assert (by_state[0] == 0).all() and (by_state[1] != 0).all()


@of_each_op
def test_splits_give_the_same(name):
    length = 6
    *tokens, state = draw(name, length)
    whole = numpy_loop(name, *tokens, state)
    run = jax.jit(getattr(ops, name))
    for split in (1, length - 1):
        # All but the rates a have an axis of time.
        first = [x[:, :split] if x.ndim == 3 else x for x in tokens]
        last = [x[:, split:] if x.ndim == 3 else x for x in tokens]
        middle, before = run(*first, state)
        after, y = run(*last, middle)
        close((after, np.concatenate([before, y], axis=1)), whole)


@of_each_op
@pytest.mark.parametrize("few", [2, 3])
def test_segments_and_large_batches_are_the_recurrence(name, few, monkeypatch):
    """Two batch elements have 2 of 5 chunks at once, or are a loop."""
    monkeypatch.setattr(forms, "AT_ONCE", 4)
    monkeypatch.setattr(forms, "FEW_CHUNKS", few)
    values = jax.jit(FORMS["parallel"][name])(*draw(name), RESET)
    close(values, numpy_loop(name, *draw(name), reset=RESET))


@of_each_op
def test_steps_are_the_recurrence(name):
    *tokens, state = draw(name, 3)
    step = jax.jit(getattr(ops, f"{name}_step"))
    expected = numpy_loop(name, *tokens, state)
    reads = []
    for t in range(3):
        token = [x[:, t] if x.ndim == 3 else x for x in tokens]
        state, y = step(*token, state)
        reads.append(y)
    close((state, np.stack(reads, axis=1)), expected)


@of_each_op
def test_no_state_is_the_empty_one(name):
    *tokens, state = map(jnp.asarray, draw(name, 3))
    close(getattr(ops, name)(*tokens), numpy_loop(name, *tokens, np.zeros_like(state)))
    sizes = (B, I) if name == "gated_scan" else (B, I, N)
    empty = getattr(ops, f"{name}_init_state")(*sizes)
    assert empty.shape == state.shape and not empty.any()


@of_each_op
def test_bfloat16_tokens_have_float32_memory(name):
    *tokens, state = draw(name)
    low = [x.astype(jnp.bfloat16) for x in tokens]
    rounded = [x.astype(np.float32) for x in low]
    expected, right = numpy_loop(name, *rounded, state)
    for how in FORMS:
        after, y = jax.jit(lambda *x, how=how: FORMS[how][name](*x, None))(*low, state)
        assert (after.dtype, y.dtype) == (jnp.float32, jnp.bfloat16)
        close(after, expected)
        close(y, right, 5e-3)


@of_each_op
def test_a_decay_of_zero_and_of_one_have_finite_gradients(name):
    u, rates, *rest = draw(name)
    rates = np.sign(rates) * np.where(np.arange(T) % 2, 1e6, 0.0)[None, :, None]
    rates = rates.astype("f4")
    for how in FORMS:
        values, gradients = with_gradients(name, how, (u, rates, *rest), WHOLE)
        close(values, numpy_loop(name, u, rates, *rest))
        assert all(np.isfinite(x).all() for x in gradients)


def test_training_saves_few_memories():
    """Less than one for every eighth token, those computed again included."""

    def peak(length):
        arrays = [np.zeros((1, length, n), np.float32) for n in (64, 64, 16, 16)]
        u, delta, b, c = arrays
        rates, state = (np.zeros((*n, 16, 64), np.float32) for n in ((), (1,)))
        given = (u, delta, rates, b, c, state)

        def loss(*given):
            return (FORMS["xla"]["selective_scan"](*given, None)[1] ** 2).sum()

        gradient = jax.jit(jax.grad(loss, argnums=range(5)))
        analysis: Any = gradient.lower(*given).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    tokens, memory = 512, 4 * 16 * 64
    assert (peak(2 * tokens) - peak(tokens)) / tokens < memory / 8 + 4 * 64 * 8


def test_the_default_is_the_fast_form():
    given = [jnp.asarray(x) for x in draw("selective_scan")]

    def jaxpr(how):
        run = functools.partial(ops.selective_scan, implementation=how)
        return str(jax.make_jaxpr(run)(*given))

    assert jaxpr(None) == jaxpr("xla") != jaxpr("reference")


def test_bad_input_is_refused_by_name():
    u, delta, a, b, c, state = map(jnp.asarray, draw("selective_scan", 3))
    scan = inspect.unwrap(ops.selective_scan)
    gated = inspect.unwrap(ops.gated_scan)
    step = inspect.unwrap(ops.gated_scan_step)
    bad: list[tuple[str, Any]] = [
        (r"a must have shape \[N, I\]", lambda: scan(u, delta, a.T, b, c)),
        (r"c must have shape \[B, T, N\]", lambda: scan(u, delta, a, b, c[:, :2])),
        (r"delta must lie in \[0.0, inf\]", lambda: scan(u, -delta, a, b, c)),
        (r"a must lie in \[-inf, 0.0\]", lambda: scan(u, delta, -a, b, c)),
        (
            r"state must have shape \[B, N, I\]",
            lambda: scan(u, delta, a, b, c, state[:1]),
        ),
        (
            "state must be float32",
            lambda: scan(u, delta, a, b, c, state.astype(jnp.bfloat16)),
        ),
        (
            "reset must be bool",
            lambda: scan(u, delta, a, b, c, reset=jnp.asarray(RESET)),
        ),
        (r"g must lie in \[-inf, 0.0\]", lambda: gated(u, delta)),
        (r"g must have shape \[B, T, I\]", lambda: gated(u, -delta[:, :1])),
        (
            r"implementation of gated_scan must be None or one of",
            lambda: gated(u, -delta, implementation="pallas_tpu"),
        ),
        (r"g must have shape \[B, I\]", lambda: step(u[:, 0], b[:, 0], state[:, 0])),
    ]
    for message, call in bad:
        with pytest.raises(ValueError, match=message):
            call()


@needs_libtpu
@of_each_op
def test_program_for_a_tpu_runs_all_chunks_at_once(name):
    """No loop of as many steps as tokens."""
    device = topologies.get_topology_desc("v5e:2x2", "tpu").devices[0]
    place = functools.partial(
        jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device)
    )
    given = [place(x.shape, x.dtype) for x in draw(name, 256)]

    def gradient(*given):
        values, pull = jax.vjp(getattr(ops, name), *given)
        return pull(values)

    traced = jax.jit(gradient).trace(*given)
    program = traced.lower(lowering_platforms=("tpu",)).compile().as_text() or ""
    assert max(x.times for x in read_program(program).operations) == 16
