"""A program for four pretended devices that divide sequences among them.

It prints, by linear mechanism, how outputs, states and gradients differ from those of
one device, and the largest array that devices gather.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.mechanisms import (
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    LinearAttentionConfig,
    Mamba2Config,
)
from tests.training.sharded_run import gathers

WAYS, B, T = 4, 2, 20
# Three heads: no axis of four divides them.
SIZES: dict[str, Any] = dict(model_dim=8, num_heads=3, key_dim=4, value_dim=2)
MIXERS = {
    "linear_attention": LinearAttentionConfig(**SIZES),
    "mamba2": Mamba2Config(**SIZES),
    "gla": GLAConfig(**SIZES),
    "deltanet": DeltaNetConfig(**SIZES),
    "gated_deltanet": GatedDeltaNetConfig(**SIZES),
}


def main() -> None:
    """Prints the differences as JSON."""
    mesh = jax.make_mesh(
        (WAYS,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    print(json.dumps({name: differences(c, mesh) for name, c in MIXERS.items()}))


def relative(expected, found):
    """The largest difference, by the largest number where that is above 1."""
    scale = max(1.0, np.abs(expected).max())
    return np.abs(np.subtract(expected, found)).max() / scale


def differences(config, mesh):
    """By what is computed: the largest difference, and what is gathered for it."""
    mechanism = config.build()
    params = mechanism.init_params(jax.random.key(0))
    draws = np.random.default_rng(1)
    x = jnp.asarray(draws.standard_normal((B, T, 8)), jnp.float32)
    starts = jnp.asarray(draws.uniform(size=(B, T)) < 0.2)
    before, _ = mechanism.apply(params, mechanism.init_state(B), x[::-1, :7])

    def loss(params, state, x):
        state, y = mechanism.apply(params, state, x)
        return (y**2).sum() + sum((leaf**2).sum() for leaf in jax.tree.leaves(state))

    programs = {
        "segment": (mechanism.apply, (params, before, x)),
        "gradient": (jax.grad(loss, (0, 1, 2)), (params, before, x)),
        "packed": (mechanism.packed.whole, (params, x, starts)),
        # Two tokens a device, where the convolution needs three.
        "short": (mechanism.apply, (params, before, x[:, : 2 * WAYS])),
        "odd": (mechanism.apply, (params, before, x[:, : T - 1])),
    }
    found = {}
    for name, (program, given) in programs.items():
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
