"""How much does each memory recall, at equal width and in as many bytes?

    python -m experiments.memories.recall                # all mechanisms
    python -m experiments.memories.recall --of trellis   # Trellis: parts, defaults
    python -m experiments.memories.recall --of lattice   # Lattice: parts
    python -m experiments.memories.recall --of contexts --seeds 0 1 2
    python -m experiments.memories.recall --plan

Rows: every mechanism with the width of the model's heads, as the papers compare, and
with a state of DeltaNet's bytes; a mechanism's own name is its defaults. Full attention
keeps all tokens and is the ceiling, a sliding window of the same bytes the floor. The
ablations have the papers' variants and the choices that the papers leave open. Columns:
seeds that learned multi-query recall (`mqar`), and what those answer, by pairs and by
length of the sequence. `trellis` also models the bytes of `text`: its validation
columns choose defaults, in which no test has a say. `contexts` is Trellis's figure 2
with table 4 (perplexity of bytes against training context; ours are a fourth of the
paper's) and figure 3 (against training FLOPs, by models of other widths; updates of
memories are not counted). A training is 80 CPU seconds, of text more, and compiles in
20; a row takes 7 of them (`climb_rate`): 10 minutes of a core.

It does not show what a language model recalls: models of 31,000 parameters learn
nothing but this task. Language models that a CPU can train are beaten by counted
4-grams.
"""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from experiments.lab import study
from experiments.lab.options import Flags, Folder, Options, Seeds, run, within
from experiments.lab.results import RESULTS, rows_before, settings, show, write_report
from experiments.memories import mqar, recall_tables, small_models, text
from memjax.checks import require_known
from memjax.config_io import to_record
from memjax.models import ModelConfig
from memjax.status import say
from memjax.training.monitoring.model_flops import flops_per_token
from memjax.training.pretrain import abstract_model
from memjax_kernels import TRELLIS_PHIS

Column = Literal["width", "bytes"]
#: CPU minutes of one training.
MINUTES = {"recall": 1.7, "text": 5.0}
#: Rates that may be tried, from `FIRST` up or down until the best is inside.
RATES, FIRST = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1), 1e-2
#: Fields of a run that say which row it is of.
PLACE = ("name", "column", "task", "context", "model_width")
#: Trellis as it has the best perplexity.
SMALL_STEPS = "C = 64, at most 1/64, l2_silu"


class Row(NamedTuple):
    """A mechanism with its options, in the columns where it is comparable.

    Attributes:
        mechanism: by name.
        options: of its configuration.
        columns: in which it is trained.
        wider: its width relative to that of the others, where widths are equal.
    """

    mechanism: str
    options: dict[str, Any] = {}
    columns: tuple[Column, ...] = ("width", "bytes")
    wider: float = 1.0


def _chunk(mechanism: str, size: int, **options: Any) -> Row:
    return Row(mechanism, {"chunk_size": size} | options)


MODELS = {
    "DeltaNet": Row("deltanet"),
    "Trellis": Row("trellis"),
    "Trellis, C = 4": _chunk("trellis", 4),
    "Lattice": Row("lattice"),
    "TTT": Row("ttt_linear"),
    "Gated DeltaNet": Row("gated_deltanet"),
    "Trellis, C = 1": _chunk("trellis", 1),
    "Lattice, C = 1": _chunk("lattice", 1),
    "TTT, C = 1": _chunk("ttt_linear", 1),
    "sliding window": Row("sliding_window", columns=("bytes",)),
    "Transformer++": Row("attention", columns=("width",)),
    "Linear Attention": Row("linear_attention"),
    "Mamba2": Row("mamba2"),
    "GLA": Row("gla"),
    "GSA": Row("gsa"),
    "ABC": Row("abc"),
}
_BASELINES = {name: MODELS[name] for name in ("DeltaNet", "TTT")}


def _of_width(mechanism: str, wider: float = 1.0, **options: Any) -> Row:
    return Row(mechanism, options, ("width",), wider)


