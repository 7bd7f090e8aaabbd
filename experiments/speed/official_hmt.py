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
which a training step does not use, are None. Without it ours is timed alone.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    settings,
    show,
    table,
    times,
    write_report,
)
from experiments.lab.timing import (
    PAGES,
    Pages,
    check_threads,
    require_checkout,
    speedups,
    summary,
    time_processes,
    versions,
)
from experiments.speed.shapes import SHAPES, Shape, Size, backbone, llama_config
from memjax.checks import check_sizes
from memjax.data import Batch
from memjax.models import HMTConfig, add_hmt
from memjax.models.lora import LoraConfig, add_lora
from memjax.training import OptimizerConfig
from memjax.training.optimizer import make_optimizer
from memjax.training.step import StepConfig, init_train_state, make_train_step

Implementation = Literal["official", "keep", "recompute"]
Trained = Literal["all", "lora"]
FILE = "modeling_rmt/language_modeling.py"
#: The linear maps that LoRA adapts.
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SEGMENT, SEGMENTS, SENSORY = 256, 4, 32
#: Width of the memory search.
RETRIEVAL: dict[Size, int] = {"tiny": 128, "smollm2": 1536}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison.

    Attributes:
        sizes: of the backbone: "tiny", or "smollm2" (135M).
        batches: sequences of a step.
        trained: everything, or LoRA (rank 8) and the memory's parameters.
        implementations: "official", and ours keeping all activations or recomputing
            them.
        official: checkout of the authors' program; None leaves it out.
        threads: of every implementation.
        repeats: timed steps of each, at least 1.
        pages: of every implementation's memory: "large", or "kept" when it is freed.
        output: where .json goes, without the ending.
    """

    sizes: tuple[Size, ...] = ("tiny", "smollm2")
    batches: tuple[int, ...] = (1, 2)
    trained: tuple[Trained, ...] = ("all", "lora")
    implementations: tuple[Implementation, ...] = get_args(Implementation)
    official: Path | None = None
    threads: int = 2
    repeats: int = 5
    pages: Pages = "large"
    output: Path = RESULTS / "speed" / "official_hmt"

    def __post_init__(self) -> None:
        for name in ("sizes", "batches", "trained", "implementations"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        check_sizes(repeats=self.repeats, batches=min(self.batches))
        require_checkout(self.official, FILE)
        check_threads(self.threads)


def build(
    implementation: Implementation,
    size: Size,
    batch: int,
    trained: Trained,
    checkout: Path | None,
) -> Callable[[], float]:
    """The training step of an implementation, which returns the loss."""
    shape, random = SHAPES[size], np.random.default_rng(0)
    tokens = random.integers(0, shape.vocab, (batch, SEGMENTS * SEGMENT), np.int32)
    memory = HMTConfig(
        segment_length=SEGMENT,
        num_sensory_tokens=SENSORY,
        retrieval_dim=RETRIEVAL[size],
    )
    if implementation == "official":
        assert checkout is not None
        return authors(checkout, shape, memory, tokens, trained)
    memory = dataclasses.replace(memory, activations=implementation)
    return ours(shape, memory, tokens, trained)


def ours(
    shape: Shape, memory: HMTConfig, tokens: np.ndarray, trained: Trained
) -> Callable[[], float]:
    """Our step, compiled at its first call."""
    base = backbone(shape)
    if trained == "lora":
        base = add_lora(base, LoraConfig(), jax.random.key(2))
    model = add_hmt(base, memory, key=jax.random.key(1))
    optimizer = OptimizerConfig(
        learning_rate=1e-5,
        beta2=0.999,
        epsilon=1e-8,
        weight_decay=0.01,
        decay_vectors=True,
        max_gradient_norm=float("inf"),
    )
    transform, config = (
        make_optimizer(optimizer, steps=1000),
        StepConfig(loss_on="last"),
    )
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
    checkout: Path,
    shape: Shape,
    memory: HMTConfig,
    tokens: np.ndarray,
    trained: Trained,
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
    if trained == "lora":
        import peft  # pyright: ignore[reportMissingImports]

        lora = peft.LoraConfig(
            task_type=peft.TaskType.CAUSAL_LM,
            target_modules=list(ADAPTED),
            r=8,
            lora_alpha=32,
            lora_dropout=0.0,
        )
        base = peft.get_peft_model(base, lora)
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


def measure(config: Config, size: Size, batch: int, trained: Trained) -> dict[str, Any]:
    """Times and speedups of one row."""
    load = os.getloadavg()[0]
    arguments = {
        name: (name, size, batch, trained, config.official)
        for name in config.implementations
        if name != "official" or config.official is not None
    }
    rounds = time_processes(
        build, arguments, config.threads, config.repeats, config.pages
    )
    found: dict[str, dict[str, Any]] = {
        name: summary([step.seconds for step in steps[1:]])
        | {
            "first_s": steps[0].seconds,
            "loss": steps[-1].value,
            "peak_mebibytes": steps[-1].peak_mebibytes,
        }
        for name, steps in rounds.items()
    }
    peers = {name: row for name, row in found.items() if name == "official"}
    for name, row in found.items():
        if name not in peers:
            row |= speedups(row, peers)
    # Next to other work PyTorch's threads wait for each other, and lose far more.
    about = {"size": size, "batch": batch, "trained": trained}
    return about | {"load_average_before": load, "implementations": found}


def main(config: Config) -> None:
    """Times, prints and writes the results."""
    rows = []
    for size in config.sizes:
        for trained in config.trained:
            for batch in config.batches:
                row = measure(config, size, batch, trained)
                rows.append(row)
                columns = ("median_s", "min_s", "max_s", "peak_mebibytes")
                found = row["implementations"]
                cells = {name: [found[name][c] for c in columns] for name in found}
                show(f"{size}, {trained}, batch {batch}", columns, cells)
    changed = {
        "official": config.official is not None,
        "environment": PAGES[config.pages],
    }
    results = {"packages": versions("torch", "transformers", "peft"), "steps": rows}
    question = "speed of a training step of HMT"
    write_report(config.output, question, settings(config) | changed, results)


@table("hmt/speed", "speed/official_hmt", "speed/official_hmt_smollm2")
def official_hmt(*results: dict[str, Any]) -> Rows:
    """Seconds of a training step, and speedups over the authors' program."""
    for step in (step for result in results for step in result["steps"]):
        ours, official = (step["implementations"][n] for n in ("keep", "official"))
        cells = {
            "backbone, trained, batch": f"{step['size']}, {step['trained']}, "
            f"{step['batch']}"
        }
        for name, row in (("memjax", ours), ("authors", official)):
            cells |= {
                f"{name}: seconds": number(row["median_s"], 3),
                f"{name}: fastest": number(row["min_s"], 3),
                f"{name}: slowest": number(row["max_s"], 3),
            }
        yield cells | {"speedup": times(ours["speedup"]["official"])}


if __name__ == "__main__":
    main(tyro.cli(Config))
