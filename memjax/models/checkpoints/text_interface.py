"""Text interface of a pretrained model: tokenizer, chat template, sampling.

`tokenizer.json`, the chat template, the ids that end a text, and how its makers draw
from it. All of it is data: a chat template is kept as text and not run here.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from memjax.config_io import AnyPath
from memjax.data.documents.tokenizer import JsonTokenizer, Tokenizer, parse_tokenizer
from memjax.models.checkpoints.hf.safetensors_file import read_object
from memjax.models.checkpoints.hf.safetensors_folder import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    read_inside,
)


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """The makers' sampling settings; None and () where they give none.

    Attributes:
        eos_ids: tokens that end a text or a turn; all are below the vocabulary's size.
        bos_id: the token that begins a text.
        pad_id: the token that fills up short rows.
        temperature: above 0, or 0 for the most likely token.
        top_k: tokens that are drawn from, at least 1.
        top_p: share of the probability that is drawn from, in (0, 1].
    """

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    @property
    def token_ids(self) -> dict[str, Any]:
        """The entries of a `config.json`; null where there is none."""
        ids = list(self.eos_ids)
        return {
            "bos_token_id": self.bos_id,
            "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
            "pad_token_id": self.pad_id,
        }


@dataclasses.dataclass(frozen=True)
class TextInterface:
    """Tokenizer, chat template and sampling settings of a model.

    Attributes:
        tokenizer: encodes and decodes; None if there is none.
        chat_template: Jinja's source of how turns become a prompt; None without one.
        generation: see `GenerationConfig`.
    """

    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    generation: GenerationConfig = GenerationConfig()

    def files(self, readme: str | None = None) -> dict[str, bytes]:
        """The files that Hugging Face's libraries read it from, by their names.

        `readme` becomes the model card.
        """
        found = {} if readme is None else {"README.md": readme.encode()}
        if isinstance(self.tokenizer, JsonTokenizer):
            found[TOKENIZER] = self.tokenizer.serialised
            found[TOKENIZER_CONFIG] = _json(_tokenizer_config(self))
        if self.chat_template is not None:
            found[CHAT_TEMPLATE] = self.chat_template.encode()
        if record := _generation_record(self.generation):
            found[GENERATION] = _json(record)
        return found


def read_text_interface(
    folder: AnyPath, vocab_size: int, *, with_tokenizer: bool = True
) -> TextInterface:
    """Reads the text interface of a Hugging Face folder.

    Args:
        folder: has `config.json`.
        vocab_size: of the model.
        with_tokenizer: False does not read the tokenizer.

    Raises:
        ValueError: if a file is not sound, or has ids beyond the vocabulary.
    """
    config = _read_object(folder, CONFIG)
    settings = _read_object(folder, TOKENIZER_CONFIG)
    drawing = _read_object(folder, GENERATION)
    file = read_inside(folder, TOKENIZER) if with_tokenizer else None
    tokenizer = None
    if file is not None:
        tokenizer = fitting_tokenizer(file, vocab_size, str(folder / TOKENIZER))
    ids = {
        name: _first(drawing.get(name), config.get(name))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    ends = ids["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    # The tokenizer's own ends a turn in many chat models, whose generation_config.json
    # names the end of a document alone.
    ends = [_token_id(tokenizer, settings.get("eos_token")), *ends]
    generation = generation_config(
        [end for end in ends if end is not None],
        ids["bos_token_id"],
        ids["pad_token_id"],
        _sampling(drawing),
        vocab_size,
        str(folder),
    )
    return TextInterface(tokenizer, _chat_template(folder, settings), generation)


def generation_config(
    eos_ids: list[Any],
    bos_id: Any,
    pad_id: Any,
    sampling: Mapping[str, Any],
    vocab_size: int,
    where: str,
) -> GenerationConfig:
    """A `GenerationConfig` of values from a file, each checked.

    Args:
        eos_ids: may name one id twice.
        bos_id: None is none.
        pad_id: None is none; one beyond the vocabulary, as Llama 2's -1, is none too.
        sampling: any of temperature, top_k and top_p.
        vocab_size: of the model.
        where: what an error calls the file.

    Raises:
        ValueError: naming the value, if it is not of its range.
    """
    for name, ids in (("eos_token_id", eos_ids), ("bos_token_id", [bos_id])):
        for found in ids:
            if found is not None and not _is_id(found, vocab_size):
                raise ValueError(
                    f"{where}: {name} must be in [0, {vocab_size}), got {found!r}"
                )
    allowed = {
        "temperature": lambda value: value >= 0,
        "top_k": lambda value: value >= 0 and value % 1 == 0,
        "top_p": lambda value: 0 < value <= 1,
    }
    for name, value in sampling.items():
        if type(value) not in (int, float) or not allowed[name](value):
            raise ValueError(f"{where}: {name} is out of its range, got {value!r}")
    temperature, top_p = sampling.get("temperature"), sampling.get("top_p")
    return GenerationConfig(
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        bos_id=bos_id,
        pad_id=pad_id if _is_id(pad_id, vocab_size) else None,
        temperature=None if temperature is None else float(temperature),
        # 0 is no bound in Hugging Face's files.
        top_k=int(sampling.get("top_k") or 0) or None,
        top_p=None if top_p is None else float(top_p),
    )


def fitting_tokenizer(serialised: bytes, vocab_size: int, where: str) -> JsonTokenizer:
    """The tokenizer of a model with `vocab_size` tokens.

    Special tokens beyond the vocabulary are taken out: the text models of Gemma 3 have
    a token for images in their tokenizer and no parameters for it. Fewer tokens than
    the model has are right: checkpoints pad their vocabulary.

    Raises:
        ValueError: if it is not a tokenizer, or has other tokens beyond the
            vocabulary, and so belongs to another model.
    """
    tokenizer = parse_tokenizer(serialised, where)
    if tokenizer.vocab_size <= vocab_size:
        return tokenizer
    record = json.loads(serialised)
    listed = record.get("added_tokens") or []
    kept = [t for t in listed if t["id"] < vocab_size or not t.get("special")]
    if len(kept) < len(listed):
        record["added_tokens"] = kept
        tokenizer = parse_tokenizer(_json(record), where)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{where}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the "
            f"model a vocabulary of {vocab_size}: they are of different models"
        )
    return tokenizer


def _sampling(record: Mapping[str, Any]) -> dict[str, Any]:
    """Temperature, top_k and top_p of a `generation_config.json`."""
    if record.get("do_sample") is False:
        return {"temperature": 0.0}
    names = ("temperature", "top_k", "top_p")
    return {name: record[name] for name in names if record.get(name) is not None}


def _generation_record(generation: GenerationConfig) -> dict[str, Any]:
    """The content of a `generation_config.json`; empty if nothing is known."""
    record = generation.token_ids
    if generation.temperature == 0:
        record["do_sample"] = False
    else:
        drawn = {n: getattr(generation, n) for n in ("temperature", "top_k", "top_p")}
        if any(value is not None for value in drawn.values()):
            record |= drawn | {"do_sample": True}
    return {name: value for name, value in record.items() if value is not None}


def _tokenizer_config(text: TextInterface) -> dict[str, Any]:
    """The content of a `tokenizer_config.json`, for transformers."""
    # Without the class transformers builds the tokenizer of the model's family.
    record: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    generation, tokenizer = text.generation, text.tokenizer
    if not isinstance(tokenizer, JsonTokenizer):
        return record
    for name, index in (
        ("bos_token", generation.bos_id),
        # The tokenizer's own comes first: see `read_text_interface`.
        ("eos_token", next(iter(generation.eos_ids), None)),
        ("pad_token", generation.pad_id),
    ):
        token = None if index is None else tokenizer.backend.id_to_token(index)
        if token is not None:
            record[name] = token
    return record


def _chat_template(folder: AnyPath, settings: Mapping[str, Any]) -> str | None:
    """The template in a file of its own, or in `tokenizer_config.json`."""
    if (file := read_inside(folder, CHAT_TEMPLATE)) is not None:
        return file.decode()
    found = settings.get("chat_template")
    if isinstance(found, list):
        # Several by name, as one for tools; "default" is the plain one.
        named = {part.get("name"): part for part in found if isinstance(part, dict)}
        found = named.get("default", {}).get("template")
    if found is not None and not isinstance(found, str):
        raise ValueError(
            f"{folder / TOKENIZER_CONFIG}: chat_template must be text, got {found!r}"
        )
    return found


def _token_id(tokenizer: JsonTokenizer | None, token: Any) -> int | None:
    """The id of a token's text, which older files wrap in a record."""
    if isinstance(token, dict):
        token = token.get("content")
    if tokenizer is None or not isinstance(token, str):
        return None
    return tokenizer.backend.token_to_id(token)


def _read_object(folder: AnyPath, name: str) -> dict[str, Any]:
    file = read_inside(folder, name)
    return {} if file is None else read_object(file, str(folder / name))


def _is_id(value: Any, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=1, ensure_ascii=False).encode()
