"""What the comparison measures of a model: losses, needles, facts, bytes, speed.

Results are JSON. Losses are sums a document and a bin of positions, so that any two
models are compared in pairs without being read again.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float32, PyTree

from memjax import evaluation
from memjax.checks import check_sizes
from memjax.data import (
    NEEDLE_TASKS,
    Passage,
    Question,
    TokenisedDocument,
    Tokenizer,
    load_facts,
    load_passages,
    needle_sample,
    pick_facts,
    unrelated,
)
from memjax.data.documents.sources import open_documents
from memjax.data.mplus_tasks.fact_tasks import FACTS_SEED, split_facts
from memjax.data.tasks.questions import QuestionInput
from memjax.evaluation import TokenLosses
from memjax.evaluation.provenance import device_name
from memjax.models.base import Model


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """What is read.

    Attributes:
        tokens: of each test document, over which perplexities are compared; `first`
            times a power of 2.
        long: documents of each kind that are read further, for perplexity by position.
        longest: tokens of those.
        first: position of the first target that counts in perplexities.
        needle_lengths: tokens of the inputs that hide a needle.
        needle_depths: where it lies, in percent of the haystack.
        needles: samples of each length and depth.
        facts: how many are asked for.
        distances: tokens of other text between a fact and its question.
        segment: tokens read at a time.
        batch: texts read side by side.
    """

    tokens: int = 4096
    long: int = 3
    longest: int = 16_384
    first: int = 512
    needle_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384)
    needle_depths: tuple[int, ...] = (0, 50, 100)
    needles: int = 1
    facts: int = 16
    distances: tuple[int, ...] = (0, 512, 2048)
    segment: int = 1024
    batch: int = 2

    def __post_init__(self):
        names = ("first", "needles", "facts", "segment", "batch")
        check_sizes(**{name: getattr(self, name) for name in names})
        if not self.first < self.tokens <= self.longest or (
            self.tokens not in self.edges
        ):
            raise ValueError(
                f"tokens must be first={self.first} times 2, 4, ... up to "
                f"longest={self.longest}, got {self.tokens}"
            )

    @property
    def edges(self) -> list[int]:
        """Of the bins of positions: 0, `first`, 2 `first`, ..., `longest`."""
        return evaluation.log2_bins(self.longest, self.first)

    @property
    def bins(self) -> tuple[int, int]:
        """The bins of [first, tokens): from the first number on, before the second."""
        return 1, self.edges.index(self.tokens)

    def up_to(self, tokens: int) -> "ScoreConfig":
        """The same for documents that all have so many tokens."""
        return dataclasses.replace(self, tokens=tokens, longest=tokens, long=0)

    @property
    def read(self) -> int:
        """Tokens that needles and facts have in all, at most."""
        hidden = sum(self.needle_lengths) * len(self.needle_depths) * self.needles
        # A fact and its question have some 400 tokens.
        return hidden + self.facts * sum(d + 400 for d in self.distances)


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all arrays, or shapes of arrays, in a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def num_parameters(model: nnx.Module) -> int:
    """Learned numbers of a model, or of its shapes."""
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def state_bytes(model: Model, tokens: int | None = None) -> int:
    """Bytes of the state of one text, after `tokens` where it grows with the text."""
    return tree_bytes(jax.eval_shape(lambda: model.init_state(1, tokens)))


class Scored(NamedTuple):
    """Losses of texts, and their cost.

    Attributes:
        losses: of all texts.
        seconds: wall time of all texts.
        cpu_seconds: of all threads.
        devices: that they were scored on; calls on several machines may share a folder.
    """

    losses: TokenLosses
    seconds: float
    cpu_seconds: float
    devices: list[str]


def score_text(
    model: Model, segment: int
) -> Callable[[TokenisedDocument], TokenLosses]:
    """The function that scores one text with a model, a segment at a time."""

    def score(text: TokenisedDocument) -> TokenLosses:
        return evaluation.token_losses(model, [text], segment=segment, batch_size=1)

    return score


def score_once(
    prepare: Callable[[], Callable[[TokenisedDocument], TokenLosses]],
    texts: Sequence[TokenisedDocument],
    folder: Path,
) -> Scored:
    """Scores texts, each once for all calls.

    Args:
        prepare: gives the function that scores a text; not called where no text is left
            to score.
        texts: of several lengths.
        folder: of this model alone.
    """
    score = None
    for text in texts:
        file = _losses_file(folder, text)
        if file.exists():
            continue
        score = prepare() if score is None else score
        wall, cpu = time.monotonic(), time.process_time()
        losses = score(text)
        seconds, cpu_seconds = time.monotonic() - wall, time.process_time() - cpu
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        with partial.open("wb") as stream:
            np.savez(
                stream,
                nll=losses.nll[0],
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                device=device_name(),
            )
        partial.replace(file)
        print(f"  {text.name}: {seconds:.0f} s", flush=True)
    found = [np.load(_losses_file(folder, text)) for text in texts]
    return Scored(
        join_losses(texts, [x["nll"] for x in found]),
        sum(float(x["seconds"]) for x in found),
        sum(float(x["cpu_seconds"]) for x in found),
        sorted({str(x["device"]) for x in found}),
    )


def are_scored(texts: Sequence[TokenisedDocument], folder: Path) -> bool:
    """Whether all texts were scored into a folder."""
    return all(_losses_file(folder, text).exists() for text in texts)


def join_losses(
    texts: Sequence[TokenisedDocument], nll: Sequence[Float32[np.ndarray, " _"]]
) -> TokenLosses:
    """Losses of texts from those of each; behind a text's end there are none."""
    longest = max(len(text.tokens) - 1 for text in texts)
    found, mask = np.zeros((2, len(texts), longest), np.float32)
    for row, one in enumerate(nll):
        found[row, : len(one)], mask[row, : len(one)] = one, 1
    kinds = tuple(text.kind for text in texts)
    return TokenLosses(found, mask, kinds, tuple(text.name for text in texts))


