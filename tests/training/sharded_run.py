"""Programs for eight pretended devices, which print what came out as JSON.

`main` makes three updates on each mesh: by mesh ("none" is one device), the losses, and
of each leaf of the state its shape and the shape that each device holds. `gathered`
compiles updates of some families and says how much their devices gather. `sequences`
divides the tokens of a row. `systems` trains HMT and M+ around a backbone, and `memory`
divides M+'s memory.
"""

import dataclasses
import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from memjax.data import TokenisedDocument, load_tokenizer
from memjax.data.batches.batch import Batch
from memjax.data.mplus_tasks.tasks import MPlusTaskConfig
from memjax.mechanisms import (
    AttentionConfig,
    DeltaNetConfig,
    ElasticMemoryConfig,
    HybridConfig,
    LatticeConfig,
    LinearAttentionConfig,
    MechanismConfig,
    SlidingWindowConfig,
)
from memjax.models import LanguageModel, ModelConfig, add_mplus, preset
from memjax.models.hmt.config import HMTConfig
from memjax.models.mplus.config import MPlusConfig
from memjax.training import launch, pretrain
from memjax.training.distributed import sharding
from memjax.training.finetune import finetune
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.run import AnyStage, FinetuneRun
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.finetune.stage import SampleConfig
from memjax.training.step import StepConfig, init_train_state, make_train_step
from memjax_kernels._src.sigmoid_scores import xla as search
from tests import tiny

# One block and a half: fewer programs to compile than two whole blocks.
B, T, V, STEPS = 8, 6, 16, 3
MESHES = {"none": None, "2 2 2": (2, 2, 2)}
MODEL = ModelConfig(
    mechanisms=(ElasticMemoryConfig(16, 4, 2, 4, block=4, order=4, decay=0.8),),
    num_layers=1,
    vocab_size=V,
    model_dim=16,
    hidden_dim=32,
    tied_head=False,
    dtype="float32",
    remat=False,
)
HEADS: dict[str, Any] = dict(model_dim=16, num_heads=8, num_kv_heads=4, head_dim=4)
WINDOW = SlidingWindowConfig(**HEADS, window=8, sinks=2)
EVERY_AXIS = sharding.MeshConfig(1, 2, 2, sequence=2), 8
SEQUENCE_ALONE = sharding.MeshConfig(1, sequence=2), 2
#: Mechanisms with divided sequences, each on a mesh. Other linear ones and slots join
#: memories, as linear attention does: see `mechanisms/layers/divided_run.py`. TTT and
#: Trellis exchange tokens in the block that Lattice has.
MECHANISMS: dict[str, tuple[MechanismConfig, tuple[sharding.MeshConfig, int]]] = {
    "attention": (AttentionConfig(**HEADS, capacity=32), SEQUENCE_ALONE),
    "elastic": (ElasticMemoryConfig(**HEADS, block=8, order=4), EVERY_AXIS),
    "beside": (HybridConfig(WINDOW, DeltaNetConfig(32, 8, 4, 4)), EVERY_AXIS),
    "linear_attention": (LinearAttentionConfig(16, 8, 4, 4), EVERY_AXIS),
    "lattice": (LatticeConfig(16, 8, slots=4, value_dim=4, chunk_size=4), EVERY_AXIS),
}
#: Families of which a layer is compiled.
COMPILED = ("transformer", "trellis")
CONFIG = StepConfig(carry_memory=True)
OPTIMIZER = optax.adamw(1e-2)


def batches():
    tokens = np.random.default_rng(0).integers(0, V, (STEPS, B, T + 1)).astype(np.int32)
    ones = np.ones((B, T), np.float32)
    for step, rows in enumerate(tokens):
        reset = np.arange(B) % 3 == step
        yield Batch(rows[:, :-1], rows[:, 1:], ones, reset)


def create():
    model = LanguageModel(MODEL, key=jax.random.key(0))
    return init_train_state(model, OPTIMIZER, CONFIG, B)


def run(axes):
    update = make_train_step(pretrain.abstract_model(MODEL), OPTIMIZER, CONFIG)
    if axes is None:
        state, step = jax.jit(create)(), jax.jit(update)
    else:
        mesh = sharding.make_mesh(sharding.MeshConfig(*axes))
        layout = sharding.shardings(mesh, jax.eval_shape(create), MODEL)
        state = jax.jit(create, out_shardings=layout)()
        step = launch.on_mesh(update, layout, mesh)
    losses = []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            leaf.shape,
            leaf.addressable_shards[0].data.shape,
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    return {"losses": losses, "leaves": leaves}


