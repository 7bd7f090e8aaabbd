"""What is true of every model, and that nothing changes one in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.models import LanguageModel, add_hmt, add_mplus
from memjax.models.adapters import freeze, merge_lora
from memjax.models.base import Model
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.model import HMT
from memjax.models.language_model.rebuilt import replace_config
from memjax.models.language_model.reread import ReReadWindow
from memjax.models.language_model.snapkv import SnapKVConfig, add_snapkv
from memjax.models.language_model.windowed import (
    limit_attention,
    limit_length,
    set_capacity,
)
from memjax.models.lora import LoraConfig, add_lora
from memjax.models.mplus.model import MPlus
from tests.tiny import LLAMA, MPLUS, drawn, make_model

NAMES = ("language model", "hmt", "mplus", "reread")


def models(
    plain: LanguageModel, hierarchical: HMT, pooled: MPlus, reread: ReReadWindow
) -> list[Model]:
    """Never called: a type checker refuses it where one of them lacks a method."""
    return [plain, hierarchical, pooled, reread]


@pytest.fixture(name="built", scope="module")
def _built():
    return {name: drawn(lambda name=name: make_model(name)) for name in NAMES}


# All are refused before anything is compiled.
@pytest.mark.parametrize("name", NAMES)
def test_wrong_input_is_refused_by_name(name, built):
    model, state = built[name], built[name].init_state(2)
    for wrong in (-1, model.vocab_size):
        with pytest.raises(ValueError, match=r"tokens must be in \[0, .*got"):
            model(state, jnp.full((2, 3), wrong))
    with pytest.raises(ValueError, match="tokens must be integers .* with 2 rows"):
        model(state, jnp.ones((3, 3), jnp.int32))
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        model.init_state(0)
    for other in built.values():
        if other is not model:
            with pytest.raises(ValueError, match="state must"):
                model(other.init_state(2), jnp.ones((2, 3), jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "window", "first_scored", "remaining"),
    [
        ("language model", 64, 0, 64),
        ("hmt", 4, 2, None),
        ("rmt", 4, 0, None),
        ("mplus", 4, 0, None),
        ("reread", 4, 0, None),
    ],
)
def test_contract_of_models(name, window, first_scored, remaining):
    model: Model = drawn(lambda: make_model(name))
    assert (model.vocab_size, model.width) == (LLAMA.vocab_size, LLAMA.model_dim)
    assert (model.window, model.first_scored) == (window, first_scored)
    assert model.remaining(model.init_state(2)) == remaining


@pytest.mark.parametrize("setting", ["bfloat16", "float64", "strict"])
@pytest.mark.parametrize("name", ["language model", "hmt", "mplus", "reread"])
def test_parameters_and_settings_of_other_types_run(name, setting):
    """bfloat16 parameters, float64 by default, and no implicit promotion."""

    def low(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16)

    settings = {
        "bfloat16": jax.enable_x64(False),
        "float64": jax.enable_x64(True),
        "strict": jax.numpy_dtype_promotion("strict"),
    }
    with settings[setting]:
        model = nnx.eval_shape(lambda: make_model(name, num_layers=1))
        params = nnx.state(model, nnx.Param)
        if setting == "bfloat16":
            nnx.update(model, jax.tree.map(low, params))
        state = jax.eval_shape(lambda: model.init_state(2))
        graph, params = nnx.split(model)

        def call(params, state):
            tokens = jnp.zeros((2, 6), jnp.int32)
            return nnx.merge(graph, params)(state, tokens)

        after, logits = jax.eval_shape(call, params, state)
    assert logits.dtype == "float32"
    types = (jax.tree.map(lambda leaf: leaf.dtype, tree) for tree in (state, after))
    assert len({str(tree) for tree in types}) == 1


def arrays(model):
    return jax.tree.map(np.array, nnx.state(model))


LORA = LoraConfig(rank=2)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: set_capacity(m, 8),
        lambda m: replace_config(m, dtype="bfloat16"),
        lambda m: limit_attention(m, 4),
        lambda m: limit_length(m, 8, True),
        lambda m: add_snapkv(m, SnapKVConfig(keep=4, room=4, window=2, kernel=3)),
        freeze,
        merge_lora,
        lambda m: add_lora(m, LORA, jax.random.key(0)),
        lambda m: merge_lora(add_lora(m, LORA, jax.random.key(0))),
        lambda m: add_hmt(
            m, HMTConfig(segment_length=4, num_sensory_tokens=2), key=jax.random.key(0)
        ),
        lambda m: add_mplus(m, MPLUS, key=jax.random.key(0)),
        lambda m: ReReadWindow(m, reread=5, segment=4),
    ],
)
def test_wrapping_does_not_change_the_backbone(change):
    model = drawn(lambda: LanguageModel(LLAMA, key=jax.random.key(0)))
    graph, before = nnx.graphdef(model), arrays(model)
    made = change(model)
    assert made is not model and model.config == LLAMA
    assert nnx.graphdef(model) == graph
    # What is changed in the new one must not show in the old.
    nnx.update(made, jax.tree.map(lambda x: x + 1, nnx.state(made)))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, arrays(model), before)))
