"""Steps of the recurrences in one kernel: the same memories and reads as in jax."""

import dataclasses
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
from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.packs import tuned
from memjax_kernels._src.common.steps import head_kernel, one_pass, open_chunk
from tests.kernels.distances import close
from tests.kernels.on_tpu import INTERPRETER, needs_libtpu

#: One of each way to write, with the gates of most; the kernel is the same for all.
OPS = ("ssd", "delta_rule", "gdn2", "gated_slots")
#: Ops whose states have the tokens of an open chunk.
CHUNKED = ("lattice", "trellis", "ttt_linear")


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
        "ssd": (q, k, v, gate(), memory),
        "delta_rule": (q, k, v, rate, memory),
        "gated_delta_rule": (q, k, v, rate, gate(), memory),
        "kda": (q, k, v, rate, gate(width), memory),
        "gdn2": (q, k, v, -gate(width), -gate(width), gate(width), memory),
        "gated_slots": (q, k, v, alpha, gate(slots)),
        "lattice": (alpha, unit(draw(slots)), v, rate, gate()),
        "trellis": (q, k, v, alpha, np.stack([rate, rate / 2], -1), gate(2)),
        "ttt_linear": (q, k, v, rate, draw(width)[0], draw(width)[0]),
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
        # The empty memory is zeros, with which any product is exact.
        weights = jnp.asarray(memory, jnp.float32)
        given = (
            *given,
            dataclasses.replace(empty(width, chunk_size=2), weights=weights),
        )
    else:
        return (*(x.astype(dtype) for x in given[:-1]), given[-1])
    return (*jax.tree.map(lambda x: x.astype(dtype), given[:-1]), given[-1])


def plain_step(name: str, **options: Any) -> Callable[..., Any]:
    step = getattr(memjax_kernels, f"{name}_step")
    return functools.partial(inspect.unwrap(step), **options)


def three_tokens(step, given):
    """Tokens one after the other, as decoding reads them."""
    first, *others, state = given

    def token(state, scale):
        return step(first * scale, *others, state)

    # One kernel to compile.
    return jax.lax.scan(token, state, jnp.asarray([1.0, -0.5, 0.3], first.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_kernel_equals_step(name):
    given, step = tokens_of(name, (2, 3, 16, 8)), plain_step(name)
    assert one_pass.unsupported(*given) == ""
    # The kernel is the same for all: one shows that memory is written.
    by = INTERPRETER if name == "ssd" else True
    kernel = functools.partial(one_pass.step_tpu, step, interpret=by)

    def run(step):
        return jax.jit(functools.partial(three_tokens, step))(given)

    close(run(kernel), run(step), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lattice", {"variant": "dec"}),
        ("lattice", {"variant": "enc", "forget": "l2"}),
        ("trellis", {"phi": "softmax"}),
        ("ttt_linear", {"chunk_size": 2}),
    ],
)
def test_kernels_of_open_chunks_equal_the_step(name, options, monkeypatch):
    """The second batch element has an open token."""
    *tokens, state = tokens_of(name, (2, 3, 16, 8))
    if name == "lattice" and "forget" not in options:
        tokens[-1] = None
    run = jax.jit(functools.partial(three_tokens, plain_step(name, **options)))
    # Three tokens are a chunk and one that is open.
    other, _ = run((*tokens, state))
    assert np.all(other.position == 1)
    given = *tokens, chunks.replace(jnp.array([False, True]), other, state)
    expected = run(given)
    # The kernel is the same for all: one shows that memory is written.
    by = INTERPRETER if name == "trellis" else True
    kernel = functools.partial(head_kernel.by_heads_tpu, interpret=by)
    monkeypatch.setattr(open_chunk, "by_heads", kernel)
    run = jax.jit(functools.partial(three_tokens, plain_step(name, **options)))
    # Operands of two parts in bfloat16: 16 bits.
    close(run(given), expected, 5e-5)


@pytest.mark.parametrize("name", ["gated_delta_rule", "trellis"])
def test_a_vmap_of_a_step_lowers_for_a_tpu(name):
    given = tokens_of(name, (2, 3, 16, 8))
    two = jax.tree.map(lambda x: jnp.stack([x, x]), given)
    step = jax.vmap(getattr(memjax_kernels, f"{name}_step"))
    lowered = jax.jit(step).trace(*two).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.slow
def test_heads_of_several_blocks(monkeypatch):
    monkeypatch.setattr(tuned, "SIZES", tuned.changed("step", heads=8))
    given, step = tokens_of("delta_rule", (2, 16, 16, 8)), plain_step("delta_rule")
    kernel = functools.partial(one_pass.step_tpu, step, interpret=INTERPRETER)
    close(jax.jit(kernel)(*given), jax.jit(step)(*given), 1e-5)


def test_heads_without_fitting_block_run_in_xla(monkeypatch):
    monkeypatch.setattr(one_pass, "_heads_of_a_block", lambda *_: 0)
    given, step = tokens_of("delta_rule", (2, 3, 16, 8)), plain_step("delta_rule")
    close(jax.jit(functools.partial(one_pass.step_tpu, step))(*given), step(*given), 0)


@pytest.mark.slow
def test_bfloat16_tokens_are_read_in_bfloat16():
    given = tokens_of("gated_delta_rule", (2, 3, 16, 8), jnp.bfloat16)
    step = plain_step("gated_delta_rule")
    kernel = functools.partial(one_pass.step_tpu, step, interpret=True)
    found, expected = jax.jit(kernel)(*given), jax.jit(step)(*given)
    assert found[1].dtype == jnp.bfloat16
    close(found[0], expected[0], 1e-5)
    close(found[1], expected[1], 1e-2)


@pytest.mark.slow
def test_gradients_of_both_modes_are_those_of_the_step():
    given = tokens_of("delta_rule", (2, 3, 16, 8))
    step = memjax_kernels.delta_rule_step
    plain = inspect.unwrap(step)

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
@pytest.mark.parametrize("name", (*OPS, *CHUNKED))
def test_it_compiles_on_a_mesh(name):
    devices = np.array(topologies.get_topology_desc("v5e:2x2", "tpu").devices)
    mesh = Mesh(devices.reshape(2, 2), ("data", "tensor"))
    options = {"chunk_size": 2} if name == "ttt_linear" else {}
    step, given = plain_step(name, **options), tokens_of(name, (4, 24, 64, 32))
    if name == "lattice":
        given = *given[:4], None, given[5]
    heads = 24

    def like(x):
        axes = ("data", "tensor") if x.ndim > 1 else ("data",)
        # The layer norm of TTT-linear has no batch.
        axes = ("tensor",) if x.shape[0] == heads else axes
        place = NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    shapes = jax.tree.map(like, given)
    kernel = "by_heads" if name in CHUNKED else "step_in_one_pass"
    with jax.set_mesh(mesh):
        step = step if name in CHUNKED else one_pass.on_tpu(step)
        lowered = jax.jit(step).lower(*shapes)
        text = str(lowered.compile().as_text())
    assert kernel in text and "all-gather" not in text
