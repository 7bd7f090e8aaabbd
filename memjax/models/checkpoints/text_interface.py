"""Text interface of a pretrained model: tokenizer, chat template, sampling.

`tokenizer.json`, the chat template, the ids that end a text, and how its makers draw
from it. All of it is data: a chat template is kept as text and not run here. The files
of a Hugging Face folder are written again as they came.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from memjax.checks import listed, short
from memjax.config_io import AnyPath
from memjax.data.documents.tokenizer import JsonTokenizer, Tokenizer, parse_tokenizer
from memjax.models.checkpoints.hf import text_keys
from memjax.models.checkpoints.hf.generation_config import GenerationConfig
from memjax.models.checkpoints.hf.hybrids.files import text_config
from memjax.models.checkpoints.hf.safetensors_file import read_object
from memjax.models.checkpoints.hf.safetensors_folder import (
    CHAT_TEMPLATE,
    CHAT_TEMPLATES,
    CONFIG,
    GENERATION,
    LICENSES,
    SPECIAL_TOKENS_MAP,
    TEXT_FILES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    read_inside,
)

logger = logging.getLogger(__name__)

ID_NAMES = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class TextInterface:
    """Tokenizer, chat template and sampling settings of a model.

    Attributes:
        tokenizer: encodes and decodes; None if there is none.
        chat_template: Jinja's source of how turns become a prompt; None without one.
        generation: see `GenerationConfig`.
        special_tokens: texts by the names that a template has for them, such as
            "bos_token"; None is those of `generation`.
        source: files that all of it was read from, by name, and texts of licences,
            which `files` gives again; without them it makes new ones.
        config_ids: token ids of the `config.json` that was read.
    """

    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    generation: GenerationConfig = GenerationConfig()
    special_tokens: Mapping[str, str] | None = dataclasses.field(
        default=None, compare=False
    )
    source: Mapping[str, bytes] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    config_ids: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, compare=False
    )

    def template_tokens(self) -> Mapping[str, str]:
        """Texts of the special tokens, by their names."""
        if self.special_tokens is not None:
            return self.special_tokens
        tokenizer, ids = self.tokenizer, self.generation
        if not isinstance(tokenizer, JsonTokenizer):
            return {}
        named = {
            "bos_token": ids.bos_id,
            # The tokenizer's own comes first: see `read_text_interface`.
            "eos_token": next(iter(ids.eos_ids), None),
            "pad_token": ids.pad_id,
        }
        texts = {
            name: tokenizer.backend.id_to_token(index)
            for name, index in named.items()
            if index is not None
        }
        return {name: text for name, text in texts.items() if text is not None}

    def files(
        self, readme: str | None = None, *, ids_in_config: bool = False
    ) -> dict[str, bytes]:
        """The files that Hugging Face's libraries read it from, by their names.

        `readme` becomes the model card. `ids_in_config` is whether a `config.json` with
        the ids of `config_entries` goes with them.
        """
        found = {} if readme is None else {"README.md": readme.encode()}
        ids = self.config_entries()
        ids = {name: found for name, found in ids.items() if found is not None}
        if self.source:
            found |= self.source
            record = json.loads(found.get(GENERATION, b"{}"))
            if not ids_in_config and ids.keys() - record:
                found[GENERATION] = _json(ids | record)
            return found
        if isinstance(self.tokenizer, JsonTokenizer):
            found[TOKENIZER] = self.tokenizer.serialised
            # Without the class transformers builds the tokenizer of the model's family.
            kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
            found[TOKENIZER_CONFIG] = _json(kind | dict(self.template_tokens()))
        if self.chat_template is not None:
            found[CHAT_TEMPLATE] = self.chat_template.encode()
        if record := ids | dict(self.generation.record):
            found[GENERATION] = _json(record)
        return found

    def config_entries(self) -> dict[str, Any]:
        """The ids for a `config.json`: as they came, where they came from one."""
        return dict(self.config_ids) if self.source else self.generation.token_ids


def read_text_interface(
    folder: AnyPath, vocab_size: int, *, with_tokenizer: bool = True
) -> TextInterface:
    """Reads the text interface of a Hugging Face folder.

    What the files say and is not followed here is a warning of `logging` each.

    Args:
        folder: has `config.json`.
        vocab_size: of the model.
        with_tokenizer: False does not read the tokenizer.

    Raises:
        ValueError: if a file is not sound, or the tokenizer is of another model.
    """
    source = {name: read_inside(folder, name) for name in _text_files(folder)}
    if not with_tokenizer:
        source.pop(TOKENIZER, None)
    files = {name: file for name, file in source.items() if file is not None}

    def parsed(name):
        return read_object(files[name], str(folder / name)) if name in files else {}

    settings, record = parsed(TOKENIZER_CONFIG), parsed(GENERATION)
    config = read_inside(folder, CONFIG)
    config = {} if config is None else read_object(config, str(folder / CONFIG))
    # Ids of a model of pictures and text may be in the record of the text.
    config = dict(text_config(config)) | config
    tokenizer = None
    if TOKENIZER in files:
        tokenizer = fitting_tokenizer(
            files[TOKENIZER], vocab_size, str(folder / TOKENIZER)
        )
    tokens = _special_tokens(settings, parsed(SPECIAL_TOKENS_MAP), str(folder))
    ids = {name: _first(record.get(name), config.get(name)) for name in ID_NAMES}
    ends = ids["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    # The tokenizer's own ends a turn in many chat models, whose generation_config.json
    # names the end of a document alone.
    if tokenizer is not None and "eos_token" in tokens:
        ends = [tokenizer.backend.token_to_id(tokens["eos_token"]), *ends]
    ends = [end for end in ends if end is not None]
    bos, pad = (
        ids[name] if _is_id(ids[name], vocab_size) else None
        for name in ("bos_token_id", "pad_token_id")
    )
    known = [end for end in ends if _is_id(end, vocab_size)]
    wrong = [end for end in ends if end not in known]
    if ids["bos_token_id"] != bos:
        wrong.append(ids["bos_token_id"])
    notes = [f"no token of the model: {listed(wrong)}"] if wrong else []
    for name, found, neutral in (
        (TOKENIZER_CONFIG, settings, text_keys.TOKENIZER_NOTED),
        (GENERATION, record, text_keys.GENERATION_NOTED),
    ):
        for key, value in text_keys.effective(found, neutral).items():
            notes.append(f"{name}: {key}={short(value)} is not followed")
    if tokenizer is not None:
        if lacking := _lacking(settings, tokens, tokenizer, vocab_size, folder):
            where = f"not in {TOKENIZER}, or otherwise, and not added"
            notes.append(f"{TOKENIZER_CONFIG}: tokens {where}: {listed(lacking)}")
    for note in notes:
        logger.warning("%s: %s", folder, note)
    return TextInterface(
        tokenizer,
        _chat_template(files, settings, str(folder)),
        GenerationConfig(
            tuple(dict.fromkeys(known)),
            bos,
            pad,
            {key: value for key, value in record.items() if key not in ID_NAMES},
        ),
        special_tokens=tokens or None,
        source=files,
        config_ids={name: config[name] for name in ID_NAMES if name in config},
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
    # Without a dropout, which is reported once.
    record = json.loads(tokenizer.backend.to_str())
    added = record.get("added_tokens") or []
    kept = [t for t in added if t["id"] < vocab_size or not t.get("special")]
    if len(kept) < len(added):
        record["added_tokens"] = kept
        lost = listed(t["content"] for t in added if t not in kept)
        logger.warning("%s: tokens beyond the vocabulary are left out: %s", where, lost)
        tokenizer = parse_tokenizer(_json(record), where)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{where}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the "
            f"model a vocabulary of {vocab_size}: they are of different models"
        )
    return tokenizer


def _text_files(folder: AnyPath) -> list[str]:
    """Names of the files of `TEXT_FILES`, of licences and of further templates."""
    further = folder / CHAT_TEMPLATES
    inside = sorted(further.iterdir()) if further.is_dir() else []
    names = [f"{CHAT_TEMPLATES}/{file.name}" for file in inside]
    names = [name for name in names if name.endswith(".jinja")]
    return [*TEXT_FILES, *LICENSES, *names]


def _special_tokens(
    settings: Mapping[str, Any], legacy: Mapping[str, Any], where: str
) -> dict[str, str]:
    """Texts of the special tokens by name.

    `legacy` is the content of `special_tokens_map.json`, which transformers reads where
    `tokenizer_config.json` does not list the tokens itself.
    """
    record = dict(settings)
    if "added_tokens_decoder" not in settings:
        record |= legacy
    if isinstance(named := record.get("extra_special_tokens"), dict):
        record |= named
    found = {}
    for name, value in record.items():
        # Older files wrap a token in a record.
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
        elif name in text_keys.SPECIAL_TOKENS and value is not None:
            raise ValueError(f"{where}: {name} must be text, got {short(value)}")
    return found


def _lacking(
    settings: Mapping[str, Any],
    named: Mapping[str, str],
    tokenizer: JsonTokenizer,
    size: int,
    folder: AnyPath,
) -> list[str]:
    """Tokens of `tokenizer_config.json` that the tokenizer lacks, or finds otherwise.

    Of `added_tokens_decoder`, ids below `size`, and of the `named` ones. transformers
    adds them, with ids of its own.
    """
    added = settings.get("added_tokens_decoder") or {}
    known = tokenizer.backend.get_added_tokens_decoder().values()
    found = {token.content: _flags(token.__getstate__()) for token in known}
    lacking = []
    for number, record in added.items() if isinstance(added, dict) else [("", added)]:
        text = record.get("content") if isinstance(record, dict) else None
        if not (number.isdecimal() and isinstance(text, str)):
            raise ValueError(
                f"{folder}: added_tokens_decoder must hold ids and tokens, got "
                f"{short(record)}"
            )
        if int(number[:9]) < size and found.get(text) != _flags(record):
            lacking.append(text)
    absent = [t for t in named.values() if tokenizer.backend.token_to_id(t) is None]
    return list(dict.fromkeys([*lacking, *absent]))


def _flags(token: Mapping[str, Any]) -> list[bool]:
    """How a token is found in a text."""
    normalized = token.get("normalized", not token.get("special"))
    others = [token.get(flag) for flag in ("lstrip", "rstrip", "single_word")]
    return [bool(flag) for flag in (normalized, *others)]


def _chat_template(
    files: Mapping[str, bytes], settings: Mapping[str, Any], where: str
) -> str | None:
    """The template in a file of its own, or in `tokenizer_config.json`."""
    if CHAT_TEMPLATE in files:
        try:
            return files[CHAT_TEMPLATE].decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}/{CHAT_TEMPLATE} is not UTF-8") from error
    found = settings.get("chat_template")
    if isinstance(found, list):
        # Several by name, as one for tools; "default" is the plain one.
        parts = [part if isinstance(part, dict) else {} for part in found]
        named = [(part.get("name"), part.get("template")) for part in parts]
        if not all(isinstance(text, str) for pair in named for text in pair):
            raise ValueError(
                f"{where}: chat_template must list names and templates, got "
                f"{short(found)}"
            )
        found = dict(named).get("default")
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{where}: chat_template must be text, got {short(found)}")
    return found


def _is_id(value: Any, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=1, ensure_ascii=False).encode()
