"""The command line, called in this process: output, refusals, exit codes."""

import dataclasses
import functools
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import memjax
from memjax.config_io import to_record
from memjax.evaluation import key_alignment
from memjax.mechanisms import SlidingWindowConfig
from memjax.models.generation import _draw
from memjax.training.config import presets
from tests.cli.commands import SIZES, TRANSFORMER, command, refused, run
from tests.training.idle import idle_updates


@pytest.fixture(scope="module", name="texts")
def _texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(4):
        (folder / f"{i}.txt").write_text("memory window block state " * (6 + i))
    return folder


@pytest.fixture(scope="module", name="train")
def _train(texts):
    def words(run_dir, *more, source=f"folder:{texts}", preset=TRANSFORMER):
        data = ["--data.source", source, "--data.cache-dir", texts / "cache"]
        return ("train", "--run-dir", run_dir, *preset, *data, *SIZES, *more)

    return words


@pytest.fixture(scope="module", name="trained")
def _trained(train, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    return run_dir, run(*train(run_dir))


def test_training_writes_a_run_and_says_where(trained):
    run_dir, (code, out, err) = trained
    assert code == 0
    assert out.startswith(f"finished at step 2; run folder {run_dir}\n")
    assert f"next: memjax generate {run_dir} --prompt" in out
    # What a person sees first, and in each line.
    said = "\n".join(err)
    assert "2 steps of 32 tokens are" in said and "compiled in" in said
    assert "  lr " in said
    assert (run_dir / "config.json").is_file()
    records = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert records and all(json.loads(record) for record in records)


def test_same_command_on_a_finished_run_does_nothing(trained, train):
    code, out, err = run(*train(trained[0]))
    assert code == 0 and "finished at step 2" in out
    said = "\n".join(err)
    assert "resumed at step 2" in said and "loss" not in said


def test_sample_goes_on_from_a_held_out_text(trained, train):
    code, out, err = command(*train(trained[0], "--loop.sample-tokens", "2"))
    assert (code, err) == (0, []) and "sample: [" in out, (out, err)
    assert "memory window bl" in out, out


def test_another_configuration_on_the_same_folder_names_the_field(trained, train):
    line = refused(*train(trained[0], "--model.mechanisms.0.window", "4"))
    assert "model.mechanisms.0.window was 8 and is now 4" in line


def test_a_run_loads_with_its_configuration(trained):
    loaded = memjax.load(trained[0])
    (window,) = loaded.model.config.mechanisms
    assert isinstance(window, SlidingWindowConfig) and window.tokens_per_call == 8
    assert loaded.run is not None and loaded.run.loop.steps == 2
    assert (loaded.origin, loaded.tokenizer.vocab_size) == ("", 256)


@pytest.mark.slow
def test_evaluation_prints_a_table_and_writes_numbers_and_a_plot(trained):
    run_dir, _ = trained
    code, out, err = command("eval", run_dir, "--split", "validation")
    assert (code, err) == (0, []) and "perplexity" in out
    result = json.loads((run_dir / "eval-validation.json").read_text())
    assert result["split"] == "validation" and result["edges"][0] == 0
    # A byte-level model after two updates is hardly better than chance.
    assert 100 < result["perplexity"]["all"]["perplexity"] < 600
    assert len(result["nats"]) == len(result["edges"]) - 1
    plot = (run_dir / "eval-validation.png").read_bytes()
    assert plot.startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_a_reference_adds_the_perplexity_of_its_key_tokens(
    trained, tmp_path, monkeypatch
):
    (tmp_path / "a.txt").write_text("memory window block state " * 40)
    words = ("eval", trained[0], "--source", tmp_path / "a.txt", "--split", "train")
    words += ("--context-length", "32", "--output", tmp_path, "--reference", trained[0])
    # An untrained one predicts nothing by the long context.
    assert "least=100 key tokens are needed, got 0 of 0" in refused(*words)
    find = functools.partial(key_alignment.find_key_tokens, alpha=-1e9, beta=-1e9)
    monkeypatch.setattr(key_alignment, "find_key_tokens", find)
    code, out, err = command(*words)
    assert (code, err) == (0, []) and "LongPPL" in out
    row = json.loads((tmp_path / "eval-train.json").read_text())["perplexity"]["all"]
    # Of all tokens that have as long a context in both readings.
    assert row["long_ppl"] != row["perplexity"]
    assert row["long_ppl"] == pytest.approx(row["perplexity"], rel=0.1)


@pytest.mark.slow
def test_another_sampling_gives_other_numbers(train, tmp_path):
    # One layer of the four: a model of two mechanisms is trained elsewhere.
    config = presets()["elastic-tiny"]
    layer: Any = config.model.mechanisms[2]
    small = dict(model_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, block=8)
    layer = dataclasses.replace(layer, **small, order=4, memory_tokens=4, bank_blocks=0)
    sizes: Any = dict(vocab_size=256, model_dim=16, hidden_dim=16, num_layers=1)
    model = dataclasses.replace(config.model, mechanisms=(layer,), **sizes)
    record = to_record(config) | {"model": to_record(model)}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(record))
    tmp_path, preset = tmp_path / "run", ("--config", tmp_path / "config")
    with idle_updates():
        assert command(*train(tmp_path, preset=preset))[0] == 0
    results = []
    for words in ([], ["--sampling", "exponential", "--decay", "0.5"]):
        code, _, _ = command("eval", tmp_path, *words)
        assert code == 0
        results.append(json.loads((tmp_path / "eval-test.json").read_text()))
    one, other = (result["perplexity"]["all"]["perplexity"] for result in results)
    assert one != other and abs(one - other) < 50


