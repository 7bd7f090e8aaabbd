"""Models whose weights stay as their file has them, of every published family."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import memjax
from memjax.models.checkpoints.fingerprint import fingerprint
from memjax.models.checkpoints.hf.hybrids.files import text_tensors
from memjax.models.checkpoints.hf.parameters import (
    _side_by_side,
    parameters_from_tensors,
)
from memjax_kernels._src.stored_product import Stored
from tests.models.checkpoints.gguf_writing import gguf, write
from tests.models.checkpoints.hybrid_reading import agree, read
from tests.models.checkpoints.test_gguf import entries, gguf_tensors, hf_tensors
from tests.models.checkpoints.test_hybrids import by_family, tensors_of

TOKENS = jnp.arange(14, dtype=jnp.int32).reshape(2, 7) % 48


def of_family(config, *, as_stored):
    """The model, of weights that bfloat16 holds."""
    model, drawn = tensors_of(config["model_type"])
    tensors = {
        name: value.astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, value in drawn.items()
    }
    shapes = {name: value.shape for name, value in tensors.items()}
    family = config["model_type"]
    form = text_tensors(family, model.config, shapes, tensors.__getitem__, "here")
    return parameters_from_tensors(
        model.config, *form, "here", family, as_stored=as_stored
    )


def stored_in(model):
    variables = nnx.to_pure_dict(nnx.state(model))
    leaves = jax.tree.leaves(variables, is_leaf=lambda x: isinstance(x, Stored))
    return [leaf for leaf in leaves if isinstance(leaf, Stored)]


@by_family
def test_every_product_takes_stored_weights(config):
    model = of_family(config, as_stored=True)
    # A token and a text, traced.
    for tokens in (TOKENS, TOKENS[:, :1]):
        jax.eval_shape(lambda m, t: m(m.init_state(2), t), model, tokens)
    # Head, embedding and at least three matrices of each of four layers.
    assert len(stored_in(model)) >= 13


@pytest.mark.slow
@by_family
def test_logits_are_those_of_wide_weights(config):
    wide, stored = (of_family(config, as_stored=x) for x in (False, True))
    (_, expected), (_, found) = (
        read(model, model.init_state(2), TOKENS) for model in (wide, stored)
    )
    agree(found, expected)


def test_weights_lie_side_by_side_in_arrays_that_jax_does_not_copy():
    place = _side_by_side(size=1 << 10)
    given = [np.arange(n, dtype=d) for n, d in ((7, "int8"), (5, "f4"), (999, "f4"))]
    parts = [place(x) for x in given]
    # The last is larger than an array of all.
    assert parts[0].base is parts[1].base is not parts[2].base
    for part, x in zip(parts, given, strict=True):
        np.testing.assert_array_equal(part, x, strict=True)
        assert jax.device_put(part).unsafe_buffer_pointer() == part.ctypes.data


def test_weights_for_generation_stay_as_stored(tmp_path):
    kinds = {
        "attn_q": "Q4_0",
        "attn_k": "Q8_0",
        "attn_output": "BF16",
        "ffn_up": "Q4_1",
        "ffn_down": "F16",
    }
    tensors = gguf_tensors(hf_tensors(biased=False), permute=True)
    more = {"token_embd.weight": "Q8_0", "output.weight": "Q4_1"}
    more |= {f"blk.0.{name}.weight": kind for name, kind in kinds.items()}
    quantized = {}
    for name, kind in more.items():
        each = gguf.GGMLQuantizationType[kind]
        quantized[name] = gguf.quantize(tensors[name], each), each
    path = write(tmp_path / "a.gguf", tensors | quantized, entries())
    stored, wide = (memjax.load(path, for_generation=x).model for x in (True, False))
    block = stored.blocks[0]
    assert block.mechanism.query.get_value().values.dtype == np.uint8
    assert block.mechanism.key.get_value().values.dtype == np.int8
    assert block.mechanism.output.get_value().values.dtype == np.uint16
    assert block.feed_forward.down.get_value().values.dtype == np.int16
    # It has all digits of float32.
    assert block.feed_forward.gate.get_value().dtype == np.float32
    # A memory of the one is a memory of the other.
    assert fingerprint(stored) == fingerprint(wide)
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    found, expected = (m(m.init_state(1), tokens)[1] for m in (stored, wide))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    with pytest.raises(ValueError, match="must not be loaded with for_generation=True"):
        stored.save(path.parent / "saved")
