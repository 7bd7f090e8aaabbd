"""How does perplexity change with the length of the input, and with which memory?

    python -m experiments.hmt.length
    python -m experiments.corpus.comparison --destination comparison
    python -m experiments.hmt.length --preset smollm2-cpu --source folder:comparison \\
        --output experiments/results/hmt/smollm2/length

HMT, HMT that reads nothing ahead, RMT and the backbone in all the ways to bound what it
reads score the same held-out documents (HMT, Figures 2 and 3); `rows.py` says which and
why. Each is shown as it came and fine-tuned, with as many updates on samples of no
fewer tokens and a learning rate of its own, which validation documents choose.

Targets count from index j of their segment on, the same for all models; no score has
seen its target. Intervals are over documents, and of the mean over seeds.

Rows are written as they are finished. A program that was stopped goes on where it was;
with `--only` the other rows are shown as far as earlier calls have scored them, those
with a smaller `--test-tokens` too.
"""

import collections
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro

from experiments.hmt import common, scores
from experiments.hmt.rows import (
    AGAIN,
    APART,
    CAUSAL,
    HIERARCHICAL,
    RMT,
    SENSORY,
    SINK_WINDOW,
    TUNED,
    Row,
    rows,
)
from experiments.hmt.tuned import Texts, Tuning, measure
from experiments.lab.intervals import format_interval, loss_difference, select_kind
from experiments.lab.results import RESULTS, figure, show
from memjax import evaluation
from memjax.checks import check_sizes, require_known
from memjax.evaluation import TokenLosses, plots
from memjax.evaluation.drawing import source_of

LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 102_400)
#: What every other row is compared with, where it is there.
BASES = (
    SINK_WINDOW,
    *(TUNED.format(name) for name in (SINK_WINDOW, SENSORY, AGAIN, APART)),
)
MEMORIES = (HIERARCHICAL, CAUSAL, RMT)


@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    """See `common.Config`.

    Attributes:
        lengths: inputs are scored up to these positions; a document that ends before
            counts with what it has.
        validation_tokens: scored of each validation document.
        rates: learning rates that are tried; none is the preset's.
        seeds: of each row that is trained, from `seed` on.
        only: names of rows to work on; none is all.
    """

    lengths: tuple[int, ...] = LENGTHS
    validation_tokens: int = 2048
    rates: tuple[float, ...] = ()
    seeds: int = 2
    only: tuple[str, ...] = ()
    output: Path = RESULTS / "hmt" / "length"

    def __post_init__(self):
        super().__post_init__()
        check_sizes(seeds=self.seeds, validation_tokens=self.validation_tokens)
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be at least 1, got {self.lengths}")

    @property
    def tuning(self) -> Tuning:
        """Rates and seeds of all rows."""
        seeds = tuple(range(self.seed, self.seed + self.seeds))
        return Tuning(self.rates or self.scale.rates, seeds)


def main(config: Config) -> None:
    """Trains what is not trained yet, scores, prints and writes, row by row."""
    stages = config.scale.stages
    memory = stages.stage2.hmt
    backbone, tokenizer = common.load_backbone(config)
    table = rows(stages, backbone, counted=config.scale.backbone == "tiny")
    for name in config.only:
        require_known("only", name, [row.name for row in table])
    longest = min(config.scale.test_tokens, max(config.lengths))

    def documents(split, tokens):
        return scores.documents(
            config.source, tokenizer, split, tokens, memory.segment_length
        )

    texts = Texts(
        validation=documents("validation", config.validation_tokens),
        test=documents("test", longest),
        segment=memory.segment_length,
        first=memory.summary,
    )
    bytes_of = {
        row.name: scores.state_bytes(row.build(backbone), longest)
        for row in table
        if row.build is not None
    }
    # The programs load it again where they need it.
    del backbone
    # What earlier calls have left is shown from the first row on.
    finished = {
        row.name: found
        for row in table
        if (found := _finished(config, row, texts, longest)) is not None
    }
    for row in table:
        if not config.only or row.name in config.only:
            print(f"row: {row.name}", flush=True)
            found = measure(config, row, texts, config.tuning, work=True)
            assert found is not None
            finished[row.name] = Finished(*found, row.longest or longest)
            report(config, table, finished, bytes_of, texts)


class Finished(NamedTuple):
    """A row as far as it is scored; see `Measured`.

    Attributes:
        losses: averaged over seeds.
        facts: what is said of it.
        reached: tokens of the longest text that counts.
    """

    losses: TokenLosses
    facts: dict[str, Any]
    reached: int


def _finished(config: Config, row: Row, texts: Texts, longest: int) -> Finished | None:
    """A row up to the longest input that earlier calls have scored; None for none."""
    for length in sorted({*config.lengths, longest}, reverse=True):
        # Losses do not depend on what follows: shorter texts are the same row.
        found = measure(config, row, texts.up_to(length), config.tuning, work=False)
        if found is not None:
            return Finished(*found, min(length, row.longest or length))
    return None


