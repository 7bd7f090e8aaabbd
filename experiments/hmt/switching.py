"""Does a memory search help where the context switches, and what does it go back to?

    python -m experiments.hmt.switching

HMT with and without retrieval is fine-tuned on three forms of documents: as they are,
interleaved in pairs, and dilated with "$". Both models of a form train for as many
steps, and are scored on held-out documents of the same form (HMT, Figures 9, 11, 14 and
15). Without retrieval a segment gets the memory of the segment before. The histograms
show how many segments back the memory lies that a search weighs most. With chunks of
one segment, the other document's memory is one segment back, and a document's own two.

Both models have the same seeds and score the same targets: those from index j on in
their segment. The perplexity of dilated documents is given with the "$" and without.
Test documents are cut exactly between tokens. Training texts are decoded and tokenised
again, so that their switches may move by a few tokens.
"""

import dataclasses
import json
from pathlib import Path
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from experiments.hmt import ablation, common, scores
from experiments.lab.intervals import gain, mean_losses
from experiments.lab.results import RESULTS, show
from memjax import evaluation
from memjax.data import (
    FILLER,
    LongInput,
    Split,
    Tokenizer,
    dilate,
    interleave,
    load_tokens,
)
from memjax.evaluation import TokenLosses, plots
from memjax.evaluation.drawing import source_of
from memjax.models.base import Model, commit_state
from memjax.models.hmt.model import HMT

Form = Literal["plain", "interleaved", "dilated"]
WITH, WITHOUT = "with retrieval", "without retrieval"


@dataclasses.dataclass(frozen=True)
class Config(ablation.Config):
    """See `ablation.Config`.

    Attributes:
        forms: of the documents.
        chunk: tokens of a chunk; 0 is a segment, or 256, as the paper has, with its
            preset.
    """

    forms: tuple[Form, ...] = get_args(Form)
    chunk: int = 0
    output: Path = RESULTS / "hmt" / "switching"

    def __post_init__(self):
        super().__post_init__()
        if self.chunk < 0:
            raise ValueError(f"chunk must be >= 0, got {self.chunk}")

    @property
    def chunk_size(self) -> int:
        """Tokens between two switches."""
        usual = self.scale.stages.stage2.hmt.segment
        return self.chunk or (256 if self.preset == "paper" else usual)


def main(config: Config) -> None:
    """Trains what is not trained yet, scores, prints and writes."""
    backbone, tokenizer = common.load_backbone(config)
    results = {}
    for form in config.forms:
        train = _training_source(config, form, tokenizer)
        test = _make(config, form, tokenizer, "test")
        results[form] = _compare(config, form, train, test)
    report(config, results)


def _compare(config: Config, form: Form, source: str, test: list[LongInput]):
    """Both models of one form of documents: their scores, and the searches."""
    stages = config.scale.stages
    sensory = stages.stage2.hmt.sensory
    seeds = [
        common.fine_tuned_on(each, source)
        for each in common.each_seed(config, config.seeds)
    ]
    models = {
        WITH: [common.train_hmt(each, stages).model for each in seeds],
        WITHOUT: [
            common.train_recurrent(each, stages, sensory).model for each in seeds
        ],
    }
    segment, first = stages.stage2.hmt.segment, stages.stage2.hmt.summary
    texts = [_cut(text, segment, config.scale.test_tokens) for text in test]

    def score(model):
        losses, _ = scores.score(model, [t.document for t in texts], segment)
        return _scored(losses, texts, segment, first)

    by_seed = {name: [score(model) for model in some] for name, some in models.items()}
    mean = {
        name: {kind: mean_losses([x[kind] for x in found]) for kind in found[0]}
        for name, found in by_seed.items()
    }
    found = [searches(model, texts, segment) for model in models[WITH]]
    distances, held = (np.concatenate(x) for x in zip(*found, strict=True))
    return {
        "perplexity": {
            kind: {name: evaluation.perplexity(x[kind]) for name, x in mean.items()}
            for kind in mean[WITH]
        },
        "nats_saved_by_retrieval": gain(mean[WITHOUT]["text"], mean[WITH]["text"]),
        "nats_saved_by_seed": [
            gain(without["text"], searched["text"])["nats"]
            for without, searched in zip(by_seed[WITHOUT], by_seed[WITH], strict=True)
        ],
        "recall": evaluation.recall_summary(distances, held),
        "histogram": _histogram(distances),
        # Every text was searched in once a seed.
        "tokens": [len(x.document.tokens) - 1 for x in texts] * config.seeds,
    }


