"""What every fine-tuning starts from: texts, a backbone's run on them; interrupts."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memjax.training import pretrain as run
from memjax.training.finetune import finetune
from memjax.training.finetune.stage import SampleConfig
from tests.training.finetune.backbone import backbone_run
from tests.training.idle import idle_updates


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SampleConfig]:
    """The run of a backbone of one layer, and how its texts are read."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for i in range(6):
        words = rng.choice(["memory", "window", "block", "state"], size=60)
        (folder / f"{i}.txt").write_text(" ".join(words))
    source, cache = f"folder:{folder}", folder / "cache"
    config = backbone_run(source, cache)
    backbone = tmp_path_factory.mktemp("backbone")
    with idle_updates():
        run.train(config, backbone)
    return backbone, SampleConfig(source, batch_size=2, cache_dir=cache)


@contextlib.contextmanager
def interrupted(at: int) -> Iterator[list[Any]]:
    """Ctrl-C in the `at`-th step of what is trained here; gives what the steps took."""
    given, programs = [], finetune._programs

    def counted(described, mesh):
        create, step = programs(described, mesh)

        def stopped(state, batch):
            given.append(batch)
            if len(given) == at:
                raise KeyboardInterrupt
            return step(state, batch)

        return create, stopped

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(finetune, "_programs", counted)
        yield given


@pytest.fixture(name="interrupted", scope="session")
def _interrupted() -> Callable[[int], AbstractContextManager[list[Any]]]:
    return interrupted
