"""What does a model still know that was injected many tokens ago?

    python -m experiments.mplus.retention.knowledge_retention
    python -m experiments.mplus.retention.knowledge_retention --model RUN \\
        --memoryllm RUN
    python -m experiments.mplus.retention.knowledge_retention --tuned RUN

A fact of the CIA World Factbook is injected inside its context, then chunks of other
text. After certain numbers of chunks the model is queried (M+, Figures 3, 5, 8 and 9;
the authors have SQuAD and NaturalQA). An answer is right if it occurs in ten tokens of
greedy decoding. The other text names neither the fact's answer nor its country.

M+ and MemoryLLM are compared with the same backbone without them, at sizes that count
what is kept between tokens on device and host (`rows.py`). With `--tuned` the backbone
has adapters that were trained on the lessons that M+ was trained on (`mplus/tuned`).

Rows are added to the result file one by one, four facts at a time: stopped, the same
call goes on where it was.

With `--carry` the memory is kept from sample to sample, as in the published programs.
"""

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import tyro

from experiments.hmt import questions as qa
from experiments.lab.results import figure, settings, show
from experiments.mplus import adapters as tuning
from experiments.mplus import answers as retention
from experiments.mplus import memories as methods
from experiments.mplus import models
from experiments.mplus.recipe import recipe
from experiments.mplus.retention import (
    recorded,
    rows,
    text_methods,
)
from experiments.mplus.retention.config import Config, Memory, Name
from experiments.mplus.samples import Samples, make_samples, samples_of
from memjax.data import Question, Tokenizer
from memjax.evaluation import plots
from memjax.evaluation.drawing import source_of
from memjax.models import LanguageModel
from memjax.models.mplus.model import MPlus


class Setting(NamedTuple):
    """What all rows share.

    Attributes:
        model: M+.
        backbone: of the methods without a memory, with the adapters if any.
        tokenizer: of both.
        memoryllm: one that was trained itself.
        sizes: of the rows.
        batches: what is injected and asked.
        seed: of the training of the adapters; None without.
    """

    model: MPlus
    backbone: LanguageModel
    tokenizer: Tokenizer
    memoryllm: MPlus | None
    sizes: rows.Sizes
    batches: list[Samples]
    seed: int | None


def main(config: Config) -> None:
    """Tests every method that the file has not, prints, draws and writes."""
    file = recorded.ResultFile(config.output, settings(config))
    setting = prepare(config, file)
    for name in config.chosen:
        test(name, config, setting, file)
    result = file.read()
    assert result is not None
    plot(result, Path(f"{config.output}.png"))
    shown = recorded.by_method(result)
    columns = [f"{distance:,}" for distance in result["distances"]]
    shares = {
        row["label"]: [found["accuracy"] for found in row["after"]]
        for row in shown.values()
    }
    shares["most frequent answer"] = [result["majority_exact"]["all"]] * len(columns)
    show("Right answers after so many tokens", columns, shares)


def prepare(config: Config, file: recorded.ResultFile) -> Setting:
    """Loads the models, and draws the facts unless the file has them."""
    model, tokenizer, _ = models.load(config)
    model = models.with_options(config, model)
    facts, after = models.facts_of(config), config.scale.after
    prompts = [tokenizer.encode(f"\n\n{fact.question}") for fact in facts]
    longest = max(map(len, prompts)) + config.answer
    batches = draw(config, model.backbone, tokenizer, facts, longest, file)
    sizes = rows.sizes(
        model,
        chunk=config.chunk,
        question=longest,
        # With `carry` all samples of a batch element are one text.
        longest=(after[-1] + 1) * config.chunk * (len(batches) if config.carry else 1),
        found=config.found,
    )
    backbone, seed = model.backbone, None
    if config.tuned is not None:
        backbone, seed = tuning.load(config.tuned, model.backbone)
    other = None
    if config.memoryllm is not None:
        other = models.load_memoryllm(config.memoryllm, tokenizer)
    return Setting(model, backbone, tokenizer, other, sizes, batches, seed)