@pytest.mark.slow
def test_generation_continues_the_prompt_and_a_file(trained, tmp_path):
    program: Any = _draw
    words, compiled = ("generate", trained[0], "--tokens", "5"), program._cache_size()
    code, out, err = command(*words, "--prompt", "memory")
    assert (code, err) == (0, []) and out.startswith("memory") and len(out) > 7
    # One program draws every token, the first one too.
    assert program._cache_size() == compiled + 1
    assert command(*words, "--prompt", "memory")[1] == out
    assert command(*words, "--prompt", "memory", "--seed", "1")[1] != out
    file = tmp_path / "prompt.txt"
    file.write_text("memory")
    code, alone, _ = command(*words, "--prompt-file", file)
    assert code == 0 and "memory" + alone == out


def test_generation_needs_one_prompt(trained):
    both = ("--prompt", "a", "--prompt-file", "b")
    for words in ((), both, ("--prompt", "")):
        line = refused("generate", trained[0], *words)
        assert "one of --prompt, --prompt-file and --prompts" in line
    assert "tokens" in refused("generate", trained[0], "--prompt", "a", "--tokens", "0")


def test_generate_prints_a_line_of_json_for_each_sample(trained, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "memory"}\n{"prompt": "block"}\n')
    options = ["--tokens", "4", "--json", "--logprobs", "-n", "2", "--seed", "1"]
    prompts = ["--prompts", tmp_path / "rows.jsonl"]
    code, out, err = command("generate", trained[0], *prompts, *options)
    assert (code, err) == (0, [])
    found = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in found] == ["memory"] * 2 + ["block"] * 2
    for row in found:
        assert len(row["tokens"]) == len(row["logprobs"]) == 4
        assert all(x < 0 for x in row["logprobs"])
        assert row["finish_reason"] == "length" and row["text"]
    assert found[0]["tokens"] != found[1]["tokens"]


def test_generate_reads_standard_input_and_prints_samples(trained, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("memory"))
    words = ["--prompt", "-", "--tokens", "2", "-n", "2"]
    code, out, _ = command("generate", trained[0], *words)
    first, second = out.split("\n---\n")
    assert code == 0 and first.startswith("memory") and second.startswith("memory")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a", "--logprobs"], "logprobs needs --json"),
        (["--prompt", "a", "-n", "2", "--temperature", "0"], "needs a temperature"),
        (["--prompt", "a", "-n", "0"], "n must be at least 1, got 0"),
        (["--prompts", "rows.csv"], "must be a .txt or .jsonl file, got rows.csv"),
    ],
)
def test_output_that_cannot_be_is_refused(words, message):
    assert message in refused("generate", "no-model", *words)


