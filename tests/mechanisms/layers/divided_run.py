"""A program for four simulated devices that divide sequences among them.

It prints, by mechanism, how outputs, states and gradients differ from those of one
device, and the largest array that devices gather.
"""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.mechanisms import (
    ElasticMemoryConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    GSAConfig,
    Mamba2Config,
)
from tests.training.sharded_run import gathers

WAYS, B, T = 4, 2, 20
# Three heads: no axis of four divides them.
SIZES: dict[str, Any] = dict(model_dim=8, num_heads=3, key_dim=4, value_dim=2)
MECHANISMS = {
    "mamba2": Mamba2Config(**SIZES),
    "gla": GLAConfig(**SIZES),
    "gated_deltanet": GatedDeltaNetConfig(**SIZES),
    "gsa": GSAConfig(**SIZES, slots=4),
}
# All share the convolution that ends of segments meet. The others join memories by one
# function; `tests/training/sharded_run.py` has its gradients.
WITH_GRADIENTS = MECHANISMS["gsa"]
# Two blocks a device.
ELASTIC_SIZES = ElasticMemoryConfig(
    model_dim=12,
    num_heads=3,
    num_kv_heads=3,
    head_dim=4,
    block=4,
    order=5,
    memory_tokens=3,
)
ELASTIC: dict[str, dict[str, Any]] = {
    "elastic": {},
    "elastic, banked in stream": {"bank_blocks": 4, "positions": "stream"},
}


def main() -> None:
    """Prints the differences as JSON."""
    mesh = jax.make_mesh(
        (WAYS,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    found = {name: in_block(config, mesh) for name, config in MECHANISMS.items()}
    print(json.dumps(found | {name: elastic(name, mesh) for name in ELASTIC}))


def relative(expected, found):
    """The largest difference, by the largest number where that is above 1."""
    expected, found = np.asarray(expected), np.asarray(found)
    return np.abs(expected - found).max() / max(1.0, np.abs(expected).max())


def loss(mechanism, params, state, x):
    """Of outputs and of the state after them, which are returned as well."""
    state, y = mechanism.apply(params, state, x)
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.float32]
    return (y**2).sum() + sum((leaf**2).sum() for leaf in leaves), (state, y)


def in_block(config, mesh):
    """`differences` of a recurrent memory in its block, wherever segments end."""
    mechanism = config.build()
    params = jax.device_get(mechanism.init_params(jax.random.key(0)))
    draws = np.random.default_rng(1)
    x = draws.standard_normal((B, T, 8), np.float32)
    starts = draws.uniform(size=(B, T)) < 0.2
    programs: dict[str, Any] = {
        "packed": (mechanism.packed.whole, [(params, x, starts)])
    }
    if config != WITH_GRADIENTS:
        return differences(programs, mesh)
    apply = jax.jit(mechanism.apply)
    # Two tokens a device, where the convolution needs three.
    short = x[:, : 2 * WAYS]
    before, _ = apply(params, mechanism.init_state(B), short[::-1])
    gradients = jax.grad(functools.partial(loss, mechanism), (0, 1, 2), has_aux=True)
    programs["segment"] = (gradients, [(params, before, x)])
    for name, part in (("short", short), ("odd", x[:, : T - 1])):
        programs[name] = (mechanism.apply, [(params, before, part)])
    return differences(programs, mesh)


def elastic(name, mesh):
    """`differences` of Elastic Memory, from states with and without an open block."""
    config = dataclasses.replace(ELASTIC_SIZES, **ELASTIC[name])
    mechanism = config.build()
    params = jax.device_get(mechanism.init_params(jax.random.key(0)))
    apply = jax.jit(mechanism.apply)
    shape = (B, 2 * WAYS * config.block, config.model_dim)
    x = np.random.default_rng(1).standard_normal(shape, np.float32)
    empty = mechanism.init_state(B)
    before, _ = apply(params, empty, x[::-1])
    if name != "elastic":
        # Other places of blocks; their gradients are those of the first form.
        return differences({"later": (mechanism.apply, [(params, before, x)])}, mesh)
    # A token less: no program divides it.
    odd = x[:, :-1]
    opened, _ = apply(params, empty, odd)

    def later(*given):
        of_state = functools.partial(loss, mechanism)
        gradients = jax.grad(of_state, (0, 1, 2), has_aux=True, allow_int=True)
        (by_params, _, by_x), after = gradients(*given)
        # Integers of the state have no gradient.
        return by_params, by_x, after

    states = (before, empty, opened)
    programs = {
        "later": (later, [(params, state, x) for state in states]),
        "odd": (mechanism.apply, [(params, before, odd)]),
    }
    return differences(programs, mesh)


def differences(programs, mesh):
    """By what is computed: the largest difference, and what is gathered for it.

    programs: (function, arguments of each of its calls) by name.
    """
    found = {}
    for name, (program, calls) in programs.items():
        # From the host, so that no array is tied to one device.
        calls = [jax.tree.map(np.asarray, given) for given in calls]
        alone = [jax.jit(program)(*given) for given in calls]
        with jax.set_mesh(mesh):
            compiled = jax.jit(program).lower(*calls[0]).compile()
            shared = [compiled(*given) for given in calls]
        apart = jax.tree.map(relative, alone, shared)
        sent = str(compiled.as_text())
        found[name] = {
            "difference": float(max(jax.tree.leaves(apart))),
            "permutes": " collective-permute" in sent,
            "exchanges": " all-to-all" in sent,
            "gathered": max(gathers(sent), default=0),
        }
    return found
