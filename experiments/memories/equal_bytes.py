"""Which memory beside a pretrained model, and does it beat a window of equal bytes?

    python -m experiments.memories.equal_bytes --plan        # rows, minutes of each
    python -m experiments.memories.equal_bytes --seeds 0     # all missing rows
    python -m experiments.memories.equal_bytes --rows lattice wide-tuned --seeds 0 1

Rows (`equal_bytes_rows`): every memory beside the windows of a few layers of SmolLM2,
HMT, RMT, and baselines. Columns (`equal_bytes_report`): perplexity of
held-out documents by kind and by position, bytes of the state. A
row has a result of its own, `results/memories/equal_layers/ROW/seedN/score.json`, and
is skipped once that exists; a stopped one continues.

It does not show how memories do with more training than 160 texts of 2,048 tokens, in
a larger model, or trained with the backbone from the start.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from experiments.lab import backbones, measure, options, study
from experiments.lab.results import RESULTS, settings
from experiments.memories import equal_bytes_report as report
from experiments.memories.equal_bytes_rows import ROWS, Setup, Sizes, wide_window
from memjax import evaluation
from memjax.data import TokenisedDocument
from memjax.evaluation.provenance import provenance
from memjax.evaluation.statistics import MIN_DOCUMENTS
from memjax.models.adapters import merge_lora
from memjax.status import say
from memjax.training.finetune import finetune

#: Tokens read at a time.
SEGMENT = 1024
#: Minutes of a window's row on one core of the machine of the committed results.
MINUTES = 70.0
Names = tuple[Annotated[str, options.among(*ROWS)], ...]
Least = Annotated[int, options.within(MIN_DOCUMENTS)]


@dataclasses.dataclass(frozen=True)
class Config(Sizes):
    """Rows and texts, and sizes and training of all rows.

    Attributes:
        rows: names; none given is all.
        seeds: of the training; rows that are not trained have seed 0 alone.
        plan: print the missing rows with their cost, and stop.
        backbone: as `memjax finetune` takes it; "smollm2" is the PyPI package's.
        least: documents that each kind must have to be scored, 5 or more.
        tokens: of each test document that are read.
        first: position of the first target that counts in perplexities.
        run_dir: of models and parts of results.
        output: folder of the results.
    """

    rows: Names = ()
    seeds: tuple[options.Seed, ...] = (0,)
    plan: bool = False
    backbone: str = "smollm2"
    least: Least = 8
    tokens: options.Tokens = 4096
    first: options.Tokens = 512
    run_dir: options.Folder = Path("runs/equal_layers")
    output: options.Folder = RESULTS / "memories" / "equal_layers"

    def __post_init__(self):
        super().__post_init__()
        if self.tokens <= self.first:
            why = f"tokens must be above first={self.first}, got {self.tokens}"
            raise ValueError(why)

    def runs(self) -> list[study.Run]:
        """Rows and seeds, seed by seed; without training every seed is the same."""
        return [
            *dict.fromkeys(
                (name, seed if ROWS[name].stages else 0)
                for seed in self.seeds
                for name in self.rows or ROWS
            )
        ]


def main(config: options.Flags[Config]) -> None:
    """Does the missing runs, one after the other."""
    setup, path, test = prepare(config)
    if config.plan:
        study.plan(config.runs(), config.output, lambda row: MINUTES * ROWS[row].cost)
        return
    study.use_compile_cache(config.run_dir)
    used = settings(config, "rows", "seeds", "plan")

    def measured(row: str, seed: int, folder: Path) -> dict[str, Any]:
        given = config, dataclasses.replace(setup, seed=seed), path, test
        return provenance(report.QUESTION, used) | run_row(row, *given)

    study.run_all(
        config.runs(),
        measured,
        run_dir=config.output,
        identity=lambda row, seed: used,
        report=lambda _: report.write(config.output),
    )
    print(f"every row has its result, in {config.output}.json")
    print(f"experiments.lab.render shows {RESULTS / report.SUMMARY}.json")


def prepare(config: Config) -> tuple[Setup, Path | str, list[TokenisedDocument]]:
    """Sizes and training of all rows, the backbone's files, and test documents."""
    options.require_corpus("corpus", config.corpus, config.least)
    path = backbones.located(config.backbone)
    loaded = finetune.load_backbone(path)
    test = measure.documents_of_kinds(
        config.corpus,
        loaded.tokenizer,
        "test",
        config.tokens,
        least=config.least,
    )
    sizes = {x.name: getattr(config, x.name) for x in dataclasses.fields(Sizes)}
    # Texts are read in whole segments.
    tokens = -(-config.tokens // SEGMENT) * SEGMENT
    setup = Setup(**sizes, backbone=loaded.model, tokens=tokens)
    # Sizes that a row would refuse are refused before the first.
    wide_window(setup.backbone, setup)
    for make in filter(None, (ROWS[name].stages for name, _ in config.runs())):
        make(setup)
    return setup, path, test


def run_row(
    name: str,
    config: Config,
    setup: Setup,
    path: Path | str,
    test: Sequence[TokenisedDocument],
) -> dict[str, Any]:
    """Trains a row and scores the test documents, each once."""
    row, model, trained = ROWS[name], setup.backbone, None
    folder = config.run_dir / f"{name}-seed{setup.seed}"
    if row.stages is not None:
        stages = row.stages(setup)
        spent = study.train_once(
            folder, lambda: finetune.finetune_stages(stages, path, folder)
        )
        _, model = finetune.load(folder / stages[-1][0])
        model = merge_lora(model)
        trained = {
            "updates": config.updates,
            "skipped_updates": spent.skipped_updates,
            "tokens": config.updates * config.context,
            "rate": config.rate,
        }
    if row.scored is not None:
        model = row.scored(model, setup)
    size = measure.state_bytes(model, config.tokens)
    wide = measure.state_bytes(wide_window(setup.backbone, setup), config.tokens)
    say(f"{name}: {size:,} bytes of state, the wide window {wide:,}")
    scored = measure.score_once(
        lambda: measure.score_text(model, SEGMENT), test, folder / "scores"
    )
    digest = hashlib.sha256()
    for text in test:
        digest.update(text.name.encode() + np.asarray(text.tokens).tobytes())
    edges = evaluation.log2_bins(config.tokens, config.first)
    return {
        "label": row.label,
        "layers": setup.layers,
        "bytes": size,
        "bytes_of_wide_window": wide,
        "texts_digest": digest.hexdigest(),
        "training": trained,
        "edges": edges,
        "bins": (1, len(edges) - 1),
        "documents": measure.bin_losses(scored.losses, edges),
    }


if __name__ == "__main__":
    options.run(main)
