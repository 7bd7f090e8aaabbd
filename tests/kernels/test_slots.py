"""Steps of sequences whose states are at slots of a pool."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import memjax_kernels
from memjax_kernels import gated_delta_rule_step, step_at_slots
from memjax_kernels._src.common.steps import one_pass
from tests.kernels.distances import close
from tests.kernels.on_tpu import INTERPRETER, needs_libtpu
from tests.kernels.test_one_pass import tokens_of

POOL, SLOTS = 7, jnp.array([5, 0, 3])
SIZES = (len(SLOTS), 2, 16, 8)


def given_of(name):
    """The tokens of an op's step, and a pool of states."""
    *tokens, state = tokens_of(name, SIZES)
    draws = np.random.default_rng(1)

    def pool(x):
        shape = (POOL, *x.shape[1:])
        if x.dtype == jnp.int32:
            return jnp.zeros(shape, x.dtype)
        return jnp.asarray(draws.standard_normal(shape, np.float32))

    return tokens, jax.tree.map(pool, state)


@pytest.mark.parametrize("name", ["gated_delta_rule", "gated_slots", "trellis"])
def test_slots_are_stepped_and_others_stay(name):
    step = getattr(memjax_kernels, f"{name}_step")
    tokens, pool = given_of(name)
    after, y = jax.jit(functools.partial(step_at_slots, step))(SLOTS, *tokens, pool)
    expected = step(*tokens, jax.tree.map(lambda x: x[SLOTS], pool))
    others = np.setdiff1d(np.arange(POOL), SLOTS)
    close((jax.tree.map(lambda x: x[SLOTS], after), y), expected, 1e-6)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(pool), strict=True):
        np.testing.assert_array_equal(new[others], old[others])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_delta_rule", "gated_slots"])
def test_the_kernel_reads_and_writes_slots_alone(name):
    step = getattr(memjax_kernels, f"{name}_step")
    tokens, pool = given_of(name)
    expected = step_at_slots(step, SLOTS, *tokens, pool)
    kernel = functools.partial(one_pass.step_tpu, inspect.unwrap(step), slotted=True)
    found = kernel(*tokens, pool, SLOTS, interpret=INTERPRETER)
    close(found, expected, 1e-6)


@pytest.mark.parametrize(
    ("slots", "message", "wrong"),
    [
        ([5, 0, 7], r"slots must lie in \[0, 6\], got \[5, 0, 7\]", [2]),
        ([-1, 0, 1], r"slots must lie in \[0, 6\]", [0]),
        ([5, 5, 1], "slots must each come at most once, got", [0, 1]),
    ],
)
def test_wrong_slots_are_refused_or_read_nan(slots, message, wrong):
    tokens, pool = given_of("gated_delta_rule")
    step = functools.partial(step_at_slots, gated_delta_rule_step)
    with pytest.raises(ValueError, match=message):
        step(jnp.array(slots), *tokens, pool)
    after, y = jax.jit(step)(jnp.array(slots), *tokens, pool)
    assert np.isnan(y).all((1, 2)).nonzero()[0].tolist() == wrong
    changed = (np.asarray(after) != pool).any((1, 2, 3)).nonzero()[0].tolist()
    assert changed == sorted({*slots} - {slots[i] for i in wrong})


@pytest.mark.usefixtures("unchecked_annotations")
def test_bad_arguments_are_named():
    tokens, pool = given_of("gated_delta_rule")
    step: Any = functools.partial(step_at_slots, gated_delta_rule_step)
    for slots in (jnp.array([0.0, 1.0, 2.0]), jnp.zeros((3, 1), jnp.int32), [0, 1, 2]):
        with pytest.raises(ValueError, match=r"slots must be integers \[B\], got"):
            step(slots, *tokens, pool)
    with pytest.raises(ValueError, match="must be a pool of states, got None"):
        step(SLOTS, *tokens, None)
    with pytest.raises(ValueError, match="state must"):
        step(SLOTS[:2], *tokens, pool)
    with pytest.raises(ValueError, match="given must be q, k, v, beta, g, state of"):
        step(SLOTS, *tokens[1:], pool)
    with pytest.raises(ValueError, match=r"a pool must be float32, got \['bfloat16'\]"):
        step(SLOTS, *tokens, pool.astype(jnp.bfloat16))
    *slotted, slots = given_of("gated_slots")[0], given_of("gated_slots")[1]
    uneven = slots._replace(values=slots.values[:2])
    with pytest.raises(ValueError, match=r"must have one S, got \[2, 7\]"):
        step_at_slots(memjax_kernels.gated_slots_step, SLOTS, *slotted[0], uneven)
    with pytest.raises(ValueError, match="beta must lie"):
        step(SLOTS, *tokens[:3], tokens[3] + 9, tokens[4], pool)


@needs_libtpu
def test_a_donated_pool_is_not_copied():
    device = topologies.get_topology_desc("v5e:2x2", "tpu").devices[0]
    place = functools.partial(
        jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device)
    )
    tokens, pool = given_of("gated_delta_rule")
    shapes = [place(x.shape, x.dtype) for x in (SLOTS, *tokens, pool)]
    function = functools.partial(step_at_slots, gated_delta_rule_step)
    compiled: Any = jax.jit(function, donate_argnums=6).lower(*shapes).compile()
    assert "step_in_one_pass" in str(compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < pool.nbytes
