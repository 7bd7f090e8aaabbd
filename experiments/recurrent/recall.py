"""How much does each memory recall, and over what distance?

    python -m experiments.recurrent.recall
    python -m experiments.recurrent.recall --tasks niah --steps 3000

MQAR (Zoology): a sequence names key-value pairs, then queries the value of every
key; accuracy against the number of pairs. S-NIAH-PK, -N and -W (RULER; Trellis,
Table 3): a sentence with a number or a UUID, hidden in noise or in an essay, is
queried at the end. The paper tests language models; here models are trained on the
tasks themselves, on short texts, and tested at 1, 2 and 4 times their length on essays
not seen before. An answer counts where greedy decoding gives it whole; `tokens` says
how many of its tokens are right, each given those before it. All models have equal
parameters and see equal examples in equal order.

The default is MQAR alone. In minutes on a CPU no needle is found: DeltaNet of the
smallest preset still guesses after 250 updates of 6 rows (no whole answer, 0.2 of the
tokens: the space before the answer, the hyphens, a tenth of the digits).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Array, Bool

from experiments.common.results import RESULTS
from experiments.recurrent import comparison, seed_report
from experiments.recurrent.comparison import Case, Scale
from experiments.recurrent.context_length import MODELS
from memjax.data import (
    NEEDLE_TASKS,
    Split,
    load_tokenizer,
    multi_query_recall,
    needle_batch,
    open_documents,
)
from memjax.data.batches.batch import Batch
from memjax.models import LanguageModel
from memjax.training import pretrain as run

BASE = "DeltaNet"
#: Of the ten recurrent models, those in Trellis's Table 3, and Lattice.
NEEDLE_MODELS = ("TTT", "Mamba2", BASE, "Gated DeltaNet", "Trellis", "Lattice")
TIMES = (1, 2, 4)
# Seeds of the tests, which no training has.
_TEST = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Config(comparison.Config):
    """See `comparison.Config`; `steps` are those of needles, `test_tokens` is unused.

    Attributes:
        tasks: what to run.
        mqar_steps: updates of MQAR; 0 is the preset's.
        test_rows: examples of each test.
    """

    tasks: tuple[Literal["mqar", "niah"], ...] = ("mqar",)
    mqar_steps: int = 0
    test_rows: int = 48
    tokenizer: str = "bpe4k"
    run_dir: Path = Path("runs/recall")
    output: Path = RESULTS / "recurrent" / "recall"

    def __post_init__(self):
        super().__post_init__()
        if self.mqar_steps < 0 or self.test_rows < 1:
            raise ValueError(
                "mqar_steps must be >= 0 and test_rows at least 1, got "
                f"{self.mqar_steps} and {self.test_rows}"
            )

    @property
    def mqar(self) -> tuple[Scale, int, tuple[int, ...]]:
        """Size, vocabulary and pairs: small, or as in Zoology's figure 2."""
        small = self.preset == "cpu"
        scale = Scale(2, 32, 4, 8, 48, 48 * 48, 350, 1e-2)
        if not small:
            scale = Scale(2, 128, 2, 64, 256, 64 * 256, 20_000, 1e-3)
        scale = scale._replace(steps=self.mqar_steps or scale.steps)
        return (scale, 48, (4, 8, 12)) if small else (scale, 8192, (16, 32, 64))

    @property
    def niah(self) -> Scale:
        """The scale of S-NIAH: the preset, on sequences short enough to repeat."""
        scale = super().scale
        length = 256 if self.preset == "cpu" else 1024
        rows = max(len(NEEDLE_TASKS), scale.tokens_per_update // length // 3 * 3)
        return scale._replace(context_length=length, tokens_per_update=length * rows)


class Generated:
    """Batches made from their step: an iterator whose position is that step."""

    def __init__(self, make: Callable[[int], Batch]):
        self._make, self._step = make, 0

    def __next__(self) -> Batch:
        self._step += 1
        return self._make(self._step - 1)

    def get_state(self) -> dict[str, int]:
        """The step."""
        return {"step": self._step}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to a step."""
        self._step = state["step"]


def cases(config: Config) -> list[Case]:
    """The models of each task, with equal parameters."""
    found = []
    names = {"mqar": tuple(MODELS), "niah": ("Transformer++", *NEEDLE_MODELS)}
    for task in config.tasks:
        scale, vocab_size = _size(config, task)
        models = []
        for name in names[task]:
            mixer = "attention" if name == "Transformer++" else MODELS[name]
            length = scale.context_length
            model = comparison.base_model(scale, vocab_size, mixer, length)
            models.append(Case(name, model, {"task": task}))
        found += comparison.equal_parameters(models, scale)
    return found


def settings(config: Config, case: Case, seed: int) -> run.RunConfig:
    """The run of one model; its sequences do not come from `data.source`."""
    scale, _ = _size(config, case.fields["task"])
    return comparison.run_config(config, scale, case.model, seed)


def measure(
    config: Config, case: Case, settings: run.RunConfig, folder: Path
) -> dict[str, Any]:
    """Trains, then answers the tests."""
    if case.fields["task"] == "mqar":
        make = functools.partial(_mqar_batch, config, settings.seed)
        tests = _mqar_tests(config)
    else:
        make = functools.partial(_needles, config, settings.seed)
        tests = _needle_tests(config)
    model, seconds = comparison.train(settings, Generated(make), folder)
    scores = [fields | accuracy(model, batches) for fields, batches in tests]
    return {"scores": scores, "seconds": seconds}


def accuracy(model: LanguageModel, batches: Iterable[Batch]) -> dict[str, float]:
    """Share of sequences whose answers are all right, and share of right answers."""
    whole, right, queried = [], 0.0, 0.0
    for batch in batches:
        # The parameters at another length: attention has a cache of that length.
        length = batch.tokens.shape[1]
        sized = comparison.for_length(model.config, length)
        hits = np.asarray(
            _hits(comparison.structure(sized), nnx.state(model, nnx.Param), batch)
        )
        mask = np.asarray(batch.mask)
        whole.append((hits | (mask == 0)).all(axis=1))
        right += float((hits * mask).sum())
        queried += float(mask.sum())
    return {"accuracy": float(np.concatenate(whole).mean()), "tokens": right / queried}


#: What tests are drawn against, and how the axis is called.
AXES = {"pairs": "key-value pairs", "length": "tokens of the test"}


def main(config: Config) -> None:
    """Trains what is not trained yet, prints and writes the results."""
    rows = comparison.study(
        config,
        cases(config),
        functools.partial(settings, config),
        functools.partial(measure, config),
        functools.partial(report, config),
    )
    for title, (summary, by) in summaries(rows).items():
        seed_report.show(title, summary, BASE, columns=(by, "name"))


def summaries(rows: list[dict]) -> dict[str, tuple[list[dict], str]]:
    """Means of each test, by what they are drawn against."""
    flat = [
        {key: row[key] for key in ("name", "seed")} | score
        for row in rows
        for score in row["scores"]
    ]
    found = {}
    # In MQAR an answer is a token, and whole sequences are right for few pairs only.
    if pairs := [row for row in flat if "pairs" in row]:
        found["MQAR"] = pairs, "tokens", "pairs"
    for task in NEEDLE_TASKS:
        if needles := [row for row in flat if row.get("task") == task]:
            found[task] = needles, "accuracy", "length"
            found[f"{task}, tokens"] = needles, "tokens", "length"
    return {
        title: (seed_report.summarise(part, metric, BASE, by), by)
        for title, (part, metric, by) in found.items()
    }


def report(config: Config, rows: list[dict]) -> None:
    """Writes what there is: MQAR and needles each have a plot."""
    found = summaries(rows)
    result = seed_report.write(
        config,
        "how much does each memory recall, and over what distance?",
        rows,
        mqar_scale=config.mqar[0]._asdict(),
        niah_scale=config.niah._asdict(),
        accuracy={title: summary for title, (summary, _) in found.items()},
    )
    for by in AXES:
        plot(result, Path(f"{config.output}_{by}.png"), by)


def plot(result: Mapping[str, Any], path: Path, by: str = "pairs") -> None:
    """Draws the tests of a result that are drawn against `by`, if there are any."""
    panels = {t: rows for t, rows in result["accuracy"].items() if by in rows[0]}
    if panels:
        seed_report.plot_lines(result, path, panels, by, (AXES[by], "accuracy"))


@functools.partial(jax.jit, static_argnums=0)
def _hits(graph, params, batch: Batch) -> Bool[Array, "B T"]:
    """Where the likeliest token is the target."""
    model = nnx.merge(graph, params)
    _, logits = model(model.init_state(batch.tokens.shape[0]), batch.tokens)
    return logits.argmax(axis=-1) == batch.targets


def _size(config: Config, task: str) -> tuple[Scale, int]:
    if task == "mqar":
        return config.mqar[:2]
    return config.niah, load_tokenizer(config.tokenizer).vocab_size


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _recall(key, rows: int, pairs: int, length: int, vocab_size: int) -> Batch:
    return multi_query_recall(key, rows, pairs, length, vocab_size)


def _mqar_batch(config: Config, seed: int, step: int) -> Batch:
    """As many sequences of each number of pairs."""
    scale, vocab_size, pairs = config.mqar
    length = scale.context_length
    rows = scale.tokens_per_update // length
    key = jax.random.fold_in(jax.random.key(seed), step)
    shares = [rows // len(pairs) + (i < rows % len(pairs)) for i in range(len(pairs))]
    parts = [
        _recall(jax.random.fold_in(key, count), share, count, length, vocab_size)
        for count, share in zip(pairs, shares, strict=True)
    ]
    return Batch(*map(jnp.concatenate, zip(*parts, strict=True)))


def _mqar_tests(config: Config):
    scale, vocab_size, pairs = config.mqar
    for count in pairs:
        key = jax.random.fold_in(jax.random.key(_TEST), count)
        size = (config.test_rows, count, scale.context_length, vocab_size)
        yield {"pairs": count}, [_recall(key, *size)]


# All models are trained on the same batches; those of three seeds fit.
@functools.lru_cache(maxsize=2048)
def _needles(config: Config, seed: int, step: int) -> Batch:
    """As many sequences of each task, from the essays for training.

    All of the text counts, as for a language model: much of it repeats, and copying
    is learned from that long before it would be from the answers.
    """
    length = config.niah.context_length
    rows = config.niah.tokens_per_update // length // len(NEEDLE_TASKS)
    tokenizer, essay = load_tokenizer(config.tokenizer), _essay(config.source, "train")
    parts = [
        needle_batch([seed, step, i], rows, task, length, tokenizer, essay, "random")
        for i, task in enumerate(NEEDLE_TASKS.values())
    ]
    batch = Batch(*map(np.concatenate, zip(*parts, strict=True)))
    until_answer = np.maximum.accumulate(np.asarray(batch.mask)[:, ::-1], axis=1)
    return batch._replace(mask=until_answer[:, ::-1].copy())


@functools.lru_cache(maxsize=1)
def _needle_tests(config: Config) -> list[tuple[dict, list[Batch]]]:
    """Each task at each length, a few sequences at a time, the same for all models."""
    tokenizer, essay = load_tokenizer(config.tokenizer), _essay(config.source, "test")
    tests = []
    for i, (name, task) in enumerate(NEEDLE_TASKS.items()):
        for times in TIMES:
            length = times * config.niah.context_length
            rows = min(config.test_rows, 16 // times)
            batches = [
                needle_batch(
                    *([_TEST, i, times, part], rows, task, length, tokenizer),
                    essay=essay,
                    start="random",
                )
                for part in range(-(-config.test_rows // rows))
            ]
            tests.append(({"task": name, "length": length}, batches))
    return tests


@functools.lru_cache(maxsize=2)
def _essay(source: str, split: Split) -> tuple[str, ...]:
    """The words of a split's prose, or of all its documents where none is prose."""
    documents = [d for d in open_documents(source) if d.split == split]
    prose = [d for d in documents if d.kind == "prose"] or documents
    return tuple(word for d in prose for word in d.text.split())


if __name__ == "__main__":
    main(tyro.cli(Config))
