"""What a run prints first, and the curves that it leaves."""

import dataclasses
import json
import struct
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from memjax.data import TokenisedDocument, load_tokenizer
from memjax.models import LanguageModel, LoraConfig, add_lora
from memjax.training import MeshConfig, run_data
from memjax.training import pretrain as run
from memjax.training.config import LoopConfig, presets
from memjax.training.distributed import sharding
from memjax.training.monitoring import curves, header
from memjax.training.step import TrainState
from tests.models.published import config


@pytest.fixture(name="lines")
def _lines(tmp_path, capsys):
    return shown(presets()["elastic-tiny"].model, tmp_path, capsys)


def shown(model, tmp_path, capsys):
    """The lines of a run's header by their first words."""
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("memory " * (i + 2))
    source = {"source": f"folder:{tmp_path}", "cache_dir": tmp_path / "cache"}
    data = run.DataConfig(**source, tokenizer="bytes", validation_texts=5)
    texts = [TokenisedDocument(str(n), "kind", np.zeros(n, int)) for n in (9, 11, 49)]
    header.show(
        data,
        LoopConfig(steps=30, evaluate_every=10),
        run.abstract_model(model),
        sharding.make_mesh(MeshConfig()),
        [texts],
        load_tokenizer("bytes"),
        tokens_per_step=40,
        shortest=11,
    )
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().err.splitlines())


def test_header_of_a_run(lines):
    assert lines["model"].startswith("1,311,872 parameters; 4 layers of width 128")
    assert lines["devices"] == "1 x cpu"
    # 1,200 tokens are read, of 60 that there are.
    assert lines["training"] == (
        "2 documents, 60 tokens; 30 steps of 40 tokens are 20 epochs"
    )
    assert lines["left"].startswith(
        "out    1 document, 9 tokens: shorter than 11 tokens; modes 'packed'"
    )
    assert lines["validation"] == (
        "1 document, 21 tokens; about 5 texts of 2,048, every 10 steps"
    )
    assert lines["test"].endswith("tokens; not used in training")


def test_header_says_that_no_loss_balances_experts(lines, tmp_path, capsys):
    assert "experts" not in lines
    model = config("granitemoehybrid", num_local_experts=3, num_experts_per_tok=2)
    said = shown(model, tmp_path, capsys)["experts"]
    assert said.startswith("2 routers are trained without a loss that balances")

    def adapted():
        key = jax.random.key(0)
        return add_lora(LanguageModel(model, rngs=nnx.Rngs(0)), LoraConfig(), key)

    assert header.trained_routers(nnx.eval_shape(adapted)) == 0


def test_header_shows_shares_of_a_mixture(tmp_path, capsys):
    mixture = []
    for name, weight in (("web", 3.0), ("code", 1.0)):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}.txt").write_text(f"memory {i} " * 10)
        mixture.append((f"folder:{tmp_path / name}", weight))
    data = run.DataConfig(mixture=tuple(mixture), cache_dir=tmp_path / "cache")
    texts = [[TokenisedDocument("a", "kind", np.zeros(n, int))] for n in (30, 20)]
    header.show(
        data,
        LoopConfig(steps=10),
        run.abstract_model(presets()["elastic-tiny"].model),
        sharding.make_mesh(MeshConfig()),
        texts,
        load_tokenizer("bytes"),
        tokens_per_step=40,
        shortest=11,
    )
    said = capsys.readouterr().err
    assert "training    10 steps of 40 tokens\n" in said
    web, code = (f"folder:{tmp_path / name}: 1 document" for name in ("web", "code"))
    assert f"75.0%       {web}, 30 tokens; its tokens are 10 epochs\n" in said
    assert f"25.0%       {code}, 20 tokens; its tokens are 5 epochs\n" in said
    # Held out are the documents of both.
    assert "validation  2 documents, 180 tokens" in said