def sequences() -> None:
    """An update's error against one device, and what is sent, by mechanism."""
    print(json.dumps({name: divided(*given) for name, given in MECHANISMS.items()}))


def divided(mechanism, on):
    model = dataclasses.replace(MODEL, mechanisms=(mechanism,))
    length, chunks, descent = 32, StepConfig(), optax.sgd(1.0)

    def create():
        fresh = LanguageModel(model, key=jax.random.key(0))
        return init_train_state(fresh, descent, chunks, B)

    update = make_train_step(pretrain.abstract_model(model), descent, chunks)
    tokens = np.random.default_rng(0).integers(0, V, (B, length + 1)).astype(np.int32)
    ones = np.ones((B, length), np.float32)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], ones, np.ones(B, bool))
    state = jax.device_get(jax.jit(create)())
    alone, metrics = jax.jit(update)(state, batch)
    expected = (alone.params, metrics["loss"])
    return on_devices(model, update, state, batch, expected, *on)


def on_devices(model, update, state, batch, expected, config, devices):
    mesh = sharding.make_mesh(config, jax.devices()[:devices])
    layout = sharding.shardings(mesh, state, model)
    state = jax.device_put(state, layout)
    batch = sharding.put_batch(mesh, batch)
    step = jax.jit(update, in_shardings=(layout, None), out_shardings=(layout, None))
    with jax.set_mesh(mesh):
        program = step.lower(state, batch).compile()
        state, metrics = program(state, batch)
    found = (state.params, metrics["loss"])
    found, expected = jax.device_get((found, expected))
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), found, expected)
    text = str(program.as_text())
    return {
        "difference": float(max(jax.tree.leaves(apart))),
        "gathered": max(gathers(text), default=0),
        "exchanges": len(re.findall(r" all-to-all(?:-start)?\(", text)),
    }


def systems() -> None:
    """By system and mesh: the losses of two updates."""
    meshes = {
        1: sharding.MeshConfig(1),
        8: sharding.MeshConfig(2, fsdp=2, tensor=2),
    }
    sizes = SampleConfig(batch_size=B)
    memory = MPlusConfig(
        num_memory_tokens=4,
        pool_size=8,
        chunk_size=8,
        min_chunk_size=2,
        num_retrieved=4,
        store_size=16,
        key_dim=4,
        rank=2,
    )
    tasks = MPlusTaskConfig(chunks=(2,), shortest_chunk=3, target=16, prompt=3)
    stages: dict[str, AnyStage] = {
        "hmt": SegmentStage(
            hmt=HMTConfig(segment_length=8, num_sensory_tokens=2, num_memories=4),
            data=sizes,
        ),
        "mplus": MPlusStage(memory=memory, tasks=tasks, data=sizes),
    }
    print(
        json.dumps(
            {
                name: {n: trained(stage, config, n) for n, config in meshes.items()}
                for name, stage in stages.items()
            }
        )
    )


