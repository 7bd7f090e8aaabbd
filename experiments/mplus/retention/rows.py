"""The rows of knowledge retention: each method at a size that is said.

M+ keeps a pool and the store's keys on the device, and the store's rows on the host.
Both are kept from one token to the next, so both count. "device" has as many bytes as
M+ has on the device, "all" as many as on both, as far as the backbone's positions go.
"""

from typing import NamedTuple

from experiments.hmt import scores
from experiments.mplus import memories as methods
from experiments.mplus.answers import Method
from experiments.mplus.retention import text_methods, variants
from experiments.mplus.retention.config import Name
from memjax.data import Tokenizer
from memjax.models import LanguageModel
from memjax.models.mplus.model import MPlus

#: First tokens that a window keeps: Xiao et al. (2023), section 3.2.
SINKS = 4


class Sizes(NamedTuple):
    """Numbers of tokens that the rows are made for.

    Attributes:
        device: whose keys and values have as many bytes as M+ has on the device.
        all: as M+ has in all, as far as the backbone's positions go.
        chunk: that is read at a time.
        question: of question and answer, at most.
        longest: that is injected before the last question.
        found: chunks that BM25 puts in front of a question.
    """

    device: int
    all: int
    chunk: int
    question: int
    longest: int
    found: int


class Row(NamedTuple):
    """A method, and what it is called in tables."""

    label: str
    method: Method


def sizes(
    model: MPlus, *, chunk: int, question: int, longest: int, found: int
) -> Sizes:
    """Sizes beside an M+; see `Sizes`."""
    kept, backbone = variants.kept_bytes(model), model.backbone
    positions = backbone.config.capacity
    tokens = lambda size: min(
        scores.equal_window(backbone, size), positions or longest + question
    )
    return Sizes(
        tokens(kept.device), tokens(kept.total), chunk, question, longest, found
    )


def build(
    name: Name,
    model: MPlus,
    backbone: LanguageModel,
    tokenizer: Tokenizer,
    sizes: Sizes,
    memoryllm: MPlus | None,
) -> Row:
    """One row.

    Args:
        name: which.
        model: M+.
        backbone: M+'s, or the same with adapters for the methods without a memory.
        tokenizer: of the backbone.
        sizes: of all rows.
        memoryllm: one that was trained itself.
    """
    chunk, question = sizes.chunk, sizes.question
    match name:
        case "M+":
            return Row("M+", methods.LatentMemory(model))
        case "M+ (attention)":
            by_attention = variants.with_attention_retrieval(model)
            return Row("M+, attention retrieves", methods.LatentMemory(by_attention))
        case "MemoryLLM":
            assert memoryllm is not None
            return Row("MemoryLLM", methods.LatentMemory(memoryllm))
        case "M+'s weights without the store":
            alone = variants.without_store(model)
            return Row(_without_store(alone), methods.LatentMemory(alone))
        case "full attention":
            read = sizes.longest + question
            return Row(name, methods.Full(backbone, chunk, read, question))
        case "window, device" | "window, all":
            size = sizes.device if name == "window, device" else sizes.all
            label = f"window of {size - SINKS:,} tokens and {SINKS} sinks"
            return Row(label, methods.window(backbone, chunk, size - SINKS, SINKS))
        case "re-read, device":
            last = sizes.device - question
            label = f"last {last:,} tokens read again"
            return Row(label, text_methods.ReRead(backbone, chunk, last, question))
        case "SnapKV, device" | "SnapKV, all":
            size = sizes.device if name == "SnapKV, device" else sizes.all
            return Row(
                f"SnapKV, a cache of {size:,} tokens",
                methods.snapkv(backbone, chunk, size, question),
            )
        case "BM25":
            label = f"BM25, {_count(sizes.found, 'chunk')} in front of the question"
            return Row(
                label,
                text_methods.bm25(backbone, tokenizer, chunk, sizes.found, question),
            )
        case "closed book":
            method = text_methods.closed_book(backbone, tokenizer, question)
            return Row("closed book", method)


def _without_store(model: MPlus) -> str:
    return f"M+'s weights without the store, a pool of {model.config.pool_size:,} rows"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
