"""A corpus of a few words in all splits and kinds, and a backbone for it."""

import numpy as np
import pytest

from memjax.mechanisms import AttentionConfig
from memjax.models import ModelConfig
from memjax.training import LoopConfig, pretrain
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
    mechanism = AttentionConfig(16, 2, 1, 8, capacity=1024)
    run = pretrain.RunConfig(
        model=ModelConfig(
            mechanisms=(mechanism,),
            num_layers=2,
            vocab_size=4096,
            model_dim=16,
            hidden_dim=16,
            dtype="float32",
            remat=False,
        ),
        data=pretrain.DataConfig(source, "bpe4k", context_length=16, batch_size=2),
        loop=LoopConfig(steps=1, save_every=1),
    )
    with idle_updates():
        pretrain.train(run, backbone)
    return source, backbone