def trained(stage, config, devices):
    """The losses of two updates of a stage on the first devices."""
    attention = AttentionConfig(**HEADS, capacity=64)
    backbone = dataclasses.replace(MODEL, mechanisms=(attention,), vocab_size=256)
    described = FinetuneRun(stage, backbone, "bytes", "", "")
    mesh = sharding.make_mesh(config, jax.devices()[:devices])
    create, step = finetune._programs(described, mesh)
    key = jax.random.key(0)
    model = tiny.drawn(lambda: stage.wrap(LanguageModel(backbone, key=key), key))
    state = create(nnx.state(model), jax.random.key(2))
    text = np.random.default_rng(0).integers(0, 256, 4000).astype(np.int32)
    documents = [TokenisedDocument("text", "text", text)]
    batches = stage.batches(documents, load_tokenizer("bytes"), 256)
    # One batch: M+ has a program for each task.
    batch, losses = next(batches), []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def memory() -> None:
    """What four devices hold and send of M+'s memory, and whether they read alike."""
    # Several blocks, as of a large store.
    search.KEYS_AT_ONCE = 16
    attention = AttentionConfig(**HEADS, capacity=64)
    config = dataclasses.replace(MODEL, mechanisms=(attention,), num_layers=2)
    sizes = MPlusConfig(
        num_memory_tokens=4,
        pool_size=40,
        chunk_size=8,
        min_chunk_size=2,
        num_retrieved=4,
        store_size=48,
        key_dim=4,
        rank=2,
    )
    key = jax.random.key(0)

    def build():
        return add_mplus(LanguageModel(config, key=key), sizes, key=key)

    model = tiny.drawn(build)
    graph, params = nnx.split(model)
    # The store overflows: three texts make 144 rows, pool and store hold 88.
    texts = np.random.default_rng(0).integers(0, V, (3, 4, 12 * 8)).astype(np.int32)

    def read(state, params, tokens):
        return nnx.merge(graph, params)(state, tokens)

    def results(program, state, params):
        logits = []
        for text in texts:
            state, y = program(state, params, text)
            logits.append(y)
        return state, logits

    # In the order of their names, as trees of JAX have them.
    empty = jax.jit(lambda: model.init_state(4))()
    given = jax.device_get({"memory": empty, "params": params})
    # Else rows grow to 60,000, which float32 rounds to a hundredth.
    given["params"] = jax.tree.map(lambda x: 0.3 * x, given["params"])
    alone = results(jax.jit(read), *given.values())
    mesh = sharding.make_mesh(
        sharding.MeshConfig(1, fsdp=2, tensor=2), jax.devices()[:4]
    )
    layout = sharding.shardings(mesh, given, config)
    placed = jax.device_put(given, layout)
    with jax.set_mesh(mesh):
        step = jax.jit(read, out_shardings=(layout["memory"], None))
        program = step.lower(*placed.values(), texts[0]).compile()
        divided = results(program, *placed.values())

    def apart(a, b):
        return float(np.abs(np.asarray(a, np.float64) - np.asarray(b)).max())

    differences = jax.tree.leaves(jax.tree.map(apart, divided, alone))

    def share(x):
        return x.size // x.addressable_shards[0].data.size

    leaves = jax.tree_util.tree_leaves_with_path(divided[0])
    kinds = "all-gather|all-reduce|all-to-all|collective-permute"
    lines = re.findall(rf"= (.*) (?:{kinds})(?:-start)?\(", str(program.as_text()))
    sent = re.findall(r"\[([\d,]+)\]", " ".join(lines))
    result = {
        "difference": max(differences),
        "stored": int(alone[0].store.num_valid.min()),
        "shares": {sharding.leaf_name(path): share(x) for path, x in leaves},
        "sent": [list(map(int, sizes.split(","))) for sizes in sent],
    }
    print(json.dumps(result))


def complaint(call):
    try:
        call()
    except ValueError as error:
        return str(error)


def main() -> None:
    result: dict[str, Any] = {name: run(axes) for name, axes in MESHES.items()}
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=2))
    result["left over"] = dict(mesh.shape)
    result["rows"] = complaint(lambda: sharding.put_batch(mesh, jnp.zeros((4, 2))))
    print(json.dumps(result))


def gathered() -> None:
    """By family: elements of the largest parameter and of the largest all-gather."""
    mesh = sharding.make_mesh(sharding.MeshConfig(fsdp=4, tensor=2))
    print(json.dumps({family: largest(family, mesh) for family in COMPILED}))


def largest(family, mesh):
    # Activations of 16 rows are larger than any parameter of a tiny model.
    rows, length = 16, 64
    config = preset(f"{family}-tiny", 64)
    # The third layer of four has the memory, where one alone has it.
    config = dataclasses.replace(config, mechanisms=config.layers[2:3], num_layers=1)
    chunks = StepConfig()

    def fresh():
        return LanguageModel(config, key=jax.random.key(0))

    state = jax.eval_shape(lambda: init_train_state(fresh(), OPTIMIZER, chunks, rows))
    layout = sharding.shardings(mesh, state, config)
    update = make_train_step(pretrain.abstract_model(config), OPTIMIZER, chunks)
    step = jax.jit(update, in_shardings=(layout, None), out_shardings=(layout, None))
    tokens = np.zeros((rows, length), np.int32)
    ones = np.ones((rows, length), np.float32)
    batch = sharding.put_batch(mesh, Batch(tokens, tokens, ones, np.ones(rows, bool)))
    with jax.set_mesh(mesh):
        text = str(step.lower(state, batch).compile().as_text())
    parameters = [x.size for x in jax.tree.leaves(state.params)]
    return max(parameters), max(gathers(text))


def gathers(text: str) -> list[int]:
    """Elements of the results of every all-gather."""
    return [
        math.prod(map(int, sizes.split(",")))
        for line in re.findall(r"= (.*) all-gather(?:-start)?\(", text)
        for sizes in re.findall(r"(?:f32|bf16)\[([\d,]+)\]", line)
    ]
