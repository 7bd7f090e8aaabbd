"""A small training run of several processes, as `memjax train` makes it."""

from pathlib import Path
from typing import Any

import jax

from memjax.mechanisms import ElasticMemoryConfig
from memjax.models import ModelConfig
from memjax.training.config import DataConfig, LoopConfig, RunConfig
from memjax.training.distributed.sharding import MeshConfig
from memjax.training.pretrain import train
from memjax.training.step import StepConfig

MODEL = ModelConfig(
    mechanisms=(ElasticMemoryConfig(16, 4, 2, 4, block=4, order=4),),
    num_layers=1,
    vocab_size=256,
    model_dim=16,
    hidden_dim=32,
    dtype="float32",
    remat=False,
)


def main(run_dir: Path, options: dict[str, Any]) -> int:
    """Trains on the texts in `options["texts"]`; returns the exit code."""
    if options["processes"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{options['port']}"
        jax.distributed.initialize(address, options["processes"], options["process"])
    texts = Path(options["texts"])
    loop = {"steps": 40, "save_every": 3, "log_every": 1} | options.get("loop", {})
    # Streams carry a memory for each batch element: it must find its element again.
    config = RunConfig(
        model=MODEL,
        data=DataConfig(
            source=f"folder:{texts}",
            tokenizer="bytes",
            mode="streamed",
            context_length=6,
            batch_size=8,
            cache_dir=texts.parent / "cache",
        ),
        step=StepConfig(carry_memory=True),
        loop=LoopConfig(**loop),
        mesh=MeshConfig(**options.get("mesh", {})),
    )
    code = train(config, run_dir).exit_code
    if options["processes"] > 1:
        # A fork ends without what is registered for a program's exit.
        jax.distributed.shutdown()
    return code
