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
    LinearAttentionConfig,
    Mamba2Config,
)
from tests.training.sharded_run import gathers

WAYS, B, T = 4, 2, 20
# Three heads: no axis of four divides them.
SIZES: dict[str, Any] = dict(model_dim=8, num_heads=3, key_dim=4, value_dim=2)
MECHANISMS = {
    "linear_attention": LinearAttentionConfig(**SIZES, retention=True),
    "mamba2": Mamba2Config(**SIZES),
    "gla": GLAConfig(**SIZES),
    "gated_deltanet": GatedDeltaNetConfig(**SIZES),
    "gsa": GSAConfig(**SIZES, slots=4),
}
# All share the convolution that ends of segments meet.
ENDS = MECHANISMS["gsa"]
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
    "elastic, in stream": {"positions": "stream"},
    "elastic, banked": {"bank_blocks": 4},
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
    scale = max(1.0, np.abs(expected).max())
    return np.abs(np.subtract(expected, found)).max() / scale


def loss(mechanism, params, state, x):
    """Of outputs and of the state after them, which are returned as well."""
    state, y = mechanism.apply(params, state, x)
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.float32]
    return (y**2).sum() + sum((leaf**2).sum() for leaf in leaves), (state, y)


def in_block(config, mesh):
    """`differences` of a recurrent memory in its block, wherever segments end."""
    mechanism = config.build()
    params = jax.jit(mechanism.init_params)(jax.random.key(0))
    apply = jax.jit(mechanism.apply)
    draws = np.random.default_rng(1)
    x = jnp.asarray(draws.standard_normal((B, T, 8)), jnp.float32)
    starts = jnp.asarray(draws.uniform(size=(B, T)) < 0.2)
    before, _ = apply(params, mechanism.init_state(B), x[::-1, :7])
    loss_of = functools.partial(loss, mechanism)
    programs = {
        "segment": (jax.grad(loss_of, (0, 1, 2), has_aux=True), (params, before, x)),
        "packed": (mechanism.packed.whole, (params, x, starts)),
    }
    if config == ENDS:
        programs |= {
            # Two tokens a device, where the convolution needs three.
            "short": (mechanism.apply, (params, before, x[:, : 2 * WAYS])),
            "odd": (mechanism.apply, (params, before, x[:, : T - 1])),
        }
    return differences(programs, mesh)


def elastic(name, mesh):
    """`differences` of Elastic Memory from a state; of its first form, from nothing."""
    config = dataclasses.replace(ELASTIC_SIZES, **ELASTIC[name])
    mechanism = config.build()
    params = jax.jit(mechanism.init_params)(jax.random.key(0))
    apply = jax.jit(mechanism.apply)
    time = 2 * WAYS * config.block
    draws = np.random.default_rng(1)
    x = jnp.asarray(draws.standard_normal((B, time, config.model_dim)), jnp.float32)
    whole = 2 * config.block
    before, _ = apply(params, mechanism.init_state(B), x[::-1, :whole])
    opened, _ = apply(params, before, x[:, :3])

    def of_empty(params, x):
        return loss(mechanism, params, mechanism.init_state(B), x)

    def later(*given):
        of_state = functools.partial(loss, mechanism)
        gradients = jax.grad(of_state, (0, 1, 2), has_aux=True, allow_int=True)
        (by_params, _, by_x), after = gradients(*given)
        # Integers of the state have no gradient.
        return by_params, by_x, after

    if name != "elastic":
        # Other places of blocks; their gradients are those of the first form.
        return differences({"later": (mechanism.apply, (params, before, x))}, mesh)
    programs = {
        "later": (later, (params, before, x)),
        "segment": (jax.grad(of_empty, (0, 1), has_aux=True), (params, x)),
        "open": (mechanism.apply, (params, opened, x)),
        "odd": (mechanism.apply, (params, before, x[:, :-1])),
    }
    return differences(programs, mesh)


def differences(programs, mesh):
    """By what is computed: the largest difference, and what is gathered for it."""
    found = {}
    for name, (program, given) in programs.items():
        # From the host, so that no array is tied to one device.
        given = jax.tree.map(np.asarray, given)
        alone = jax.jit(program)(*given)
        with jax.set_mesh(mesh):
            compiled = jax.jit(program).lower(*given).compile()
            shared = compiled(*given)
        apart = jax.tree.map(relative, alone, shared)
        sent = str(compiled.as_text())
        found[name] = {
            "difference": float(max(jax.tree.leaves(apart))),
            "permutes": " collective-permute" in sent,
            "gathered": max(gathers(sent), default=0),
        }
    return found
