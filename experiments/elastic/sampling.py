"""Does it matter where and how densely a trained memory is read?

    python -m experiments.elastic.sampling --run-dir runs/books/elastic-42

Reads one trained Elastic Memory with other samplings and other numbers of memory
tokens, with no retraining (the paper's Tables 5 and 6, and L_mem, for which it gives no
value). Every row scores the same held-out texts; differences are paired with the
trained setting's, by document.
"""

import dataclasses
import pathlib

import tyro
from rich.console import Console
from rich.table import Table

from experiments.lab.intervals import loss_difference
from experiments.lab.results import RESULTS, settings, write_report
from memjax import evaluation
from memjax.data import load_tokenizer
from memjax.mechanisms import ElasticMemoryConfig
from memjax.training import pretrain as run
from memjax.training import run_data


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

    run_dir: pathlib.Path = pathlib.Path("runs/books/elastic-42")
    texts: int = 8
    memory_tokens: tuple[int, ...] = (4, 16, 64, 128)
    decays: tuple[float, ...] = (0.8, 0.9, 0.95)
    output: pathlib.Path = RESULTS / "elastic" / "sampling"


def main(config: Config) -> None:
    """Scores, prints and writes the results."""
    trained_run, model = run.load_model(config.run_dir)
    trained = next(
        m for m in trained_run.model.mechanisms if isinstance(m, ElasticMemoryConfig)
    )
    changes = [{}]
    changes += [
        {"sampling": sampling, "memory_tokens": count}
        for sampling in ("uniform", "exponential")
        for count in config.memory_tokens
    ]
    changes += [{"sampling": "exponential", "decay": decay} for decay in config.decays]
    length = trained_run.data.context_length
    tokenizer = load_tokenizer(trained_run.data.tokenizer)
    documents = [
        d._replace(tokens=d.tokens[: config.texts * length + 1])
        for d in run_data.load_split(trained_run, tokenizer, "test")
    ]
    scores = [
        evaluation.token_losses(
            run.with_sampling(model, **change),
            documents,
            context_length=length,
            segment=length,
            batch_size=trained_run.data.batch_size,
        )
        for change in changes
    ]
    rows = _rows(changes, scores, trained_run.model.window)
    _print(rows)
    results = {
        "trained": dataclasses.asdict(trained),
        "trained_steps": trained_run.loop.steps,
        "rows": rows,
    }
    fields = settings(config) | {"run_dir": str(config.run_dir)}
    question = "where and how densely is a memory read?"
    write_report(config.output, question, fields, results)


def _rows(changes, scores, window):
    """Perplexities, and the nats that each change costs against the trained setting."""
    beyond = lambda x: x._replace(nll=x.nll[:, window:], mask=x.mask[:, window:])
    rows = []
    for change, losses in zip(changes, scores, strict=True):
        cost = loss_difference(beyond(losses), beyond(scores[0]))
        rows.append(
            {
                "change": change or "as trained",
                "perplexity": evaluation.perplexity(losses),
                "beyond_window": evaluation.perplexity(losses, first=window),
                "nats_against_trained": cost["nats"],
                "interval": [cost["low"], cost["high"]],
                "documents": cost["documents"],
            }
        )
    return rows


def _print(rows: list[dict]) -> None:
    table = Table("read", "perplexity", "beyond the window", "nats against trained")
    for row in rows:
        change = row["change"]
        if not isinstance(change, str):
            change = " ".join(str(value) for value in change.values())
        values = f"{row['perplexity']:.2f}", f"{row['beyond_window']:.2f}"
        table.add_row(change, *values, f"{row['nats_against_trained']:+.4f}")
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Config))
