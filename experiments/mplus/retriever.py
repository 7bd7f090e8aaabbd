"""A retriever for a trained M+, fitted by similarity.

    python -m experiments.mplus.retriever --model RUN --output retriever.safetensors

Queries and keys are fitted so that a query retrieves rows that resemble its tokens
(`memjax/training/mplus/retriever_fit.py`). Thirty documents of the run's own training
are enough. `--retriever` of `experiments.mplus.retrieval` takes the result.
"""

import dataclasses
from pathlib import Path
from typing import cast

import jax.numpy as jnp
import numpy as np
import tyro
from safetensors.numpy import load_file, save_file

from experiments.mplus import models
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.retriever import Retriever
from memjax.nnx.params import as_arrays
from memjax.training import run_data
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.run import read_run
from memjax.training.mplus.retriever_fit import start_by_similarity

PARTS = ("query", "key")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        model: run folder of an M+.
        output: file of the retriever.
        documents: number of the run's documents.
        ask: share of them that tell facts; the rest are running text.
        seed: of documents and draws, other than the run's.
    """

    model: Path
    output: Path
    documents: int = 32
    ask: float = 0.75
    seed: int = 1


def main(config: Config) -> None:
    """Fits a retriever and writes it."""
    model, tokenizer = models.load_trained("model", config.model)
    run = read_run(config.model)
    if not model.config.has_retriever:
        raise ValueError(
            f"model={str(config.model)!r} must be a run of M+ with a retriever"
        )
    documents = run_data.load_split(run, tokenizer, "train")
    bank = cast(MPlusStage, run.config).retriever_bank(
        model, documents, tokenizer, config.documents, config.seed, config.ask
    )
    save(start_by_similarity(model, bank), config.output)


def save(model: MPlus, file: Path) -> None:
    """Writes query and key of the retriever."""
    arrays = {
        f"{part}.{name}": np.asarray(array)
        for part in PARTS
        for name, array in as_arrays(getattr(model, part))._asdict().items()
    }
    save_file(arrays, file)


def read(model: MPlus, file: Path) -> MPlus:
    """The model with the retriever of a file.

    Raises:
        ValueError: if the file has other arrays than the model.
    """
    found, parts = load_file(file), {}
    for part in PARTS:
        new = {}
        for name, array in as_arrays(getattr(model, part))._asdict().items():
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
