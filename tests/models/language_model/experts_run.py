"""A program for eight pretended devices: a mixture of experts on meshes, as JSON."""

import json
import re

import jax
import numpy as np
from flax import nnx

from memjax.mechanisms import SlidingWindowConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.config import BlockStyle
from memjax.models.language_model.hidden.router import ExpertsConfig
from memjax.training.distributed import sharding
from memjax.training.distributed.sharding import MeshConfig
from tests import tiny

EXPERTS = ExpertsConfig(
    12,
    3,
    6,
    router="sigmoid",
    groups=4,
    chosen_groups=2,
    shared_dim=4,
    shared_gate=True,
)
CONFIG = ModelConfig(
    mechanisms=(SlidingWindowConfig(8, 4, 4, 2, window=4),),
    styles=(BlockStyle(experts=EXPERTS),),
    num_layers=1,
    vocab_size=16,
    model_dim=8,
    dtype="float32",
    remat=False,
)
MESH = MeshConfig(fsdp=2, tensor=2, sequence=2)


def main() -> None:
    """Loss and gradients on a mesh, and what the devices hold and send."""
    model = tiny.drawn(lambda: LanguageModel(CONFIG, key=jax.random.key(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    tokens = tiny.tokens(1, 4, 6) % CONFIG.vocab_size

    @jax.jit
    @jax.value_and_grad
    def step(params):
        model = nnx.merge(graph, params, rest)
        logits = model.logits(model.encode(model.embed(tokens)))
        return (jax.nn.log_softmax(logits) ** 2).mean()

    alone = jax.device_get(step(params))
    mesh = sharding.make_mesh(MESH)
    with jax.set_mesh(mesh):
        divided = jax.device_put(params, sharding.shardings(mesh, params, CONFIG))
        program = step.lower(divided).compile()
        result = program(divided)
    pairs = zip(*map(jax.tree.leaves, (alone, result)), strict=True)
    text = program.as_text() or ""
    up = divided["blocks"][0]["feed_forward"].routed.up.get_value()
    found = {
        "difference": max(
            float(abs(a - np.asarray(b)).max() / abs(a).max())
            for a, b in pairs
            if a.any()
        ),
        "held": up.addressable_shards[0].data.shape,
        "gathered": re.findall(r"= (\w+\[[\d,]*\])\S* all-gather", text),
    }
    print(json.dumps(found))
