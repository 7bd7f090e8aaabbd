"""Cases of M+ around a backbone of 8B parameters, and of HMT around one of 1B."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from experiments.lab.measure import tree_bytes
from experiments.tpu.case import Case, Program, shape
from memjax.data.batches.batch import Batch
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.hmt.config import HMTConfig
from memjax.models.mplus import read
from memjax.models.mplus.build import add_memoryllm
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.read import ReadOptions
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.finetune.stage import SampleConfig
from memjax.training.step import init_train_state, make_train_step
from memjax_kernels import sigmoid_scores

#: Rows of M+'s store, and tokens that search it.
ROWS, QUERIES = 150_000, 2048
#: Rows that M+'s tokens attend to in a layer, pool and retrieved ones, tokens of a
#: chunk, and tokens that are decoded one by one.
POOL, CHUNK, DECODED = 10_240 + 2_560, 512, 32
#: HMT: samples of an update, and segments of each.
SAMPLES, SEGMENTS = 4, 4
HMT = HMTConfig(segment_length=512, num_sensory_tokens=32)


def search() -> Program:
    """The scores of all rows of one layer's store."""
    width = MPlusConfig().key_dim
    queries = shape(1, QUERIES, width, dtype=jnp.float32)
    mask = shape(1, QUERIES, dtype=jnp.bool_)
    given = (queries, mask, shape(1, ROWS, width, dtype=jnp.float32))
    return Program(sigmoid_scores, given, flops=2.0 * ROWS * QUERIES * width)


def mplus_layer(decodes: bool) -> Program:
    """A layer of Llama 3 8B that reads behind M+'s memory.

    Of a chunk all rows pass the layer's norm and the projections of keys and values.
    Decoding finds them in a cache.
    """
    attention = AttentionConfig(4096, num_heads=32, num_kv_heads=8, head_dim=128)
    # The smallest vocabulary: head and embedding are not of the layer.
    backbone = _llama(attention, layers=1, hidden=14_336, vocab_size=256)
    config = MPlusConfig(pool_size=POOL)

    def build() -> Any:
        return add_memoryllm(
            LanguageModel(backbone, key=jax.random.key(0)),
            config,
            key=jax.random.key(1),
        )

    model = nnx.eval_shape(build)
    graph, params = nnx.split(model)
    params = jax.tree.map(lambda x: shape(*x.shape), params)
    state = jax.eval_shape(lambda: model.init_state(1))
    options = ReadOptions(max_new_tokens=DECODED)

    def read_chunk(params: PyTree, state: PyTree, tokens: Array) -> tuple:
        weights = nnx.merge(graph, params).weights
        return read.read_closed(weights, state, tokens, options)[:2]

    def decode(params: PyTree, cache: PyTree, tokens: Array) -> tuple:
        weights = nnx.merge(graph, params).weights

        def step(cache: PyTree, token: Array) -> tuple:
            return read.decode(weights, cache, token, False, None)

        return jax.lax.scan(step, cache, tokens)

    given = (params, state, shape(1, CHUNK, dtype=jnp.int32))
    if not decodes:
        return Program(read_chunk, given, flops=_chunk_flops(backbone))
    cache = jax.eval_shape(read_chunk, *given)[0]
    tokens = shape(DECODED, 1, 1, dtype=jnp.int32)
    moved = DECODED * tree_bytes((params, cache))
    return Program(decode, (params, cache, tokens), donated=(1,), bytes=moved)


def _chunk_flops(backbone):
    """Of the tokens, and of keys and values of the memory."""
    heads = backbone.heads
    shared = heads.num_kv_heads * heads.head_dim
    rows = 4.0 * POOL * backbone.model_dim * shared
    return rows + CHUNK * _token_flops(backbone, POOL + CHUNK / 2)


def _token_flops(backbone, seen):
    """Of a token in a layer: its matrices, scores and reads of so many tokens."""
    heads, d = backbone.heads, backbone.model_dim
    own, shared = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    matrices = 2 * d * (own + shared) + 3 * d * backbone.hidden_dim
    return 2.0 * matrices + 4.0 * seen * own


def hmt(updates: bool) -> Program:
    """HMT around Llama 3.2 1B, of which adapters are trained: reading, or an update."""
    attention = AttentionConfig(2048, num_heads=32, num_kv_heads=8, head_dim=64)
    backbone = _llama(attention, layers=16, hidden=8192, vocab_size=128_256)
    stage = SegmentStage(
        hmt=HMT,
        depth=SEGMENTS,
        train="lora",
        dtype="bfloat16",
        scan_layers=True,
        data=SampleConfig(batch_size=SAMPLES),
    )
    key = jax.random.key(0)

    def build() -> Any:
        return stage.wrap(LanguageModel(backbone, key=key), key)

    model = nnx.eval_shape(build)
    tokens = shape(SAMPLES, stage.context_length, dtype=jnp.int32)
    if not updates:
        graph, params = nnx.split(model)
        state = jax.eval_shape(lambda: model.init_state(SAMPLES))

        def features(params: PyTree, state: PyTree, tokens: Array) -> tuple:
            return nnx.merge(graph, params).features(state, tokens)

        given = (params, state, tokens)
        return Program(features, given, donated=(1,), flops=_hmt_flops(backbone))
    update = stage.transform()
    state = jax.eval_shape(
        lambda: init_train_state(build(), update, stage.step, SAMPLES)
    )
    mask = shape(SAMPLES, stage.context_length, dtype=jnp.float32)
    batch = Batch(tokens, tokens, mask, shape(SAMPLES, dtype=jnp.bool_))
    step = make_train_step(model, update, stage.step)
    # Frozen matrices have no gradients. The last segment's tokens count alone.
    head = 4.0 * SAMPLES * HMT.segment_length * backbone.model_dim * backbone.vocab_size
    flops = 2 * _hmt_flops(backbone) + head
    return Program(step, (state, batch), donated=(0,), flops=flops)


def _hmt_flops(backbone):
    """Of all segments: the summary's tokens, then the segment with what is beside."""
    reads = (HMT.summary + 2, HMT.num_sensory_tokens + HMT.segment_length + 2)
    segment = sum(n * _token_flops(backbone, n / 2) for n in reads)
    return SAMPLES * SEGMENTS * backbone.num_layers * segment


def _llama(attention, layers, hidden, vocab_size):
    return ModelConfig(
        mechanisms=(attention,),
        num_layers=layers,
        vocab_size=vocab_size,
        model_dim=attention.model_dim,
        hidden_dim=hidden,
        dtype="bfloat16",
        remat=True,
    )


def table() -> dict[str, Case]:
    """All cases of this file by name."""
    read_by = functools.partial(mplus_layer, False)
    found = {
        "mplus-search": Case(search, ROWS, "row"),
        "mplus-layer/chunk": Case(read_by, CHUNK, "token"),
        "mplus-layer/decode": Case(
            functools.partial(mplus_layer, True), DECODED, "token"
        ),
    }
    tokens = SAMPLES * SEGMENTS * HMT.segment_length
    for name, updates in (("forward", False), ("train", True)):
        found[f"hmt-1b/{name}"] = Case(functools.partial(hmt, updates), tokens, "token")
    return found
