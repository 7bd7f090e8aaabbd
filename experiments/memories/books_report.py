"""The result of the models: perplexities, gains over each baseline, plot, table."""

import dataclasses
from pathlib import Path

from experiments.lab.baselines import ORDER
from experiments.lab.intervals import (
    format_interval,
    loss_difference,
    mean_losses,
    select_kind,
)
from experiments.lab.results import figure, show
from experiments.memories import books_scores as scores
from experiments.memories.books_models import FAMILIES, Config, name_of, window_of
from memjax import evaluation
from memjax.evaluation import TokenLosses, plots
from memjax.evaluation.drawing import source_of
from memjax.evaluation.provenance import provenance


def result_of(config: Config, steps: int, results: dict[str, list[dict]]) -> dict:
    """What the result file has; draws the plot.

    Args:
        config: of the program.
        steps: that each model was trained.
        results: by family, of each seed what `scores.train_and_score` gave.
    """
    window, wide = (window_of(config, family) for family in ("window", "wide"))
    edges = evaluation.log2_bins(config.context_length, first=config.window)
    means = {
        name_of(config, family): mean_losses([each["losses"] for each in found])
        for family, found in results.items()
    }
    models = {
        name_of(config, family): {
            "parameters": found[0]["parameters"],
            "state_bytes": found[0]["state_bytes"],
        }
        for family, found in results.items()
    }
    counted = f"{ORDER}-gram"
    means[counted], models[counted] = scores.counted(config), {}
    for name, losses in means.items():
        models[name] |= _perplexities(losses, window)
    settings = dataclasses.asdict(config) | {"run_dir": None, "wide": wide}
    result = provenance("does a memory help beyond the window?", settings) | {
        "steps": steps,
        "models": models,
        "gains": {
            name_of(config, family): _gains(results, family, window)
            for family in FAMILIES
            if family != "elastic"
        },
        "edges": edges,
        "nats_by_position": {
            name: evaluation.loss_by_position(losses, edges)
            for name, losses in means.items()
        },
        "sample": results["elastic"][0]["sample"],
    }
    plot(result, config.run_dir / "results.png")
    return result


def _perplexities(losses: TokenLosses, window: int) -> dict:
    return {
        "perplexity": evaluation.perplexity(losses),
        "beyond_window": evaluation.perplexity(losses, first=window),
        "beyond_window_by_kind": {
            kind: evaluation.perplexity(losses, kind=kind, first=window)
            for kind in sorted(set(losses.kinds))
        },
    }


@figure("memories/books_window8", "memories/books_window64")
def plot(result: dict, path: Path) -> None:
    """Draws the losses of a result by position."""
    plots.loss_by_position(
        result["nats_by_position"],
        result["edges"],
        path,
        window=result["config"]["window"],
        title="Held-out documents: loss by position",
        source=source_of(result),
    )


def _gains(results: dict[str, list[dict]], base: str, window: int) -> dict:
    """Nats a token that the memory saves beyond the short window, by kind of text.

    Of losses averaged over seeds, and with each seed.
    """
    beyond = lambda x: x._replace(nll=x.nll[:, window:], mask=x.mask[:, window:])
    some, memory = (
        [beyond(each["losses"]) for each in results[family]]
        for family in (base, "elastic")
    )
    kinds = {"all": None} | {kind: kind for kind in sorted(set(memory[0].kinds))}

    def saved(a: TokenLosses, b: TokenLosses, kind: str | None) -> dict:
        return loss_difference(select_kind(a, kind), select_kind(b, kind))

    return {
        name: saved(mean_losses(some), mean_losses(memory), kind)
        | {
            "by_seed": [
                saved(a, b, kind)["nats"] for a, b in zip(some, memory, strict=True)
            ]
        }
        for name, kind in kinds.items()
    }


def show_tables(report: dict) -> None:
    """Prints perplexities, and what the memory saves."""
    window = report["config"]["window"]
    show(
        "Held-out documents",
        ["parameters", "state bytes", "test PPL", f"PPL beyond {window}"],
        {
            name: [
                row.get("parameters", ""),
                row.get("state_bytes", ""),
                row["perplexity"],
                row["beyond_window"],
            ]
            for name, row in report["models"].items()
        },
    )
    show(
        f"Nats a token that the memory saves beyond {window} tokens [95%, by document]",
        [f"over {name}" for name in report["gains"]],
        {
            kind: [
                format_interval(found[kind], 4) for found in report["gains"].values()
            ]
            for kind in next(iter(report["gains"].values()))
        },
    )
