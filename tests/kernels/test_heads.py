"""Rotary embeddings, and layouts of heads for attention kernels."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from memjax_kernels import rotate
from memjax_kernels._src.common.packs import tuned
from memjax_kernels._src.heads import layouts_tpu, rotate_tpu, xla
from tests.kernels.distances import close
from tests.kernels.on_tpu import INTERPRETER, compiled_for_two, needs_libtpu

ROTATE = functools.partial(rotate_tpu.rotate_tpu, interpret=INTERPRETER)
# bfloat16 has 8 bits.
NEAR = 6e-3


def heads_and_angles(seed, time, heads, width, rows=None):
    draws = np.random.default_rng(seed)
    x = jnp.asarray(draws.standard_normal((2, time, heads, width)), jnp.bfloat16)
    shape = (time, width // 2) if rows is None else (rows, time, width // 2)
    angles = draws.uniform(-9, 9, shape).astype(np.float32)
    return x, jnp.cos(angles), jnp.sin(angles)


def with_gradients(form, x):
    """The result, its gradient, and the gradient of that gradient's square."""
    y = jax.eval_shape(form, x)
    weight = np.random.default_rng(5).integers(-2, 3, y.shape)

    def loss(x):
        y = form(x)
        return ((y.astype(jnp.float32) * weight) ** 2).sum(), y

    @jax.jit
    def run(x):
        once, pull, y = jax.vjp(jax.grad(loss, has_aux=True), x, has_aux=True)
        return y, once, pull(2 * once)[0]

    return run(x)


def test_rotation_multiplies_complex_pairs():
    x, cos, sin = heads_and_angles(0, 5, 2, 6)
    x = np.asarray(x, np.float32)
    turned = (x[..., :3] + 1j * x[..., 3:]) * np.asarray(cos + 1j * sin)[:, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    found = jax.jit(rotate)(x, cos, sin)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def small_blocks(monkeypatch):
    """128 tokens are two blocks of two tiles each, and 512 lanes two blocks."""
    sizes = tuned.changed("tiles", tokens=64, lanes=256, rows=32)
    monkeypatch.setattr(tuned, "SIZES", sizes)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("sizes", "rows"), [((128, 16, 32), 1), ((48, 3, 128), 2)])
def test_rotation_kernel_equals_xla(sizes, rows):
    x, cos, sin = heads_and_angles(1, *sizes, rows=rows)
    assert rotate_tpu.unsupported(x, cos) == ""

    def run(form):
        return with_gradients(lambda x: form(x, cos, sin), x)

    # Memory is written alike in both: one shows that it is.
    lighter = {} if rows == 1 else {"interpret": True}
    kernel = functools.partial(ROTATE, **lighter)
    close(run(kernel), run(xla.rotate), NEAR)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("sizes", "scale"), [((128, 16, 32), 0.125), ((48, 3, 128), 1.0)]
)
def test_layout_kernels_equal_swapaxes(sizes, scale):
    x = heads_and_angles(2, *sizes)[0]

    def exchanged(x):
        return jnp.swapaxes(x, 1, 2)

    by = True if scale == 1 else INTERPRETER
    first, last = (
        functools.partial(layouts_tpu.moved, layouts_tpu.Static(to, scale, by))
        for to in (True, False)
    )
    for form, given in ((first, x), (last, exchanged(x))):
        expected = with_gradients(lambda x: exchanged(x) * scale, given)
        close(with_gradients(form, given), expected, NEAR)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones((2, 5, 2, 7))}, r"even number of channels, got \(2, 5, 2, 7\)"),
        ({"cos": jnp.ones((5, 4))}, r"cos must end in \(5, 3\), got \(5, 4\)"),
        ({"sin": jnp.ones((4, 3))}, r"sin must end in \(5, 3\), got \(4, 3\)"),
        ({"implementation": "pallas_tpu"}, "pallas_tpu' of rotate cannot run here"),
    ],
)
def test_bad_input_is_refused(change, message):
    x, angles = jnp.ones((2, 5, 2, 6)), jnp.ones((5, 3))
    # Without the annotations' own check.
    run = inspect.unwrap(rotate)
    with pytest.raises(ValueError, match=message):
        run(**({"x": x, "cos": angles, "sin": angles} | change))


@needs_libtpu
@pytest.mark.parametrize(
    ("chip", "axis"),
    [("v5e:2x2", "tensor"), ("v6e:2x2", "sequence")],
)
def test_gradients_compile_on_two_devices_without_exchange(chip, axis):
    x, cos, sin = heads_and_angles(3, 64, 4, 64)
    specs = [P(None, None, axis), P(), P()]
    text = compiled_for_two(
        chip,
        jax.grad(
            lambda x, cos, sin: (rotate(x, cos, sin) ** 2).astype(jnp.float32).sum()
        ),
        (x, cos, sin),
        axis,
        specs,
    )
    assert "rotate" in text and "all-gather" not in text and "all-to-all" not in text
