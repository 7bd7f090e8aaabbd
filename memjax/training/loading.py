"""Load any model by its name.

    loaded = memjax.load("HuggingFaceTB/SmolLM2-135M")    # a model of the hub
    loaded = memjax.load("model.gguf")                    # a file, or a folder
    loaded = memjax.load("runs/one")                      # a run

Nothing that is read is executed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import jax

from memjax.buckets.bucket import as_path
from memjax.checks import require_known
from memjax.config_io import AnyPath
from memjax.data import Tokenizer
from memjax.models.checkpoints import own_format
from memjax.models.checkpoints.hf import hub, peft
from memjax.models.checkpoints.hf.fields import read_entry
from memjax.models.checkpoints.hf.safetensors_folder import CONFIG, read_model_config
from memjax.models.checkpoints.license import read_license
from memjax.models.checkpoints.pretrained import Progress, read_pretrained, unseen
from memjax.models.checkpoints.text_interface import TextInterface, read_text_interface
from memjax.models.hmt import checkpoint as hmt_checkpoint
from memjax.models.language_model.config import Dtype
from memjax.models.mplus.checkpoints import checkpoint as mplus_checkpoint
from memjax.training.finetune.run import later_stage, load_model
from memjax.training.launch import Run
from memjax.training.run_folder import CHECKPOINTS


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model and all that came with it.

    Attributes:
        model: a `LanguageModel`, `HMT`, `MPlus` or `ReReadWindow`.
        text: tokenizer, chat template, and the makers' sampling.
        origin: source of the model, or of its backbone: a path, or
            "owner/name@commit" of the hub; empty if a run began with random parameters.
        run: the configuration of the run that trained it; None without one.
        license: `license`, `license_name` and `license_link`, as the card or the GGUF
            file of the model, or of its backbone, gives them; empty if unknown.
    """

    model: Any
    text: TextInterface
    origin: str
    run: Run | None = None
    license: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def tokenizer(self) -> Tokenizer:
        """Encodes and decodes.

        Raises:
            ValueError: if the model has none.
        """
        if self.text.tokenizer is None:
            raise ValueError(
                f"{self.origin} has no tokenizer: put its tokenizer.json beside it"
            )
        return self.text.tokenizer


def load(
    name: AnyPath | str,
    *,
    base: AnyPath | str | None = None,
    dtype: Dtype | None = None,
    param_dtype: Dtype | None = None,
    with_tokenizer: bool = True,
    for_generation: bool = False,
    progress: Progress = unseen,
) -> Loaded:
    """Loads a model with its tokenizer.

    Args:
        name: a model of the hub, "owner/name" or "owner/name/file.gguf", at its newest
            commit or the one behind an "@"; a folder of `config.json` and safetensors,
            of HMT and M+ too; a GGUF file; or the folder of a run, whose newest
            checkpoint is loaded. A folder with a LoRA of PEFT is loaded onto its base,
            frozen: `plain()` of the model merges both.
        base: of a LoRA of PEFT, as `name`; None is the one that it names.
        dtype: of the activations; None is a run's own, the saved one of models that
            memjax saved in its own format, and float32 of others.
        param_dtype: of the parameters of a model without a memory. None is float32;
            with dtype="bfloat16" it is bfloat16 for what the file has in bfloat16 or
            quantized, without a copy in float32 of more than a tensor. Decays of
            recurrent memories and skips around them are as the file has them.
        with_tokenizer: False does not read it, which helps if its kind is unknown.
        for_generation: a model that is not to be trained or saved. On a CPU, in
            float32, the matrices of a model without a memory then stay in the bits of
            their file, in blocks of 4 or 8 bits (Q4_0, Q4_1, Q8_0), bfloat16 or
            float16, and are widened inside the products; elsewhere it changes nothing.
        progress: called with each tensor: how many were read, and how many there are.

    Raises:
        ValueError: naming file, tensor, what was expected and found, if the files are
            not sound, describe a model that is not built here, or are of different
            models; saying where it was looked for, if there is no such model; on an
            unknown dtype, or one for a run; without an optional package that is needed.
    """
    for option, chosen in {"dtype": dtype, "param_dtype": param_dtype}.items():
        require_known(option, chosen, (None, *get_args(Dtype)))
    path = as_path(name)
    if is_run(path):
        _require_none(f"the run {path}", base=base)
        _require_none(f"the run {path}", dtype=dtype, param_dtype=param_dtype)
        run, model = load_model(path)
        folder = later_stage(path) or path
        terms = read_license(folder)
        return Loaded(model, run.text(folder), run.origin, run, terms)
    found = hub.locate(name)
    options: Any = {"dtype": dtype, "param_dtype": param_dtype}
    options |= {"with_tokenizer": with_tokenizer, "progress": progress}
    if hub.is_adapter(found.path):
        return _load_adapter(found, base, **options)
    _require_none(f"{found.origin}, which is no LoRA of PEFT", base=base)
    in_float32 = param_dtype is None and dtype != "bfloat16"
    on_cpu = jax.default_backend() == "cpu"
    as_stored = for_generation and in_float32 and on_cpu
    return _load_whole(found, as_stored=as_stored, **options)


