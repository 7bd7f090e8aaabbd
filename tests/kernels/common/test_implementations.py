"""The choice of an implementation."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import memjax_kernels
from memjax_kernels._src.common import implementations

NAMES = ("xla", "pallas_tpu", "pallas_gpu", "reference")
# A form that says its name.
FORMS = {name: functools.partial(lambda name, *_: name, name) for name in NAMES}


def test_none_is_xla_where_no_kernel_takes_the_arguments(caplog):
    with caplog.at_level(logging.DEBUG, logger=implementations.__name__):
        form = implementations.choose("gla", None, FORMS, {"pallas_tpu": "too wide"})
    assert form() == "xla"
    assert caplog.messages == ["gla cannot run as pallas_tpu: too wide"]
    without = {"xla": FORMS["xla"], "reference": FORMS["reference"]}
    assert implementations.choose("gla", None, without)() == "xla"


def test_an_explicit_choice_runs_or_raises():
    choose = functools.partial(implementations.choose, "gla", forms=FORMS)
    assert choose(implementation="reference")() == "reference"
    with pytest.raises(
        ValueError,
        match="'pallas_tpu' of gla cannot run here: it needs a tpu, jax runs on cpu",
    ):
        choose(implementation="pallas_tpu")
    with pytest.raises(ValueError, match="'xla' of gla cannot run here: too wide"):
        choose(implementation="xla", unsupported={"xla": "too wide"})
    with pytest.raises(
        ValueError,
        match="of gla must be None or one of .*'xla'.*'reference'.*, got 'cuda'",
    ):
        choose(implementation="cuda")


def test_a_kernel_runs_where_jax_does(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert implementations.choose("gla", "pallas_tpu", FORMS)() == "pallas_tpu"
    assert implementations.needs("gpu") == "it needs a gpu, jax runs on tpu"


def test_cpu_loops_over_small_memories_unless_differentiated():
    forms = {"xla": lambda x, reset: 2 * x, "reference": lambda x, reset: 3 * x}
    small, large = (jnp.zeros((n, 2**19)) for n in (1, 2))
    x, reset = jnp.ones(()), jnp.ones(2, bool)
    for looped, value in ((None, 2), (small, 3), (large, 2)):
        form = implementations.choose("gla", None, forms, looped=looped)
        assert jax.jit(form)(x, reset) == value
        assert jax.jit(jax.grad(form))(x, reset) == 2
        # What a program for a TPU has instead where no kernel takes the arguments.
        traced = jax.jit(form).trace(x, reset)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert "3.0" not in text


def draw(op, time=20):
    """An op of small sizes, its arguments [B, T, H, ...] and its chunk size."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, alpha = (jax.random.normal(key, (2, time, 2, 64)) / 9 for key in keys[:4])
    gamma = jax.nn.sigmoid(jax.random.normal(keys[4], (2, time, 2)))
    tokens = (q, k, v, alpha, gamma) if op == "trellis" else (q, k, v, gamma)
    return functools.partial(getattr(memjax_kernels, op), chunk_size=16), tokens


def gradient(function, tokens):
    """Of the sum of the squared reads, for all tokens."""
    return jax.grad(
        lambda *tokens: jnp.sum(function(*tokens)[1] ** 2), range(len(tokens))
    )


def test_the_platform_of_lowering_decides():
    function, tokens = draw("lattice")
    traced = jax.jit(gradient(function, tokens)).trace(*tokens)
    on_tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    # One kernel forward and one backward, and nothing of the XLA form.
    assert on_tpu.count("@tpu_custom_call") == 2 and "stablehlo.while" not in on_tpu
    for platform in ("cpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "custom_call @tpu" not in text


def draw_half(op, width=64):
    """As `draw`, but as the GPU kernels take tokens; the values in `width`."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, alpha = (
        jax.random.normal(key, (2, 20, 2, width if i == 2 else 64), jnp.bfloat16)
        for i, key in enumerate(keys[:4])
    )
    gamma = jax.nn.sigmoid(jax.random.normal(keys[4], (2, 20, 2)))
    tokens = (q, k, v, alpha, gamma) if op == "trellis" else (q, k, v, gamma)
    return functools.partial(getattr(memjax_kernels, op), chunk_size=16), tokens


@pytest.fixture
def on_hopper(monkeypatch):
    """jax as on a Hopper GPU; what is lowered for it cannot run here."""
    monkeypatch.setattr(implementations, "needs", lambda platform: "")


def on_gpu(function, tokens) -> str:
    lowered = jax.jit(function).trace(*tokens).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("op", ["trellis", "lattice"])
def test_hopper_kernels_are_default_on_hopper(op, on_hopper):
    function, tokens = draw_half(op)
    traced = jax.jit(function).trace(*tokens)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # One kernel, and nothing of the XLA form.
    assert text.count("@mosaic_gpu") == 1 and "stablehlo.while" not in text
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    # Other sizes were not timed, or are not the kernels'.
    assert "mosaic_gpu" not in on_gpu(function, draw_half(op, width=128)[1])


@pytest.mark.slow
def test_gpu_kernels_under_transformations(on_hopper):
    """vmap inside shard_map inside a mesh, and their gradient."""
    _, tokens = draw_half("lattice")
    op = functools.partial(
        memjax_kernels.lattice, chunk_size=16, implementation="pallas_gpu"
    )
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,))
    rows = [x[:, None] for x in tokens]
    mapped = jax.shard_map(
        jax.vmap(op), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    with jax.set_mesh(mesh):
        # One forward and one backward.
        assert on_gpu(gradient(mapped, rows), rows).count("@mosaic_gpu") == 2


@pytest.mark.slow
def test_default_lowers_to_xla_on_cpu_under_transformations():
    """Bit for bit: vmap, scan, checkpoint, shard_map and the gradient of them."""
    function, tokens = draw("lattice")
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,))

    def nested(implementation):
        call = functools.partial(function, implementation=implementation)

        @jax.checkpoint
        def layer(v, _):
            return call(*tokens[:2], v, *tokens[3:])[1], None

        def layers(v):
            return jax.lax.scan(layer, v, None, length=2)[0]

        def mapped(*x):
            return jax.shard_map(
                lambda *x: call(*x)[1],
                mesh=mesh,
                in_specs=P("data"),
                out_specs=P("data"),
            )(*x)

        return jax.jit(
            jax.grad(
                lambda v: (
                    jnp.sum(jax.vmap(layers)(v[None]) ** 2)
                    + jnp.sum(mapped(*tokens[:2], v, *tokens[3:]) ** 2)
                )
            )
        )

    chosen, xla = nested(None)(tokens[2]), nested("xla")(tokens[2])
    np.testing.assert_array_equal(chosen, xla)
    assert np.abs(chosen).max() > 0


@pytest.mark.slow
def test_gradients_of_gradients_exist_where_the_platform_decides(on_hopper):
    """As for a gradient penalty: no kernel, of a TPU or GPU, stands in their way."""
    function, (q, *tokens) = draw_half("lattice")

    def penalty(q):
        return jnp.sum(jax.grad(lambda q: jnp.sum(function(q, *tokens)[1] ** 2))(q))

    assert jax.eval_shape(jax.grad(penalty), q).shape == q.shape


@pytest.mark.slow
def test_outside_jit_only_the_form_of_this_platform_is_traced(monkeypatch):
    function, tokens = draw("lattice", time=1)
    monkeypatch.setattr(
        "jax.experimental.pallas.pallas_call",
        lambda *_, **__: pytest.fail("the kernel was traced"),
    )
    function(*tokens)
