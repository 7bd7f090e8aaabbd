"""Speed of a training step of HMT, against the program of its authors.

    python -m experiments.speed.official_hmt --official HMT-pytorch

One step reads 4 segments of 256 new tokens. Its loss is on the last 256, its gradients
go back through all segments, and AdamW updates the parameters. All implementations
compute in float32 with the same number of threads, each in a process of its own, timed
interleaved; compilation and the first step are left out. Weights are random, which does
not change the time.

The peer is https://github.com/OswaldHe/HMT-pytorch, cloned to the folder that
`--official` names, with what it imports (PyTorch, transformers, accelerate, peft,
evaluate, scikit-learn). Two things are changed for a machine without a GPU or network:
calls that send tensors to a GPU leave them in place, and two metrics that it downloads,
which a training step does not use, are None.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    show,
    table,
    times,
    write_report,
)
from experiments.lab.timing import (
    PAGES,
    Pages,
    require_checkout,
    speedup,
    summary,
    time_processes,
    versions,
)
from experiments.speed.shapes import SHAPES, Shape, Size, backbone, llama_config
from memjax.data import Batch
from memjax.models import HMTConfig, add_hmt
from memjax.training import OptimizerConfig
from memjax.training.optimizer import make_optimizer
from memjax.training.step import StepConfig, init_train_state, make_train_step

FILE = "modeling_rmt/language_modeling.py"
SEGMENT, SEGMENTS, THREADS = 256, 4, 2


class Setting(NamedTuple):
    """Of a backbone: width of the memory's search, batches, rounds, and its memory."""

    retrieval_dim: int
    batches: tuple[int, ...]
    repeats: int
    pages: Pages


SETTINGS: dict[Size, Setting] = {
    "tiny": Setting(128, (1, 2), 5, "large"),
    "smollm2": Setting(1536, (1,), 3, "kept"),
}


def build(
    implementation: str, size: Size, batch: int, checkout: Path
) -> Callable[[], float]:
    """The training step of "official" or "keep", ours; it returns the loss."""
    shape, random = SHAPES[size], np.random.default_rng(0)
    tokens = random.integers(0, shape.vocab, (batch, SEGMENTS * SEGMENT), np.int32)
    memory = HMTConfig(
        segment_length=SEGMENT,
        num_sensory_tokens=32,
        retrieval_dim=SETTINGS[size].retrieval_dim,
        activations="keep",
    )
    if implementation == "official":
        return authors(checkout, shape, memory, tokens)
    return ours(shape, memory, tokens)


def ours(shape: Shape, memory: HMTConfig, tokens: np.ndarray) -> Callable[[], float]:
    """Our step, compiled at its first call."""
    model = add_hmt(backbone(shape), memory, key=jax.random.key(1))
    optimizer = OptimizerConfig(
        learning_rate=1e-5,
        beta2=0.999,
        epsilon=1e-8,
        weight_decay=0.01,
        decay_vectors=True,
        max_gradient_norm=float("inf"),
    )
    transform, config = make_optimizer(optimizer, 1000), StepConfig(loss_on="last")
    state = init_train_state(model, transform, config, len(tokens))
    update = jax.jit(make_train_step(model, transform, config), donate_argnums=0)
    # The last logits have no target.
    mask = np.ones(tokens.shape, np.float32)
    mask[:, -1] = 0
    items = (tokens, np.roll(tokens, -1, axis=1), mask, np.ones(len(tokens), bool))
    batch = Batch(*map(jnp.asarray, items))

    def step() -> float:
        nonlocal state
        state, metrics = update(state, batch)
        jax.block_until_ready((state, metrics))
        return float(metrics["loss"])

    return step


