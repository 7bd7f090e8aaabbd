"""A program for eight pretended devices: layers of hybrids on meshes, as JSON."""

import dataclasses
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
# More devices than heads of keys. Divided sequences are tested by mechanism.
MESH = MeshConfig(fsdp=2, tensor=4)


def main() -> None:
    """How far loss, gradients and memories are from one device's."""
    # Gated DeltaNet, attention and Mamba-2 in one program: most of a program is not
    # its layers.
    qwen, mamba = config("qwen3_5_text"), config("mamba2")
    sizes = dataclasses.replace(
        qwen, mechanisms=(*qwen.layers, mamba.layers[0]), num_layers=3, remat=False
    )

    def make():
        fresh = LanguageModel(sizes, key=jax.random.key(0))
        return add_lora(fresh, LoraConfig(rank=2), jax.random.key(1))

    graph, params = nnx.split(tiny.drawn(make))
    tokens = tiny.tokens(1, B, T)
    starts = jnp.zeros((B, T), bool).at[:, 5].set(True)

    @jax.jit
    @jax.value_and_grad
    def learn(params):
        model = nnx.merge(graph, params)
        packed = model.encode_packed(model.embed(tokens), starts)
        return (jax.nn.log_softmax(model.logits(packed)) ** 2).mean()

    @jax.jit
    def read(params):
        model = nnx.merge(graph, params)
        return model.read(model.init_state(B, T), model.embed(tokens))

    alone = jax.device_get((learn(params), read(params)))
    mesh = sharding.make_mesh(MESH)
    with jax.set_mesh(mesh):
        divided = jax.device_put(params, sharding.shardings(mesh, params, sizes))
        state, y = read(divided)
        differences = [
            _difference(alone[0], learn(divided)),
            _difference(alone[1], (state, y)),
        ]
        memory = [_held(state[i].memory) for i in (0, 2)]
    print(json.dumps(_layers(divided) | {"differences": differences, "memory": memory}))


def _difference(alone, found):
    numbers = [map(np.float64, jax.tree.leaves(x)) for x in (alone, found)]
    pairs = zip(*numbers, strict=True)
    return max(float(abs(a - b).max() / abs(a).max()) for a, b in pairs if a.any())


def _layers(divided):
    """How the parameters of the two recurrent layers are divided."""
    layers = [divided["blocks"][i]["mechanism"] for i in (0, 2)]
    return {
        "weight": [_held(layer.query_key.weight) for layer in layers],
        "change": [_held(layer.query_key.up) for layer in layers],
        "value": [_held(layer.value.weight) for layer in layers],
    }


def _held(x):
    """Of a parameter or an array, the parts that a device does not hold."""
    x = x.get_value() if hasattr(x, "get_value") else x
    return [
        a // b for a, b in zip(x.shape, x.addressable_shards[0].data.shape, strict=True)
    ]
