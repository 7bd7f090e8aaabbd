"""Converts the tokenizer in a GGUF file to a `tokenizer.json`.

"gpt2" is a byte-level BPE: tokens and merges. How text is split into words before the
merges (pre-tokenization) is only named, in `tokenizer.ggml.pre`. The same merges after
another split give other tokens, so unknown names are refused.

"llama" is SentencePiece's BPE: tokens and scores. Of all adjacent pairs that form a
token, the one with the best score is merged first, and of equal ones the leftmost.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from memjax.checks import short

# GPT-2's split (Radford et al., 2019).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Llama 3's and Qwen2's, which differ in how many digits stay together.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Qwen3.5's keeps marks at their letters.
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
# Mistral's and GPT-4o's also split where a word goes from lower to upper case.
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    TEKKEN.replace(f"[{LOWER}]+", f"[{LOWER}]+{SUFFIX}")
    .replace(f"[{LOWER}]*", f"[{LOWER}]*{SUFFIX}")
    .replace(r"\p{N}|", r"\p{N}{1,3}|")
)
# What llama.cpp calls "default": four splits, one after the other.
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2,),
    "default": DEFAULT,
    "smollm": (r"\p{N}", GPT2),
    "olmo": (GPT2,),
    "mpt": (GPT2,),
    "granite-docling": (GPT2,),
    "llama-bpe": (LLAMA3,),
    "llama3": (LLAMA3,),
    "llama-v3": (LLAMA3,),
    "falcon3": (LLAMA3,),
    "falcon-h1": (LLAMA3,),
    "lfm2": (LLAMA3,),
    "pixtral": (LLAMA3,),
    "smaug-bpe": (LLAMA3,),  # SmolLM3
    "dbrx": (LLAMA3,),  # OLMo 2, cl100k
    "qwen2": (QWEN2,),
    "deepseek-r1-qwen": (QWEN2,),
    "qwen35": (QWEN35,),
    "tekken": (TEKKEN,),
    "gpt-4o": (GPT4O,),
    "llama4": (GPT4O,),
}
# Texts begin with the first token where the file does not say.
WITH_BOS = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"),
    "tekken",
)
# The merges are not applied to a word that is a token.
WHOLE_WORDS = (*WITH_BOS, "smaug-bpe")
# Tokens that end a turn, which many files name in their vocabulary alone.
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")
# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SPACE = "\u2581"
BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}
# Characters of all parts into which tokens may be split; Llama 2's are 0.0015 of it.
MAX_PARTS = 2**30


def tokenizer_json(metadata: Mapping[str, Any], where: str) -> bytes | None:
    """The tokenizer of a file's metadata as the bytes of a `tokenizer.json`.

    Args:
        metadata: of the file.
        where: what an error calls the file.

    Returns:
        None if the file has no vocabulary.

    Raises:
        ValueError: if the kind of vocabulary or its pre-tokenizer is not known, or
            tokens and merges contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(kind, str) or kind not in builders:
        raise ValueError(
            f"{where}: tokenizer.ggml.model={short(kind)} cannot be rebuilt, expected "
            f"one of {tuple(builders)}; load the model without its tokenizer, and a "
            "tokenizer.json from the original model"
        )
    vocabulary = _vocabulary(_strings(metadata, "tokens", where), where)
    result = builders[kind](metadata, vocabulary, where)
    _add_special(result, metadata, list(vocabulary), where)
    return result.to_str().encode()


def _byte_level(
    metadata: Mapping[str, Any], vocabulary: dict[str, int], where: str
) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PATTERNS:
        raise ValueError(
            f"{where}: tokenizer.ggml.pre={short(pre)} is not a known pre-tokenizer, "
            f"expected one of {tuple(PATTERNS)}"
        )
    merges = _merges(_strings(metadata, "merges", where), vocabulary, where)
    model = BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS)
    result = tokenizers.Tokenizer(model)
    if PATTERNS[pre] in ((QWEN2,), (QWEN35,)):
        result.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Split(Regex(p), behavior="isolated") for p in PATTERNS[pre]
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    result.decoder = decoders.ByteLevel()
    return result


def _sentencepiece(
    metadata: Mapping[str, Any], vocabulary: dict[str, int], where: str
) -> tokenizers.Tokenizer:
    def entry(name):
        return metadata.get(f"tokenizer.ggml.{name}")

    for name in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if np.any(entry(name)):
            raise ValueError(
                f"{where}: tokenizer.ggml.{name} changes texts in a way that cannot be "
                "rebuilt; load the model without its tokenizer"
            )
    scores = _numbers(metadata, "scores", len(vocabulary), where)
    kinds = _numbers(metadata, "token_type", len(vocabulary), where)
    unknown = [t for t, kind in zip(vocabulary, kinds, strict=True) if kind == UNKNOWN]
    index = special_id(metadata, "unknown", len(vocabulary), where)
    if not unknown and index is not None:
        # Gemma's is of the kind of the other special tokens.
        unknown = [list(vocabulary)[index]]
    if len(unknown) != 1 or not BYTE_TOKENS <= vocabulary.keys():
        raise ValueError(
            f"{where}: expected one unknown token and one for each byte in a 'llama' "
            f"vocabulary, got {short(unknown)} and "
            f"{len(BYTE_TOKENS & vocabulary.keys())} bytes"
        )
    plain = {t: i for t, i in vocabulary.items() if kinds[i] == NORMAL}
    model = BPE(
        vocabulary,
        _merges_by_score(plain, scores, where),
        unk_token=unknown[0],
        fuse_unk=True,
        byte_fallback=True,
    )
    result = tokenizers.Tokenizer(model)
    space = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if not _flag(metadata, "add_space_prefix", True, where):
        result.normalizer = space
    else:
        result.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), space])
        steps.append(decoders.Strip(" ", 1, 0))
    result.decoder = decoders.Sequence(steps)
    return result


