"""Sampling of a trained memory at other points, without training it again.

    python -m experiments.elastic.sampling --run-dir runs/books/elastic/seed42

One trained Elastic Memory is read with other samplings, decays and numbers of memory
tokens (the paper's tables 5 and 6, and L_mem, for which it gives no value). All score
the same held-out texts; differences are paired with the trained setting, by document.

What this does not show: a memory that was trained with the other sampling.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

from experiments.lab.intervals import format_interval, loss_difference
from experiments.lab.results import RESULTS, Rows, number, show, table, write_report
from memjax import evaluation
from memjax.data import load_tokenizer
from memjax.evaluation import TokenLosses
from memjax.training import pretrain, run_data

#: Texts of each document, counts of memory tokens with each sampling, and decays of the
#: exponential one with the trained count.
TEXTS, MEMORY_TOKENS, DECAYS = 8, (4, 16, 64, 128), (0.8, 0.9, 0.95)


def changes() -> Iterator[dict[str, Any]]:
    """The changes of each row; none in the first."""
    yield {}
    for sampling in ("uniform", "exponential"):
        for count in MEMORY_TOKENS:
            yield {"sampling": sampling, "memory_tokens": count}
    for decay in DECAYS:
        yield {"sampling": "exponential", "decay": decay}


def main(run_dir: Path = Path("runs/books/elastic/seed42")) -> None:
    """Scores, prints and writes the results.

    Args:
        run_dir: a trained run with an Elastic Memory.
    """
    trained, model = pretrain.load_model(run_dir)
    length, window = trained.data.context_length, trained.model.window
    tokenizer = load_tokenizer(trained.data.tokenizer)
    documents = [
        d._replace(tokens=d.tokens[: TEXTS * length + 1])
        for d in run_data.load_split(trained, tokenizer, "test")
    ]

    def beyond(losses: TokenLosses) -> TokenLosses:
        return losses._replace(nll=losses.nll[:, window:], mask=losses.mask[:, window:])

    rows, base = [], None
    for change in changes():
        losses = evaluation.token_losses(
            pretrain.with_sampling(model, **change),
            documents,
            context_length=length,
            segment=length,
            batch_size=trained.data.batch_size,
        )
        base = base or beyond(losses)
        cost = loss_difference(beyond(losses), base)
        row = {
            "change": change or "as trained",
            "beyond_window": evaluation.perplexity(losses, first=window),
            "nats_against_trained": cost["nats"],
            "interval": [cost["low"], cost["high"]],
        }
        rows.append(row)
        columns = ("beyond_window", "nats_against_trained")
        show("", columns, {str(row["change"]): [row[name] for name in columns]})
    used = {"texts": TEXTS, "run_dir": str(run_dir)}
    results = {"trained_steps": trained.loop.steps, "rows": rows}
    question = "where and how densely is a memory read?"
    write_report(RESULTS / "elastic" / "sampling", question, used, results)


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
    tyro.cli(main)
