"""The TPU kernels of the linear recurrences: run, and compiled."""

import functools
import types
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from memjax_kernels import (
    Decay,
    GatedSlotsState,
    delta_rule,
    gated_delta_rule,
    gated_slots,
    gdn2,
    gla,
    kda,
    linear_attention,
    ssd,
)
from memjax_kernels._src.common import implementations
from memjax_kernels._src.common.packs import recurrence, tuned
from memjax_kernels._src.common.packs.channels import MILD
from memjax_kernels._src.common.packs.recurrence import unsupported
from memjax_kernels._src.common.packs.recurrence_chunk import forgets_little, log_gates
from memjax_kernels._src.gated_slots.pallas_tpu import gated_slots_tpu
from memjax_kernels._src.linear import pallas_tpu
from tests.kernels.distances import close, distances
from tests.kernels.on_tpu import INTERPRETER, needs_libtpu


def interpreted(kernels, by: Any = INTERPRETER):
    return functools.partial(kernels, interpret=by)


def by_token(op):
    """An op's reference, with the reset as the last argument: little to compile."""

    def form(*given):
        *arguments, reset = given
        return op(*arguments, reset=reset, implementation="reference")

    return form


# Of each op with gates: its kernels, interpreted, its reference, and the index of g.
# Memory is written where all ops have it written: two show that it is, and the lighter
# interpreter runs the others.
OPS = {
    "ssd": (interpreted(pallas_tpu.ssd_tpu), by_token(ssd), 3),
    "gla": (interpreted(pallas_tpu.gla_tpu, True), by_token(gla), 3),
    "gated_delta_rule": (
        interpreted(pallas_tpu.gated_delta_rule_tpu, True),
        by_token(gated_delta_rule),
        4,
    ),
    "kda": (interpreted(pallas_tpu.kda_tpu), by_token(kda), 4),
    "gdn2": (interpreted(pallas_tpu.gdn2_tpu, True), by_token(gdn2), 5),
    "gated_slots": (interpreted(gated_slots_tpu, True), by_token(gated_slots), 4),
}
# The same kernels with gates of 0.
WITHOUT_GATES = {
    "linear_attention": (pallas_tpu.linear_attention_tpu, by_token(linear_attention)),
    "delta_rule": (pallas_tpu.delta_rule_tpu, by_token(delta_rule)),
}
DELTA_RULES = ("gated_delta_rule", "kda", "gdn2")
OF_OPS = pytest.mark.parametrize("name", OPS)


