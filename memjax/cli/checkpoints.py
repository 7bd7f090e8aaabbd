"""The commands `memjax import` and `memjax export`."""

from pathlib import Path
from typing import Annotated

import tyro

from memjax.data import load_tokenizer
from memjax.data.documents.tokenizer import JsonTokenizer
from memjax.models.checkpoints import own_format
from memjax.models.checkpoints import pretrained as interop
from memjax.models.checkpoints.safetensors_folder import require_free
from memjax.models.hmt.checkpoint import save_hmt
from memjax.models.hmt.model import HMT
from memjax.models.language_model.config import Dtype
from memjax.models.mplus.checkpoint import save_mplus
from memjax.models.mplus.model import MPlus
from memjax.training.finetune import finetune
from memjax.training.finetune.run import later_stage
from memjax.training.run_folder import CHECKPOINTS


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
    require_free(destination)
    config, model = finetune.load_model(source)
    tokenizer = load_tokenizer(config.data.tokenizer)
    known = isinstance(tokenizer, JsonTokenizer)
    file = tokenizer.backend.to_str().encode() if known else None
    if not known:
        print(f"no tokenizer.json: there is none of {config.data.tokenizer!r}")
    if isinstance(model, HMT):
        save_hmt(model, destination, file, dtype=dtype)
        print(f"wrote {destination} under HMT's official names: load_hmt loads it")
        return 0
    if isinstance(model, MPlus):
        save_mplus(model, destination, file, dtype=dtype)
        print(f"wrote {destination} under M+'s official names: load_mplus loads it")
        return 0
    model_type = interop.save_pretrained(model, destination, file, dtype=dtype)
    return _report(model_type, destination)


def _report(model_type: str, folder: Path) -> int:
    readers = "memjax and transformers load it"
    if model_type == own_format.MODEL_TYPE:
        readers = "memjax loads it; transformers has no such model"
    print(f"wrote {folder} ({model_type}): {readers}")
    return 0
