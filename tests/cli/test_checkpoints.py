"""The commands import and export, called in this process."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import memjax
from memjax.data import load_tokenizer
from memjax.models.checkpoints.hf.peft import save_adapter
from memjax.models.checkpoints.text_interface import GenerationConfig, TextInterface
from memjax.models.lora import LoraConfig, add_lora
from memjax.training import pretrain as run
from tests import tiny
from tests.cli.commands import TRANSFORMER, command, refused
from tests.training.idle import idle_updates

pytest.importorskip("safetensors", reason="needs the optional package safetensors")

LLAMA = Path(__file__).parents[1] / "models" / "golden" / "families" / "llama3"


@pytest.fixture(scope="module", name="trained")
def _trained(tmp_path_factory):
    """A run of one step, with the tokenizer that ships."""
    folder = tmp_path_factory.mktemp("run")
    for i in range(4):
        (folder / f"{i}.txt").write_text("memory window block state " * 30)
    source = ["--data.source", f"folder:{folder}", "--data.cache-dir", folder / "cache"]
    words = ["train", "--run-dir", folder / "one", *TRANSFORMER, *source]
    words += "--loop.writers --data.context-length 16 --data.batch-size 2".split()
    words += ["--loop.steps", "1"]
    # Any parameters will do.
    with idle_updates():
        code, _, err = command(*words)
    assert (code, err) == (0, [])
    return folder / "one"


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, nnx.state(one), nnx.state(other))


def test_import_writes_a_folder_that_loads(tmp_path):
    code, out, err = command("import", LLAMA, tmp_path / "a")
    assert (code, err) == (0, [])
    assert "(llama): memjax and transformers load it" in out
    seen = []
    loaded = memjax.load(LLAMA, progress=lambda *counts: seen.append(counts))
    assert_same(memjax.load(tmp_path / "a").model, loaded.model)
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))] and len(seen) > 8
    assert "exists already" in refused("import", LLAMA, tmp_path / "a")
    assert "neither a folder nor" in refused("import", tmp_path / "no", tmp_path / "b")


def test_import_in_half_precision(tmp_path):
    words = ("import", LLAMA, tmp_path / "a", "--dtype", "bfloat16", "--no-tokenizer")
    assert command(*words)[0] == 0
    size = (tmp_path / "a" / "model.safetensors").stat().st_size
    assert size < 0.6 * (LLAMA / "model.safetensors").stat().st_size
    assert "dtype" in refused("import", LLAMA, tmp_path / "b", "--dtype", "int8")


def test_export_writes_the_adapter_alone(tmp_path):
    model = add_lora(memjax.load(LLAMA).model, LoraConfig(rank=2), jax.random.key(0))
    save_adapter(model, tmp_path / "a", base=str(LLAMA))
    words = ("export", tmp_path / "a", tmp_path / "b", "--adapter-only")
    assert command(*words)[0] == 0
    assert "library_name: peft" in (tmp_path / "b" / "README.md").read_text()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        one, other = ((tmp_path / folder / name).read_bytes() for folder in "ab")
        assert one == other
    words = (*words[:2], tmp_path / "c", "--adapter-only", "--backbone-only")
    assert "takes neither --backbone-only nor --dtype" in refused(*words)


@pytest.mark.slow
def test_export_writes_what_was_trained(trained, tmp_path):
    code, out, err = command("export", trained, tmp_path / "a")
    assert (code, err) == (0, []) and "(mistral)" in out
    config, model = run.load_model(trained)
    loaded = memjax.load(tmp_path / "a")
    found, there = loaded.model, loaded.tokenizer
    # The tied, scaled embedding is told as an embedding and a head.
    embedding = np.asarray(model.embedding.get_value())
    np.testing.assert_array_equal(np.asarray(found.head.get_value()).T, embedding)
    np.testing.assert_array_equal(found.embedding.get_value(), embedding * 4)
    assert_same(found.blocks, model.blocks)
    own = load_tokenizer(config.data.tokenizer)
    text = "memory of 12 blocks\n"
    assert there is not None
    assert there.encode(text).tolist() == own.encode(text).tolist()
    again = command("export", tmp_path / "a", tmp_path / "b")
    assert again[0] == 0
    assert_same(memjax.load(tmp_path / "b").model, found)
    assert "exists already" in refused("export", trained, tmp_path / "a")


def test_folder_of_another_program_is_generated_from_and_scored(tmp_path):
    """A folder as other programs write it: `generate`, `eval` and `export` take it."""
    folder, texts = tmp_path / "model", tmp_path / "texts"
    text = TextInterface(tiny.tokenizer(), generation=GenerationConfig((0,)))
    tiny.llama().save(folder, text, origin="owner/name@abc")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"of_another": 1}))
    (folder / "generation_config.json").write_text('{"stop_strings": ["x"]}')
    said = [
        "not read of config.json: of_another",
        "generation_config.json: stop_strings=['x'] is not followed",
    ]
    reported = [f"warning: {folder}: {line}" for line in said]
    words = ["generate", folder, "--prompt", "abc", "--tokens", "3"]
    code, out, err = command(*words, "--temperature", "0")
    assert (code, err) == (0, reported) and out.startswith("abc") and len(out) > 4
    texts.mkdir()
    for i in range(4):
        (texts / f"{i}.txt").write_text("abcdefgh" * 3)
    words = ["eval", folder, "--source", f"folder:{texts}", "--tokens-per-call", "8"]
    words += ["--split", "train", "--output", tmp_path / "scores"]
    code, out, err = command(*words)
    assert (code, err) == (0, reported)
    assert (tmp_path / "scores/eval-train.png").exists()
    scores = json.loads((tmp_path / "scores/eval-train.json").read_text())
    assert 1 < scores["perplexity"]["all"]["perplexity"] < 1e4
    code, _, err = command("export", folder, tmp_path / "b", "--backbone-only")
    assert (code, err) == (0, reported)
    card = (tmp_path / "b" / "README.md").read_text()
    assert "base_model: owner/name" in card and "--backbone-only" in card
    assert memjax.load(tmp_path / "b").origin == "owner/name@abc"


def test_no_network_is_one_line(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")

    def unreachable(*_, **__):
        raise hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    for words in (
        ["generate", "owner/name", "--prompt", "a"],
        ["eval", "owner/name"],
        ["import", "owner/name", tmp_path / "a"],
        ["export", "owner/name", tmp_path / "a"],
        ["finetune", "window", "--backbone", "owner/name", "--run-dir", tmp_path / "r"],
    ):
        line = refused(*words)
        assert "owner/name was not found" in line and "huggingface.co" in line