def _merges_by_score(
    tokens: dict[str, int], scores: list[float], where: str
) -> list[tuple[str, str]]:
    """All pairs that form a token, the best score first."""
    # A token of n characters has n - 1 pairs of n characters.
    if (size := sum(len(token) ** 2 for token in tokens)) > MAX_PARTS:
        raise ValueError(
            f"{where}: tokenizer.ggml.tokens are too long: the pairs that may form "
            f"them have {size:,} characters, of at most {MAX_PARTS:,}"
        )
    # One string of each token, however many pairs it is part of.
    known = {token: token for token in tokens}
    # The order of two pairs that form the same token makes no difference: either order
    # gave SentencePiece's ids for 80,000 random texts of repeats.
    merges = [
        (-scores[index], index, known[token[:at]], known[token[at:]])
        for token, index in tokens.items()
        for at in range(1, len(token))
        if token[:at] in tokens and token[at:] in tokens
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def special_id(
    metadata: Mapping[str, Any], name: str, size: int, where: str
) -> int | None:
    """The id of "bos", "unknown", ... or None; ValueError if it is beyond `size`."""
    found = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if found is not None and not (type(found) is int and 0 <= found < size):
        raise ValueError(
            f"{where}: tokenizer.ggml.{name}_token_id must be in [0, {size}), "
            f"got {found!r}"
        )
    return found


def end_ids(metadata: Mapping[str, Any], size: int, where: str) -> list[int]:
    """The ids that end a text or a turn, as named, or else by their text.

    Raises:
        ValueError: if one is beyond `size`.
    """
    named = [special_id(metadata, name, size, where) for name in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    by_text = [i for i, token in enumerate(tokens) if token in TURN_ENDS]
    return [i for i in (*named, *by_text) if i is not None]


def _flag(metadata: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    found = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(found, bool):
        raise ValueError(
            f"{where}: tokenizer.ggml.{name} must be true or false, got {short(found)}"
        )
    return found


def _strings(metadata, name: str, where: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found:
        raise ValueError(f"{where}: tokenizer.ggml.{name} must list strings")
    return found


def _numbers(metadata, name: str, count: int, where: str) -> list[Any]:
    found = np.asarray(metadata.get(f"tokenizer.ggml.{name}", ()))
    sound = found.dtype.kind in "iuf" and np.all(np.isfinite(found))
    if found.shape != (count,) or not sound:
        raise ValueError(
            f"{where}: tokenizer.ggml.{name} must hold {count} numbers, one a token, "
            f"got {found.dtype}{list(found.shape)}"
        )
    return found.tolist()


def _vocabulary(tokens: list[str], where: str) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(t for i, t in enumerate(tokens) if vocabulary[t] != i)
        raise ValueError(f"{where}: the token {short(twice)} appears twice")
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
                f"{where}: the merge {short(line)} must be two tokens that make a third"
            )
        merges.append((left, right))
    return merges


def _add_special(
    result: tokenizers.Tokenizer,
    metadata: Mapping[str, Any],
    tokens: list[str],
    where: str,
) -> None:
    """Adds tokens that are matched before splitting, and those around every text."""
    kinds = ()
    if "tokenizer.ggml.token_type" in metadata:
        kinds = _numbers(metadata, "token_type", len(tokens), where)
    # Matched before normalisation, which would change a special token's text. All at
    # once: each call is as long as what was added before it, and Gemma has thousands.
    result.add_tokens(
        [
            AddedToken(token, normalized=False, special=bool(kind == CONTROL))
            for token, kind in zip(tokens, kinds, strict=False)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    around = {"bos": "", "eos": ""}
    for name in around:
        index = special_id(metadata, name, len(tokens), where)
        # What llama.cpp does unless the file says otherwise.
        sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
        begins = sentencepiece or metadata.get("tokenizer.ggml.pre") in WITH_BOS
        default = name == "bos" and begins
        added = _flag(metadata, f"add_{name}_token", default, where)
        if added and index is not None:
            around[name] = tokens[index]
    if any(around.values()):
        result.post_processor = processors.TemplateProcessing(
            single=f"{around['bos']} $A {around['eos']}".strip(),
            special_tokens=[
                (token, result.token_to_id(token)) for token in around.values() if token
            ],
        )