def draw(name, seed, b, t, h, key, value, dtype=jnp.float32, ways=1) -> Any:
    """Queries, keys, values, what else is written, log gates, memory.

    `ways` value heads share a key head.
    """
    draws = np.random.default_rng(seed)

    def normal(*shape):
        return draws.standard_normal(shape, np.float32)

    q, k = normal(b, t, h // ways, key), normal(b, t, h // ways, key)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    # Slots are as many as channels of a key.
    channels = [key] * (name in ("gla", "kda", "gdn2", "gated_slots"))
    g = -np.log1p(np.exp(-normal(b, t, h, *channels) - 2))
    tokens = [x.astype(dtype) for x in (q, k, normal(b, t, h, value))]
    memory = normal(b, h, key, value)
    if name == "gated_slots":
        state: Any = GatedSlotsState
        memories = state(normal(b, h, key, key), memory)
        return *tokens, (1 - np.exp(g)).astype(dtype), g, memories
    rates = [1 / (1 + np.exp(normal(b, t, h)))] * (name in DELTA_RULES)
    if name == "gdn2":
        # Of the channels of keys to erase, and of those of values to write.
        rates = [1 / (1 + np.exp(normal(b, t, h, d))) for d in (key, value)]
    return *tokens, *rates, g, memory


@functools.partial(jax.jit, static_argnums=0)
def both(form, reset, *arguments):
    """Results, and gradients of everything for random cotangents."""
    values, back = jax.vjp(lambda *x: form(*x, reset), *arguments)
    draws = np.random.default_rng(7)
    return values, back(
        jax.tree.map(lambda x: draws.standard_normal(x.shape).astype(x.dtype), values)
    )


def documents():
    """They begin inside, and where a chunk does: a chunk and a part of one."""
    found = np.zeros((2, LENGTH), bool)
    found[[0, 1], [37, 64]] = True
    return found


LENGTH = 100
# Of each op: value heads, those of a key head, sizes of keys and values, the packing.
SIZES = {
    # Two key heads a program.
    "gated_delta_rule": (4, 2, 128, 128, (4, 1, 2)),
    # A key head for two programs.
    "ssd": (4, 4, 128, 128, (2, 1, 4)),
    # No block of one key head fills the lanes: copies of it do. Two groups.
    "gla": (8, 4, 64, 64, (2, 2, 2)),
    "kda": (2, 2, 128, 128, (2, 1, 2)),
    "gdn2": (2, 2, 64, 128, (1, 2, 2)),
    "gated_slots": (2, 1, 64, 128, (1, 2, 1)),
}


@pytest.fixture
def draw_wide(name, monkeypatch):
    """`draw` for an op and its `SIZES`, with few heads a program."""
    heads, ways, *widths, packing = SIZES[name]
    sizes = tuned.changed("recurrence", packs=4 if ways == 2 else 2)
    monkeypatch.setattr(tuned, "SIZES", sizes)
    q, v = (
        jax.ShapeDtypeStruct((2, LENGTH, h, d), jnp.float32)
        for h, d in zip((heads // ways, heads), widths, strict=True)
    )
    assert recurrence.packing_of(q, v) == packing

    def drawn(seed, dtype=jnp.float32):
        key, value = widths
        return list(draw(name, seed, 2, LENGTH, heads, key, value, dtype, ways))

    return drawn


@pytest.mark.slow
@OF_OPS
def test_values_and_gradients_agree_with_the_reference(name, draw_wide):
    """Gates of minus infinity clear memory and gradient."""
    arguments = draw_wide(0)
    kernels, reference, place = OPS[name]
    if name != "gated_slots":
        # Mild gates behind strong ones keep their digits.
        g = arguments[place]
        g[0, 20], g[0, 55], g[0, 70:80] = -np.inf, -1e4, -103.0
    reset = documents()
    found = both(kernels, reset, *arguments)
    close(found, both(reference, reset, *arguments), 3e-6)
    if name != "gated_slots":
        gradient = np.asarray(found[1][place])
        assert not gradient[0, 20].any() and gradient[0, 21].any()


@pytest.mark.slow
@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
@hypothesis.given(
    st.sampled_from(["gated_delta_rule", "kda", "gdn2", "gated_slots"]),
    st.integers(64, 140),
    st.sampled_from([(2, 1), (2, 2), (4, 2)]),
    st.sampled_from([64, 128]),
    st.lists(st.integers(0, 139), max_size=3),
)
@hypothesis.example("gated_slots", 70, (2, 2), 64, [3])
@hypothesis.example("kda", 64, (2, 2), 192, [])
def test_kernels_of_any_shape_agree_with_the_reference(name, time, heads, width, at):
    number, ways = heads
    given = draw(name, time, 1, time, number, width, width, ways=ways)
    kernels, reference, _ = OPS[name]
    kernels = functools.partial(kernels, interpret=True)
    reset = np.isin(np.arange(time), at)[None]
    close(both(kernels, reset, *given), both(reference, reset, *given), 3e-6)


def by_logits(name, kernels: Any = None):
    """An op of (*tokens, z, bias, log_rate, memory, reset): kernels, or by token."""

    def form(*given):
        *tokens, z, bias, log_rate, memory, reset = given
        decay = Decay(log_rate, bias)
        if kernels is None:
            return OPS[name][1](*tokens, decay.log_gates(z), memory, reset)
        return kernels(*tokens, z, memory, reset, decay=decay)

    return form


def draw_logits(name, dtype=jnp.float32):
    """Most chunks forget little; heads differ in rates, and a few logits are large."""
    *tokens, g, memory = draw(name, 9, 2, LENGTH, 2, 64, 128, dtype)
    draws = np.random.default_rng(10)
    z = draws.standard_normal(g.shape, np.float32)
    z[0, 20], z[1, 30:34] = 200.0, -200.0
    bias = draws.standard_normal(g.shape[2:], np.float32) - 3
    return *tokens, z.astype(dtype), bias, np.array([-1.0, 2.5], np.float32), memory


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gla", "kda", "gdn2"])
def test_kernels_compute_gates_of_logits(name, dtype):
    """As exactly as with gates from outside, their bias and rates over all chunks."""
    kernels = interpreted(
        getattr(pallas_tpu, f"{name}_tpu"), INTERPRETER if dtype == "float32" else True
    )
    given, reset = draw_logits(name, dtype), documents()

    def of_gates(*given):
        *tokens, z, bias, log_rate, memory, reset = given
        g = Decay(log_rate, bias).log_gates(z)
        return kernels(*tokens, g, memory, reset)

    high = (x.astype(np.float32) for x in given)
    exact = both(by_logits(name), reset, *high)
    found, other = (
        distances(both(form, reset, *given), exact)
        for form in (by_logits(name, kernels), of_gates)
    )
    rounding = 1e-6 if dtype == "float32" else 2e-4
    for (path, distance), of_gate in zip(found.items(), other.values(), strict=True):
        assert distance <= 1.1 * of_gate + rounding, (path, distance, of_gate)
        # Of the rates, the gradients of strong gates cost digits in either.
        assert of_gate <= 30 * rounding or dtype == "bfloat16", (path, of_gate)


# Relative errors of the chunk form of XLA in bfloat16, in thousandths, for the tokens
# of the test below: of memories, reads, and gradients of all arguments.
XLA_ERRORS = {
    "ssd": (1.42, 2.39, 3.08, 2.80, 2.94, 1.83, 2.33),
    "gla": (1.36, 2.88, 3.97, 4.00, 3.33, 2.60, 2.33),
    "gated_delta_rule": (0, 3.03, 3.04, 3.37, 5.00, 4.52, 2.23, 2.37),
    "kda": (0, 3.16, 3.56, 4.21, 6.92, 6.91, 2.56, 2.38),
    "gdn2": (0, 3.37, 3.71, 4.28, 6.90, 7.40, 6.58, 2.66, 2.40),
    "gated_slots": (1.32, 1.33, 3.00, 8.24, 3.19, 2.80, 2.70, 5.86, 8.48, 4.32),
}


@pytest.mark.slow
@OF_OPS
def test_bfloat16_error_is_no_larger_than_xla(name, draw_wide, monkeypatch):
    """Keys that are all alike leave the delta rule the hardest systems."""
    kernels, reference, place = OPS[name]
    low = draw_wide(3, jnp.bfloat16)
    if name in DELTA_RULES:
        k = low[1].astype(np.float32)
        k = k[:, :1] + 0.3 * k
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        low[1] = k.astype(jnp.bfloat16)
        low[place] *= 0.01
    high = jax.tree.map(lambda x: x.astype(np.float32), low)
    # The program of the test above.
    exact = both(reference, documents(), *high)
    # Which memory is not written yet is tested above: here by the lighter interpreter.
    kernels = functools.partial(kernels, interpret=True)
    # Packs beside each other are tested above, too.
    monkeypatch.setattr(tuned, "SIZES", tuned.changed("recurrence", packs=1))
    kernel = both(kernels, documents(), *low)
    no_larger_than_xla(name, distances(kernel, exact))
    assert kernel[0][1].dtype == jnp.bfloat16


def no_larger_than_xla(name, found):
    for (path, distance), xla in zip(found.items(), XLA_ERRORS[name], strict=True):
        assert distance <= 1.3e-3 * xla + 2e-4, (path, distance, xla)


def gates_of_quarters(width, share):
    """Log gates [1, 64, 2, width] whose quarters sum to a share of the limit."""
    g = np.full((1, 64, 2, width), -0.01, np.float32)
    g[..., ::3] = -share * MILD / 16
    return g


@pytest.mark.parametrize(
    ("share", "dtype", "mild"),
    [
        (0.99, "bfloat16", True),
        (1.0, "bfloat16", False),
        (1.01, "bfloat16", False),
        (np.inf, "bfloat16", False),
        (np.nan, "bfloat16", False),
        (-1.01, "bfloat16", False),
        (0.99, "float32", None),
    ],
)
def test_the_limit_of_mild_chunks(share, dtype, mild):
    """Each quarter alone counts, also where a program has a head above the limit."""
    token = jnp.zeros((1, 1, 64, 256), dtype)
    for quarter in range(4):
        g = gates_of_quarters(128, 0.99)
        g[:, 16 * quarter : 16 * (quarter + 1), 1, 7] = -share * MILD / 16
        gates = jnp.asarray(g).reshape(1, 1, 64, 256)
        found = forgets_little(types.SimpleNamespace(tokens=(token,) * 3 + (gates,)))
        assert found is mild if mild is None else bool(found) is mild


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), [("kda", 128), ("gdn2", 64)])
def test_mild_and_strong_chunks_follow_each_other(name, key):
    """Gates below the limit, at it, and above, -inf, and a reset; mild ones behind."""
    time = 7 * 64 - 20
    kernels, reference, place = OPS[name]
    kernels = functools.partial(kernels, interpret=True)
    low = list(draw(name, 8, 1, time, 2, key, 128, jnp.bfloat16))
    for chunk, share in enumerate((0.99, 1.0, 1.01, 0.99)):
        at = slice(64 * chunk, 64 * (chunk + 1))
        low[place][:, at] = gates_of_quarters(key, share)
    low[place][:, 4 * 64 + 20] = -np.inf
    reset = np.arange(time)[None] == 5 * 64 + 7
    high = jax.tree.map(lambda x: x.astype(np.float32), low)
    exact = both(reference, reset, *high)
    no_larger_than_xla(name, distances(both(kernels, reset, *low), exact))


@pytest.mark.slow
def test_gradients_of_gradients_differentiate_the_same_function():
    """`test_single_head_of_64_runs_in_xla` has the function, for each op."""
    arguments = draw("ssd", 4, 1, 64, 2, 64, 64)
    reference = OPS["ssd"][1]

    def size(form, *arguments):
        grads = jax.grad(lambda *x: jnp.sum(form(*x, None)[1] ** 2), (0, 3))
        return sum(jnp.sum(x * x) for x in grads(*arguments))

    def twice(form):
        return jax.jit(jax.grad(functools.partial(size, form)))(*arguments)

    kernels = interpreted(pallas_tpu.ssd_tpu, True)
    close(twice(kernels), twice(reference), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", (*OPS, "linear_attention", "delta_rule"))
def test_single_head_of_64_runs_in_xla(name):
    """As on a device of a mesh; gradients of gradients take the same form."""
    *tokens, memory = draw("kda" if name == "delta_rule" else name, 5, 1, 70, 1, 64, 64)
    if name in WITHOUT_GATES:
        kernels, reference = WITHOUT_GATES[name]
        tokens.pop()
    else:
        kernels, reference, _ = OPS[name]
    arguments = *tokens, memory, np.arange(70)[None] == 65
    assert "pallas_call" not in str(jax.make_jaxpr(kernels)(*arguments))
    close(jax.jit(kernels)(*arguments), jax.jit(reference)(*arguments), 3e-6)


def test_single_head_of_logits_runs_in_xla():
    *tokens, z, memory = draw("gla", 5, 1, 70, 1, 64, 64)
    arguments = *tokens, z, z[0, 0], np.array([0.5]), memory, np.arange(70)[None] == 65
    kernels = by_logits("gla", pallas_tpu.gla_tpu)
    reference = by_logits("gla")
    assert "pallas_call" not in str(jax.make_jaxpr(kernels)(*arguments))
    close(jax.jit(kernels)(*arguments), jax.jit(reference)(*arguments), 3e-6)


@pytest.mark.slow
def test_gradients_of_logits_in_xla():
    """Rates of a file are rounded after the sum; softplus is curved at 0."""
    q, k, v, z, memory = draw("gla", 5, 1, 66, 1, 8, 4)
    starts, bias = np.arange(66)[None] == 65, jnp.zeros((1, 8))

    def slopes(form, *learned):
        def loss(log_rate, bias):
            given = q, k, v, 0 * z, bias, log_rate, memory, starts
            return jnp.sum(jnp.sin(form(*given)[1]))

        return jax.grad(loss, (0, 1))(*learned)

    def curve(form):
        size = jax.grad(lambda x: jnp.sum(jnp.sin(slopes(form, jnp.zeros(1), x)[1])))
        return jax.jit(size)(bias)

    kernels = by_logits("gla", pallas_tpu.gla_tpu)
    close(curve(kernels), curve(by_logits("gla")), 3e-6)
    rates = jnp.zeros(1, jnp.bfloat16), jnp.zeros(1)
    low, high = (slopes(kernels, rate, bias)[0] for rate in rates)
    assert low[0] == high[0].astype(jnp.bfloat16)


def test_the_slope_of_gates_that_forget_little():
    """And of logits of resets and of filling tokens."""
    z = np.concatenate([np.linspace(-40, 40, 81), [-np.inf, np.inf]])
    g, slope = log_gates(jnp.asarray(z - 1, jnp.float32)[None], jnp.ones((2, 83)))
    np.testing.assert_allclose(np.exp(slope[0]), 1 / (1 + np.exp(-z)), 1e-5)
    np.testing.assert_allclose(g[0], -np.e * np.logaddexp(z, 0), 1e-6)


def test_gates_that_kernels_cannot_load_are_cast():
    *tokens, z, memory = draw("gla", 5, 1, 70, 2, 64, 64)
    low, by = z.astype(np.float16), by_logits("gla", pallas_tpu.gla_tpu)
    forms = (by, [low, z[0, 0], np.zeros(2)]), (pallas_tpu.gdn2_tpu, [-abs(low)] * 3)
    for form, given in forms:
        text = str(jax.make_jaxpr(form)(*tokens, *given, memory, None))
        assert "pallas_call" in text and "f16[1,2,64," not in text


def test_unsupported_reasons():
    def shape(t, h, d, dtype="bfloat16"):
        return jnp.zeros((1, t, h, d), dtype)

    x = shape(64, 2, 64)
    assert unsupported(x, x, x) == ""
    assert "all be float32 or all" in unsupported(x, x, shape(64, 2, 64, "float32"))
    short = shape(63, 2, 64)
    assert "63 tokens are less than a chunk of 64" in unsupported(short, short, short)
    odd = shape(64, 3, 64)
    assert "no number of 3 heads fills 128 lanes" in unsupported(odd, odd, odd)
    if implementations.needs("tpu"):
        gate = jnp.zeros((1, 64, 2))
        given: Any = {
            linear_attention: (),
            gla: (x,),
            ssd: (gate,),
            delta_rule: (gate,),
        }
        given |= {gated_delta_rule: (gate, gate), gated_slots: (x,), gdn2: (x, x, x)}
        for op, gates in given.items():
            with pytest.raises(ValueError, match="it needs a tpu"):
                op(x, x, x, *gates, implementation="pallas_tpu")


# Names of kernels by the op, where they differ.
OF_KERNELS = {"gated_delta_rule": "delta_rule", "gated_slots": "slot_weights"}
OF_KERNELS |= {"ssd": "linear_attention"}


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "chip", "sizes", "dtype", "mesh_shape"),
    [
        ("ssd", "v6e:2x2", (2, 64, 8, 32, 64), jnp.bfloat16, (2, 2)),
        ("gla", "v5p:2x2x1", (2, 65, 2, 64, 128), jnp.float32, (1, 1)),
        ("kda", "v6e:2x2", (2, 64, 4, 128, 128), jnp.bfloat16, (2, 2)),
        ("gdn2", "v5e:2x2", (2, 64, 8, 64, 128), jnp.bfloat16, (2, 2)),
        # The widest, as many heads as a program may take.
        ("kda", "v5e:2x2", (1, 64, 16, 256, 256), jnp.bfloat16, (1, 1)),
        ("gdn2", "v5e:2x2", (1, 64, 16, 256, 256), jnp.bfloat16, (1, 1)),
        ("gla_of_logits", "v5e:2x2", (2, 65, 8, 64, 64), jnp.bfloat16, (2, 2)),
        ("gated_slots", "v5e:2x2", (2, 64, 8, 32, 64), jnp.bfloat16, (2, 2)),
        ("delta_rule", "v5p:2x2x1", (2, 65, 2, 64, 128), jnp.float32, (1, 1)),
    ],
)
def test_the_gradient_compiles(name, chip, sizes, dtype, mesh_shape):
    """Of an op, the kernels alone: its other forms take as long to trace."""
    devices = np.array(topologies.get_topology_desc(chip, "tpu").devices)
    devices = devices[: np.prod(mesh_shape)].reshape(mesh_shape)
    mesh = Mesh(devices, ("data", "tensor"))
    gated = "gated_delta_rule" if name == "delta_rule" else name
    gated = gated.removesuffix("_of_logits")
    kernels = interpreted(OPS[gated][0], False)
    q, k, v, *gates, state = draw(gated, 0, *sizes, dtype=dtype)
    if gated != name and name != "delta_rule":
        bias = gates[-1][0, 0]
        kernels = functools.partial(kernels, decay=Decay(bias[:, 0], bias))
    if name == "delta_rule":
        gates = gates[:1]
    given = (q, k, v, *gates, state)

    def place(spec):
        return lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        )

    shaped = jax.tree.map(place(P("data", None, "tensor")), given[:-1])
    shaped += (jax.tree.map(place(P("data", "tensor")), given[-1]),)

    def loss(*given):
        public = name == "delta_rule"
        after, y = delta_rule(*given) if public else kernels(*given, None)
        total = sum(jnp.sum(x**2) for x in jax.tree.leaves(after))
        return total + jnp.sum(y.astype(jnp.float32) ** 2)

    gradient = jax.grad(loss, tuple(range(len(shaped))))
    with jax.set_mesh(mesh):
        text = str(jax.jit(gradient).lower(*shaped).compile().as_text())
    kind = OF_KERNELS.get(gated, gated)
    assert f"{kind}_forward" in text and f"{kind}_backward" in text
    assert "all-gather" not in text and "all-to-all" not in text