@pytest.mark.slow
def test_the_embedded_corpus_trains_without_a_download(train, tmp_path):
    code, out, err = command(*train(tmp_path / "run", source="embedded"))
    assert (code, err) == (0, []) and "finished at step 2" in out


def test_data_lists_documents_with_their_tokens(texts, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(texts / "cache"))
    code, out, err = command(
        "data", "--source", f"folder:{texts}", "--tokenizer", "bytes"
    )
    assert (code, err) == (0, [])
    for size in ("156", "182", "208", "234"):
        assert size in out
    for split in ("train", "validation", "test"):
        assert split in out


@pytest.mark.parametrize(
    "words,expected",
    [
        ([], ["train", "eval", "generate", "data"]),
        (["train"], ["--run-dir", "elastic-tiny", "transformer-400m"]),
        (
            ["train", "elastic-tiny"],
            ["mechanisms.2.order", "N, coefficients", "--loop.steps", "--mesh.fsdp"],
        ),
        (["eval"], ["--split", "--context-length", "--sampling"]),
        (["generate"], ["--prompt", "--temperature", "--top-p"]),
        (["data"], ["--source", "--tokenizer"]),
    ],
)
def test_every_command_explains_itself(words, expected):
    code, out, err = command(*words, "--help")
    assert (code, err) == (0, [])
    for option in expected:
        assert option in out


def test_unknown_preset_names_the_nearest():
    assert "did you mean 'elastic-tiny'?" in refused("train", "elastic-tinny")


def test_option_of_another_mechanism_is_refused():
    line = refused("train", "elastic-tiny", "--model.mechanisms.0.order", "4")
    assert "--model.mechanisms.0.order" in line


@pytest.mark.parametrize(
    "words,expected",
    [
        (["trian"], "trian"),
        ([], "train"),
        (["train"], "quick or transformer-tiny"),
        (["train", "elastic-tiny", "--loop.steps", "many"], "--loop.steps"),
        (
            ["train", "elastic-tiny", "--loop.steps", "0"],
            "steps must be at least 1, got 0",
        ),
        (["train", "elastic-tiny", "--data.mode", "streamed"], "step.carry_memory"),
        (["train", "elastic-tiny", "--model.vocab-size", "9"], "the tokenizer's 4096"),
        (["train", "elastic-tiny", "--data.source", "nowhere"], "nowhere"),
        (["train", "elastic-tiny", "--data.source", "hf:name"], "pip install datasets"),
        (
            ["train", "elastic-tiny", "--loop.steps", f"{2**31}"],
            "steps must be at most",
        ),
        (["train", "elastic-tiny", "--model.num-layers", "2000"], "num_layers must be"),
        (["train", "elastic-tiny", "--seed", f"{2**70}"], "seed must be in [0, 2**32)"),
        (["generate", "/run", "--prompt", "a", "--tokens", f"{10**12}"], "at most"),
        (["generate", "/run", "--prompt", "a", "--seed", f"{2**70}"], "[0, 2**32)"),
        (["generate", "/run", "--prompt-file", "/dev/zero"], "more than 134,217,728"),
        (["train", "elastic-tiny", "--mesh.fsdp", "3"], "does not fit 1 devices"),
        (["eval", "/no/such/run"], "/no/such/run is neither a folder nor a GGUF file"),
        (["generate", "/no/such/run", "--prompt", "a"], "hub is named owner/name"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, expected, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    if words[1:] and words[0] == "train":
        words = ["train", "--run-dir", str(tmp_path), *words[1:]]
    assert expected in refused(*words)


@pytest.mark.parametrize(
    "text,expected",
    [
        ("notes", "is not JSON"),
        ('{"a": 1}', "model_type is missing"),
        ('{"loop": 1}', "config.loop"),
        ("[]", "must be a JSON object"),
    ],
)
def test_folder_with_other_content_is_refused(text, expected, tmp_path):
    (tmp_path / "config.json").write_text(text)
    assert expected in refused("eval", tmp_path)


def test_a_run_without_a_checkpoint_is_refused(trained, tmp_path):
    config = (trained[0] / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    assert "has no checkpoint yet" in refused("eval", tmp_path)


def test_error_messages_are_shortened():
    line = refused("train", "elastic-tiny", "--data.source", "x" * 1_000_000)
    assert len(line) < 4000
