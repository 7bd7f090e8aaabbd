"""Parsing of command lines: refusals, presets, configurations from files."""

import inspect
import json
from typing import Any

import pytest

from memjax.cli import describe, help, main
from memjax.cli.arguments.parsing import for_all_stages, parse
from memjax.config_io import to_record
from memjax.training.config import presets
from memjax.training.finetune.hmt_presets import presets as hmt_presets
from memjax.training.finetune.run import FinetuneRun


def call(*words):
    """The call that a line asks for, and its configuration."""
    made: Any = parse([str(word) for word in words], main.COMMANDS, main.CONFIGURED)
    bound = inspect.signature(made.func).bind(*made.args, **made.keywords)
    return bound.arguments


@pytest.mark.parametrize(
    "line,expected",
    [
        (
            "train elastic-tiny --loop.steps many",
            "--loop.steps must be a whole number, got 'many'; see memjax train "
            "elastic-tiny --help",
        ),
        (
            "train elastic-tiny --optimizer.beta2=x",
            "--optimizer.beta2 must be a number, got 'x'",
        ),
        (
            "train elastic-tiny --loop.profile 3",
            "--loop.profile must be two whole numbers or None, got '3'",
        ),
        ("train elastic-tiny --loop.steps", "--loop.steps needs a value"),
        ("train elastic-tiny --loop.steps 0", "loop.steps must be at least 1, got 0"),
        ("train elastic-tiny --seed -1", "seed must be in [0, 2**32), got -1"),
        (
            "train elastic-tiny --loop.stops 1",
            "no option '--loop.stops' (did you mean --loop.steps,",
        ),
        (
            "train elastic-tiny --data.mode chunks",
            "--data.mode must be one of chunked, packed, streamed, got 'chunks' (did "
            "you mean chunked?)",
        ),
        (
            "train elastic-tiny --model.remat 1",
            "'1' after --model.remat is one word too many",
        ),
        ("train elastic-tinny", "no preset 'elastic-tinny' (did you mean 'elastic-tin"),
        ("train --run-dir x", "a preset is missing"),
        ("eval", "eval lacks an argument: folder of a run"),
        ("ask m q", "ask lacks an argument: --memory, folder of the memory"),
        ("finetune retrofit --layers x", "--layers must be whole numbers or auto, got"),
        ("eval --splitt test", "no option '--splitt' (did you mean --split"),
        ("eval a b", "'b' after a is one word too many"),
        (
            "generate a --temprature 1",
            "no option '--temprature' (did you mean --temperature?)",
        ),
        (
            "finetune hmt-tiny --stage1.loop.steps x",
            "--stage1.loop.steps must be a",
        ),
        ("trian", "command must be one of"),
        ("", "a command is missing: train, finetune"),
    ],
)
def test_wrong_command_line_is_explained(line, expected):
    with pytest.raises(ValueError) as refused:
        parse(line.split(), main.COMMANDS, main.CONFIGURED)
    message = str(refused.value)
    assert message.startswith(expected)
    assert "\n" not in message and "helptext" not in message


def test_fields_of_a_preset_are_options_in_any_order():
    words = ("--run-dir", "there", "elastic-tiny", "--loop.steps", "7")
    found = call("train", *words, "--model.mechanisms.2.order", "8")
    assert str(found["run_dir"]) == "there" and found["config"].loop.steps == 7
    assert found["config"].model.mechanisms[2].order == 8


def test_tables_of_presets_are_up_to_date():
    written = describe.FILE.read_text("utf-8")
    assert written == describe.content(), "run python -m memjax.cli.describe"


@pytest.mark.parametrize(("table", "command"), [(0, "train"), (1, "finetune")])
def test_help_lists_presets_and_options_without_a_parser(table, command):
    page = help.quick_answer([command, "--help"]) or ""
    assert help.TABLES[table] in page
    for name in inspect.signature(main.CONFIGURED[command].function).parameters:
        assert f"--{name.replace('_', '-')} " in page
    for name in main.CONFIGURED[command].presets():
        assert f"\n{name} " in page


@pytest.fixture(name="file")
def _file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(to_record(presets()["trellis-tiny"])))
    return file


def test_training_config_is_read_from_a_file(file):
    found = call("train", "--config", file, "--run-dir", "other")
    assert found["config"] == presets()["trellis-tiny"]
    assert str(found["run_dir"]) == "other"
    changed = call("train", f"--config={file}", "--data.batch-size", "3")["config"]
    assert changed.data.batch_size == 3
    assert changed.model == found["config"].model
    # Also by the folder of the run.
    assert call("train", "--config", file.parent)["config"] == found["config"]


def test_fine_tuning_config_is_read_from_a_file(file, tmp_path):
    stage: Any = hmt_presets()["hmt-stage2"]
    model = presets()["trellis-tiny"].model
    run = FinetuneRun(stage, model, "bpe4k", "a", "b", origin="owner/name@abc")
    file.write_text(json.dumps(to_record(run)))
    found = call("finetune", "--config", file, "--loop.steps", "9")
    assert found["config"].hmt == stage.hmt and found["config"].loop.steps == 9
    assert found["backbone"] == "owner/name@abc"
    given = call("finetune", "--config", file, "--backbone", "x")
    assert given["backbone"] == "x"
    with pytest.raises(ValueError, match="use memjax finetune --config"):
        call("train", "--config", file)


@pytest.mark.parametrize(
    "content,expected",
    [
        ("notes", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[1]", "must be an object"),
        (None, "is not there"),
        ({"seed": "x"}, "config.seed must be"),
        ({"later": 1}, "of this version of memjax: config.later is not a field"),
        ({"loop": {"save_every": 1}}, "config.loop.steps is missing"),
        ({"seed": -1}, "seed must be in"),
    ],
)
def test_another_file_is_refused(content, expected, file):
    if content is None:
        file.unlink()
    elif isinstance(content, str):
        file.write_text(content)
    else:
        record = json.loads(file.read_text())
        file.write_text(json.dumps(record | content))
    with pytest.raises(ValueError, match="config") as refused:
        call("train", "--config", file)
    assert expected in str(refused.value) and len(str(refused.value)) < 400


def test_file_with_a_preset_is_refused(file):
    with pytest.raises(ValueError, match="either a preset or --config"):
        call("train", "elastic-tiny", "--config", file)
    with pytest.raises(ValueError, match="is of a training run"):
        call("finetune", "--config", file)


def test_option_without_a_stage_is_of_all_stages():
    config = hmt_presets()["hmt-tiny"]
    words = ["--data.source", "a b", "--stage2.loop.steps", "5", "--loop.steps=3"]
    assert for_all_stages(words, config) == [
        *["--stage1.data.source", "a b", "--stage2.data.source", "a b"],
        *["--stage2.loop.steps", "5", "--stage1.loop.steps=3"],
    ]
    # The command's own options, and presets of one stage, are left alone.
    words = ["--run-dir", "x", "--backbone", "y"]
    assert for_all_stages(words, config) == words
    words = ["--loop.steps", "3"]
    assert for_all_stages(words, hmt_presets()["hmt-stage1"]) == words
    found = call("finetune", "hmt-tiny", "--loop.steps", "7", "--backbone", "y")
    assert [stage.loop.steps for _, stage in found["config"].stages()] == [7, 7]