def _losses_file(folder: Path, text: TokenisedDocument) -> Path:
    tokens = np.ascontiguousarray(text.tokens, np.int32)
    return folder / f"{hashlib.sha256(tokens.tobytes()).hexdigest()[:16]}.npz"


def kept_bytes(model: Model, tokens: int) -> int:
    """Bytes of everything that a model keeps after so many tokens of one text.

    Only full attention keeps more the longer the text is.
    """
    state = jax.eval_shape(lambda: model.init_state(1, tokens))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def perplexity(
    model: Model, texts: Sequence[TokenisedDocument], config: ScoreConfig
) -> dict[str, Any]:
    """Nats of each document in each bin of positions, and the time of reading."""
    began = time.process_time()
    found = evaluation.token_losses(
        model,
        texts,
        segment=config.segment,
        batch_size=min(config.batch, len(texts)),
        progress=lambda done, total: print(f"read {done:,} of {total:,}", flush=True),
    )
    seconds = time.process_time() - began
    starts, short = config.edges[:-1], config.longest - found.nll.shape[1]
    # Texts of one kind may all be short; their last bins have no target.
    found = found._replace(
        nll=np.pad(found.nll, ((0, 0), (0, short))),
        mask=np.pad(found.mask, ((0, 0), (0, short))),
    )
    # In float64, as the sums are of thousands of terms.
    nats = np.add.reduceat(found.nll.astype(np.float64), starts, axis=1)
    targets = np.add.reduceat(found.mask, starts, axis=1)
    return {
        "documents": [
            {
                "name": found.documents[row],
                "kind": found.kinds[row],
                "nats": nats[row].tolist(),
                "targets": targets[row].astype(int).tolist(),
            }
            for row in range(len(texts))
        ],
        "tokens": int(found.mask.sum()),
        "cpu_seconds": seconds,
    }


def binned_losses(
    documents: Sequence[Mapping[str, Any]], bins: tuple[int, int]
) -> TokenLosses:
    """The losses of a result with a bin in the place of a position.

    Sums and targets are as of single positions, so that perplexities and paired gains
    are the same.

    Args:
        documents: of `perplexity`.
        bins: the first that counts, and the one behind the last.
    """
    part = lambda name: np.asarray([d[name] for d in documents], np.float32)
    mask = part("targets")
    mask[:, : bins[0]] = mask[:, bins[1] :] = 0
    nll = np.where(mask > 0, part("nats"), 0).astype(np.float32)
    kinds = tuple(d["kind"] for d in documents)
    return TokenLosses(nll, mask, kinds, tuple(d["name"] for d in documents))


