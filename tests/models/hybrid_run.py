"""A program for four pretended devices: published hybrids on meshes, as JSON."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memjax.models import LanguageModel, LoraConfig, add_lora
from memjax.training.distributed import sharding
from memjax.training.distributed.sharding import MeshConfig
from tests import tiny
from tests.models.published import config

B, T = 4, 12
MESHES = {
    "fsdp": MeshConfig(fsdp=2, tensor=2),
    "sequence": MeshConfig(data=2, sequence=2),
    # More devices than heads of keys.
    "heads": MeshConfig(tensor=4),
}


def main(*names: str) -> None:
    """By model and mesh: how far loss, gradients and memory are from one device's."""
    print(json.dumps({name: _run(name) for name in names}))


def _run(name):
    sizes = config(name)

    def make():
        fresh = LanguageModel(sizes, key=jax.random.key(0))
        return add_lora(fresh, LoraConfig(rank=2), jax.random.key(1))

    graph, params = nnx.split(tiny.drawn(make))
    tokens = tiny.tokens(1, B, T)
    starts = jnp.zeros((B, T), bool).at[:, 5].set(True)

    @jax.jit
    def run(params):
        def loss(params):
            model = nnx.merge(graph, params)
            packed = model.encode_packed(model.embed(tokens), starts)
            return (jax.nn.log_softmax(model.logits(packed)) ** 2).mean()

        model = nnx.merge(graph, params)
        read = model.read(model.init_state(B, T), model.embed(tokens))
        return jax.value_and_grad(loss)(params), read

    alone = jax.device_get(run(params))
    return {
        mesh: _on_mesh(run, params, sizes, at, alone) for mesh, at in MESHES.items()
    }


def _on_mesh(run, params, sizes, config, alone):
    mesh = sharding.make_mesh(config)
    with jax.set_mesh(mesh):
        divided = jax.device_put(params, sharding.shardings(mesh, params, sizes))
        result = run(divided)
    numbers = [map(np.float64, jax.tree.leaves(x)) for x in (alone, result)]
    pairs = zip(*numbers, strict=True)
    mechanism = divided["blocks"][0]["mechanism"]
    memory = getattr(mechanism, "memory", mechanism)
    _, (state, _) = result
    held = getattr(state[0], "memory", state[0])
    held = getattr(held, "memory", held)
    return {
        "difference": max(
            float(abs(a - b).max() / abs(a).max()) for a, b in pairs if a.any()
        ),
        "weight": _held(memory.query_key.weight),
        "change": _held(memory.query_key.up),
        "value": _held(memory.value.weight),
        "memory": _held(held),
    }


def _held(x):
    """Of a parameter or an array, the parts that a device does not hold."""
    x = x.get_value() if hasattr(x, "get_value") else x
    return [
        a // b for a, b in zip(x.shape, x.addressable_shards[0].data.shape, strict=True)
    ]
