"""The TPU kernels of linear attention and SSD: interpreted, and compiled."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from memjax_kernels.common import implementations
from memjax_kernels.common.packs import blocks as pack_blocks
from memjax_kernels.linear_attention import linear_attention, linear_attention_xla
from memjax_kernels.linear_attention.pallas_tpu import recur_tpu, unsupported
from memjax_kernels.linear_attention.ssd import ssd, ssd_xla
from tests.kernels.distances import close, distances
from tests.kernels.on_tpu import INTERPRETER, needs_libtpu

INTERPRETED = functools.partial(recur_tpu, interpret=INTERPRETER)


def draw(seed, b, t, h, key, value, dtype=jnp.float32) -> Any:
    """Queries, keys, values, log gates and a memory."""
    keys = jax.random.split(jax.random.key(seed), 5)
    normal = lambda i, *shape: jax.random.normal(keys[i], shape)
    q, k = normal(0, b, t, h, key), normal(1, b, t, h, key) / 8
    g = jax.nn.log_sigmoid(normal(3, b, t, h) + 2)
    tokens = (x.astype(dtype) for x in (q, k, normal(2, b, t, h, value)))
    return *tokens, g, normal(4, b, h, key, value)


def both(form, reset, *arguments):
    """Results, and gradients of everything for random cotangents."""

    def pull(*arguments):
        values, back = jax.vjp(lambda *x: form(*x, reset), *arguments)
        keys = jax.random.split(jax.random.key(7), 2)
        weigh = lambda key, x: jax.random.normal(key, x.shape).astype(x.dtype)
        return values, back(tuple(map(weigh, keys, values)))

    return jax.jit(pull)(*arguments)


@st.composite
def segments(draw):
    heads, key = draw(st.sampled_from([(2, 64), (4, 32), (1, 128)]))
    value = draw(st.sampled_from([128 // heads, 256 // heads]))
    length = draw(st.integers(64, 150))
    places = draw(st.lists(st.integers(0, length - 1), max_size=3))
    return (heads, key, value, length), places, draw(st.integers(0, 2**16))


@pytest.mark.slow
# A failure is not made smaller: each size compiles anew.
@settings(
    max_examples=4,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(segments())
def test_values_and_gradients_agree_with_xla(drawn):
    (heads, key, value, length), places, seed = drawn
    arguments = draw(seed, 2, length, heads, key, value)
    reset = jnp.zeros((2, length), bool)
    for place in places:
        reset = reset.at[place % 2, place].set(True)
    close(both(INTERPRETED, reset, *arguments), both(ssd_xla, reset, *arguments), 3e-6)


@pytest.mark.slow
def test_gates_that_forget_all_leave_nothing_and_no_gradient(monkeypatch):
    """Two groups of packs; mild gates behind strong ones keep their digits."""
    monkeypatch.setattr(pack_blocks, "PACKS", 1)
    q, k, v, g, state = draw(1, 1, 100, 4, 64, 64)
    g = g.at[0, 20].set(-jnp.inf).at[0, 40].set(-1e4).at[0, 70:80].set(-103.0)
    arguments = q, k, v, g, state
    expected = both(ssd_xla, None, *arguments)
    found = both(INTERPRETED, None, *arguments)
    close(found, expected, 3e-6)
    assert not found[1][3][0, 20].any() and found[1][3][0, 21].any()


@pytest.mark.slow
def test_without_gates_it_is_linear_attention():
    q, k, v, _, state = draw(2, 2, 70, 2, 64, 64)
    reset = jnp.zeros((2, 70), bool).at[1, 65].set(True)
    ours = lambda q, k, v, state, reset: INTERPRETED(q, k, v, None, state, reset)
    expected = both(linear_attention_xla, reset, q, k, v, state)
    close(both(ours, reset, q, k, v, state), expected, 3e-6)


@pytest.mark.slow
def test_half_precision_is_as_exact_as_that_of_xla():
    low = draw(3, 1, 100, 2, 64, 64, jnp.bfloat16)
    high = jax.tree.map(lambda x: x.astype(jnp.float32), low)
    exact = both(ssd_xla, None, *high)
    kernel = both(INTERPRETED, None, *low)
    xla = distances(both(ssd_xla, None, *low), exact)
    for path, distance in distances(kernel, exact).items():
        assert distance <= 1.05 * xla[path] + 1e-4, (path, distance, xla[path])
    assert kernel[0][1].dtype == jnp.bfloat16


@pytest.mark.slow
def test_gradients_of_gradients_differentiate_the_same_function():
    arguments = draw(4, 1, 64, 2, 64, 64)

    def size(form, *arguments):
        grads = jax.grad(lambda *x: jnp.sum(form(*x, None)[1] ** 2), (0, 3))
        return sum(jnp.sum(x * x) for x in grads(*arguments))

    twice = lambda form: jax.jit(jax.grad(functools.partial(size, form)))(*arguments)
    close(twice(INTERPRETED), twice(ssd_xla), 1e-5)


def test_unsupported_arguments_say_why():
    shape = lambda t, h, d, dtype="bfloat16": jnp.zeros((1, t, h, d), dtype)
    x = shape(64, 2, 64)
    assert unsupported(x, x, x) == ""
    assert "all be float32 or all" in unsupported(x, x, shape(64, 2, 64, "float32"))
    short = shape(63, 2, 64)
    assert "63 tokens are less than a chunk of 64" in unsupported(short, short, short)
    odd = shape(64, 3, 64)
    assert "no number of 3 heads fills 128 lanes" in unsupported(odd, odd, odd)
    if implementations.needs("tpu"):
        for op, gates in ((linear_attention, ()), (ssd, (jnp.zeros((1, 64, 2)),))):
            with pytest.raises(ValueError, match="it needs a tpu"):
                op(x, x, x, *gates, implementation="pallas_tpu")


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "sizes", "dtype", "gated", "mesh_shape"),
    [
        ("v5e:2x2", (1, 128, 4, 64, 64), jnp.bfloat16, True, (1, 1)),
        ("v5p:2x2x1", (2, 100, 2, 128, 256), jnp.float32, False, (1, 1)),
        ("v6e:2x2", (2, 64, 8, 32, 64), jnp.bfloat16, True, (2, 2)),
    ],
)
def test_the_gradient_compiles(name, sizes, dtype, gated, mesh_shape):
    devices = np.array(topologies.get_topology_desc(name, "tpu").devices)
    devices = devices[: np.prod(mesh_shape)].reshape(mesh_shape)
    mesh = Mesh(devices, ("data", "tensor"))
    b, t, h, key, value = sizes
    q, k, v, g, state = jax.eval_shape(lambda: draw(0, b, t, h, key, value, dtype))
    token, memory = P("data", None, "tensor"), P("data", "tensor")
    given = ((q, token), (k, token), (v, token), (state, memory))
    given = (*given, (g, token)) if gated else given
    shaped = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in given
    ]

    def loss(q, k, v, state, *gates):
        op = ssd if gated else linear_attention
        given: Any = (q, k, v, *gates, state)
        after, y = op(*given)
        return jnp.sum(after**2) + jnp.sum(y.astype(jnp.float32) ** 2)

    gradient = jax.grad(loss, tuple(range(len(shaped))))
    with jax.set_mesh(mesh):
        text = str(jax.jit(gradient).lower(*shaped).compile().as_text())
    assert "linear_attention_forward" in text and "linear_attention_backward" in text
    assert "all-gather" not in text and "all-to-all" not in text