def authors(
    checkout: Path, shape: Shape, memory: HMTConfig, tokens: np.ndarray
) -> Callable[[], float]:
    """The step of the authors' training loop, with its defaults."""
    # Optional, and no other implementation's process should load them.
    import accelerate  # pyright: ignore[reportMissingImports]
    import evaluate  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    here: Any = torch.Tensor
    here.cuda = lambda tensor, *_: tensor
    evaluate.load = lambda *_: None
    # Its logger wants one.
    accelerate.Accelerator(cpu=True)
    sys.path.insert(0, str(checkout))
    from modeling_rmt import language_modeling  # pyright: ignore[reportMissingImports]

    base = transformers.LlamaForCausalLM(llama_config(shape))
    model = language_modeling.RecurrentWrapper(
        language_modeling.MemoryCell(base, 1, memory.num_sensory_tokens),
        emb=base.get_input_embeddings(),
        word_emb_dim=shape.width,
        hidden_dim=memory.retrieval_dim,
        ltm_context=memory.num_memories,
        segment_size=SEGMENT,
        max_n_segments=SEGMENTS,
        mask_size=SEGMENT,
        n_cell_out=5,
    ).train()
    updated = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(updated, lr=1e-5, weight_decay=0.01)
    ids = torch.from_numpy(tokens).long()

    def step() -> float:
        adamw.zero_grad()
        out, _ = model(
            input_ids=ids,
            labels=ids,
            attention_mask=torch.ones_like(ids),
            segment_size=SEGMENT,
            sum_fraction=0.5,
        )
        out.loss.backward()
        adamw.step()
        return out.loss.detach().item()

    return step


def measure(official: Path, size: Size, batch: int) -> dict[str, Any]:
    """Times and the speedup of one row."""
    arguments = {name: (name, size, batch, official) for name in ("official", "keep")}
    _, _, repeats, pages = SETTINGS[size]
    rounds = time_processes(build, arguments, THREADS, repeats, pages)
    found: dict[str, dict[str, Any]] = {}
    for name, steps in rounds.items():
        found[name] = summary([step.seconds for step in steps[1:]]) | {
            "loss": steps[-1].value,
            "peak_mebibytes": steps[-1].peak_mebibytes,
        }
    ours = found["keep"]
    ours["speedup"] = speedup(ours, {"official": found["official"]})
    about = {"size": size, "batch": batch, "trained": "all"}
    return about | {"implementations": found}


def main(official: Path, size: Size = "tiny") -> None:
    """Times, prints and writes the results.

    Args:
        official: checkout of the authors' program.
        size: of the backbone: "tiny", or "smollm2" (135M).
    """
    require_checkout(official, FILE)
    rows = []
    for batch in SETTINGS[size].batches:
        row = measure(official, size, batch)
        rows.append(row)
        columns = ("median_s", "min_s", "max_s", "peak_mebibytes")
        found = row["implementations"].items()
        cells = {name: [x[column] for column in columns] for name, x in found}
        show(f"{size}, batch {batch}", columns, cells)
    used = {"threads": THREADS, "environment": PAGES[SETTINGS[size].pages]}
    results = {"packages": versions("torch", "transformers", "peft"), "steps": rows}
    question = "speed of a training step of HMT"
    name = "official_hmt" if size == "tiny" else f"official_hmt_{size}"
    write_report(RESULTS / "speed" / name, question, used, results)


@table("hmt/speed", "speed/official_hmt", "speed/official_hmt_smollm2")
def official_hmt(*results: dict[str, Any]) -> Rows:
    """Seconds of a training step, and speedups over the authors' program."""
    for step in (step for result in results for step in result["steps"]):
        if step["trained"] != "all":
            continue
        ours, official = (step["implementations"][n] for n in ("keep", "official"))
        cells = {"backbone, batch": f"{step['size']}, {step['batch']}"}
        for name, row in (("memjax", ours), ("authors", official)):
            cells |= {
                f"{name}: seconds": number(row["median_s"], 3),
                f"{name}: fastest": number(row["min_s"], 3),
                f"{name}: slowest": number(row["max_s"], 3),
            }
        yield cells | {"speedup": times(ours["speedup"]["official"])}


if __name__ == "__main__":
    tyro.cli(main)
