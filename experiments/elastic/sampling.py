"""Sampling of a trained memory at other points, without training it again.

    python -m experiments.elastic.sampling --run-dir runs/books/elastic/seed42

One trained Elastic Memory is read with other samplings, decays and numbers of memory
tokens (the paper's tables 5 and 6, and L_mem, for which it gives no value). All score
the same held-out texts; differences are paired with the trained setting, by document.

What this does not show: a memory that was trained with the other sampling.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

from experiments.lab.intervals import format_interval, loss_difference
from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    settings,
    show,
    table,
    write_report,
)
from memjax import evaluation
from memjax.data import load_tokenizer
from memjax.evaluation import TokenLosses
from memjax.training import pretrain, run_data


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that changes the result.

    Attributes:
        run_dir: a trained run with an Elastic Memory.
        texts: held-out texts of each document.
        memory_tokens: counts to try with each sampling.
        decays: of the exponential sampling, with the trained count.
        output: where .json goes, without the ending.
    """

    run_dir: Path = Path("runs/books/elastic/seed42")
    texts: int = 8
    memory_tokens: tuple[int, ...] = (4, 16, 64, 128)
    decays: tuple[float, ...] = (0.8, 0.9, 0.95)
    output: Path = RESULTS / "elastic" / "sampling"


def changes(config: Config) -> Iterator[dict[str, Any]]:
    """What is changed in each row; nothing in the first."""
    yield {}
    for sampling in ("uniform", "exponential"):
        for count in config.memory_tokens:
            yield {"sampling": sampling, "memory_tokens": count}
    for decay in config.decays:
        yield {"sampling": "exponential", "decay": decay}


def main(config: Config) -> None:
    """Scores, prints and writes the results."""
    trained, model = pretrain.load_model(config.run_dir)
    length, window = trained.data.context_length, trained.model.window
    tokenizer = load_tokenizer(trained.data.tokenizer)
    documents = [
        d._replace(tokens=d.tokens[: config.texts * length + 1])
        for d in run_data.load_split(trained, tokenizer, "test")
    ]

    def score(change: dict[str, Any]) -> TokenLosses:
        return evaluation.token_losses(
            pretrain.with_sampling(model, **change),
            documents,
            context_length=length,
            segment=length,
            batch_size=trained.data.batch_size,
        )

    def beyond(losses: TokenLosses) -> TokenLosses:
        return losses._replace(nll=losses.nll[:, window:], mask=losses.mask[:, window:])

    rows, base = [], None
    for change in changes(config):
        losses = score(change)
        base = beyond(losses) if base is None else base
        cost = loss_difference(beyond(losses), base)
        row = {
            "change": change or "as trained",
            "perplexity": evaluation.perplexity(losses),
            "beyond_window": evaluation.perplexity(losses, first=window),
            "nats_against_trained": cost["nats"],
            "interval": [cost["low"], cost["high"]],
            "documents": cost["documents"],
        }
        rows.append(row)
        columns = ("perplexity", "beyond_window", "nats_against_trained")
        show("", columns, {str(row["change"]): [row[name] for name in columns]})
    fields = settings(config) | {"run_dir": str(config.run_dir)}
    results = {"trained_steps": trained.loop.steps, "rows": rows}
    question = "where and how densely is a memory read?"
    write_report(config.output, question, fields, results)


@table("elastic/sampling")
def sampling(result: dict[str, Any]) -> Rows:
    """One trained memory, read with other samplings."""
    for row in result["rows"]:
        change, trained = row["change"], row["change"] == "as trained"
        if not trained:
            change = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in change.items())
        low, high = row["interval"]
        cost = {"nats": row["nats_against_trained"], "low": low, "high": high}
        yield {
            "read": change,
            "PPL beyond the window": number(row["beyond_window"], 1),
            "nats a token lost against as trained": ""
            if trained
            else format_interval(cost, 4),
        }


if __name__ == "__main__":
    main(tyro.cli(Config))
