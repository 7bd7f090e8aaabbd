"""Speed of published hybrids on a CPU, against transformers.

    pip install torch transformers accelerate
    python -m experiments.speed.hybrids

Random weights in float32: four layers of Qwen3.5-0.8B's sizes (three of Gated DeltaNet,
one of attention) and Mamba-2 130m at full depth. Each reads a long prompt, and goes on
with a short one greedily, in a process of its own, timed interleaved; loading,
compilation and the first round are left out. transformers runs its PyTorch forms.

What this does not show: a GPU or TPU, other precisions, batches.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import memjax
from experiments.lab import measure, timing
from experiments.lab.options import run
from experiments.lab.results import RESULTS, Rows, number, table, write_report
from experiments.speed import generation
from experiments.speed.generation import Prompts
from memjax.config_io import read_json

#: Tokens of the prompt that is timed, of a short one, drawn behind it; cores, rounds.
PROMPT, SHORT, NEW_TOKENS, CORES, REPEATS = 4096, 64, 64, 2, 2
#: Tokens after which the bytes of a state are counted.
LENGTHS = (1024, 102_400)
#: A config.json of `experiments/aot`, and the layers that are timed.
MODELS = {
    "Qwen3.5 0.8B, 4 layers": ("qwen3.5-0.8b", 4),
    "Mamba-2 130m": ("mamba2-130m", 24),
}


def folder_of(name: str) -> Path:
    """A folder with random weights, written by transformers once."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    folder = Path("runs/hybrids") / name.replace(" ", "_")
    if not (folder / "config.json").exists():
        config_file, layers = MODELS[name]
        record = read_json(Path(f"experiments/aot/{config_file}.json"))
        kind = transformers.CONFIG_MAPPING[record.pop("model_type")]
        torch.manual_seed(0)
        config = kind(**record | {"num_hidden_layers": layers})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def state_bytes(folder: Path) -> list[int]:
    """Bytes of a state that has read the tokens of `LENGTHS`."""
    model = memjax.load(folder, with_tokenizer=False).model
    return [measure.state_bytes(model, length) for length in LENGTHS]


def time_row(name: str, folder: Path) -> dict[str, Any]:
    """Both programs with one model."""
    tokens = np.random.default_rng(0).integers(2, 50_000, (1, PROMPT))
    names = ("memjax", "transformers")

    def rounds_of(length, drawn):
        prompts = Prompts(tokens[:, :length], (length,), drawn)
        arguments = {each: (each, folder, prompts) for each in names}
        return timing.time_processes(generation.make, arguments, CORES, REPEATS)

    reading, drawing = rounds_of(PROMPT, 1), rounds_of(SHORT, NEW_TOKENS)
    rows = {}
    for each in names:
        read = [x.value["first"] for x in reading[each][1:]]
        drew = [x.value["whole"] - x.value["first"] for x in drawing[each][1:]]
        rows[each] = {
            "prompt": timing.summary(read),
            "drawing": timing.summary(drew),
            "peak_mebibytes": reading[each][-1].peak_mebibytes,
        }
    ours, theirs = (rows[each] for each in names)
    ratios = {
        x: theirs[x]["median_s"] / ours[x]["median_s"] for x in ("prompt", "drawing")
    }
    return {"name": name, "speedup": ratios} | rows


def main() -> None:
    """Times and writes the results."""
    # A process begins with the peak memory of the one that started it: models are made
    # and loaded in others.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as apart:
        folders = {name: apart.submit(folder_of, name).result() for name in MODELS}
        sizes = {n: apart.submit(state_bytes, f).result() for n, f in folders.items()}
    rows = [{"bytes": sizes[n]} | time_row(n, folders[n]) for n in MODELS]
    results = {"rows": rows, "packages": timing.versions("torch", "transformers")}
    used = {"cores": CORES, "prompt": PROMPT, "environment": timing.ENVIRONMENT}
    write_report(RESULTS / "speed/hybrids", "published hybrids on a CPU", used, results)


@table("hybrids/speed", "speed/hybrids")
def hybrids(result: dict[str, Any]) -> Rows:
    """Both programs with every model."""
    for found in result["rows"]:
        for each in ("memjax", "transformers"):
            row, ours = found[each], each == "memjax"
            drawn = (NEW_TOKENS - 1) / row["drawing"]["median_s"]
            of_both = found["speedup"].values(), found["bytes"]
            ratios, sizes = of_both if ours else ((), ())
            yield {
                "model": found["name"],
                "program": each,
                "prompt: tokens/s": number(PROMPT / row["prompt"]["median_s"], 0),
                "drawing: tokens/s": number(drawn, 1),
                "memjax is faster by": " and ".join(number(x, 1) for x in ratios),
                "peak MiB": number(row["peak_mebibytes"], 0),
                "MB of state at 1k and 100k tokens": " and ".join(
                    number(x / 1e6, 1) for x in sizes
                ),
            }


if __name__ == "__main__":
    run(main)
