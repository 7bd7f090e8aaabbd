"""The commands `memjax import` and `memjax export`."""

from pathlib import Path
from typing import Annotated

import tyro

from memjax.data import load_tokenizer
from memjax.data.documents.tokenizer import JsonTokenizer
from memjax.models.checkpoints import own_format
from memjax.models.checkpoints import pretrained as interop
from memjax.models.checkpoints.safetensors_write import require_free
from memjax.models.language_model.config import Dtype
from memjax.training import pretrain
from memjax.training.finetune import finetune
from memjax.training.finetune.run import is_finetuned, later_stage
from memjax.training.run_folder import CHECKPOINTS

#: Who reads a folder, by its model type; transformers reads the others.
READERS = {
    "hmt": "under HMT's official names; load_hmt loads it",
    "mplus": "under M+'s official names; load_mplus loads it",
    own_format.MODEL_TYPE: "memjax loads it; transformers has no such model",
}


def import_model(
    source: Annotated[Path, tyro.conf.Positional],
    destination: Annotated[Path, tyro.conf.Positional],
    dtype: Dtype = "float32",
    tokenizer: bool = True,
) -> int:
    """Turns a pretrained model into a folder that loads quickly, here and elsewhere.

    Args:
        source: a Hugging Face folder of safetensors, or a GGUF file.
        destination: folder that is written; must not exist, or be empty.
        dtype: of the saved numbers; float32 holds all that the source held.
        tokenizer: take the tokenizer too; --no-tokenizer for one that cannot be read.
    """
    model_type = interop.convert(
        source, destination, dtype=dtype, with_tokenizer=tokenizer
    )
    return _report(model_type, destination)


def export_model(
    source: Annotated[Path, tyro.conf.Positional],
    destination: Annotated[Path, tyro.conf.Positional],
    dtype: Dtype = "float32",
) -> int:
    """Writes a trained model as a folder of safetensors, which transformers loads.

    Args:
        source: a run's folder, or a folder that `memjax import` or `export` wrote. HMT
            and M+ go under the names of their official programs.
        destination: folder that is written; must not exist, or be empty.
        dtype: of the saved numbers.
    """
    if not (source / CHECKPOINTS).is_dir() and not later_stage(source):
        return _report(interop.convert(source, destination, dtype=dtype), destination)
    # Before the model is read, which may take minutes.
    require_free(destination)
    if is_finetuned(source):
        described, model = finetune.load(source)
        save, name = described.config.export, described.tokenizer
    else:
        config, model = pretrain.load_model(source)
        save, name = interop.save_pretrained, config.data.tokenizer
    tokenizer = load_tokenizer(name)
    known = isinstance(tokenizer, JsonTokenizer)
    file = tokenizer.backend.to_str().encode() if known else None
    if not known:
        print(f"no tokenizer.json: there is none of {name!r}")
    return _report(save(model, destination, file, dtype=dtype), destination)


def _report(model_type: str, folder: Path) -> int:
    readers = READERS.get(model_type, "memjax and transformers load it")
    print(f"wrote {folder} ({model_type}): {readers}")
    return 0
