"""transformers' models with recurrent layers, read here, and written back."""

import collections
import json
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from memjax.models.checkpoints.hf.config import from_hf_config
from tests.models.checkpoints.hybrid_reading import (
    agree,
    read,
    read_parts,
    read_token_by_token,
)

with warnings.catch_warnings():
    # Both libraries warn of deprecated parts of their own.
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from tests.models.checkpoints.hybrid_models import CUTS, FAMILIES, build, numbers

# Its threads would wait for each other most of the time.
torch.set_num_threads(1)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def written(model, folder, tokens):
    """The logits of transformers' model of what is written here, all tensors used."""
    model.save(folder)
    there, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        output_loading_info=True,
        attn_implementation="eager",
        dtype=torch.float32,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind], (kind, report[kind])
    with torch.no_grad():
        return there(torch.from_numpy(tokens), use_cache=False).logits.numpy()


#: A variant of each family whose head is the embedding; transformers ties none of
#: Nemotron-H, whatever its file says.
TIED = {kind: name for name, (kind, _) in FAMILIES.items() if kind != "nemotron_h"}
VARIANTS = collections.Counter(kind for kind, _ in FAMILIES.values())
#: Families that are read in steps too: one for each kind of recurrent layer and of
#: arrangement of layers.
STEPPED = ("qwen3_5", "olmo_hybrid", "mamba2", "bamba", "falcon_h1", "nemotron_h")
STEPPED += ("lfm2", "mamba", "recurrent_gemma")


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_equal_transformers_and_are_written_back(family, tmp_path):
    kind = FAMILIES[family][0]
    # Families of one variant have both heads: see below.
    tied = VARIANTS[kind] > 1 and TIED[kind] == family
    theirs = build(family, tied=tied)
    theirs.save_pretrained(tmp_path / "a")
    expected = numbers(theirs)
    held = any(name.startswith(f"state{CUTS[1]}.") for name in expected)
    assert held or family == "recurrent_gemma"
    model = memjax.load(tmp_path / "a").model
    assert model.config.tied_head == tied
    read_parts(model, expected, CUTS)
    if family in STEPPED:
        read_token_by_token(model, expected)
    agree(written(model, tmp_path / "b", expected["tokens"]), expected["logits"])


@pytest.mark.parametrize("family", [n for k, n in TIED.items() if VARIANTS[k] == 1])
def test_a_head_that_is_the_embedding_is_read_and_written(family, tmp_path):
    theirs = build(family, tied=True)
    theirs.save_pretrained(tmp_path / "a")
    tokens = np.arange(22).reshape(2, 11) * 7 % 48
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens), use_cache=False).logits.numpy()
    model = memjax.load(tmp_path / "a").model
    assert model.config.tied_head
    # What is computed with either head is tested above.
    agree(written(model, tmp_path / "b", tokens), expected)


@pytest.mark.parametrize("family", sorted({kind for kind, _ in FAMILIES.values()}))
def test_missing_keys_have_the_defaults_of_transformers(family):
    """Or have to be given."""
    kind: Any = transformers.CONFIG_MAPPING[family]
    # Its default is a mixture of experts.
    dense = {"num_local_experts": 0} if family == "granitemoehybrid" else {}
    config = json.loads(json.dumps(kind(**dense).to_dict()))
    model = from_hf_config(config)
    for key in config:
        rest = {other: value for other, value in config.items() if other != key}
        try:
            assert from_hf_config(rest) == model, key
        except ValueError as error:
            assert f"{key} is missing from config.json" in str(error)


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_of_a_model_of_pictures_is_read(tied, tmp_path, caplog):
    """As transformers saves it; written back as the text model alone."""
    text = build("qwen3_5", tied)
    kind: Any = transformers.CONFIG_MAPPING["qwen3_5"]
    vision = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2)
    vision |= dict(out_hidden_size=24, num_position_embeddings=4)
    config = kind(
        text_config=text.config.to_dict(),
        vision_config=vision,
        tie_word_embeddings=tied,
    )
    both = transformers.AutoModelForImageTextToText.from_config(config).eval().float()
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    both.save_pretrained(tmp_path / "a")
    model = memjax.load(tmp_path / "a").model
    assert model.config.tied_head == tied
    assert "tensors of pictures" in caplog.text
    assert "not read of config.json" not in caplog.text
    tokens = np.arange(22).reshape(2, 11) * 7 % 48
    with torch.no_grad():
        expected = both(torch.from_numpy(tokens), use_cache=False).logits.numpy()
    _, logits = read(model, model.init_state(2), jnp.asarray(tokens, jnp.int32))
    agree(logits, expected)
    agree(written(model, tmp_path / "b", tokens), expected)