TRELLIS: dict[str, Row] = _BASELINES | {
    "Trellis": Row("trellis"),
    "C = 4": _chunk("trellis", 4),
    "C = 1": _chunk("trellis", 1),
    # In as many bytes an open chunk of 64 leaves no memory.
    "C = 64": _of_width("trellis", chunk_size=64),
    SMALL_STEPS: _of_width("trellis", chunk_size=64, step_size=1 / 64, phi="l2_silu"),
    "at most 1/16": _of_width("trellis", step_size=1 / 16),
    "at most 1": _of_width("trellis", step_size=1.0),
    "targets of any size": _of_width("trellis", normalize_target=False),
    **{
        f"phi = {phi}": _of_width("trellis", phi=phi)
        for phi in TRELLIS_PHIS
        if phi not in ("identity", "silu")
    },
    "without forget gate": _of_width("trellis", forget=False),
    "f = l2_silu": _of_width("trellis", activation="l2_silu"),
    "f = softmax": _of_width("trellis", activation="softmax"),
    "linear, f = softmax": _of_width("trellis", phi="identity", activation="softmax"),
    "linear, f = ln_silu": _of_width("trellis", phi="identity"),
    # Slots and keys, for a key memory has the rank of its keys with any slots. Twice
    # the width has more parameters than the other models.
    "half the width": _of_width("trellis", 0.5),
}
_LATTICE: dict[str, dict[str, Any]] = {
    "orthogonal recurrence": dict(normalize=False),
    "forget gate (l2)": dict(forget="l2"),
    "forget gate (l1)": dict(forget="l1"),
    "ENC": dict(variant="enc"),
    "SIM": dict(variant="sim"),
}
LATTICE: dict[str, Row] = _BASELINES | {
    "normalised projection": _chunk("lattice", 1),
    **{name: _of_width("lattice", chunk_size=1, **x) for name, x in _LATTICE.items()},
    "C = 4": _chunk("lattice", 4),
    "C = 16": _chunk("lattice", 16),
    "C = 64": _of_width("lattice", chunk_size=64),
}


CONTEXTS: dict[str, Row] = {name: MODELS[name] for name in recall_tables.PAPER} | {
    f"Trellis, {name}": TRELLIS[name] for name in ("without forget gate", SMALL_STEPS)
}


class Study(NamedTuple):
    """A table: its question and rows, and whether text is modelled too.

    With `scales` text alone is, by models and trainings of these.
    """

    question: str
    rows: dict[str, Row]
    text: bool = False
    scales: tuple[small_models.Scale, ...] = ()


