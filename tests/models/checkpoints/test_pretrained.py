"""Folders of safetensors: saved models load exactly, malformed folders are refused."""

import dataclasses
import json
import os
import struct
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import memjax
from memjax.mechanisms import (
    AttentionConfig,
    ElasticMemoryConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    SlidingWindowConfig,
    TrellisConfig,
)
from memjax.models import LanguageModel, ModelConfig
from memjax.models.checkpoints.hf.safetensors_file import SafetensorsFile
from memjax.models.checkpoints.hf.safetensors_folder import SafetensorsFolder
from memjax.models.checkpoints.text_interface import (
    GenerationConfig,
    TextInterface,
)
from memjax.models.lora import LoraConfig, add_lora
from tests import tiny as tiny_models

safetensors = pytest.importorskip(
    "safetensors.numpy", reason="needs the optional package safetensors"
)

TINY = ModelConfig(
    mechanisms=(AttentionConfig(16, 4, 2, 8, capacity=32, rope_theta=10_000.0),),
    num_layers=2,
    vocab_size=48,
    model_dim=16,
    hidden_dim=24,
    tied_head=False,
    dtype="float32",
    remat=False,
)
TOKENIZER = tiny_models.tokenizer()
MAKERS = {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.1}
TEXT = TextInterface(TOKENIZER, "{{ x }}", GenerationConfig((5, 2), 1, None, MAKERS))
MEMORIES = (ElasticMemoryConfig(16, 4, 2, 8), TrellisConfig(16, 4, 8, 8))
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def tiny(**changes):
    config = dataclasses.replace(TINY, **changes)
    return tiny_models.drawn(lambda: LanguageModel(config, key=jax.random.key(0)))


