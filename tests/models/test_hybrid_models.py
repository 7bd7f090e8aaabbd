"""Models of published hybrids with what any model can do: generate, stream, refuse."""

import dataclasses
import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.models import (
    LanguageModel,
    Sampling,
    SnapKVConfig,
    add_memory,
    add_mplus,
    add_snapkv,
    generate,
    limit_attention,
)
from memjax.models.checkpoints.memory_bytes import bytes_by_kind
from memjax.models.checkpoints.own_format import leaf_name, leaves_of
from memjax.models.language_model import caches
from memjax.models.language_model.config import BlockStyle
from memjax.models.language_model.teacher import run_teacher
from memjax.training.finetune.curricula import HMTStages
from memjax.training.finetune.hmt_presets import presets
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.optimizer import decays
from tests import tiny
from tests.models import hybrid_run
from tests.models.published import PUBLISHED, SIZES, config
from tests.training.processes import Process


@functools.cache
def model(name: str) -> Any:
    """It with drawn parameters; do not change it in place."""
    return tiny.drawn(lambda: LanguageModel(config(name), key=jax.random.key(0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
def test_ragged_prompts_are_read_as_single_rows(name):
    # Of one piece and a part of the next, of one piece, and of less than a filter.
    lengths = (19, 16, 3)
    prompt = np.asarray(tiny.tokens(1, len(lengths), max(lengths)))
    options: Any = {"key": jax.random.key(0), "sampling": Sampling(0.0)}
    options |= {"tokens_per_call": 16}
    joined = generate(model(name), None, prompt, 4, lengths=lengths, **options)
    # Padding is read like any token where no lengths say that it is padding.
    padded = generate(model(name), None, prompt, 4, **options)
    assert np.abs(padded.log_probs - joined.log_probs)[2].max() > 1e-3
    for b, length in enumerate(lengths):
        # Of a batch of equal rows: its programs are those of the rows together.
        same = np.repeat(prompt[b : b + 1, :length], len(lengths), axis=0)
        alone = generate(model(name), None, same, 4, **options)
        np.testing.assert_array_equal(alone.tokens[0], joined.tokens[b])
        np.testing.assert_allclose(alone.log_probs[0], joined.log_probs[b], atol=1e-5)


def test_a_state_of_another_family_is_refused_by_name():
    tokens = tiny.tokens(1, 1, 4)
    qwen, mamba = model("qwen3_5_text"), model("mamba2")
    with pytest.raises(ValueError, match=r"state\[1\], of attention, must be the arra"):
        qwen(mamba.init_state(1), tokens)
    with pytest.raises(ValueError, match=r"state\[1\], of mamba2, .* a BlockState"):
        generate(mamba, qwen.init_state(1), tokens, 1, key=jax.random.key(0))
    other = [m.build().init_state(1) for m in config("mamba2", state_size=5).layers]
    with pytest.raises(ValueError, match=r"state\[0\], .* window \[B, 3, 2, 2, 3\]"):
        mamba(tuple(other), tokens)


def test_only_rope_bounds_a_text():
    state = {name: model(name).init_state(1) for name in PUBLISHED}
    rooms = {name: model(name).remaining(state[name]) for name in PUBLISHED}
    assert (
        rooms["qwen3_5_text"] == rooms["falcon_h1"] == SIZES["max_position_embeddings"]
    )
    assert rooms["mamba2"] is None
    granite, tokens = model("granitemoehybrid"), tiny.tokens(1, 1, 66)
    assert rooms["granitemoehybrid"] == 2**30
    after, logits = granite(state["granitemoehybrid"], tokens)
    assert jnp.isfinite(logits).all() and after[1].keys.shape[1] == 256
    with pytest.raises(ValueError, match="full attention has room for 64 more"):
        model("qwen3_5_text")(state["qwen3_5_text"], tokens)


def test_the_state_of_qwen_is_20_mb_and_a_cache():
    """Qwen3.5-0.8B: 18 layers of 16 memories of 128 x 128, six of attention."""
    sizes = config(
        "qwen3_5_text",
        vocab_size=248_320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        layer_types=None,
        num_attention_heads=8,
        head_dim=256,
        num_key_value_heads=2,
        max_position_embeddings=262_144,
        **{key: 16 for key in ("linear_num_key_heads", "linear_num_value_heads")},
        **{key: 128 for key in ("linear_key_head_dim", "linear_value_head_dim")},
    )
    layers = [mechanism.build() for mechanism in sizes.layers]
    slots = 1024
    state = jax.eval_shape(lambda: caches.init_state(layers, 1, slots, "bfloat16"))
    found = bytes_by_kind(
        {
            leaf_name(path): leaf.size * leaf.dtype.itemsize
            for path, leaf in leaves_of(state)
        }
    )
    assert found["memory"] == 18 * 16 * 128 * 128 * 4
    assert found["memory"] + found["convolution"] == 20_201_472
    numbers = found["attention cache"] - 6 * (slots + 4)
    assert numbers == 2 * 6_144 * slots


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_decays_of_half_precision_are_exponentials_in_float32(name):
    """A weight's own rounding is all that bfloat16 does to A, Δ and D."""
    layer = config(name).layers[0].build()
    params = jax.jit(layer.init_params)(jax.random.key(0))
    params = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), params)
    names = ("log_rate", ".bias", "skip")

    def high(path, leaf):
        exact = jax.tree_util.keystr(path).endswith(names)
        return np.asarray(leaf, np.float32) if exact else leaf

    exact = jax.tree_util.tree_map_with_path(high, params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(exact)} == {
        "bfloat16",
        "float32",
    }
    x, apply = tiny.draw(1, 1, 16, 8).astype(jnp.bfloat16), jax.jit(layer.apply)
    after, y = apply(params, layer.init_state(1), x)
    assert y.dtype == jnp.bfloat16
    tiny.assert_equal((after, y), apply(exact, layer.init_state(1), x))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(after))


