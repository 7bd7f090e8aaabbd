"""The run that fine-tunings start from."""

from pathlib import Path

from memjax.mechanisms import AttentionConfig
from memjax.models import ModelConfig
from memjax.training import LoopConfig, pretrain


def backbone_run(source: str, cache: Path) -> pretrain.RunConfig:
    """One update of one layer, on bytes."""
    return pretrain.RunConfig(
        model=ModelConfig(
            mechanisms=(AttentionConfig(8, 2, 1, 4, capacity=64),),
            num_layers=1,
            vocab_size=256,
            model_dim=8,
            hidden_dim=8,
            dtype="float32",
            remat=False,
        ),
        data=pretrain.DataConfig(
            source, "bytes", context_length=16, batch_size=2, cache_dir=cache
        ),
        loop=LoopConfig(steps=1, save_every=1, log_every=1),
    )