def parameters(model):
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same(one, other):
    one, other = parameters(one), parameters(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.fixture(scope="module", name="model")
def _model():
    return tiny()


@pytest.fixture(name="folder")
def _folder(model, tmp_path):
    model.save(tmp_path / "saved")
    return tmp_path / "saved"


def refuses(folder, *words):
    with pytest.raises(ValueError) as error:
        memjax.load(folder)
    for word in words:
        assert word in str(error.value), str(error.value)


def rewrite(folder, change):
    """Changes the tensors of the single file."""
    tensors = safetensors.load_file(folder / SINGLE)
    change(tensors)
    safetensors.save_file(tensors, folder / SINGLE)


def put(folder, **changes):
    """Changes the configuration; None takes a key away."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


# What goes out comes back.


@pytest.mark.parametrize(
    "model_type, changes",
    [
        ("llama", {}),
        ("mistral", {"mechanisms": (SlidingWindowConfig(16, 4, 2, 8),)}),
        (
            "memjax",
            {"mechanisms": (GatedDeltaNetConfig(16, 4, 8, 8), *TINY.mechanisms)},
        ),
        ("memjax", {"mechanisms": MEMORIES, "tied_head": True}),
    ],
)
def test_a_saved_model_is_read_back_exactly(model_type, changes, tmp_path):
    model = tiny(**changes)
    assert model.save(tmp_path / "a", TEXT, origin="a/b@c") == model_type
    loaded = memjax.load(tmp_path / "a")
    found = loaded.model
    assert (loaded.text, loaded.origin) == (TEXT, "a/b@c")
    assert found.config.mechanisms == model.config.mechanisms
    assert_same(found, model)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["model_type"] == model_type


def test_shards_have_at_most_the_given_size(model, tmp_path):
    model.save(tmp_path / "a", shard_bytes=4000)
    files = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    count = len(files)
    assert count > 3 and files[0] == f"model-00001-of-{count:05}.safetensors"
    sizes = []
    for name in files:
        tensors = safetensors.load_file(tmp_path / "a" / name)
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        assert sizes[-1] <= 4000 or len(tensors) == 1
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    total = sum(value.nbytes for value in parameters(model).values())
    assert index["metadata"]["total_size"] == total == sum(sizes)
    assert_same(memjax.load(tmp_path / "a").model, model)


def test_bfloat16_halves_the_file(model, tmp_path):
    model.save(tmp_path / "a", dtype="bfloat16")
    stored = safetensors.load_file(tmp_path / "a" / SINGLE)
    assert {value.dtype for value in stored.values()} == {np.dtype("bfloat16")}
    rounded = {
        name: value.astype(ml_dtypes.bfloat16)
        for name, value in parameters(model).items()
    }
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"param_dtype": "bfloat16"}, "bfloat16"),
        ({}, "float32"),
        ({"dtype": "bfloat16", "param_dtype": "float32"}, "float32"),
    ]
    for options, expected in cases:
        found = memjax.load(tmp_path / "a", **options).model
        assert found.config.dtype == options.get("dtype", "float32")
        for name, value in parameters(found).items():
            assert value.dtype == np.dtype(expected)
            np.testing.assert_array_equal(value, rounded[name].astype(expected))
    # A file in float32 has digits that bfloat16 would lose.
    model.save(tmp_path / "b")
    assert_same(memjax.load(tmp_path / "b", dtype="bfloat16").model, model)


def test_bfloat16_parameters_equal_float32(model, tmp_path):
    model.save(tmp_path / "a", dtype="bfloat16")
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    logits = [
        tiny_models.method(m, "__call__", m.init_state(1), tokens)[1]
        for m in (
            memjax.load(tmp_path / "a", dtype="bfloat16", param_dtype=d).model
            for d in (None, "float32")
        )
    ]
    np.testing.assert_array_equal(*logits)


def test_bfloat16_is_read_without_a_copy_in_float32(model, tmp_path, monkeypatch):
    model.save(tmp_path / "a", dtype="bfloat16")
    monkeypatch.setattr(SafetensorsFile, "get", None)
    memjax.load(tmp_path / "a", dtype="bfloat16")


def test_a_scaled_tied_embedding_keeps_its_function(tmp_path):
    model = tiny(tied_head=True)
    assert model.save(tmp_path / "a") == "llama"
    found = memjax.load(tmp_path / "a").model
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    run = nnx.jit(lambda model: model(model.init_state(1), tokens)[1])
    np.testing.assert_allclose(run(found), run(model), atol=1e-6)


def test_adapters_are_merged(model, tmp_path):
    adapted = add_lora(model, LoraConfig(rank=2), jax.random.key(1))
    adapted.save(tmp_path / "a")
    assert_same(memjax.load(tmp_path / "a").model, model)


def test_conversion_keeps_tokenizer_and_token_ids(folder, tmp_path, model):
    (folder / "tokenizer.json").write_bytes(TOKENIZER.serialised)
    put(folder, eos_token_id=3)
    loaded = memjax.load(folder)
    origin = loaded.origin
    kind = loaded.model.save(tmp_path / "b", loaded.text, origin=origin)
    assert kind == "llama"
    assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == 3
    found = memjax.load(tmp_path / "b")
    assert (found.tokenizer, found.text.generation.eos_ids) == (TOKENIZER, (3,))
    # What others may see of a path.
    assert found.origin == folder.name
    assert memjax.load(tmp_path / "b", with_tokenizer=False).text.tokenizer is None
    assert_same(found.model, model)


def test_a_folder_that_is_not_empty_is_not_overwritten(model, folder, tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match="exists already"):
        model.save(folder)
    with pytest.raises(ValueError, match="shard_bytes must be at least 1, got 0"):
        model.save(tmp_path / "b", shard_bytes=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_failed_write_leaves_nothing(model, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(safetensors, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        model.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# What lies is refused.


def test_all_tensors_that_contradict_the_config_are_named(folder):
    query = "model.layers.0.self_attn.q_proj.weight"

    def change(tensors):
        tensors["model.layers.7.extra.weight"] = np.ones(3, "f4")
        tensors[query] = np.ones((5, 16), "f4")
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.mlp.up_proj.weight"]

    rewrite(folder, change)
    refuses(
        folder,
        str(folder),
        "model.norm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.7.extra.weight",
        query,
        "[5, 16]",
        "[32, 16]",
    )


def test_all_wrong_tensors_of_our_own_format_are_named(tmp_path):
    tiny(mechanisms=(GLAConfig(16, 4, 8, 8),)).save(tmp_path / "a")

    def change(tensors):
        tensors["more"] = np.ones(3, "f4")
        tensors["norm"] = np.ones(5, "f4")
        del tensors["embedding"]

    rewrite(tmp_path / "a", change)
    refuses(tmp_path / "a", "'embedding'", "'more'", "'norm'", "[5]", "[16]")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "gemma3"}, ["model_type", "gemma3"]),
        ({"model_type": None}, ["model_type"]),
        ({"hidden_size": "many"}, ["hidden_size", "many"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers=1000000000000"]),
        ({"hidden_size": 10**13}, ["hidden_size must be at most", "10000000000000"]),
        ({"vocab_size": 10**30}, ["vocab_size must be at most", str(10**30)]),
        ({"auto_map": {"AutoModel": "evil.Model"}}, ["auto_map", "evil.Model"]),
        ({"model_type": "memjax"}, ["memjax", "must be an object, got None"]),
        ({"model_type": "memjax", "memjax": {"depth": 3}}, ["memjax.depth"]),
    ],
)
def test_malformed_configs_are_refused(changes, words, folder):
    put(folder, **changes)
    refuses(folder, str(folder), *words)


def test_json_other_than_an_object_without_repeats_is_refused(folder):
    for text, word in (
        ("{", "not JSON"),
        ("[1]", "must be a JSON object, got list"),
        ("[" * 100_000, "not JSON"),
        ('{"model_type": "llama", "model_type": "opt"}', "'model_type' given twice"),
        ("\udcff", "not JSON"),
    ):
        (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        refuses(folder, "config.json", word)
    (folder / "config.json").unlink()
    refuses(folder, "no file config.json")


def test_pickles_are_refused_by_name(folder):
    (folder / SINGLE).unlink()
    refuses(folder, SINGLE, INDEX)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refuses(folder, "pytorch_model.bin", "runs code", "save safetensors")
    refuses(folder / "pytorch_model.bin", "runs code")
    refuses(folder / "nothing", "neither a folder nor a GGUF file")


def header(path, tensors, data=b""):
    """Writes a safetensors file by hand."""
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_malformed_headers_are_refused(tmp_path):
    path = tmp_path / SINGLE
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header(path, {"a": entry}, bytes(8))
    assert SafetensorsFile(path).shapes == {"a": (2,)}
    text = json.dumps(entry)
    twice = f'{{"a": {text}, "a": {text}}}'.encode()
    for tensors, data, word in (
        ({"a": entry}, bytes(4), "not a safetensors file"),
        ({"a": entry}, bytes(12), "not a safetensors file"),
        ({"a": entry | {"shape": [2**62]}}, bytes(8), "not a safetensors file"),
        ({"a": entry | {"dtype": "I64", "shape": [1]}}, bytes(8), "'a'.*I64"),
        ({"a": entry | {"dtype": "F8_E4M3", "shape": [8]}}, bytes(8), "F8_E4M3"),
        ({"a": entry, "b": entry}, bytes(8), "not a safetensors file"),
        (twice, bytes(8), "'a' given twice"),
    ):
        header(path, tensors, data)
        with pytest.raises(ValueError, match=f"{SINGLE}.*{word}"):
            SafetensorsFile(path)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match="not a safetensors file"):
        SafetensorsFile(path)


def test_an_open_file_is_read_whole_without_a_position_of_its_own(
    tmp_path, monkeypatch
):
    """Threads and forks share a descriptor's position."""
    path, tensors = tmp_path / SINGLE, {n: np.arange(5.0, dtype="f4") for n in "ab"}
    safetensors.save_file(tensors | {"none": np.ones((0, 3), "f4")}, path)
    opened, whole = SafetensorsFile(path), os.preadv
    (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
    path.rename(tmp_path / "first")
    (tmp_path / "other").rename(path)

    def short_read(file, buffers, place):
        """As of a tensor above 2 GiB."""
        return whole(file, [buffers[0][:7]], place)

    monkeypatch.setattr(os, "preadv", short_read)
    os.lseek(opened._file, 3, os.SEEK_SET)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(opened.get(name), tensor)
    assert opened.get("none").shape == (0, 3)
    assert os.lseek(opened._file, 0, os.SEEK_CUR) == 3
    os.truncate(tmp_path / "first", (tmp_path / "first").stat().st_size - 1)
    np.testing.assert_array_equal(opened.get("a"), tensors["a"])
    with pytest.raises(ValueError, match="ended while 'b' was read"):
        opened.get("b")


@pytest.fixture(name="sharded")
def _sharded(model, tmp_path):
    folder = tmp_path / "model" / "sharded"
    model.save(folder, shard_bytes=6000)
    return folder


def reindex(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "place",
    ["../secret.safetensors", "/secret.safetensors", "a/b.safetensors", "..", "", 3]
    + ["..\\secret.safetensors", "model.bin"],
)
def test_an_index_cannot_name_files_outside(place, sharded, tmp_path):
    for folder in (tmp_path, tmp_path / "model"):
        safetensors.save_file({"a": np.ones(1, "f4")}, folder / "secret.safetensors")
    reindex(sharded, lambda places: places.update({"model.norm.weight": place}))
    refuses(sharded, INDEX, "model.norm.weight", repr(place), "plain name")


def test_an_index_that_contradicts_its_files_is_refused(sharded):
    files = sorted(sharded.glob("*.safetensors"))
    first, last = files[0], files[-1]
    names = safetensors.load_file(first)
    held, other = next(iter(names)), next(iter(safetensors.load_file(last)))
    reindex(sharded, lambda places: places.update(new=first.name))
    refuses(sharded, INDEX, f"{first.name} lacks 'new'")
    reindex(sharded, lambda places: (places.pop("new"), places.pop(held)))
    refuses(sharded, f"{first.name} holds '{held}', not in the index")
    reindex(sharded, lambda places: places.update({held: first.name}))
    safetensors.save_file(names | {other: np.ones(1, "f4")}, first)
    refuses(sharded, f"'{other}', which the index puts in {last.name}")
    first.unlink()
    refuses(sharded, f"has no file {first.name}")
    (sharded / INDEX).write_text('{"weight_map": {}}')
    refuses(sharded, "weight_map must map tensors to files")


def test_weights_may_be_links_and_texts_may_not_leave_the_folder(
    folder, tmp_path, model
):
    outside = tmp_path / "outside.safetensors"
    (folder / SINGLE).rename(outside)
    (folder / SINGLE).symlink_to(outside)
    assert_same(memjax.load(folder).model, model)
    (tmp_path / "secret").write_text("{}")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    refuses(folder, "tokenizer.json", "outside its folder")


def test_links_of_the_hub_cache_are_read(folder, tmp_path, model):
    snapshot, blobs = tmp_path / "hub/snapshots/abc", tmp_path / "hub/blobs"
    snapshot.mkdir(parents=True)
    # As on clusters: the blobs are on another disk.
    (tmp_path / "disk").mkdir()
    blobs.symlink_to(tmp_path / "disk")
    for file in folder.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert_same(memjax.load(snapshot).model, model)


def test_half_precision_files_are_read_exactly(folder, model):
    rewrite(folder, lambda t: t.update({n: v.astype("f2") for n, v in t.items()}))
    opened = SafetensorsFolder(folder)
    for name in opened.shapes:
        assert opened.get(name).dtype == np.float32
    found = parameters(memjax.load(folder).model)
    for name, value in parameters(model).items():
        np.testing.assert_array_equal(found[name], value.astype("f2").astype("f4"))
