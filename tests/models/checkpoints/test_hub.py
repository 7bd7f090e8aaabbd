"""Models by their names on the hub, with a folder in the place of the hub."""

import fnmatch
import json
import shutil
import sys
from pathlib import Path

import pytest

import memjax
from memjax.models.checkpoints.hf import hub
from memjax.models.checkpoints.text_interface import GenerationConfig, TextInterface
from tests import tiny

huggingface_hub = pytest.importorskip(
    "huggingface_hub", reason="needs the optional package huggingface_hub"
)
pytest.importorskip("safetensors", reason="needs the optional package safetensors")

COMMIT = "0123456789abcdef"
TEXT = TextInterface(tiny.tokenizer(), "{{ messages }}", GenerationConfig((0,)))


@pytest.fixture(name="remote")
def _remote(tmp_path, monkeypatch):
    """Repositories below a folder; what was downloaded lies in another."""
    remote, cache = tmp_path / "remote", tmp_path / "cache"
    tiny.llama().save(remote / "owner/name", TEXT, shard_bytes=6000)
    for other in ("original/model-00001-of-00002.safetensors", "pytorch_model.bin"):
        (remote / "owner/name" / other).parent.mkdir(exist_ok=True)
        (remote / "owner/name" / other).write_bytes(b"gigabytes")

    def snapshot_download(repository, *, revision=None, allow_patterns):
        source = remote / repository
        if not source.is_dir() or revision not in (None, "main", COMMIT):
            raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nat all")
        snapshot = cache / repository.replace("/", "--") / "snapshots" / COMMIT
        for file in filter(Path.is_file, source.rglob("*")):
            name = str(file.relative_to(source))
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, snapshot / name)
        snapshot.mkdir(parents=True, exist_ok=True)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return remote


def refuses(name, *words):
    with pytest.raises(ValueError) as error:
        memjax.load(name)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


def test_only_needed_files_are_downloaded(remote, tmp_path):
    found = memjax.load("owner/name@main")
    assert (found.text, found.origin) == (TEXT, f"owner/name@{COMMIT}")
    tiny.assert_equal(*(tiny.parameters(m) for m in (found.model, tiny.llama())))
    (snapshot,) = (tmp_path / "cache").glob("*/snapshots/*")
    names = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*")}
    assert sum(name.endswith(".safetensors") for name in names) > 1
    assert not names & {"original", "pytorch_model.bin"}
    # What is made from it says what it was made from.
    found.model.save(tmp_path / "mine", found.text, origin=found.origin)
    assert memjax.load("mine").origin == found.origin
    # A path goes before a name of the hub.
    (tmp_path / "owner").mkdir()
    (tmp_path / "mine").rename(tmp_path / "owner/name")
    assert hub.locate("owner/name").repository is None


def test_all_parts_of_a_gguf_file_are_downloaded(remote, tmp_path):
    parts = [f"q8/a-0000{i}-of-00002.gguf" for i in (1, 2)]
    (remote / "owner/name/q8").mkdir()
    for part in parts:
        (remote / "owner/name" / part).write_bytes(b"")
    found = hub.locate(f"owner/name/{parts[0]}")
    assert all((found.path.parents[1] / part).is_file() for part in parts)
    (remote / "owner/name" / parts[1]).unlink()
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ValueError, match=f"owner/name has no file {parts[1]} at"):
        hub.locate(f"owner/name/{parts[0]}")


def test_missing_models_are_refused_in_one_line(remote, tmp_path, monkeypatch):
    cache = huggingface_hub.constants.HF_HUB_CACHE
    refuses("nobody/nothing", str(tmp_path / "nobody/nothing"), cache, "no network")
    refuses("owner/name@other", "owner/name@other was not found")
    refuses("./nobody/nothing", "neither a folder nor a GGUF file", "owner/name")
    refuses("owner/name/no.gguf", "owner/name has no file no.gguf")
    # Another family is refused before its weights are downloaded.
    (remote / "owner/other").mkdir()
    (remote / "owner/other/config.json").write_text('{"model_type": "rwkv"}')
    refuses("owner/other", "model_type must be one of ('llama'", "got 'rwkv'")
    (remote / "owner/empty").mkdir()
    refuses("owner/empty", "no config.json", "owner/name/file.gguf")
    (remote / "owner/pickled").mkdir()
    config = (remote / "owner/name/config.json").read_text()
    (remote / "owner/pickled/config.json").write_text(config)
    refuses("owner/pickled", "no file model.safetensors (pickled weights are not read)")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refuses("owner/name", "pip install huggingface_hub")


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    model, folder = tiny.llama(), tmp_path / "a"
    model.save(folder, TextInterface(tiny.tokenizer(32)))
    refuses(folder, "ids up to 31, the model a vocabulary of 31")
    # A special token that the model has no row for is left out, as Gemma 3's image.
    record = json.loads(tiny.tokenizer(32).serialised)
    image = {"id": 31, "content": record["model"]["vocab"].popitem()[0]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    record["added_tokens"].append(image | flags | {"special": True})
    (folder / "tokenizer.json").write_text(json.dumps(record))
    tokenizer = memjax.load(folder).tokenizer
    assert tokenizer is not None and tokenizer.vocab_size == 31


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"config": {"eos_token_id": 3}}, GenerationConfig((3,))),
        (
            {
                "generation_config": {"eos_token_id": [3, 0], "temperature": 0.6},
                "config": {"eos_token_id": 4, "bos_token_id": 1, "pad_token_id": -1},
            },
            GenerationConfig((3, 0), 1, None, {"temperature": 0.6}),
        ),
        (
            {
                "tokenizer_config": {"eos_token": {"content": "<end>"}},
                "generation_config": {"eos_token_id": 2, "do_sample": False},
            },
            GenerationConfig((0, 2), record={"do_sample": False}),
        ),
        # What a file says wrongly does not stop a load.
        ({"config": {"eos_token_id": [31, 3, "x"]}}, GenerationConfig((3,))),
        ({"config": {"bos_token_id": -1}}, GenerationConfig()),
        ({"generation_config": {"top_k": -1}}, GenerationConfig(record={"top_k": -1})),
        ({"tokenizer_config": {"chat_template": 3}}, "chat_template must be text"),
        (
            {"tokenizer_config": {"chat_template": [{"name": {}, "template": "a"}]}},
            "chat_template must list names and templates",
        ),
        (
            {"tokenizer_config": {"chat_template": [{"name": ["x"]}]}},
            "chat_template must list names and templates",
        ),
        ({"tokenizer_config": {"eos_token": 3}}, "eos_token must be text, got 3"),
    ],
)
def test_eos_ids(files, expected, tmp_path):
    tiny.llama().save(tmp_path / "a", TextInterface(tiny.tokenizer()))
    for name, record in files.items():
        file = tmp_path / "a" / f"{name}.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | record))
    if isinstance(expected, str):
        refuses(tmp_path / "a", expected)
    else:
        assert memjax.load(tmp_path / "a").text.generation == expected


def test_named_chat_templates(tmp_path):
    tiny.llama().save(tmp_path / "a", TextInterface(tiny.tokenizer()))
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    file = tmp_path / "a" / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": named}))
    assert memjax.load(tmp_path / "a").text.chat_template == "d"