def test_only_attention_alone_is_limited_or_compressed():
    qwen = limit_attention(model("qwen3_5_text"), 4, sinks=1)
    assert qwen.config.layers[0] == config("qwen3_5_text").layers[0]
    assert (qwen.config.layers[1].name, qwen.remaining(qwen.init_state(1))) == (
        "sliding_window",
        None,
    )
    for name, kind in {"mamba2": "Mamba2Config", "falcon_h1": "ParallelConfig"}.items():
        with pytest.raises(ValueError, match=f"layers of attention alone.* {kind}"):
            limit_attention(model(name), 4)
        with pytest.raises(ValueError, match=f"attention in every layer, got {kind}"):
            add_mplus(model(name), tiny.MPLUS, key=jax.random.key(0))
        with pytest.raises(ValueError, match=f"attention in every layer, got {kind}"):
            add_snapkv(model(name), SnapKVConfig(keep=8, window=2))


@pytest.mark.slow
def test_eight_devices_read_and_train_as_one_does(with_devices):
    process = Process(hybrid_run.main, environment=with_devices(8))
    found = json.loads(process.require_end().splitlines()[-1])
    assert max(found["differences"]) < 1e-4
    # Two heads of queries and keys do not divide among four devices, which all have
    # them; four of values and of memories do. LoRA's changes are everywhere.
    assert found["weight"] == [[2, 1, 1, 1]] * 2
    assert found["value"] == [[2, 4, 1]] * 2
    assert found["memory"] == [[2, 4, 1, 1]] * 2
    assert found["change"] == [[1] * 4] * 2


