"""Does a memory help beyond the window? Trains small models on real books and shows.

    python -m experiments.memories.books

Three models have equal parameters, see the same batches in the same order, and are
scored on the same held-out documents: a Transformer++ with short sliding windows; one
whose windows are longer, so that they keep as many bytes as the memory; and Elastic
Memory, which is the first with one of its layers reading a compressed history. An
n-gram of the training documents says what counting alone predicts. Writes a table,
results.json, a plot of loss by position, and a sample of text. Running it again goes on
where it was stopped. What was measured (`experiments/results/books/`) is from

    python -m experiments.corpus.comparison --destination comparison
    python -m experiments.memories.books --source folder:comparison --seeds 2 \\
        --steps 8000
    python -m experiments.memories.books --source folder:comparison --seeds 2 \\
        --steps 2000 --window 64 --run-dir runs/books64
"""

import json
import time

import jax
import numpy as np
import tyro

from experiments.memories.books_models import FAMILIES, Config, name_of, run_config
from experiments.memories.books_report import result_of, show_tables
from experiments.memories.books_scores import test_documents, train_and_score
from memjax.data import load_tokenizer
from memjax.training import pretrain as run
from memjax.training import run_data
from memjax.training.checkpoints.checksums import write_atomically
from memjax.training.distributed import sharding


def main(config: Config) -> None:
    """Trains, scores and reports."""
    began = time.monotonic()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    # The runs compile what the timing compiled.
    if not jax.config.values["jax_compilation_cache_dir"]:
        cache = config.run_dir.resolve() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(cache))
    steps = _plan(config, began)
    results: dict[str, list[dict]] = {family: [] for family in FAMILIES}
    for family in FAMILIES:
        for seed in range(config.seed, config.seed + config.seeds):
            name = name_of(config, family)
            print(f"\n{name}, seed {seed}: {steps} steps", flush=True)
            results[family].append(train_and_score(config, family, steps, seed))
    found = result_of(config, steps, results)
    write_atomically(config.run_dir / "results.json", json.dumps(found, indent=1))
    show_tables(found)
    print(f"\n{found['sample']}\n\nwrote {config.run_dir}/results.json and .png")


def _plan(config: Config, began: float) -> int:
    """Steps that fit the budget, kept for reruns of the same folder."""
    file = config.run_dir / "plan.json"
    if file.exists():
        return json.loads(file.read_text())["steps"]
    steps = config.steps
    if not steps:
        # Scoring costs about a third of a training step a batch; compiling again,
        # saving and sampling take about a minute.
        per_step = config.seeds * sum(_seconds(config, each) for each in FAMILIES)
        texts = len(test_documents(config)) * config.test_texts
        scoring = per_step * texts / config.batch_size / 3
        left = 60 * config.minutes - (time.monotonic() - began) - scoring - 60
        steps = max(20, int(left / per_step))
    write_atomically(file, json.dumps({"steps": steps}))
    return steps


def _seconds(config: Config, family: str) -> float:
    """Seconds of one update, median of five after compiling."""
    settings = run_config(config, family, 100, config.seed)
    tokenizer = load_tokenizer(settings.data.tokenizer)
    documents = run_data.load_split(settings, tokenizer, "train")
    data = run_data.batches(settings, [documents])
    state, step = run.build_step(settings, sharding.make_mesh(settings.mesh))
    times = []
    for _ in range(6):
        start = time.monotonic()
        state, metrics = step(state, next(data))
        jax.block_until_ready(metrics)
        times.append(time.monotonic() - start)
    return float(np.median(times[1:]))


if __name__ == "__main__":
    main(tyro.cli(Config))
