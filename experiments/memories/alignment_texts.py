"""What one layer of a pretrained model reads and makes of texts, kept in files."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from memjax.models import LanguageModel, ModelConfig
from memjax.training.finetune.distillation import teacher_outputs


class Read(NamedTuple):
    """What the layer reads in the full model, and makes of it."""

    x: Float[np.ndarray, "R T D"]
    y: Float[np.ndarray, "R T D"]


def read(
    student: LanguageModel,
    teacher: ModelConfig,
    tokens: Int[np.ndarray, "R T"],
    file: Path,
) -> Read:
    """What full attention made of texts in a layer, from the file if it is there.

    Args:
        student: that `add_memory` made, with a memory in that layer alone.
        teacher: configuration of the model that it was made of.
        tokens: of the texts.
        file: where it is kept; it is there once all texts are read.
    """
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"part-{file.name}")
        rows, length = tokens.shape
        shape = (rows, 2, length, teacher.model_dim)
        found = np.lib.format.open_memmap(part, "w+", np.float32, shape)
        graph, variables = nnx.split(student)
        taught = jax.jit(
            lambda variables, one: teacher_outputs(
                nnx.merge(graph, variables), teacher, one
            )
        )
        for i, text in enumerate(tokens):
            one = taught(variables, jnp.asarray(text)[None])
            found[i] = np.stack([one["x"][0][0], one["y"][0][0]])
            print(f"{file.stem}: {i + 1} of {rows} texts", flush=True)
        found.flush()
        part.replace(file)
    stored = np.load(file, mmap_mode="r")
    return Read(stored[:, 0], stored[:, 1])


def batches(read: Read) -> Iterator[dict[str, list[Array]]]:
    """One text at a time, as `distillation_loss` takes it."""
    for x, y in zip(read.x, read.y, strict=True):
        yield {"x": [jnp.asarray(x[None])], "y": [jnp.asarray(y[None])]}