@pytest.mark.slow
def test_hmt_around_mamba_with_lora():
    """The paper's stage 2 of Mamba 370M at small sizes."""
    stages = presets()["hmt-mamba-370m"]
    assert isinstance(stages, HMTStages) and stages.stage2.train == "lora"
    memory = dataclasses.replace(
        stages.stage2.hmt,
        segment_length=4,
        num_sensory_tokens=1,
        num_memories=3,
        # Half as much to compile: gradients of a search are in `hmt/`.
        retrieval=False,
    )
    stage = dataclasses.replace(
        stages.stage2, hmt=memory, dtype="float32", scan_layers=False
    )
    sizes = dataclasses.replace(config("mamba", num_hidden_layers=1))

    def make():
        backbone = LanguageModel(sizes, key=jax.random.key(0))
        return stage.wrap(backbone, jax.random.key(1))

    hmt, tokens = tiny.drawn(make), tiny.tokens(1, 1, 10)
    graph, trained, frozen = nnx.split(hmt, nnx.Param, ...)

    @jax.jit
    @jax.grad
    def gradient(trained):
        model = nnx.merge(graph, trained, frozen)
        return (model.features(model.init_state(1), tokens)[1] ** 2).sum()

    # Every matrix of a recurrent layer learns, and M_init too.
    leaves = jax.tree_util.tree_leaves_with_path(gradient(trained))
    still = [leaf_name(path) for path, leaf in leaves if not leaf.any()]
    assert leaves and not still
    named = " ".join(leaf_name(path) for path, _ in leaves)
    for matrix in ("gate", "output", "selection"):
        assert re.search(rf"blocks.0.mechanism.*{matrix}.up", named), matrix


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba", "falcon_h1"])
def test_plain_fine_tuning_decays_matrices_and_filters_alone(name):
    stage = presets()["plain"]
    assert isinstance(stage, SegmentStage) and not stage.optimizer.decay_vectors
    assert stage.wrap(model(name), jax.random.key(0)) is model(name)
    names = [leaf_name(path) for path, _ in leaves_of(tiny.parameters(model(name)))]
    decayed = {part for part in names if decays(part.replace(".", "/"))}
    kept = {part.rpartition(".")[2] for part in set(names) - decayed}
    rates = {"log_rate", "pace_bias" if name == "mamba" else "bias"}
    skip = set() if name == "qwen3_5_text" else {"skip", "filter_bias"}
    assert rates | skip | {"mechanism_norm", "norm"} <= kept
    matrices = {part.rpartition(".")[2] for part in decayed}
    assert not re.search("norm|bias|rate$|skip", " ".join(matrices - {"rate"}))


@pytest.mark.slow
def test_a_memory_in_the_attention_of_a_hybrid_starts_as_its_window():
    qwen, tokens = model("qwen3_5_text"), tiny.tokens(1, 1, 12)
    layers: dict[str, Any] = {"memory": "gated_deltanet", "layers": [1]}
    hybrid = add_memory(qwen, window=5, sinks=1, key=jax.random.key(0), **layers)
    windowed = limit_attention(qwen, 5, sinks=1)
    # The gate of Qwen3.5's attention and its partial RoPE are in both.
    pair = [tiny.method(m, "encode", m.embed(tokens)) for m in (hybrid, windowed)]
    tiny.assert_close(*pair)
    assert hybrid.config.layers[1].name == "hybrid"
    assert hybrid.remaining(hybrid.init_state(1)) is None


def test_the_teacher_of_a_layer_reads_what_the_layer_does():
    """OLMo Hybrid: attention has no norm before it, other layers have one."""
    olmo, tokens = model("olmo_hybrid"), tiny.tokens(1, 1, 6)

    @jax.jit
    def inputs(tokens):
        found = run_teacher(olmo, olmo.config, tokens, (1, 3))
        h = olmo.embed(tokens)
        for block, state in zip(olmo.blocks[:3], olmo.init_state(1)[:3], strict=True):
            _, h = block(state, h)
        return found[3].x, h

    tiny.assert_close(*inputs(tokens))
    with pytest.raises(ValueError, match="layers of one style, got 2"):
        two = tuple(BlockStyle(norm_outputs=flag) for flag in (False, True))
        both = tiny.LLAMA.mechanisms * 2
        styled = tiny.drawn(lambda: tiny.make_llama(mechanisms=both, styles=two))
        add_mplus(styled, tiny.MPLUS, key=jax.random.key(0))
