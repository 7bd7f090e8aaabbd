"""Cases of single tokens in decoding, and of training steps."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from experiments.lab.measure import tree_bytes
from experiments.tpu.case import Case, Program, shape
from memjax.aot.cycles.attention import shares
from memjax.data.batches.batch import Batch
from memjax.mechanisms import AttentionConfig, MechanismConfig
from memjax.models import LanguageModel, preset
from memjax.models.language_model.presets import RECURRENT, SIZES
from memjax.training.optimizer import OptimizerConfig, make_optimizer
from memjax.training.step import StepConfig, init_train_state, make_train_step
from memjax_kernels import gated_delta_rule_step, step_at_slots

ATTENTION = ("attention", "sliding_window", "elastic_memory")
#: Batch elements and steps of decoding, and slots of attention's cache.
DECODED, STEPS, CAPACITY = 64, 32, 2048
#: A training step: tokens of it, of a microbatch at least, and of a row.
TOKENS, MICROBATCH, TIMES = 32_768, 8192, (2048, 8192, 32_768)
TRAINED = (
    "transformer-125m",
    "elastic-100m",
    "gated_deltanet-125m",
    "lattice-125m",
    "trellis-125m",
)


def decoded_tokens(config: MechanismConfig, reads_all: bool) -> Program:
    """Tokens of every batch element one after the other, as `generate` reads them.

    `reads_all`: a token writes little of the state, which is moved once a token, else
    twice.
    """
    memory = config.build()
    init_state = functools.partial(memory.init_state, DECODED)
    if memory.cache is not None:
        # In the model's dtype, as a language model keeps it.
        slots = CAPACITY if memory.cache.capacity else None
        init_state = functools.partial(memory.cache.init, DECODED, slots, jnp.bfloat16)
    params = jax.eval_shape(memory.init_params, jax.random.key(0))
    # A model in bfloat16 gives them so.
    params = jax.tree.map(lambda x: shape(*x.shape), params)
    state = jax.eval_shape(init_state)
    x = shape(STEPS, DECODED, config.model_dim)

    def decode(params: PyTree, state: PyTree, x: Array) -> tuple[PyTree, Array]:
        step = functools.partial(memory.step, params)
        return jax.lax.scan(step, state, x)

    moved = tree_bytes(params) + (1 if reads_all else 2) * tree_bytes(state)
    moved = STEPS * moved + 2 * tree_bytes(x)
    return Program(decode, (params, state, x), donated=(1,), bytes=moved)


def decoded_slots() -> Program:
    """A token each of sequences whose states are at slots of a pool twice as large."""
    token, gate = shape(DECODED, 16, 128), shape(DECODED, 16, dtype=jnp.float32)
    pool = shape(2 * DECODED, 16, 128, 128, dtype=jnp.float32)
    step = functools.partial(step_at_slots, gated_delta_rule_step)
    given = shape(DECODED, dtype=jnp.int32), *(token,) * 3, gate, gate, pool
    return Program(step, given, donated=(6,), bytes=tree_bytes((pool, token) * 2) / 2)


def training_step(name: str, time: int, unrolled: bool = False) -> Program:
    """An update of a preset, in microbatches: what a layer computes of one stays on the
    chip, where that of all tokens would go through HBM.

    Layers are `unrolled` and keep their activations, or are one loop and compute them
    again.
    """
    config, batch_size = preset(name), TOKENS // time
    if unrolled:
        config = dataclasses.replace(config, scan_layers=False, remat=False)

    def fresh() -> LanguageModel:
        return LanguageModel(config, key=jax.random.key(0))

    model = nnx.eval_shape(fresh)
    update = make_optimizer(OptimizerConfig(), 1000)
    step = StepConfig(accumulate=TOKENS // max(time, MICROBATCH))

    state = jax.eval_shape(lambda: init_train_state(fresh(), update, step, batch_size))
    batch = Batch(
        tokens=shape(batch_size, time, dtype=jnp.int32),
        targets=shape(batch_size, time, dtype=jnp.int32),
        mask=shape(batch_size, time, dtype=jnp.float32),
        reset=shape(batch_size, dtype=jnp.bool_),
    )
    function = make_train_step(model, update, step)
    # Six operations a parameter and token. The embedding is the head as well.
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(state.params)]
    # And scores and reads of all keys before a token.
    heads = [m for m in config.layers if isinstance(m, AttentionConfig)]
    reads = sum(time * m.num_heads * m.head_dim for m in heads)
    flops = 6.0 * (sum(sizes) + reads) * TOKENS
    blocks = shares(config.layers, time)
    return Program(function, (state, batch), donated=(0,), flops=flops, shares=blocks)


def table() -> dict[str, Case]:
    """All cases of this file by name."""
    found: dict[str, Case] = {}
    for name in (*ATTENTION, *RECURRENT):
        options = {"capacity": CAPACITY} if name == "attention" else {}
        config = SIZES["125m"].mechanism(name, **options)
        build = functools.partial(decoded_tokens, config, name in ATTENTION)
        found[f"decode/{name}"] = Case(build, DECODED * STEPS, "token")
    found["decode/slots"] = Case(decoded_slots, DECODED * 16, "token and head")
    for name, time in itertools.product(TRAINED, TIMES):
        build = functools.partial(training_step, name, time)
        found[f"train/{name}/t{time}"] = Case(build, TOKENS, "token")
    # Activations of all layers fit in the chip's memory with the shortest rows.
    for name in TRAINED:
        if name != "elastic-100m":
            build = functools.partial(training_step, name, TIMES[0], unrolled=True)
            found[f"train/{name}/t{TIMES[0]}/unrolled"] = Case(build, TOKENS, "token")
    return found
