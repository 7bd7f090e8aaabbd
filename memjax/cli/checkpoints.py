"""The commands `memjax import` and `memjax export`."""

from pathlib import Path
from typing import Annotated

import tyro

import memjax
from memjax.buckets.bucket import Bucket, as_path
from memjax.buckets.local_copies import written_here
from memjax.buckets.writing import require_free
from memjax.cli.texts import opening
from memjax.config_io import AnyPath
from memjax.data.documents.tokenizer import JsonTokenizer
from memjax.models.checkpoints import own_format
from memjax.models.checkpoints.hf.peft import save_adapter
from memjax.models.checkpoints.license import described
from memjax.models.hmt import saving as hmt_saving
from memjax.models.language_model.config import Dtype
from memjax.models.mplus.checkpoints import saving as mplus_saving
from memjax.status import Status, say
from memjax.training.finetune.model_card import ADAPTER, model_card

#: Programs that load a folder, by its model type; transformers loads the others.
READERS = {
    hmt_saving.MODEL_TYPE: "under HMT's official names; memjax loads it, and "
    "transformers refuses it",
    mplus_saving.MODEL_TYPE: "under M+'s official names; memjax loads it, and "
    "transformers refuses it",
    own_format.MODEL_TYPE: "memjax loads it; transformers has no such model",
}


def import_model(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    destination: Annotated[Path, tyro.conf.Positional],
    dtype: Dtype = "float32",
    tokenizer: bool = True,
) -> int:
    """Converts a pretrained model to a folder of safetensors, which loads quickly.

    Args:
        source: folder of a run or of safetensors, a GGUF file, or a model of the hub
            ("owner/name", "owner/name/file.gguf", with "@revision").
        destination: folder to write; must not exist, or be empty.
        dtype: of the saved tensors; float32 represents all others exactly.
        tokenizer: convert the tokenizer too; --no-tokenizer if it cannot be read.
    """
    place = as_path(destination)
    _require_empty(place)
    with (
        Status(f"converting {source}", "tensors") as progress,
        written_here(place) as folder,
    ):
        loaded = memjax.load(source, with_tokenizer=tokenizer, progress=progress)
        command = ["import", source, str(place)]
        card = model_card(loaded, None, loaded.model.model_type, command)
        written = loaded.model.save(
            folder, loaded.text, origin=loaded.origin, readme=card, dtype=dtype
        )
    return _report(written, place, loaded)


def export_model(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    destination: Annotated[Path, tyro.conf.Positional],
    dtype: Dtype = "float32",
    backbone_only: bool = False,
    adapter_only: bool = False,
) -> int:
    """Exports a model as a folder of safetensors; transformers loads it if it can.

    The model card, README.md, describes its origin. HMT and M+ have the tensor names of
    their official programs, and transformers refuses them.

    Args:
        source: as for `memjax import`.
        destination: folder to write; must not exist, or be empty.
        dtype: of the saved tensors.
        backbone_only: export the backbone without its memory, adapters merged.
        adapter_only: export the backbone's LoRA alone, for PEFT.
    """
    # Before the model is read, which may take minutes.
    place = as_path(destination)
    _require_empty(place)
    if adapter_only and (backbone_only or dtype != "float32"):
        raise ValueError("--adapter-only takes neither --backbone-only nor --dtype")
    opened = opening.load(source)
    command = ["export", source, str(place)]
    if adapter_only:
        card = model_card(opened, None, ADAPTER, [*command, "--adapter-only"])
        with written_here(place) as folder:
            model, base = opened.model.backbone, opened.origin
            save_adapter(model, folder, base=base, readme=card)
        print(f"wrote {place}: PEFT and memjax load it onto {base}")
        _say_license(opened)
        return 0
    model = opened.model.plain() if backbone_only else opened.model
    command += ["--backbone-only"] if backbone_only else []
    # The scores of a run are those of the model with its memory.
    run_dir = None if backbone_only or opened.run is None else as_path(source)
    card = model_card(opened, run_dir, model.model_type, command)
    with Status(f"writing {place}"), written_here(place) as folder:
        model.save(folder, opened.text, origin=opened.origin, readme=card, dtype=dtype)
    if not isinstance(opened.text.tokenizer, JsonTokenizer):
        print("no tokenizer.json: the model has none")
    return _report(model.model_type, place, opened)


def _require_empty(destination: AnyPath) -> None:
    if isinstance(destination, Path):
        require_free(destination)
    elif names := list(Bucket(destination).entries()):
        raise ValueError(f"{destination} must be empty, it has {names[0]}")


def _report(written: str, folder: AnyPath, loaded: memjax.Loaded) -> int:
    readers = READERS.get(written, "memjax and transformers load it")
    print(f"wrote {folder} ({written}): {readers}")
    _say_license(loaded)
    return 0


def _say_license(loaded: memjax.Loaded) -> None:
    if loaded.origin and not loaded.license:
        say(f"notice: licence {described(loaded.license)}", 8)
