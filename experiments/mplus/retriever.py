"""Fits a retriever for a trained M+: by similarity, or by training on many documents.

    python -m experiments.mplus.retriever --model RUN --output retriever.safetensors
    python -m experiments.mplus.retriever --model RUN --output fitted.safetensors \\
        --start model --documents 256 --steps 500

"similarity" fits queries and keys so that a query retrieves rows that resemble its
tokens; thirty documents are enough. `--steps` trains the retriever further: the
backbone reads each document once, and the retriever's loss is taken many times, of each
document's rows against those of all others of a batch
(`memjax/training/mplus/retriever_fit.py`). That retrieves more rows of a document, but
fewer of those that hold the answer. The documents are those of the run's training.
"""

import dataclasses
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from safetensors.numpy import load_file, save_file

from memjax.data import load_tokenizer
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.retriever import Retriever
from memjax.nnx.params import as_arrays
from memjax.training import run_data
from memjax.training.finetune import finetune
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.run import FinetuneRun
from memjax.training.mplus.retriever_fit import fit, start_by_similarity

PARTS = ("query", "key")


@dataclasses.dataclass(frozen=True)
class Config:
    """What is fitted, and how.

    Attributes:
        model: folder of a run of stage 3.
        output: file of the retriever.
        start: "similarity", or the "model"'s own retriever.
        documents: whose passes are run, in the run's batches.
        steps: of the fit; 0 leaves what it starts from.
        batch: documents of a step.
        learning_rate: the first, of Adam.
        ask: share of the documents that tell facts; the rest are running text.
        seed: of documents and draws, other than the run's.
    """

    model: Path
    output: Path
    start: Literal["similarity", "model"] = "similarity"
    documents: int = 32
    steps: int = 0
    batch: int = 16
    learning_rate: float = 2e-3
    ask: float = 0.75
    seed: int = 1

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError(f"steps must be at least 0, got {self.steps}")
        if not self.steps and self.start == "model":
            raise ValueError("steps must be above 0 with start='model', got 0")


def main(config: Config) -> None:
    """Collects, starts, fits, writes; prints the loss."""
    described, model = finetune.load_model(config.model)
    stage = getattr(described, "config", None)
    if (
        not isinstance(described, FinetuneRun)
        or not isinstance(stage, MPlusStage)
        or not isinstance(model, MPlus)
        or not model.config.has_retriever
    ):
        raise ValueError(
            f"model={str(config.model)!r} must be a run of M+ with a retriever"
        )
    tokenizer = load_tokenizer(described.data.tokenizer)
    documents = run_data.load_split(described, tokenizer, "train")
    bank = stage.retriever_bank(
        model, documents, tokenizer, config.documents, config.seed, config.ask
    )
    print(f"{len(bank.query_mask)} documents", flush=True)
    if config.start == "similarity":
        model = start_by_similarity(model, bank)
    if config.steps:
        model, losses = fit(
            model,
            bank,
            steps=config.steps,
            documents=config.batch,
            learning_rate=config.learning_rate,
            key=jax.random.key(config.seed),
        )
        for first in range(0, len(losses), 25):
            print(f"step {first + 1}: {np.mean(losses[first : first + 25]):.4f}")
    save(model, config.output)


def save(model: MPlus, file: Path) -> None:
    """Writes query and key of the retriever."""
    found = {part: as_arrays(getattr(model, part)) for part in PARTS}
    save_file(
        {
            f"{part}.{name}": np.asarray(array)
            for part, value in found.items()
            for name, array in value._asdict().items()
        },
        file,
    )


def read(model: MPlus, file: Path) -> MPlus:
    """The model with the retriever of a file.

    Raises:
        ValueError: if the file has other arrays than the model.
    """
    found, parts = load_file(file), {}
    for part in PARTS:
        old = as_arrays(getattr(model, part))._asdict()
        new = {}
        for name, array in old.items():
            given = found.pop(f"{part}.{name}", None)
            if given is None or given.shape != array.shape:
                raise ValueError(
                    f"retriever={str(file)!r}: {part}.{name} must be "
                    f"{list(array.shape)}, got "
                    f"{None if given is None else list(given.shape)}"
                )
            new[name] = jnp.asarray(given)
        parts[part] = Retriever(**new)
    if found:
        raise ValueError(f"retriever={str(file)!r} has more: {sorted(found)}")
    return model.replace(**parts)


if __name__ == "__main__":
    main(tyro.cli(Config))
