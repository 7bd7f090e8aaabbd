"""Steps of the recurrences in one kernel: the same memories and reads as in jax."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax_kernels
from memjax_kernels._src.common import one_pass
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.reference import advance
from tests.kernels.distances import close
from tests.kernels.on_tpu import INTERPRETER, needs_libtpu

OPS = ("linear_attention", "ssd", "gla", "delta_rule", "gated_delta_rule")
OPS += ("gated_slots", "lattice", "trellis", "ttt_linear")


def tokens_of(name, sizes, dtype=jnp.float32):
    """Random arguments of a step, all that it forgets with included."""
    batch, heads, width, slots = sizes
    draws = np.random.default_rng(0)

    def draw(*shape):
        return draws.standard_normal((batch, heads, *shape))

    def gate(*shape):
        return -np.abs(draw(*shape)) / 4

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k, v, alpha, rate = (
        *(unit(draw(width)) for _ in range(3)),
        unit(draw(slots)),
        np.abs(draw()) / 4,
    )
    memory = draw(width, width)
    named = {
        "linear_attention": (q, k, v, memory),
        "ssd": (q, k, v, gate(), memory),
        "gla": (q, k, v, gate(width), memory),
        "delta_rule": (q, k, v, rate, memory),
        "gated_delta_rule": (q, k, v, rate, gate(), memory),
        "gated_slots": (q, k, v, alpha, gate(slots)),
        "lattice": (alpha, unit(draw(slots)), v, rate, gate()),
        "trellis": (q, k, v, alpha, np.stack([rate, rate / 2], -1), gate(2)),
        "ttt_linear": (q, k, v, rate, draw(width), draw(width)),
    }
    given = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), named[name])
    empty = functools.partial(
        getattr(memjax_kernels, f"{name}_init_state"), batch, heads
    )
    if name == "gated_slots":
        given = (*given, empty(slots, width, width))
    elif name == "lattice":
        given = (*given, empty(slots, width, chunk_size=2))
    elif name == "trellis":
        given = (*given, empty(slots, width, width, chunk_size=2))
    elif name == "ttt_linear":
        given = (*given, empty(width, chunk_size=2))
    else:
        return (*(x.astype(dtype) for x in given[:-1]), given[-1])
    return (*jax.tree.map(lambda x: x.astype(dtype), given[:-1]), given[-1])


def plain_step(name: str, **options: Any) -> Callable[..., Any]:
    if name == "lattice":
        return functools.partial(_lattice_step, **options)
    step = "batched_step" if name == "ttt_linear" else "step"
    step = getattr(memjax_kernels, f"{name}_{step}")
    return functools.partial(inspect.unwrap(step), **options)


def _lattice_step(
    q,
    k,
    v,
    gamma,
    g,
    state,
    *,
    variant: Any = "dec",
    normalize=True,
    forget: Any = None,
):
    """Without the checks: the kernel takes g always, and l1 in chunks."""
    return advance(q, k, v, gamma, g, state, Rule(variant, normalize, forget))


def three_tokens(step, given):
    """Two open chunks: the chunk-start memory changes and stays."""
    first, *others, state = given

    def token(state, scale):
        return step(first * scale, *others, state)

    # One kernel to compile.
    return jax.lax.scan(token, state, jnp.asarray([1.0, -0.5, 0.3], first.dtype))


CASES = [(name, {}) for name in OPS]
CASES += [("lattice", {"variant": v, "forget": "l2"}) for v in ("dec", "enc", "sim")]
CASES += [("lattice", {"forget": "l1"}), ("lattice", {"normalize": False})]
CASES += [("trellis", {"phi": "softmax"}), ("trellis", {"phi": "ln_silu"})]
# Options with primitives of their own.
COMPILED = [
    case for case in CASES if case[1] in ({}, {"forget": "l1"}, {"phi": "softmax"})
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), CASES)
def test_kernel_equals_step(name, options):
    given, step = tokens_of(name, (2, 3, 16, 8)), plain_step(name, **options)
    assert one_pass.unsupported(*given) == ""
    kernel = functools.partial(one_pass.step_tpu, step, interpret=INTERPRETER)

    def run(step):
        return jax.jit(functools.partial(three_tokens, step))(given)

    close(run(kernel), run(step), 1e-5)


@pytest.mark.slow
def test_heads_of_several_blocks(monkeypatch):
    monkeypatch.setattr(one_pass, "MOST_HEADS", 8)
    given, step = tokens_of("lattice", (2, 16, 16, 8)), plain_step("lattice")
    kernel = functools.partial(one_pass.step_tpu, step, interpret=INTERPRETER)
    close(jax.jit(kernel)(*given), jax.jit(step)(*given), 1e-5)


def test_heads_without_fitting_block_run_in_xla(monkeypatch):
    monkeypatch.setattr(one_pass, "_heads_of_a_block", lambda *_: 0)
    given, step = tokens_of("trellis", (2, 3, 16, 8)), plain_step("trellis")
    close(jax.jit(functools.partial(one_pass.step_tpu, step))(*given), step(*given), 0)


@pytest.mark.slow
def test_bfloat16_tokens_are_read_in_bfloat16():
    given = tokens_of("gated_delta_rule", (2, 3, 16, 8), jnp.bfloat16)
    step = plain_step("gated_delta_rule")
    kernel = functools.partial(one_pass.step_tpu, step, interpret=INTERPRETER)
    found, expected = jax.jit(kernel)(*given), jax.jit(step)(*given)
    assert found[1].dtype == jnp.bfloat16
    close(found[0], expected[0], 1e-5)
    close(found[1], expected[1], 1e-2)


@pytest.mark.slow
def test_gradients_of_both_modes_are_those_of_the_step():
    given = tokens_of("lattice", (2, 3, 16, 8))
    step = functools.partial(memjax_kernels.lattice_step, forget="l2")
    plain = functools.partial(inspect.unwrap(step.func), forget="l2")

    def loss(step, *given):
        return three_tokens(step, given)[1].sum()

    def gradients(step):
        reverse = jax.grad(functools.partial(loss, step), (0, 1, 2, 3))(*given)
        ones = jax.tree.map(jnp.ones_like, given[:1])
        return reverse, jax.jvp(lambda q: loss(step, q, *given[1:]), given[:1], ones)

    close(gradients(step), gradients(plain), 1e-5)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((2, 3, 12, 8), "not a multiple of 8"),
        ((2, 3, 1024, 8), "no number of 3 heads fits"),
        ((5000, 4, 16, 8), "more than 16384"),
    ],
)
def test_unsupported_reasons(sizes, reason):
    batch, heads, width, _ = sizes

    def like(*shape):
        return jax.ShapeDtypeStruct((batch, heads, *shape), jnp.float32)

    row = like(width)
    assert reason in one_pass.unsupported(row, row, row, like(width, width))


@needs_libtpu
@pytest.mark.parametrize(("name", "options"), COMPILED)
def test_it_compiles_on_a_mesh(name, options):
    devices = np.array(topologies.get_topology_desc("v5e:2x2", "tpu").devices)
    mesh = Mesh(devices.reshape(2, 2), ("data", "tensor"))
    step, given = plain_step(name, **options), tokens_of(name, (4, 24, 64, 32))

    def like(x):
        axes = ("data", "tensor") if x.ndim > 1 else ("data",)
        place = NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    shapes = jax.tree.map(like, given)
    with jax.set_mesh(mesh):
        lowered = jax.jit(one_pass.on_tpu(step)).lower(*shapes)
        text = str(lowered.compile().as_text())
    assert "step_in_one_pass" in text and "all-gather" not in text
