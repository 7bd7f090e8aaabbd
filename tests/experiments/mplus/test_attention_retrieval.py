"""M+-Attn of a trained model: what is kept, what goes, and what a checkpoint brings."""

import dataclasses
import functools
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.mplus import memories as methods
from experiments.mplus.retention import variants
from memjax.models.mplus.build import add_memoryllm
from memjax.models.mplus.checkpoints.checkpoint import load_official
from memjax.nnx import as_arrays

GOLDEN = Path(__file__).parents[2] / "models" / "golden" / "mplus"
HF = json.loads((GOLDEN / "config.json").read_text())


@functools.cache
def official_model():
    return load_official(GOLDEN / "tiny_model.safetensors", HF)


@functools.cache
def by_attention():
    return variants.with_attention_retrieval(official_model())


@pytest.mark.slow
def test_the_parameters_are_the_same_without_the_retrievers():
    before, after = (
        nnx.to_pure_dict(nnx.state(m)) for m in (official_model(), by_attention())
    )
    for name in ("query", "key", "encoder_query"):
        del before[name]
    # The initial store is another, see below.
    del before["initial"], after["initial"]
    chex.assert_trees_all_equal(after, before)
    expected = dataclasses.replace(official_model().config, retrieval="attention")
    assert (
        by_attention().config == expected
        and official_model().config.retrieval == "learned"
    )


@pytest.mark.slow
def test_a_checkpoints_store_becomes_keys_and_values():
    """Each row's through the layer that reads, in float64."""
    state, official = by_attention().init_state(1), official_model().init_state(1)
    assert state.store is not None and official.store is not None
    count, width = HF["ltm_initial_size"], 2 * 16
    assert state.store.num_valid.tolist() == [count]
    chex.assert_trees_all_equal(state.pool, official.pool)
    scale = HF["lora_config"]["lora_alpha"] / HF["lora_config"]["r"]
    for layer, block in enumerate(official_model().backbone.blocks):
        rows = np.asarray(official.store.layers[layer].rows[0, :count], np.float64)
        norm = np.asarray(block.mechanism_norm.get_value())
        rows /= np.sqrt((rows**2).mean(-1, keepdims=True) + HF["rms_norm_eps"])
        changes = as_arrays(official_model().read_adapter)[layer]["mechanism"]
        found = state.store.layers[layer]
        np.testing.assert_array_equal(found.born, official.store.layers[layer].born)
        for name, part in (("key", found.keys), ("value", found.rows)):
            assert part.shape == (1, official_model().config.store_size, width)
            plain = np.asarray(getattr(block.parameters().mechanism, name), np.float64)
            change = np.tensordot(changes[name].down, changes[name].up, 1)
            expected = np.tensordot(rows * norm, plain + scale * change, 1)
            expected = expected.reshape(count, width)
            np.testing.assert_allclose(part[0, :count], expected, atol=1e-5)


@pytest.mark.slow
def test_it_answers():
    """All of the store must be on the device, keys and values."""
    prompt = jnp.array([[3, 1, 4, 1]], jnp.int32)
    found = methods.LatentMemory(by_attention()).query(
        by_attention().init_state(1), prompt, 2
    )
    assert found.shape == (1, 2)
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    assert variants.device_bytes(by_attention()) == size(by_attention().init_state(1))


def test_a_model_without_a_retriever_is_refused():
    plain = add_memoryllm(
        official_model().backbone, official_model().config, key=jax.random.key(0)
    )
    with pytest.raises(ValueError, match="must have a learned .* num_retrieved=0"):
        variants.with_attention_retrieval(plain)
    with pytest.raises(ValueError, match="must have a learned .*'attention'"):
        variants.with_attention_retrieval(by_attention())
