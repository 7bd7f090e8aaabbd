"""The gated delta rule with its convolutions and gates: one kernel on a TPU."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from memjax.mechanisms.gated_deltanet import GatedDeltaNetConfig
from memjax.mechanisms.layers.recurrent.style import RecurrentStyle
from memjax_kernels import (
    Decay,
    convolved_gated_delta_rule,
    gated_delta_rule,
    short_convolution,
)
from memjax_kernels._src.common import gradients
from memjax_kernels._src.linear import convolved, convolved_tpu
from tests.kernels.distances import close
from tests.kernels.on_tpu import INTERPRETER, needs_libtpu

OPTIONS = {"scale": 0.3, "max_rate": 1.7}


def draw(
    time, groups, heads, key=128, value=128, taps=4, dtype="float32", bias=True, batch=1
) -> dict[str, Any]:
    """Arguments of the op by their names."""
    draws = np.random.default_rng(time + heads)

    def normal(*shape):
        return jnp.asarray(draws.normal(size=shape), jnp.float32)

    shapes = (groups, key), (groups, key), (heads, value)

    def each(*lead):
        return tuple(normal(*lead, *shape) for shape in shapes)

    return {
        "inputs": tuple(x.astype(dtype) for x in each(batch, time)),
        "filters": each(taps),
        "before": each(batch, taps - 1),
        "rates": normal(batch, time, heads),
        "paces": normal(batch, time, heads),
        "decay": Decay(normal(heads), normal(heads)),
        "state": normal(batch, heads, key, value),
        "biases": each() if bias else None,
    }


def resets(time, *at, batch=1):
    one = np.isin(np.arange(time), at)
    return jnp.asarray(np.broadcast_to(one, (batch, time)))


def by_ops(x, reset):
    """The definition: the ops that exist, one after the other."""
    time = x["rates"].shape[1]
    at = jnp.arange(time)[None]
    last = jax.lax.cummax(jnp.where(reset, at, -9), axis=1)
    q, k, v = (
        short_convolution(
            x["inputs"][i],
            x["filters"][i],
            x["before"][i],
            at - last,
            bias=x["biases"][i],
            unit_norm=i < 2,
        )
        for i in range(3)
    )
    log_rate, bias = (number[None, None] for number in x["decay"])
    g = -jnp.exp(log_rate) * jax.nn.softplus(x["paces"] + bias)
    beta = OPTIONS["max_rate"] * jax.nn.sigmoid(x["rates"])
    q = OPTIONS["scale"] * q
    return gated_delta_rule(q, k, v, beta, g, x["state"], reset=reset)


def by_op(x, reset=None, **options):
    state, _, y = convolved_gated_delta_rule(**x, reset=reset, **OPTIONS, **options)
    return state, y


def in_kernel(x, reset, by: Any = True):
    """The kernel, interpreted."""
    seen = None if reset is None else convolved._since_reset(reset, 8)
    given = convolved_tpu.Segment(**x, seen=seen)
    assert not convolved_tpu.unsupported(given)
    kernel = convolved_tpu.convolved_gated_delta_rule_tpu
    return jax.jit(functools.partial(kernel, **OPTIONS, interpret=by))(given)


def test_the_op_is_its_ops_one_after_the_other():
    x, reset = draw(9, 1, 2, key=4, value=6), resets(9, 3, 8)
    close(jax.jit(by_op)(x, reset), jax.jit(by_ops)(x, reset), 1e-6)


@pytest.mark.slow
def test_segments_in_a_row_are_one():
    x, reset = draw(11, 1, 2, key=4, value=6, taps=3), resets(11, 5)
    op = functools.partial(convolved_gated_delta_rule, implementation="xla", **OPTIONS)
    expected, last, y = op(**x, reset=reset)
    state, before, parts = x.pop("state"), x.pop("before"), []
    for at in (slice(0, 1), slice(1, 6), slice(6, 11)):
        tokens = {name: x[name][:, at] for name in ("rates", "paces")}
        tokens["inputs"] = tuple(z[:, at] for z in x["inputs"])
        given = x | tokens | {"state": state, "before": before}
        state, before, part = op(**given, reset=reset[:, at])
        parts.append(part)
    close((state, before), (expected, last), 1e-5)
    close(jnp.concatenate(parts, axis=1), y, 1e-5)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((70, 1, 2), {"dtype": "bfloat16"}),
        ((64, 4, 4), {"key": 64, "value": 64, "taps": 2}),
    ],
)
def test_kernel_equals_the_ops(sizes, options):
    x = draw(*sizes, **options)
    # A head that forgets at once forgets nothing in the tokens that fill a chunk.
    both = zip(x["decay"], (90.0, 1e38), strict=True)
    x["decay"] = Decay(*(number.at[0].set(value) for number, value in both))
    reset = resets(sizes[0], 0, 13, 14)
    tolerance = 0.01 if options.get("dtype") else 3e-6
    close(in_kernel(x, reset), jax.jit(by_op)(x, reset), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((130, 2, 4), {"bias": False}),
        # Of several programs; of heads of two registers; of two in a register.
        ((64, 17, 34), {"taps": 3}),
        ((70, 1, 4), {"value": 64, "taps": 1}),
        ((66, 1, 1), {"key": 256, "dtype": "bfloat16"}),
        ((70, 2, 4), {"key": 64, "bias": False, "batch": 2}),
    ],
)
def test_kernel_of_more_shapes(sizes, options):
    """Memory that was not written is NaN."""
    x, batch = draw(*sizes, **options), options.get("batch", 1)
    reset = resets(sizes[0], 0, 63, 64, batch=batch) if options.get("bias", 1) else None
    tolerance = 0.01 if options.get("dtype") else 3e-6
    close(in_kernel(x, reset, INTERPRETER), jax.jit(by_op)(x, reset), tolerance)


@pytest.mark.slow
@hypothesis.settings(max_examples=5, deadline=None, derandomize=True)
@hypothesis.given(
    st.integers(64, 140),
    st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 6)]),
    st.sampled_from([64, 128]),
    st.integers(1, 5),
    st.lists(st.integers(0, 139), max_size=5),
)
def test_kernel_of_any_shape(time, heads, key, taps, at):
    x = draw(time, *heads, key=key, taps=taps, bias=taps % 2 == 1)
    given = convolved_tpu.Segment(**x, seen=None)
    hypothesis.assume(not convolved_tpu.unsupported(given))
    reset = resets(time, *at) if at else None
    close(in_kernel(x, reset), jax.jit(by_op)(x, reset), 3e-6)


def test_derivatives_are_those_of_the_ops():
    """The kernel is not called where one is taken."""
    x, reset = draw(9, 1, 2, key=4, value=6), resets(9, 3)
    seen = convolved._since_reset(reset, 4)
    composed = functools.partial(convolved._composed, by="xla", **OPTIONS)
    kernel = convolved_tpu.convolved_gated_delta_rule_tpu
    kernels = gradients.unless_differentiated(kernel, composed)

    def loss(function, x):
        state, y = function(x)
        return jnp.sum(state**2) + jnp.sum(jnp.sin(y))

    def of_kernels(x):
        return kernels(convolved_tpu.Segment(**x, seen=seen))

    found = jax.jit(jax.grad(functools.partial(loss, of_kernels)))(x)
    expected = jax.jit(jax.grad(lambda x: loss(lambda x: by_ops(x, reset), x)))(x)
    close(found, expected, 1e-5)
    assert all(jnp.any(d != 0) for d in jax.tree.leaves(found))


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"inputs": (1, 2)}, "inputs must be three arrays, of q, k, v"),
        ({"before": ()}, "before must be three arrays"),
        ({"filters": (jnp.ones((2, 1, 4)),) * 3}, "filters of v must have shape"),
        ({"before": (jnp.ones((1, 2, 1, 4)),) * 3}, "before of q must have shape"),
        (
            {"before": (jnp.ones((1, 3, 1, 4), int),) * 3},
            "before of q must be floating",
        ),
        ({"rates": jnp.ones((1, 9, 3))}, "rates must have shape"),
        ({"decay": Decay(jnp.ones(3), jnp.ones(2))}, "log_rate must have shape"),
        ({"decay": (jnp.ones(2), jnp.ones(2))}, "decay must be a Decay, got tuple"),
        ({"state": jnp.ones((1, 2, 4, 6), "bfloat16")}, "state must be float32"),
        ({"reset": jnp.ones((1, 8), bool)}, "reset must be bool of shape"),
        ({"max_rate": 2.5}, "max_rate must be in"),
        ({"implementation": "mosaic"}, "implementation of convolved_gated_delta_rule"),
        (
            {"implementation": "pallas_tpu"},
            "it needs a tpu",
        ),
    ],
)
def test_bad_arguments_are_named(changed, message):
    given = draw(9, 1, 2, key=4, value=6) | changed
    with pytest.raises(ValueError, match=message):
        convolved_gated_delta_rule(**given)


def test_what_the_kernel_refuses_is_said():
    def reason(*sizes, **options):
        given = convolved_tpu.Segment(**draw(*sizes, **options), seen=None)
        return convolved_tpu.unsupported(given)

    assert "less than a chunk" in reason(63, 1, 2)
    assert "9 rows, more than 8" in reason(64, 1, 2, taps=8)
    assert "fill no 128 lanes" in reason(64, 2, 4, key=192)


def on_v5e(tree):
    """The types of arrays on one device of a v5e."""
    device = topologies.get_topology_desc("v5e:2x2", "tpu").devices[0]
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


@needs_libtpu
def test_it_compiles_for_a_tpu_as_one_kernel():
    arguments = on_v5e(draw(128, 2, 4, dtype="bfloat16"))
    text = str(jax.jit(by_op).lower(arguments).compile().as_text())
    assert text.count("tpu_custom_call") == 1

    def loss(x):
        return jnp.sum(by_op(x)[1].astype(jnp.float32))

    text = str(jax.jit(jax.grad(loss)).lower(arguments).as_text())
    assert "delta_rule_backward" in text
    assert "convolved_gated_delta_rule_forward" not in text


@needs_libtpu
def test_published_layers_prefill_by_it():
    style = RecurrentStyle(num_key_heads=1, conv_value=True, gate="silu")
    layer = GatedDeltaNetConfig(64, 2, 128, 128, style=style).build()
    params = jax.eval_shape(layer.init_params, jax.random.key(0))
    state = jax.eval_shape(lambda: layer.init_state(1))
    x = jax.ShapeDtypeStruct((1, 64, 64), jnp.bfloat16)
    given = on_v5e((params, state, x))
    text = str(jax.jit(layer.apply).lower(*given).as_text())
    assert text.count("convolved_gated_delta_rule_forward") == 1
    assert "short_convolution" not in text