STUDIES = {
    "recall": Study(
        "how much does each memory recall, at equal width and bytes?", MODELS
    ),
    "trellis": Study(
        "what does each part of Trellis bring, and which defaults learn?", TRELLIS, True
    ),
    "lattice": Study("what does each part of Lattice bring to recall?", LATTICE),
    "contexts": Study(
        "is Trellis ahead at every training context and number of FLOPs?",
        CONTEXTS,
        True,
        tuple(
            [text.SCALE._replace(context_length=x) for x in recall_tables.LENGTHS]
            + [text.SCALE._replace(model_dim=x) for x in (32, 128)]
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Rows, seeds and tests.

    Attributes:
        of: the study.
        only: names of the rows to run; none is all.
        columns: what is made equal: the width of memories, the bytes of states.
        seeds: of parameters and data order; 3 at least, for a range.
        test_rows: sequences of each test.
        plan: print the missing rows, and stop.
        run_dir: of trainings and their numbers, which all studies share.
        output: folder of the result file.
    """

    of: Literal["recall", "trellis", "lattice", "contexts"] = "recall"
    only: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ("width", "bytes")
    seeds: Seeds = (0, 1, 2, 3, 4)
    test_rows: Annotated[int, within(1, 1024)] = 64
    plan: bool = False
    run_dir: Folder = Path("runs/recall")
    output: Folder = RESULTS / "memories" / "columns"

    def __post_init__(self):
        super().__post_init__()
        chosen = STUDIES[self.of]
        for name in self.only:
            require_known("only", name, [*chosen.rows])
        for name in self.only or (chosen.rows if chosen.scales else ()):
            known = ("width",) if chosen.scales else chosen.rows[name].columns
            if not {*known} & {*self.columns}:
                raise ValueError(
                    f"columns must have one of {known} for {name!r}, got {self.columns}"
                )
        if chosen.scales and self.test_rows != Config.test_rows:
            raise ValueError(f"test_rows={self.test_rows} has no test in {self.of!r}")


class Case(NamedTuple):
    """A row in one column, with its model of a task; `scale` is that of text."""

    name: str
    column: Column
    task: Literal["recall", "text"]
    model: ModelConfig
    scale: small_models.Scale = text.SCALE

    @property
    def place(self) -> tuple[str | int | None, ...]:
        """`PLACE` of its runs."""
        has_text, scale = self.task == "text", self.scale
        sizes = (scale.context_length, scale.model_dim) if has_text else (None, None)
        return self.name, self.column, self.task, *sizes


def model(task: mqar.Task, row: Row, column: Column) -> ModelConfig:
    """The model of a row, its width or its bytes those of DeltaNet."""
    if column == "bytes":
        return mqar.of_bytes(task, row.mechanism, mqar.budget(task), **row.options)
    width = round(task.width * row.wider)
    return mqar.of_width(task, row.mechanism, width, **row.options)


def cases(of: str) -> list[Case]:
    """All rows of a study with equal parameters, one column after the other."""
    chosen = STUDIES[of]

    def equal(name: str, column: Column, task: mqar.Task) -> ModelConfig:
        made = model(task, chosen.rows[name], column)
        return small_models.equal_parameters(made, task.scale)

    order: list[tuple[str, Column]] = [
        (name, column)
        for column in get_args(Column)
        for name, row in chosen.rows.items()
        if column in row.columns
    ]
    found = [
        Case(name, column, "recall", equal(name, column, mqar.SMALL))
        for name, column in order
        if not chosen.scales
    ]
    if chosen.text:
        found += [
            Case(name, column, "text", equal(name, column, task), task.scale)
            for scale in chosen.scales or (text.SCALE,)
            for task in [text.TASK._replace(scale=scale)]
            for name, column in order
            if column == "width"
        ]
    return found


def _trainings(config: Config, case: Case) -> study.Trainings:
    task = case.scale if case.task == "text" else mqar.SMALL
    identity = [to_record(case.model), task._asdict(), config.test_rows]

    def loss(found: dict[str, Any]) -> float:
        if case.task == "text":
            return math.log(found["perplexity"])
        return 1 - sum(found["validation"]) / len(found["validation"])

    folder = config.run_dir / study.digest(identity)
    return study.Trainings(folder, identity, RATES, FIRST, config.seeds, loss)


def train_row(config: Config, case: Case) -> list[dict[str, Any]]:
    """The runs of all seeds at the rate that the first seed's validation data chose."""

    def measure(rate: float, seed: int) -> dict[str, Any]:
        if case.task == "text":
            return text.measure(case.model, rate, seed, case.scale)
        return mqar.measure(mqar.SMALL, case.model, rate, seed, config.test_rows)

    found = _trainings(config, case).run(measure)
    runs = found.pop("runs")
    about = {
        **{"name": case.name, "column": case.column, "task": case.task},
        **found,
        "width": getattr(case.model.mechanisms[0], "value_dim", None),
        "state_bytes": small_models.state_bytes(case.model),
        "parameters": small_models.parameters(case.model),
        "hidden_dim": case.model.hidden_dim,
    }
    if case.task == "text":
        length, updates = case.scale.context_length, case.scale.steps
        each = flops_per_token(abstract_model(case.model), length)
        tera_flops = each * case.scale.tokens_per_update * updates / 1e12
        sizes = {"context": length, "model_width": case.scale.model_dim}
        about |= sizes | {"tera_flops": tera_flops}
    return [about | run for run in runs]


def main(config: Flags[Config]) -> None:
    """Trains and tests the missing rows, and writes those that are complete."""
    known = cases(config.of)
    made = [
        case
        for case in known
        if case.column in config.columns and case.name in (config.only or [case.name])
    ]
    if config.plan:
        missing = {}
        for case in made:
            row = _trainings(config, case)
            if left := row.left():
                # A model of both columns is trained once.
                words = f"{case.name}, {case.task} {row.folder.name}, {left} trainings"
                missing[words] = left * MINUTES[case.task]
        return study.show_plan(missing)
    study.use_compile_cache(config.run_dir)
    task = mqar.SMALL
    results: dict[str, Any] = {
        "task": task._asdict() | {"scale": task.scale._asdict()},
        "budget": mqar.budget(task),
        "rows": [],
    }
    if STUDIES[config.of].text:
        results |= {"text": text.SCALE._asdict(), "ngrams": text.ngrams()}
    output, question = config.output / config.of, STUDIES[config.of].question
    report: dict[str, Any] = {}
    for case in made:
        say(f"{case.name}, equal {case.column}, {case.task}")
        new = train_row(config, case)
        # Rows that other calls trained stay in the file, in the study's order.
        rows: dict[Any, list[dict[str, Any]]] = {x.place: [] for x in known}
        with rows_before(output, config, "only", "columns") as before:
            for old in before:
                rows.get(tuple(map(old.get, PLACE)), []).append(old)
            results["rows"] = [*itertools.chain(*(rows | {case.place: new}).values())]
            report = write_report(output, question, settings(config), results)
    length, counts = task.scale.context_length, task.pairs
    if config.of == "recall":
        length, counts = task.lengths[1], task.tested[-3:]
    if STUDIES[config.of].scales:
        return show(question, recall_tables.by_context.rows(report))
    show(question, recall_tables.complete(report, length, counts))


if __name__ == "__main__":
    run(main)
