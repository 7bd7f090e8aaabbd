"""Mechanisms on meshes of Explicit axes, the default of jax.make_mesh."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.mechanisms.test_contract import CONFIGS, FLOWS, KINDS, B, D, T, rows


@pytest.mark.parametrize("name", rows(FLOWS, set(CONFIGS)))
def test_explicit_axes_keep_their_sharding(name):
    """Shapes alone: shardings that do not fit are found when a program is traced."""
    mechanism = CONFIGS[name].build()
    mesh = jax.make_mesh((1, 1), ("data", "tensor"))

    def placed(tree, *axes):
        lies = NamedSharding(mesh, P(*axes))

        def struct(a):
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=lies)

        return jax.tree.map(struct, tree)

    params = placed(jax.eval_shape(mechanism.init_params, jax.random.key(0)))
    state = placed(jax.eval_shape(lambda: mechanism.init_state(B)), "data")
    x = placed(jax.ShapeDtypeStruct((B, T, D), jnp.float32), "data")
    # What carries the shardings to where no mesh is set is the same for all.
    outside = [contextlib.nullcontext()] * (name in KINDS)
    for context in (jax.set_mesh(mesh), *outside):
        with context:
            after, y = jax.eval_shape(mechanism.apply, params, state, x)
        for found in (*jax.tree.leaves(after), y):
            assert found.sharding.spec[0] == "data", found