def report(
    config: Config,
    table: list[Row],
    finished: dict[str, Finished],
    bytes_of: dict[str, int],
    texts: Texts,
) -> None:
    """Writes, draws and prints the rows that are finished."""
    targets = max(len(text.tokens) - 1 for text in texts.test)
    lengths = [length for length in config.lengths if length < 2 * targets]
    mask = evaluation.scored_mask(targets, texts.segment, texts.first)
    present = [row for row in table if row.name in finished]
    losses = {
        row.name: evaluation.mask_losses(
            _wide(finished[row.name].losses, targets), mask
        )
        for row in present
    }
    reach = {row.name: finished[row.name].reached for row in present}
    every = next(iter(losses.values()))
    result = common.write(
        config,
        "how does perplexity change with the length of the input?",
        # This machine may have scored none of them.
        device=_scored_on(finished),
        lengths=lengths,
        documents={text.name: len(text.tokens) - 1 for text in texts.test},
        documents_that_reach_it=[
            sum(len(text.tokens) > length for text in texts.test) for length in lengths
        ],
        segment=texts.segment,
        scored_from=texts.first,
        models={
            row.name: {
                "state_bytes": bytes_of.get(row.name),
                "reads": row.reads,
                **row.sizes,
                **finished[row.name].facts,
            }
            for row in present
        },
        missing=[row.name for row in table if row.name not in finished],
        perplexity=_perplexity(losses, lengths, reach),
        gains=_gains(losses, lengths, reach, every.kinds),
    )
    plot(result, Path(f"{config.output}.png"))
    _show(result)


def _scored_on(finished: dict[str, Finished]) -> str:
    """The device of most rows; where others were scored elsewhere, which and where."""
    where = {name: " and ".join(row.facts["devices"]) for name, row in finished.items()}
    most, _ = collections.Counter(where.values()).most_common(1)[0]
    others = [f"{name} on {device}" for name, device in where.items() if device != most]
    return f"{most} ({'; '.join(others)})" if others else most


@figure("hmt/smollm2/length")
def plot(result: dict, path: Path) -> None:
    """Draws the perplexities of a result."""
    curves = {
        name: [np.nan if value is None else value for value in values]
        for name, values in result["perplexity"]["all"].items()
        if not name.endswith("-gram")
    }
    plots.perplexity_by_length(
        curves,
        result["lengths"],
        path,
        title=f"Held-out documents, targets from {result['scored_from']} on in each "
        "segment",
        source=source_of(result),
    )


def _perplexity(
    losses: dict[str, TokenLosses], lengths: list[int], reach: dict[str, int]
) -> dict[str, dict[str, list[float | None]]]:
    """By kind of text, row and length; None beyond what is read or was scored."""
    curves = scores.by_kind(losses, lengths)
    return {
        kind: {
            name: [
                value if length <= reach[name] else None
                for value, length in zip(values, lengths, strict=True)
            ]
            for name, values in found.items()
        }
        for kind, found in curves.items()
    }


def _gains(
    losses: dict[str, TokenLosses],
    lengths: list[int],
    reach: dict[str, int],
    kinds: tuple[str, ...],
) -> list[dict[str, Any]]:
    """Of every row over each base, and of each memory over every row, by kind.

    At the shortest length, and at the longest that both models read.
    """
    pairs = [
        (base, name)
        for base in losses
        for name in losses
        if name != base and (base in BASES or name in MEMORIES)
    ]
    found = []
    for base, name in pairs:
        both_reach = [x for x in lengths if x <= min(reach[base], reach[name])]
        for length in dict.fromkeys(both_reach[:1] + both_reach[-1:]):
            for kind in (None, *dict.fromkeys(kinds)):
                both = (
                    scores.up_to(select_kind(losses[x], kind), length)
                    for x in (base, name)
                )
                where = {"base": base, "model": name, "length": length}
                found.append(where | {"kind": kind or "all"} | loss_difference(*both))
    return found


def _wide(losses: TokenLosses, targets: int) -> TokenLosses:
    """With room for so many targets a text; there is none where nothing was read."""
    more = ((0, 0), (0, targets - losses.nll.shape[1]))
    return losses._replace(nll=np.pad(losses.nll, more), mask=np.pad(losses.mask, more))


def _show(result: dict) -> None:
    lengths = result["lengths"]
    show(
        "Perplexity by input length",
        ["bytes", "tokens read for one", *(f"{length:,}" for length in lengths)],
        {
            name: [
                result["models"][name]["state_bytes"] or "",
                result["models"][name]["reads"],
                *("" if value is None else value for value in values),
            ]
            for name, values in result["perplexity"]["all"].items()
        },
    )
    for found in result["gains"]:
        if found["model"] == HIERARCHICAL and found["length"] == lengths[-1]:
            name = f"HMT over {found['base']}, {found['kind']}"
            print(f"{name}: {format_interval(found)} nats")


if __name__ == "__main__":
    main(tyro.cli(Config))
