"""Do Elastic Memory's own comparisons come out as in its paper, at the size of `books`?

    python -m experiments.elastic.tables --plan
    python -m experiments.elastic.tables --sizes 1x   # the rows of 1x alone

Tables of the paper: 2 (all memories), 3 (memory of 1x to 16x), 5 and 6 (trained with
one sampling, read with the other), 7 (noise in the block, see `probes`) and 13 (error
of keys and values read back from the state). The models are those of `books`. 1x is
N = 64, for texts of 1,024 tokens, read at 32 points; n times the memory has n times the
points, as far back. At 16x the Memorizing Transformer keeps the whole text, as in the
paper. Perplexities are of all held-out documents, in tables 2 and 5 of one kind.

It does not show the paper's figures: models, texts and training are far smaller, and
one model learns three kinds of documents, where the paper has a model for each.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import memjax
from experiments.elastic import probes
from experiments.lab import backbones, intervals, options, results, study
from experiments.memories import books, small_models
from memjax import evaluation
from memjax.models import LanguageModel
from memjax.training.pretrain import with_sampling

UNIFORM = f"{books.MEMORY}, uniform"
ROWS = ("Memorizing Transformer", "Melodi", UNIFORM, books.MEMORY)
#: Rows of table 2 alone; windows are its Transformer++.
ALONE = ("windows of {}", "Infini-attention")
#: The sampling with which a row is not trained.
OTHER = {UNIFORM: "exponential", books.MEMORY: "uniform"}
#: Sizes of the memory, and minutes of a training relative to 1x.
SIZES = {"1x": 1.0, "2x": 1.05, "4x": 1.1, "8x": 1.2, "16x": 1.4}
RATES = (0.25, 0.5, 0.75)
TABLES = ("table2", "table3", "table5", "table6", "table7", "table13")
#: The paper's figures: table, what rows have in common, row, and two measures.
_LINES = (Path(__file__).parent / "paper.txt").read_text("utf-8").splitlines()
PAPER = {at: (one, two) for at, one, two in (x.rsplit(" | ", 2) for x in _LINES)}


@dataclasses.dataclass(frozen=True)
class Config(books.Config):
    """Settings of `books`, and more.

    Attributes:
        reference: model that finds key tokens, "smollm2" or as `memjax.load` takes it;
            "" is none.
        sizes: of the memories, in multiples of that of `books`.
        output: folder of the result file.
    """

    window: options.Tokens = 64
    seeds: options.Seeds = (42, 43, 44)
    reference: str = "smollm2"
    run_dir: options.Folder = Path("runs/table2")
    sizes: tuple[Annotated[str, options.among(*SIZES)], ...] = tuple(SIZES)
    output: options.Folder = results.RESULTS / "elastic"


def main(config: options.Flags[Config]) -> None:
    """Trains and reads the missing runs, writes and prints."""
    sized = {x: books.models(config.window, True, int(x[:-1])) for x in config.sizes}
    # Rows of 1x have the names of `books`.
    made = {
        row if size == "1x" else f"{row}, {size}": (size, row)
        for size, row in itertools.product(sized, ROWS)
    }
    if "1x" in sized:
        alone = [name.format(config.window) for name in ALONE]
        made |= {name: ("1x", name) for name in alone}
    runs, numbers = [*itertools.product(made, config.seeds)], config.run_dir / "tables"
    # Before a plan too: it refuses what the run does.
    texts = books.test_texts(config)
    path = config.reference and backbones.located(config.reference)
    reference = memjax.load(path) if path else None
    if config.plan:
        each = config.steps * books.SECONDS_AN_UPDATE / 60
        return study.plan(runs, numbers, lambda name: each * SIZES[made[name][0]])
    study.use_compile_cache(config.run_dir)
    # Short contexts of two blocks, as Elastic Memory's 4,096 tokens are.
    keys = reference and evaluation.key_tokens_by(
        *(reference.model, reference.tokenizer, texts, books.TOKENIZER),
        short_context=2 * config.window,
    )

    def measured(name: str, seed: int, _: Path) -> dict[str, Any]:
        size, row = made[name]
        settings = books.run_config(config, sized[size][row], seed)
        home = study.run_folder(config.run_dir, name, seed)
        return read_all(config, size, row, books.trained(settings, home), texts, keys)

    def said(name: str, seed: int) -> list[Any]:
        size, row = made[name]
        own = books.identity(config, sized[size][row], seed)
        return [*own, *filter(None, [config.reference])]

    cells: dict[str, list[list[float]]] = {}
    for run in study.run_all(runs, measured, run_dir=numbers, identity=said):
        for at in run.keys() - {"name", "seed"}:
            cells.setdefault(at, []).append(run[at])
    plain, *_ = map(small_models.parameters, books.models(config.window).values())
    added = {
        f"table3 | {size} | {row}": small_models.parameters(sized[size][row]) - plain
        for size, row in made.values()
    }
    question = "do Elastic Memory's own comparisons come out as in its paper?"
    found, output = {"cells": cells, "added": added}, config.output / "tables"
    report = results.write_report(output, question, results.settings(config), found)
    for name in TABLES:
        if any(at.startswith(f"{name} ") for at in cells):
            results.show(name, compared(name, report))


def read_all(config: Config, size, row, model, texts, keys) -> dict[str, list[float]]:
    """The cells of all tables that a trained model has, each with two measures."""

    def read(model: LanguageModel, call: int = config.context_length):
        every = evaluation.token_losses(model, texts, tokens_per_call=call)
        losses, tokenizer = [every], books.TOKENIZER
        if keys:
            given = every, keys, texts
            losses.append(evaluation.keep_key_tokens(*given, tokenizer=tokenizer))
        return lambda kind=None: [evaluation.perplexity(x, kind=kind) for x in losses]

    own, kinds = read(model), {x.kind for x in texts} if size == "1x" else ()
    label = "Transformer++" if row.startswith("windows") else row
    found, readings = {f"table3 | {size} | {row}": own()}, {row: own}
    if row in OTHER:
        other = with_sampling(model, sampling=OTHER[row])
        readings[f"{row}, read {OTHER[row]}"] = read(other)
        for name, values in readings.items():
            found[f"table6 | {size} | {name}"] = values()
            for kind in kinds:
                found[f"table5 | {kind} | {name}"] = values(kind)
    found |= {f"table2 | {kind} | {label}": own(kind) for kind in kinds}
    if size == "1x" and f"table7 | none | {row}" in PAPER:
        found[f"table7 | none | {row}"] = own()
        for where, rate in itertools.product(("memory", "all"), RATES):
            noisy = probes.with_noise(model, rate, everywhere=where == "all")
            values = read(noisy, config.window)()
            found[f"table7 | {where}, {rate:.0%} | {row}"] = values
    if row == books.MEMORY:
        length = config.context_length
        whole = np.stack([x.tokens[:length] for x in texts if len(x.tokens) > length])
        error = probes.reconstruction_error(model, whole)
        found[f"table13 | {row} | {size}"] = [error, own()[0]]
    return found


def compared(name: str, result: Mapping[str, Any]) -> results.Rows:
    """A table, ours beside the paper's, and where the order of rows differs."""
    measures = ("MSE", "PPL") if name == "table13" else ("PPL", "LongPPL")
    groups: dict[str, list[tuple[str, str]]] = {}
    for at in PAPER:
        table, group, row = at.split(" | ")
        if table != name or at not in result["cells"]:
            continue
        groups.setdefault(group, []).append((at, row))
        cells = {"": row, "at": group}
        if name == "table3":
            cells |= {"added parameters": results.number(result["added"][at], 0)}
        # Without a reference there is no LongPPL.
        columns = zip(measures, PAPER[at], *result["cells"][at], strict=False)
        for measure, paper, *ours in columns:
            cells[measure] = intervals.median_and_range(ours)
            cells[f"{measure}, paper"] = paper
        yield cells
    for (group, rows), i in itertools.product(groups.items(), (0, 1)):
        ours = {row: [x[i] for x in result["cells"][at] if x[i:]] for at, row in rows}
        if all(ours.values()):
            paper = {row: float(PAPER[at][i]) for at, row in rows}
            order = intervals.against_paper(paper, ours)
            yield f"{measures[i]}, {group}: {order}"


table2, table3, table5, table6, table7, table13 = (
    results.table(f"elastic/{x}", "elastic/tables")(functools.partial(compared, x))
    for x in TABLES
)

if __name__ == "__main__":
    options.run(main)
