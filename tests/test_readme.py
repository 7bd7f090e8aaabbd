"""The README's example runs as printed, and its commands name what exists."""

import dataclasses
import functools
import pathlib
import re

import flax.nnx
import jax
import pytest

from memjax.cli.finetune import presets as finetune_presets
from memjax.mechanisms import TrellisConfig
from memjax.models import LanguageModel
from memjax.models.checkpoints.text_interface import TextInterface
from memjax.models.hmt.model import HMT
from memjax.models.language_model import presets
from memjax.nnx import Memory
from memjax.training.config import presets as training_presets
from tests import tiny

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


EXAMPLE, FLAX, PRETRAINED = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(example, scope):
    exec(compile(example, "README.md", "exec"), scope)


@pytest.fixture
def compiled(monkeypatch):
    """Compiles whole calls of the examples: eagerly each operation is a program."""
    for kind in (LanguageModel, HMT, Memory):
        monkeypatch.setattr(kind, "__call__", compile_method(kind.__call__))
    plain = TrellisConfig.build

    def build(config):
        mechanism = plain(config)
        return mechanism._replace(
            apply=jax.jit(mechanism.apply), step=jax.jit(mechanism.step)
        )

    monkeypatch.setattr(TrellisConfig, "build", build)


def compile_method(method):
    @functools.partial(jax.jit, static_argnums=0)
    def run(graph, variables, *args):
        return method(flax.nnx.merge(graph, variables), *args)

    @functools.wraps(method)
    def call(model, *args):
        return run(*flax.nnx.split(model), *args)

    return call


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch, compiled):
    scope = {}
    run(EXAMPLE, scope)
    assert scope["y"].shape == (2, 256)
    assert scope["logits"].shape == (2, 1000, 4096)

    run(FLAX, scope)
    assert scope["y"].shape == (2, 1000, 256)

    # A model of another size in the place of the one that is named.
    size = dataclasses.replace(presets.TINY, num_layers=1)
    tokenizer = tiny.tokenizer()
    config = size.model("attention", vocab_size=tokenizer.vocab_size)
    small = LanguageModel(config, key=jax.random.key(0))
    folder = tmp_path / "HuggingFaceTB" / "SmolLM2-135M"
    small.save(folder, TextInterface(tokenizer))
    monkeypatch.chdir(tmp_path)
    run(PRETRAINED.replace(" 100,", " 20,"), scope)
    assert scope["found"].tokens.shape == (1, 20)
    assert (tmp_path / "night").is_dir()


def test_commands_name_presets_that_exist():
    trained = re.findall(r"memjax train ([\w-]+)", README)
    finetuned = re.findall(r"memjax finetune ([\w-]+)", README)
    assert trained and set(trained) <= set(training_presets())
    assert finetuned and set(finetuned) <= {*finetune_presets()}


def test_files_named_in_the_readme_exist():
    root = pathlib.Path(__file__).parents[1]
    names = re.findall(r"`((?:memjax|experiments|kernels|tests)/[\w/.]+)`", README)
    names += re.findall(r"\]\(([\w/.-]+)\)", README)
    assert len(names) > 20
    assert all((root / name).exists() for name in names)