def searches(
    model: Model, texts: list[LongInput], segment: int
) -> tuple[np.ndarray, np.ndarray]:
    """Distances of all of HMT's searches, text by text, and the memories held then."""
    assert isinstance(model, HMT)
    graph, params = nnx.split(model)
    read = jax.jit(lambda params, *rest: nnx.merge(graph, params).trace(*rest)[::2])
    found = []
    for text in texts:
        state = commit_state(params, model.init_state(1))
        tokens = np.asarray(text.document.tokens)[None, :-1]
        step = scores.TOGETHER * segment
        for start in range(0, tokens.shape[1], step):
            chunk = jnp.asarray(tokens[:, start : start + step])
            state, trace = read(params, state, chunk)
            counts = (trace.scores, trace.num_valid, trace.length)
            found.append(evaluation.recall_distances(*counts))
    distances, held = zip(*found, strict=True)
    return np.concatenate(distances), np.concatenate(held)


def report(config: Config, results: dict) -> None:
    """Writes, draws and prints."""
    memory = config.scale.stages.stage2.hmt
    result = common.write(
        config,
        "does a memory search help where the context switches?",
        segment=memory.segment,
        chunk=config.chunk_size,
        chunk_over_segment=config.chunk_size / memory.segment,
        scored_from=memory.summary,
        memories=memory.memories,
        forms=results,
    )
    show(
        f"Perplexity of targets from index {memory.summary} on in their segment",
        [WITH, WITHOUT],
        {
            f"{form}, {kind}": [*values.values()]
            for form, row in results.items()
            for kind, values in row["perplexity"].items()
        },
    )
    for form, row in results.items():
        print(f"{form}: {json.dumps(row['recall'])}")
    plot(result, Path(f"{config.output}.png"))


def plot(result: dict, path: Path) -> None:
    """Draws how far back the searches of a result go."""
    longest = min(50, result["memories"])
    plots.recall_histogram(
        {form: searches_of(row, result) for form, row in result["forms"].items()},
        path,
        longest=longest,
        title=f"What searches go back to; segments of {result['segment']}, "
        f"chunks of {result['chunk']} tokens",
        source=source_of(result),
    )


def searches_of(row: dict, result: dict) -> tuple[np.ndarray, np.ndarray]:
    """Distances of all searches, in any order, and the memories that were held."""
    counts = [(int(back), count) for back, count in row["histogram"].items()]
    distances = np.repeat(*np.asarray(counts).T)
    # Every segment but a text's first is searched for among those before it.
    searched = [-(-tokens // result["segment"]) for tokens in row["tokens"]]
    held = np.concatenate([np.arange(1, segments) for segments in searched])
    return distances, np.minimum(held, result["memories"])


def _make(
    config: Config, form: Form, tokenizer: Tokenizer, split: Split
) -> list[LongInput]:
    """The documents of a split in one form."""
    documents = load_tokens(config.source, tokenizer, split)
    match form:
        case "plain":
            blank = lambda d: np.zeros(len(d.tokens), np.int8)
            return [LongInput(d, blank(d)) for d in documents]
        case "interleaved":
            return interleave(documents, config.chunk_size)
        case "dilated":
            return dilate(documents, _dollar(tokenizer), config.chunk_size)


def _dollar(tokenizer: Tokenizer) -> int:
    """The id of "$"."""
    ids = tokenizer.encode("$")
    if len(ids) != 1:
        raise ValueError(f'"$" must be one token of the tokenizer, got {len(ids)}')
    return int(ids[0])


def _training_source(config: Config, form: Form, tokenizer: Tokenizer) -> str:
    """Documents of the form to train on, as a folder of texts."""
    if form == "plain":
        return config.source
    name = f"texts-{form}-{config.chunk_size}-{config.source.replace('/', '_')}"
    folder = config.run_dir / f"{name}-{tokenizer.digest[:8]}" / "train"
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(_make(config, form, tokenizer, "train")):
        content = tokenizer.decode(np.asarray(text.document.tokens))
        (folder / f"{i:03}.txt").write_text(content, "utf-8")
    return f"folder:{folder.parent}"


def _cut(text: LongInput, segment: int, tokens: int) -> LongInput:
    """Whole segments, at most so many tokens, and one to predict."""
    size = min(tokens, len(text.origin) - 1) // segment * segment + 1
    document = text.document._replace(tokens=text.document.tokens[:size])
    return LongInput(document, text.origin[:size])


def _scored(
    losses: TokenLosses, texts: list[LongInput], segment: int, first: int
) -> dict[str, TokenLosses]:
    """The scored targets: of the text, and where there is filler, with it."""
    causal = evaluation.scored_mask(losses.mask.shape[1], segment, first)
    real = np.zeros_like(losses.mask)
    for row, text in enumerate(texts):
        real[row, : len(text.origin) - 1] = text.origin[1:] != FILLER
    found = {"text": evaluation.mask_losses(losses, real * causal)}
    if any(np.any(text.origin == FILLER) for text in texts):
        found["text and filler"] = evaluation.mask_losses(losses, causal)
    return found


def _histogram(distances: np.ndarray) -> dict[str, int]:
    values, counts = np.unique(distances, return_counts=True)
    return {str(v): int(c) for v, c in zip(values, counts, strict=True)}


if __name__ == "__main__":
    main(tyro.cli(Config))
