"""The tokenizer inside a GGUF file, as a `tokenizers` JSON.

A byte-level BPE vocabulary holds tokens and merges; how a text is cut before the merges
is only named (`tokenizer.ggml.pre`), and the same merges after another cut give other
tokens. So a name that is not known here is refused.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, processors
from tokenizers import pre_tokenizers as cuts
from tokenizers.models import BPE

# GPT-2's cut (Radford et al., 2019); the byte-level step applies the same by itself.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Llama 3's and Qwen2's, which differ in how many digits stay together.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# What llama.cpp calls "default": four cuts, one inside the other.
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2,),
    "default": DEFAULT,
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (LLAMA3,),
    "llama3": (LLAMA3,),
    "llama-v3": (LLAMA3,),
    "qwen2": (QWEN2,),
    "deepseek-r1-qwen": (QWEN2,),
}
CONTROL, USER_DEFINED = 3, 4


def tokenizer_json(metadata: Mapping[str, Any], where: str) -> bytes | None:
    """The tokenizer of a file's metadata as the bytes of a `tokenizer.json`.

    Args:
        metadata: of the file.
        where: what an error calls the file.

    Returns:
        None if the file has no vocabulary.

    Raises:
        ValueError: if the kind of vocabulary or its cut is not known, or tokens and
            merges contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind != "gpt2":
        raise ValueError(
            f"{where}: tokenizer.ggml.model={kind!r} cannot be rebuilt, only 'gpt2' "
            "(byte-level BPE); load the model without its tokenizer, and a "
            "tokenizer.json from the original model"
        )
    cut = metadata.get("tokenizer.ggml.pre")
    if cut not in PATTERNS:
        raise ValueError(
            f"{where}: tokenizer.ggml.pre={cut!r} is not a known way to cut a text, "
            f"expected one of {tuple(PATTERNS)}"
        )
    vocabulary = _vocabulary(_texts(metadata, "tokens", where), where)
    merges = _merges(_texts(metadata, "merges", where), vocabulary, where)
    # Llama 3 takes a word that is a token as it is, whatever the merges say.
    whole = PATTERNS[cut] == (LLAMA3,)
    result = tokenizers.Tokenizer(BPE(vocabulary, merges, ignore_merges=whole))
    if PATTERNS[cut] == (QWEN2,):
        result.normalizer = normalizers.NFC()
    splits = [cuts.Split(Regex(p), behavior="isolated") for p in PATTERNS[cut]]
    byte_level = cuts.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = cuts.Sequence([*splits, byte_level])
    result.decoder = decoders.ByteLevel()
    _add_special(result, metadata, list(vocabulary), where)
    return result.to_str().encode()


def special_id(
    metadata: Mapping[str, Any], name: str, size: int, where: str
) -> int | None:
    """The id of "bos" or "eos", None if there is none; ValueError beyond `size`."""
    found = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if found is not None and not (type(found) is int and 0 <= found < size):
        raise ValueError(
            f"{where}: tokenizer.ggml.{name}_token_id must be in [0, {size}), "
            f"got {found!r}"
        )
    return found


def _texts(metadata, name: str, where: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found:
        raise ValueError(f"{where}: tokenizer.ggml.{name} must list strings")
    return found


def _vocabulary(tokens: list[str], where: str) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(t for i, t in enumerate(tokens) if vocabulary[t] != i)
        raise ValueError(f"{where}: the token {twice!r} appears twice")
    return vocabulary


def _merges(
    lines: list[str], vocabulary: dict[str, int], where: str
) -> list[tuple[str, str]]:
    merges = []
    for line in lines:
        left, _, right = line.partition(" ")
        known = {left, right, left + right} <= vocabulary.keys()
        if not (left and right and known):
            raise ValueError(
                f"{where}: the merge {line!r} must be two tokens that make a third"
            )
        merges.append((left, right))
    return merges


def _add_special(
    result: tokenizers.Tokenizer,
    metadata: Mapping[str, Any],
    tokens: list[str],
    where: str,
) -> None:
    """Tokens that are found in a text before it is cut, and those put around it."""
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list | np.ndarray):
        raise ValueError(f"{where}: tokenizer.ggml.token_type must be numbers")
    if len(kinds) not in (0, len(tokens)):
        raise ValueError(
            f"{where}: tokenizer.ggml.token_type has {len(kinds)} entries "
            f"for {len(tokens)} tokens"
        )
    for token, kind in zip(tokens, kinds, strict=False):
        added = AddedToken(token, normalized=False, special=bool(kind == CONTROL))
        if kind == CONTROL:
            result.add_special_tokens([added])
        elif kind == USER_DEFINED:
            result.add_tokens([added])
    around = {"bos": "", "eos": ""}
    for name in around:
        index = special_id(metadata, name, len(tokens), where)
        asked = metadata.get(f"tokenizer.ggml.add_{name}_token") is True
        if asked and index is not None:
            around[name] = tokens[index]
    if any(around.values()):
        result.post_processor = processors.TemplateProcessing(
            single=f"{around['bos']} $A {around['eos']}".strip(),
            special_tokens=[
                (token, result.token_to_id(token)) for token in around.values() if token
            ],
        )