def test_header_shows_bytes_per_device(capsys):
    mesh = AbstractMesh((2, 2, 1), ("data", "fsdp", "tensor"))

    def laid_out(*shape, axes=(), dtype: Any = np.float32) -> Any:
        place = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    state = TrainState(
        step=laid_out(dtype=np.int32),
        params={"w": laid_out(1024, 64, axes=("fsdp",)), "b": laid_out(64)},
        optimizer=[laid_out(1024, 1024, axes=("fsdp",)), laid_out()],
        memory=laid_out(8, 3, axes=(("data", "fsdp"),)),
        frozen=laid_out(16, dtype=np.int8),
    )
    header.show_cost(state, 2.5e9)
    assert capsys.readouterr().err == (
        "a device    32,848 parameters, 128.3 KiB; moments 2 MiB; memory 24 B; "
        "2.5e+09 FLOPs a step\n"
    )
    header.show_cost(state._replace(memory=()))
    said = capsys.readouterr().err
    assert "memory" not in said and "FLOPs" not in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": (("", 1.0),)}, "a weight of no source"),
        ({"mixture": (("hf:a", 0.0),)}, "the weight of 'hf:a' in mixture must be"),
        ({"mixture": (("hf:a", 1.0), ("hf:a", 2.0))}, "names a source twice"),
        ({"source": "hf:b"}, "source='hf:b' has no part in a mixture"),
        (
            {"mode": "streamed"},
            "a mixture needs mode='chunked' or 'packed', got 'streamed'",
        ),
    ],
)
def test_invalid_mixture_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        run.DataConfig(**({"mixture": (("hf:a", 1.0),)} | changes))


def test_unknown_source_is_refused_before_any_is_read(tmp_path):
    data = run.DataConfig(mixture=(("embedded", 1.0), ("nowhere", 1.0)))
    with pytest.raises(ValueError, match="source='nowhere' is no path"):
        run_data.load_sources(
            dataclasses.replace(data, cache_dir=tmp_path),
            load_tokenizer("bytes"),
            "train",
        )
    assert not list(tmp_path.iterdir())


def test_empty_split_in_the_header(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("memory")
    data = run.DataConfig(source=f"folder:{tmp_path}", cache_dir=tmp_path)
    assert header.held_out(data, load_tokenizer("bytes"), "test") == "no documents"


def write(folder, records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text + '{"step": 3, "ki')


def record(step, kind="train", **values):
    return {"step": step, "kind": kind, "time": 0.0, "values": values}


def test_curves_are_drawn_from_the_records(tmp_path, monkeypatch):
    drawn = {}

    def remember(train, validation, rates, path, **_):
        drawn.update(train=train, validation=validation, rates=rates)

    monkeypatch.setattr(curves, "training_curves", remember)
    write(
        tmp_path,
        [
            record(1, loss=3.0, learning_rate=0.1),
            record(2, loss=None, learning_rate=0.2),
            record(2, "evaluation", validation_perplexity=1.0),
            record(3, loss=2.0, learning_rate=0.3),
        ],
    )
    assert curves.draw_curves(tmp_path) == tmp_path / "curves.png"
    assert drawn["train"] == [(1, 3.0), (3, 2.0)]
    assert drawn["validation"] == [(2, 0.0)]
    assert drawn["rates"] == [(1, 0.1), (2, 0.2), (3, 0.3)]


@pytest.mark.parametrize("count", [3, 80])
def test_curves_become_a_picture(count, tmp_path):
    write(tmp_path, [record(i, loss=1.0 / (i + 1)) for i in range(count)])
    path = curves.draw_curves(tmp_path)
    assert path is not None
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert width > height > 100


def test_a_single_loss_is_no_curve(tmp_path):
    assert curves.draw_curves(tmp_path) is None
    write(tmp_path, [record(1, loss=1.0)])
    assert (
        curves.draw_curves(tmp_path) is None and not (tmp_path / "curves.png").exists()
    )


def test_header_says_which_files_are_read_and_which_are_not(tmp_path, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    for split in ("train", "valid", "test"):
        (texts / f"{split}.txt").write_text(f"{split} " * 30)
    (texts / "scan.pdf").write_text("%")
    source = {"source": str(texts), "cache_dir": tmp_path / "cache"}
    data = run.DataConfig(tokenizer="bytes", context_length=8, **source)
    header.show(
        data,
        LoopConfig(steps=10),
        run.abstract_model(presets()["elastic-tiny"].model),
        sharding.make_mesh(MeshConfig()),
        run_data.load_sources(data, load_tokenizer("bytes"), "train"),
        load_tokenizer("bytes"),
        tokens_per_step=40,
        shortest=11,
    )
    shown = " ".join(capsys.readouterr().err.split())
    read = "train is train.txt; validation is valid.txt; test is test.txt"
    assert f"files {texts}: {read}; left out: 1 x .pdf" in shown
