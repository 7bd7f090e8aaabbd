"""Every kind of model is opened by its name, and written so that others can tell."""

import dataclasses
import functools
import json
from typing import Any

import jax
import pytest

import memjax
from memjax.models import HMTConfig, MPlusConfig, ReReadWindow, add_hmt, add_mplus
from memjax.models.checkpoints.license import read_license
from memjax.models.checkpoints.text_interface import GenerationConfig, TextInterface
from memjax.models.hmt.model import HMT
from memjax.models.lora import LoraConfig, add_lora
from memjax.models.mplus.model import MPlus
from memjax.training.finetune import finetune, hmt_presets
from memjax.training.finetune.model_card import ADAPTER, model_card
from memjax.training.finetune.run import read_run
from memjax.training.finetune.start import StoredText, starting_point
from memjax.training.run_folder import RunFolder, record_config
from tests import tiny

pytest.importorskip("safetensors", reason="needs the optional package safetensors")

TEXT = TextInterface(tiny.tokenizer(), "{{ messages }}", GenerationConfig((0,)))
MEMORY = MPlusConfig(
    4, pool_size=8, chunk_size=8, min_chunk_size=8, num_retrieved=4, store_size=16
)


@functools.cache
def build(name: str) -> Any:
    key = jax.random.key(1)
    if name == "memoryllm":
        return add_mplus(tiny.llama(), MEMORY, key=key)
    adapted = add_lora(tiny.llama(), LoraConfig(rank=2), key)
    return add_hmt(
        adapted,
        HMTConfig(segment_length=8, num_sensory_tokens=2, num_memories=4),
        key=key,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name, kind", [("hmt", HMT), ("memoryllm", MPlus)])
def test_memory_model_loads_as_its_own_class(name, kind, tmp_path):
    model, plain = build(name), tiny.parameters(tiny.llama())
    model.save(tmp_path / "a", TEXT, origin="owner/name@abc")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    # The backbone's own type would have other programs draw all of it anew.
    assert config["model_type"] == model.model_type == name
    assert config["backbone_model_type"] == "llama"
    opened = memjax.load(tmp_path / "a")
    assert isinstance(opened.model, kind)
    assert (opened.text, opened.origin) == (TEXT, "owner/name@abc")
    assert opened.tokenizer == TEXT.tokenizer
    # The plain model inside, which other programs load, without adapters.
    opened.model.plain().save(tmp_path / "b", opened.text)
    alone = memjax.load(tmp_path / "b").model
    for found in (model.plain(), opened.model.plain()):
        tiny.assert_equal(tiny.parameters(found), plain)
    tiny.assert_equal(tiny.parameters(alone)["blocks"], plain["blocks"])


def test_run_stores_the_text_interface_of_its_backbone(tmp_path):
    tiny.llama().save(tmp_path / "a", TEXT, origin="owner/name@abc")
    (_, stage), *_ = hmt_presets.presets()["window"].stages()
    described, _, stored, _ = starting_point(stage, str(tmp_path / "a"), None)
    assert described.origin == "owner/name@abc"
    run = tmp_path / "run"
    with RunFolder(run) as folder:
        record_config(described, folder, ())
    for name, content in stored.files().items():
        (run / name).write_bytes(content)
    assert read_run(run).text(run) == TEXT
    # The same backbone under another name is the same run.
    moved = dataclasses.replace(described, origin="elsewhere")
    with RunFolder(run) as folder:
        record_config(moved, folder, finetune.FREE)
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        memjax.load(run)
    with pytest.raises(ValueError, match="dtype must be None for the run"):
        memjax.load(run, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_refuses_a_memory(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    for name in ("hmt", "memoryllm"):
        build(name).save(tmp_path / name, TEXT)
        with pytest.raises(ValueError, match=name):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)


def test_model_card_names_origin_and_training(tmp_path):
    card = "---\ntags: [a]\nlicense: apache-2.0\n---\nlicense: none\n"
    origin = "owner/name@abc"
    tiny.llama().save(tmp_path / "a", TEXT, origin=origin, readme=card)
    (tmp_path / "a" / "eval-test.json").write_text(
        '{"split": "test", "perplexity": {"all": '
        '{"perplexity": 7.25, "beyond_window": null}}}'
    )
    opened = memjax.load(tmp_path / "a")
    card = model_card(opened, tmp_path / "a", "hmt", ["export", "a b", "c"])
    for line in (
        "base_model: owner/name\n",
        "license: apache-2.0\n",
        "- made from: `owner/name@abc`",
        "- licence: apache-2.0\n",
        "- exported by: `memjax export 'a b' c`",
        "| test | all | 7.250 |  |",
        "load_hmt",
    ):
        assert line in card, card
    assert "Scores" not in model_card(opened, None, "llama", [])
    unknown = model_card(dataclasses.replace(opened, license={}), None, ADAPTER, [])
    assert "license:" not in unknown and "- licence: unknown: the files" in unknown


@pytest.mark.parametrize(
    "head,expected",
    [
        ("license:\n- mit", {"license": "mit"}),
        (
            'license: other\nlicense_name: "a b"\nlicense_link: LICENSE',
            {"license": "other", "license_name": "a b", "license_link": "LICENSE"},
        ),
        ("license: [mit, gpl]", {}),
    ],
)
def test_licence_is_carried_on(head, expected, tmp_path):
    """By memory models, runs, and their texts of it."""
    card = f"---\n{head}\n---\n"
    tiny.llama().save(tmp_path / "a", TEXT, readme=card)
    (tmp_path / "a" / "LICENSE").write_text("You may.")
    loaded = memjax.load(tmp_path / "a")
    assert loaded.license == expected
    card = model_card(loaded, None, "hmt", [])
    build("hmt").save(tmp_path / "b", loaded.text, readme=card)
    again = memjax.load(tmp_path / "b")
    assert again.license == expected
    stored = StoredText("tokenizer.json", again.text, tiny.tokenizer(), again.license)
    (tmp_path / "run").mkdir()
    for name, content in stored.files().items():
        (tmp_path / "run" / name).write_bytes(content)
    assert read_license(tmp_path / "run") == expected
    assert (tmp_path / "run" / "LICENSE").read_text() == "You may."


@pytest.mark.slow  # Fast tests are also run with all annotations checked.
def test_missing_files_are_named(tmp_path):
    tiny.llama().save(tmp_path / "a", TextInterface())
    with pytest.raises(ValueError, match="has no tokenizer: put its tokenizer.json"):
        _ = memjax.load(tmp_path / "a").tokenizer
    again = ReReadWindow(tiny.llama(), reread=4, segment=4)
    for refused in (lambda: again.save(tmp_path / "b", TEXT), lambda: again.model_type):
        with pytest.raises(ValueError, match="must be a LanguageModel, HMT or MPlus"):
            refused()
