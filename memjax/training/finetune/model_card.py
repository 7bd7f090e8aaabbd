"""Model card of an export: origin, training and scores."""

import shlex

from memjax.config_io import AnyPath, read_json
from memjax.models.checkpoints import own_format
from memjax.models.checkpoints.license import card_entries, described
from memjax.training.finetune.run import later_stage
from memjax.training.launch import Run
from memjax.training.loading import Loaded

#: Kind of the card of a LoRA alone.
ADAPTER = "lora"
KINDS = {
    ADAPTER: "A LoRA of PEFT, which memjax loads as well.",
    "hmt": "A language model with HMT memory (a memory vector for every segment).",
    "memoryllm": "A language model with M+ memory (memory tokens in every layer).",
    "memjax": "A language model of memjax with recurrent or memory layers.",
}
USES = {
    "hmt": "from memjax.models.hmt.checkpoint import load_hmt\n\n"
    "model = load_hmt(FOLDER)",
    "memoryllm": "from memjax.models.mplus.checkpoints.checkpoint import load_mplus\n\n"
    "model = load_mplus(FOLDER)",
}
PLAIN = "import memjax\n\nmodel = memjax.load(FOLDER).model"


def model_card(
    opened: Loaded, folder: AnyPath | None, model_type: str, command: list[str]
) -> str:
    """The text of a `README.md` for the hub.

    Args:
        opened: the model that is exported.
        folder: of its run, for the scores; None without a run.
        model_type: of the exported folder.
        command: the arguments that export it.
    """
    parts = [
        _front_matter(opened, model_type),
        f"# {model_type} model, written by memjax\n",
        KINDS.get(model_type, "A language model that transformers loads as well.")
        + "\n",
        "## How it was made\n",
        *_making(opened, command),
    ]
    if folder is not None and (scores := _scores(later_stage(folder) or folder)):
        parts += ["\n## Scores\n", scores]
    use = USES.get(model_type, PLAIN).replace("FOLDER", '"this/folder"')
    parts += ["\n## How to use it\n", f"```python\n{use}\n```\n"]
    return "\n".join(parts)


def _front_matter(opened: Loaded, model_type: str) -> str:
    """YAML metadata for the hub."""
    library = "peft" if model_type == ADAPTER else "memjax"
    lines = ["---", f"library_name: {library}", f"tags: [{model_type}]"]
    lines += card_entries(opened.license)
    # Of a model of the hub: its name without the commit.
    name, at, _ = opened.origin.partition("@")
    if at:
        lines.append(f"base_model: {'/'.join(name.split('/')[:2])}")
    return "\n".join([*lines, "---\n"])


def _making(opened: Loaded, command: list[str]) -> list[str]:
    lines = []
    if opened.origin:
        lines.append(f"- made from: `{own_format.public_name(opened.origin)}`")
        lines.append(f"- licence: {described(opened.license)}")
    run = opened.run
    if run is not None:
        lines.append(f"- trained: {run.memory_name}, {_training(run)}")
    return [*lines, f"- exported by: `{shlex.join(['memjax', *command])}`"]


def _training(run: Run) -> str:
    data = run.data
    return (
        f"on `{data.source}`, {run.loop.steps} steps of {data.batch_size} samples of "
        f"{data.context_length} tokens, seed {run.seed}"
    )


def _scores(folder: AnyPath) -> str:
    """A table of the reports of `memjax eval` in the run's folder."""
    rows = []
    for file in sorted(folder.glob("eval-*.json")):
        record = read_json(file)
        for kind, row in record["perplexity"].items():
            value = " | ".join(
                "" if row.get(name) is None else f"{row[name]:.3f}"
                for name in ("perplexity", "beyond_window")
            )
            rows.append(f"| {record['split']} | {kind} | {value} |")
    head = "| split | text | perplexity | beyond the window |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n" if rows else ""
