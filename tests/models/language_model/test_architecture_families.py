"""Published families: tiny random checkpoints and transformers' logits for them.

`golden/make_family_goldens.py` made both.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.models.checkpoints.hf.export import to_hf_config
from memjax.models.checkpoints.hf.parameters import parameters_from_tensors
from memjax.models.checkpoints.hf.tensor_names import (
    tensors_from_parameters,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
PIECE = 5
#: Of each way that a mask shifts: learned positions, windows, two kinds of layers.
PLACED = {"opt", "mistral", "gemma3"}
#: And norms that come last, layers without RoPE; others read as Mistral does.
PADDED = sorted(PLACED | {"opt_350m", "smollm3"})


def read_safetensors(path):
    """The format by hand: a header of JSON behind its length, then float32 numbers."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, place in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            first, last = place["data_offsets"]
            numbers = np.frombuffer(raw[start + first : start + last], np.float32)
            tensors[name] = numbers.reshape(place["shape"])
    return tensors


@functools.cache
def family(name):
    """The model, and what transformers gave."""
    hf_config = json.loads((GOLDEN / name / "config.json").read_text())
    tensors = read_safetensors(GOLDEN / name / "model.safetensors")
    shapes = {key: value.shape for key, value in tensors.items()}
    config = from_hf_config(hf_config)
    model = parameters_from_tensors(config, shapes, tensors.__getitem__)
    with np.load(GOLDEN / name / "logits.npz") as golden:
        return model, dict(golden)


@functools.partial(jax.jit, static_argnums=0)
def _encode(graph, params, tokens, mask):
    model = nnx.merge(graph, params)
    return model.logits(model.encode(model.embed(tokens), mask))


@functools.partial(jax.jit, static_argnums=0)
def _read(graph, params, state, tokens, mask):
    model = nnx.merge(graph, params)
    state, features = model.read(state, model.embed(tokens), mask)
    return state, model.logits(features)


def read_in_pieces(model, tokens, mask, size):
    graph, params = nnx.split(model)
    state, logits = model.init_state(len(tokens)), []
    for at in range(0, tokens.shape[1], size):
        piece = None if mask is None else mask[:, at : at + size]
        state, y = _read(graph, params, state, tokens[:, at : at + size], piece)
        logits.append(y)
    return np.concatenate(logits, axis=1)


def close(actual, expected, where=...):
    np.testing.assert_allclose(actual[where], expected[where], rtol=0, atol=1e-4)


def test_there_is_a_checkpoint_of_every_family():
    names = "gemma3 llama2 llama3 llama_linear llama_yarn mistral olmo2 opt opt_350m"
    assert NAMES == [*names.split(), "qwen2", "qwen3", "smollm3"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    model, golden = family(name)
    logits = _encode(*nnx.split(model), golden["tokens"], None)
    assert np.abs(golden["logits"]).max() > 1
    close(logits, golden["logits"])


@pytest.mark.slow
@pytest.mark.parametrize("name", PADDED)
def test_padding_is_not_seen_whole_or_in_pieces(name):
    """Nor later, from the cache; the padded tokens' own logits have no meaning."""
    model, golden = family(name)
    tokens, mask = golden["tokens"], golden["mask"]
    # What is masked makes a difference.
    assert np.abs(golden["padded"] - golden["logits"])[mask].max() > 0.1
    if name in PLACED:
        close(_encode(*nnx.split(model), tokens, mask), golden["padded"], mask)
    close(read_in_pieces(model, tokens, mask, PIECE), golden["padded"], mask)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_yarn", "mistral", "opt_350m", "gemma3"])
def test_tokens_one_by_one(name):
    model, golden = family(name)
    close(read_in_pieces(model, golden["tokens"], None, 1), golden["logits"])


def test_positions_beyond_the_table_are_nan():
    model, _ = family("opt")
    tokens = np.zeros((1, (model.config.capacity or 0) + 2), np.int32)
    state = model.init_state(1)
    mask = jnp.ones((1, PIECE), bool)
    graph, params = nnx.split(model)
    for at in range(0, 30, PIECE):
        state, _ = _read(graph, params, state, tokens[:, at : at + PIECE], mask)
    _, y = _read(graph, params, state, tokens[:, :PIECE], mask)
    np.testing.assert_array_equal(np.isnan(y).all(axis=-1)[0], [0, 0, 1, 1, 1])


@pytest.mark.parametrize("name", NAMES)
def test_export_is_what_was_imported(name):
    model, _ = family(name)
    record = json.loads(json.dumps(to_hf_config(model.config)))
    assert from_hf_config(record) == model.config
    tensors = read_safetensors(GOLDEN / name / "model.safetensors")
    exported = dict(tensors_from_parameters(model.config, model))
    assert exported.keys() == tensors.keys()
    # Gemma's scales are 1 larger here, and rounded there.
    rounding = 2e-7 if name == "gemma3" else 0
    for key, value in tensors.items():
        np.testing.assert_allclose(exported[key], value, 0, rounding, err_msg=key)
