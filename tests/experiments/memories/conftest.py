"""A corpus of a few words in all splits and kinds, and a backbone for it."""

import numpy as np
import pytest

from memjax.training import LoopConfig, pretrain
from tests import tiny
from tests.training.idle import idle_updates


@pytest.fixture(name="small")
def _small(tmp_path):
    """Source of the corpus, five documents a kind, and folder of the backbone."""
    words = np.array(["memory", "window", "block", "state", "It rained."])
    rng = np.random.default_rng(0)
    for split in ("train", "validation", "test"):
        for kind in ("proofs", "code", "prose"):
            for i in range(5):
                file = tmp_path / "corpus" / split / kind / f"{i}.txt"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(" ".join(rng.choice(words, 60)))
    source, backbone = f"folder:{tmp_path}/corpus", tmp_path / "backbone"
    run = pretrain.RunConfig(
        model=tiny.make_config(4096, capacity=1024),
        data=pretrain.DataConfig(source, "bpe4k", context_length=16, batch_size=2),
        loop=LoopConfig(steps=1, save_every=1),
    )
    with idle_updates():
        pretrain.train(run, backbone)
    return source, backbone