def _load_whole(
    found: hub.Location,
    *,
    dtype: Dtype | None,
    param_dtype: Dtype | None,
    with_tokenizer: bool,
    progress: Progress,
    as_stored: bool = False,
) -> Loaded:
    """A model that is no run, with the weights of its own folder or file."""
    is_folder = (found.path / CONFIG).is_file()
    config = read_model_config(found.path) if is_folder else {}
    loaders = {
        hmt_checkpoint.CONFIG_KEY: hmt_checkpoint.load_hmt,
        mplus_checkpoint.RECORD: mplus_checkpoint.load_mplus,
    }
    loader = next((load for key, load in loaders.items() if key in config), None)
    if loader is None:
        model, text, origin, terms = read_pretrained(
            found,
            dtype=dtype,
            param_dtype=param_dtype,
            with_tokenizer=with_tokenizer,
            as_stored=as_stored,
            progress=progress,
        )
        return Loaded(model, text, origin, license=terms)
    _require_none(f"the memory model {found.origin}", param_dtype=param_dtype)
    hub.fetch_weights(found)
    model = loader(found.path, dtype=dtype or "float32")
    text = read_text_interface(
        found.path, model.vocab_size, with_tokenizer=with_tokenizer
    )
    origin = str(config.get(own_format.ORIGIN) or found.origin)
    return Loaded(model, text, origin, license=read_license(found.path))


def _load_adapter(
    found: hub.Location, name: AnyPath | str | None, **options: Any
) -> Loaded:
    """A LoRA of PEFT on the model of a name, or on the one that it names itself."""
    config = peft.read_adapter_config(found.path)
    if name is None:
        name = str(read_entry(config, "base_model_name_or_path", str)) or "''"
        if config.get("revision") and not as_path(name).exists():
            name = f"{name}@{config['revision']}"
    try:
        base = _load_base(found, name, **options)
    except ValueError as error:
        raise ValueError(f"{found.origin}: its base, or base=...: {error}") from error
    if base.model.backbone is not base.model:
        raise ValueError(
            f"base must be a language model without a memory for {found.origin}, "
            f"got {name}"
        )
    hub.fetch_weights(found, adapter=True)
    model = peft.load_adapter(base.model, found.path)
    text, with_tokenizer = base.text, options["with_tokenizer"]
    own = read_text_interface(
        found.path, model.vocab_size, with_tokenizer=with_tokenizer
    )
    if own.tokenizer is not None:
        text = dataclasses.replace(
            own,
            chat_template=own.chat_template or text.chat_template,
            generation=text.generation,
            source={**text.source, **own.source},
            config_ids=text.config_ids,
        )
    terms = read_license(found.path) or base.license
    return Loaded(model, text, base.origin, license=terms)


def _load_base(found: hub.Location, name: AnyPath | str, **options: Any) -> Loaded:
    """The model of a name, which may be in the folder of its LoRA."""
    if not is_run(as_path(name)) and hub.is_adapter(other := hub.locate(name).path):
        if other.resolve() != found.path.resolve():
            raise ValueError(f"{name} is a LoRA of PEFT itself")
        return _load_whole(found, **options)
    return load(name, **options)


def _require_none(model: str, **options: AnyPath | str | None) -> None:
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{option} must be None for {model}, got {value!r}")


def is_run(path: AnyPath) -> bool:
    """Whether a folder is of a run, trained from scratch or fine-tuned."""
    if (path / CHECKPOINTS).is_dir() or later_stage(path) is not None:
        return True
    # Before its first checkpoint a run has only its configuration.
    file = path / CONFIG
    text = file.read_bytes().decode("utf-8", "replace") if file.is_file() else ""
    return '"loop"' in text and '"model_type"' not in text