def needles(
    model: Model,
    tokenizer: Tokenizer,
    essay: Sequence[str],
    length: int,
    seed: int,
    config: ScoreConfig,
) -> dict[str, Any]:
    """Share of right answers by depth: RULER's number in an essay, at one length."""
    inputs = needle_inputs(tokenizer, essay, length, seed, config)
    found = _ask(model, inputs, config)
    depths = np.repeat(config.needle_depths, config.needles)
    return {
        str(depth): {
            "right": float(found.exact[depths == depth].mean()),
            "nats": float(found.nll[depths == depth].sum(axis=1).mean()),
        }
        for depth in config.needle_depths
    }


def needle_inputs(
    tokenizer: Tokenizer,
    essay: Sequence[str],
    length: int,
    seed: int,
    config: ScoreConfig,
) -> list[QuestionInput]:
    """One input a depth and sample, in this order."""
    inputs = []
    for depth in config.needle_depths:
        for i in range(config.needles):
            sample = needle_sample(
                [seed, length, depth, i],
                NEEDLE_TASKS["S-NIAH-N"],
                length,
                tokenizer,
                essay,
                start="random",
                depth=depth,
            )
            item = Question(sample.prompt, "", sample.answer)
            inputs.append(_input(tokenizer, sample.prompt, sample.answer, item))
    return inputs


def essay_words(source: str) -> list[str]:
    """Words that needles are hidden in: the prose of the validation split.

    Raises:
        ValueError: if it has none.
    """
    texts = [
        document.text
        for document in open_documents(source)
        if (document.split, document.kind) == ("validation", "prose")
    ]
    if not texts:
        raise ValueError(f"source={source!r} has no prose in its validation split")
    return " ".join(texts).split()


def facts(model: Model, tokenizer: Tokenizer, seed: int, config: ScoreConfig) -> dict:
    """Share of right answers by the tokens between a fact and its question."""
    asked = pick_facts(split_facts(load_facts(), seed=FACTS_SEED)[1], seed=seed)
    asked = asked[: config.facts]
    if len(asked) < config.facts:
        raise ValueError(f"facts must be at most {len(asked)}, got {config.facts}")
    passages = load_passages()
    return {
        str(distance): _share(
            _ask(
                model,
                [fact_input(tokenizer, fact, passages, distance) for fact in asked],
                config,
            )
        )
        for distance in config.distances
    }


def fact_input(
    tokenizer: Tokenizer, fact: Question, passages: Sequence[Passage], distance: int
) -> QuestionInput:
    """A fact's context, so many tokens that do not name it, and its question."""
    between, number = [], 0
    # Other texts for other facts, the same for every model.
    allowed = unrelated(passages, fact)
    start = len(fact.context) % len(allowed)
    for passage in (*allowed[start:], *allowed[:start]):
        if number >= distance:
            break
        between.append(tokenizer.encode(f"\n\n{passage.text}"))
        number += len(between[-1])
    if number < distance:
        raise ValueError(f"distances must be at most {number}, got {distance}")
    filler = np.concatenate([np.zeros(0, np.int32), *between])[:distance]
    context = tokenizer.encode(fact.context)
    asked = _input(tokenizer, f"\n\n{fact.question}", fact.answer, fact)
    before = np.concatenate([context, filler]).astype(np.int32)
    tokens = np.concatenate([before, asked.tokens])
    return asked._replace(tokens=tokens, answer=len(before) + asked.answer)


def _input(tokenizer, prompt: str, answer: str, item: Question) -> QuestionInput:
    # Encoded apart, so that no token has a part of both.
    head, tail = tokenizer.encode(prompt), tokenizer.encode(f" {answer}")
    return QuestionInput(np.concatenate([head, tail]), len(head), item, 0, 1)


def _ask(model, inputs, config):
    return evaluation.score_answers(
        model, inputs, segment=config.segment, batch_size=config.batch
    )


def _share(found) -> dict[str, float]:
    right = float(found.exact.mean())
    nats = float(found.nll.sum(axis=1).mean())
    return {"questions": len(found.exact), "right": right, "nats": nats}