def draw(
    config: Config,
    backbone: LanguageModel,
    tokenizer: Tokenizer,
    facts: list[Question],
    longest: int,
    file: recorded.ResultFile,
) -> list[Samples]:
    """The samples; a file that is there says which facts, and is made otherwise."""
    texts = models.passages(config)
    given: dict[str, Any] = dict(
        batch=config.batch,
        num_chunks=config.scale.after[-1],
        chunk=config.chunk,
        seed=config.seed,
    )
    if asked := file.facts():
        batches = samples_of(asked, texts, tokenizer, **given)
    else:
        answer_closed_book = None
        if not config.known:
            alone = text_methods.closed_book(backbone, tokenizer, longest)
            answer_closed_book = functools.partial(
                retention.closed_book_answers, alone, tokenizer, config.answer
            )
        batches = make_samples(
            facts,
            texts,
            tokenizer,
            samples=config.scale.samples,
            lengths=config.lengths,
            apart=not config.carry,
            answer_closed_book=answer_closed_book,
            **given,
        )
    asked = [fact for batch in batches for fact in batch.facts]
    if len(asked) != config.scale.samples:
        raise ValueError(
            f"samples={config.scale.samples} must be the {len(asked)} of "
            f"{config.output}.json; or give another output"
        )
    rest = [fact for fact in facts if fact not in set(asked)]
    common = {
        "distances": [count * config.chunk for count in config.scale.after],
        "majority_exact": qa.majority_exact(rest, asked),
    }
    file.begin(asked, common)
    return batches


def test(
    name: Name, config: Config, setting: Setting, file: recorded.ResultFile
) -> None:
    """Asks one method what it was not asked yet, and puts it into the file."""
    found = rows.build(
        name,
        setting.model,
        setting.backbone,
        setting.tokenizer,
        setting.sizes,
        setting.memoryllm,
    )
    row = describe(name, config, setting, found)
    key = recorded.row_name(row)
    before = file.row(key)
    marks, seconds = [""] * len(config.scale.after), 0.0
    if before is not None:
        same = ("label", "kept_bytes", "recipe", "memory", "retriever")
        if [before.get(part) for part in same] != [row[part] for part in same]:
            raise ValueError(f"{key!r} in {config.output}.json is of another model")
        marks, seconds = before["marks"], before["seconds"]
    # A memory that is carried on cannot be taken up in the middle.
    done = 0 if config.carry else len(marks[0]) // config.batch
    marks = [part[: done * config.batch] for part in marks]
    file.write_row(key, row | {"marks": marks, "seconds": seconds})
    began = time.monotonic() - seconds
    for more in retention.query_batches(
        found.method,
        setting.batches[done : config.until // config.batch or None],
        setting.tokenizer,
        after=config.scale.after,
        answer=config.answer,
        carry=config.carry,
    ):
        marks = [old + new for old, new in zip(marks, more, strict=True)]
        spent = time.monotonic() - began
        file.write_row(key, row | {"marks": marks, "seconds": spent})
        found_right = (retention.accuracy(retention.right(part)) for part in marks)
        shares = " ".join(f"{x['accuracy']:.2f}" for x in found_right)
        print(f"{key}: {shares} of {len(marks[0])} ({spent:.0f} s)", flush=True)
    jax.clear_caches()


def describe(
    name: Name, config: Config, setting: Setting, found: rows.Row
) -> dict[str, Any]:
    """What is known of a row before it is tested."""
    sizes, after = setting.sizes, config.scale.after
    injected = [(count + 1) * sizes.chunk for count in after]
    own = config.memoryllm if name == "MemoryLLM" else config.model
    trained = own is not None and name in get_args(Memory)
    stages = recipe(own) if trained and own is not None else []
    method = found.method
    latent = isinstance(method, methods.LatentMemory)
    memory = method.model.config if latent else None
    if config.tuned is not None:
        stages = tuning.recipe(config.tuned)
    return {
        "method": name,
        "label": found.label,
        "tuned": config.tuned is not None,
        "seed": stages[-1]["seed"] if stages else None,
        "recipe": stages,
        "kept_bytes": [method.kept(tokens)._asdict() for tokens in injected],
        "memory": None if memory is None else dataclasses.asdict(memory),
        "retriever": config.retriever.name if memory and config.retriever else None,
    }


@figure("mplus/retention")
def plot(result: dict[str, Any], path: Path) -> None:
    """Draws the right answers of a result against the distance."""
    shown = recorded.by_method(result)
    carried = ", memory carried on" if result["config"]["carry"] else ""
    plots.accuracy_by_distance(
        {
            name: [(x["accuracy"], x["low"], x["high"]) for x in row["after"]]
            for name, row in shown.items()
        },
        result["distances"],
        path,
        title=f"Facts still known, {len(result['facts'])} of them{carried}",
        source=source_of(result),
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
