"""The TPU kernels of Lattice: interpreted, and compiled without a TPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from memjax_kernels import lattice_init_state, lattice_state
from memjax_kernels._src.lattice import Rule, pallas_tpu
from memjax_kernels._src.lattice.pallas_tpu import lattice_tpu, unsupported
from memjax_kernels._src.lattice.segment import in_chunks
from memjax_kernels._src.lattice.xla import lattice_xla
from tests.kernels.distances import close
from tests.kernels.lattice.against_xla import draw, rows
from tests.kernels.on_tpu import needs_libtpu


@pytest.mark.slow
def test_gradients_of_gradients_differentiate_the_same_function(monkeypatch):
    """The XLA form of the kernels' own arguments is the op: `gradients.of_kernels`."""
    b, t, h, d, c = 2, 20, 2, 64, 16
    before, blank = (lattice_state(rows(seed, b, h, d, d), c) for seed in (2, 3))
    reset = np.arange(t) == np.array([16, t])[:, None]
    given = (*draw(b, t, h, d, d), None, before, reset, blank)

    # It runs where heads fill no registers.
    monkeypatch.setattr(pallas_tpu._op, "heads", lambda *_: 0)

    def run(form):
        form = functools.partial(form, rule=Rule("dec"))
        return jax.jit(functools.partial(in_chunks, form))(*given)

    close(run(lattice_tpu), run(lattice_xla), 1e-6)


def test_unsupported_reasons():
    low, high = (jnp.zeros((1, 2, 2, 64), t) for t in ("bfloat16", "float32"))
    assert unsupported(high, high, high, 16, Rule("sim")) == ""
    assert unsupported(low, low, low, 64, Rule()) == ""
    assert "all be float32 or all bfloat16" in unsupported(low, low, high, 16, Rule())
    wild = Rule(normalize=False)
    assert "normalize must be True, got False" in unsupported(
        high, high, high, 16, wild
    )
    decayed = Rule(forget="l2")
    assert "forget must be None, got 'l2'" in unsupported(high, high, high, 16, decayed)
    for size in (1, 24):
        why = unsupported(high, high, high, size, Rule())
        assert f"must be a multiple of 16, got {size}" in why
    one = high[:, :, :1]
    assert "no number of 1 heads, 64 wide in q" in unsupported(
        one, one, one, 16, Rule()
    )


@pytest.mark.parametrize(("size", "fits"), [(512, True), (768, False)])
def test_memory_beyond_vmem_is_refused(size, fits):
    """Compiled for a v5e, the largest that fits does."""
    wide = jnp.zeros((1, 32, 1, size), jnp.bfloat16)
    why = unsupported(wide, wide, wide, 16, Rule())
    assert (why == "") == fits and (fits or "and fits in VMEM" in why)


def compiled(name, mesh_shape, specs, sizes, dtype, variant, check_vma=None):
    """The gradient of everything, compiled for `name`; under shard_map if asked."""
    devices = np.array(topologies.get_topology_desc(name, "tpu").devices)
    devices = devices[: np.prod(mesh_shape)].reshape(mesh_shape)
    mesh = Mesh(devices, ("data", "model"))
    b, t, h, m, v, c = sizes
    row, token, memory = specs
    tokens = jax.eval_shape(lambda: draw(b, t, h, m, v, dtype))
    state = jax.eval_shape(lambda: lattice_init_state(b, h, m, v, c))
    by_rank = {1: row, 3: memory, 4: memory}
    state_specs = jax.tree.map(lambda x: by_rank[x.ndim], state)
    reset = jax.ShapeDtypeStruct((b, t), bool)

    def forward(tokens, state, reset):
        rows, heads = state.start.shape[:2]
        empty = lattice_init_state(rows, heads, m, v, c)
        given: Any = (*tokens, None, state, reset, empty)
        form = functools.partial(lattice_tpu, rule=Rule(variant))
        after, y = in_chunks(form, *given)
        return after.start, after.tokens, y

    if check_vma is not None:
        forward = jax.shard_map(
            forward,
            mesh=mesh,
            in_specs=((token,) * 4, state_specs, row),
            out_specs=(memory, memory, token),
            check_vma=check_vma,
        )

    def loss(tokens, state, reset):
        leaves = jax.tree.leaves(forward(tokens, state, reset))
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in leaves)

    def place(spec, x):
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        )

    arguments = (
        jax.tree.map(functools.partial(place, token), tokens),
        jax.tree.map(place, state_specs, state),
        place(row, reset),
    )
    gradient = jax.grad(loss, (0, 1), allow_int=True)
    return str(jax.jit(gradient).lower(*arguments).compile().as_text())


@needs_libtpu
@pytest.mark.parametrize(
    "name, sizes, dtype, variant",
    [
        ("v5e:2x2", (1, 128, 4, 64, 64, 64), jnp.bfloat16, "dec"),
        ("v5e:2x2", (1, 33, 1, 256, 256, 16), jnp.bfloat16, "enc"),
        ("v6e:2x2", (1, 40, 2, 64, 128, 16), jnp.float32, "sim"),
    ],
)
def test_the_gradient_compiles(name, sizes, dtype, variant):
    text = compiled(name, (1, 1), (P(), P(), P()), sizes, dtype, variant)
    assert "lattice_forward" in text and "lattice_backward" in text


@needs_libtpu
@pytest.mark.parametrize(
    "name, size, check_vma, variant",
    [("v5p:2x2x1", 16, True, "enc"), ("v6e:2x2", 64, False, "dec")],
)
def test_the_gradient_compiles_over_a_mesh(name, size, check_vma, variant):
    """Rows and heads are apart: nothing is exchanged."""
    specs = P("data"), P("data", None, "model"), P("data", "model")
    sizes = (2, size, 4, 64, 64, size)
    text = compiled(name, (2, 2), specs, sizes, jnp.bfloat16, variant, check_vma)
    assert "_backward" in text
    # The sum of the loss over devices is the one thing that is.
    assert "all-gather" not in text and "all-to-all" not in text
