"""Scores of a row of the table: trained with the rate that validation texts choose.

Every row that is trained gets as many updates on the same documents, and a learning
rate of its own: each is tried with the first seed, scored on the validation documents,
and the best one is trained with the other seeds. Test documents choose nothing. What
is in the folders of an earlier call is not done again.
"""

import dataclasses
from typing import Any, NamedTuple

from experiments.hmt import common, scores
from experiments.hmt.rows import Row
from experiments.lab.baselines import NGram
from experiments.lab.intervals import mean_losses
from memjax import evaluation
from memjax.data import TokenisedDocument, load_tokens
from memjax.evaluation import TokenLosses


class Measured(NamedTuple):
    """The losses of a row, averaged over seeds, and what is said of it."""

    losses: TokenLosses
    facts: dict[str, Any]


class Texts(NamedTuple):
    """What is scored, and how.

    Attributes:
        validation: chooses the learning rate.
        test: of the results.
        segment: tokens of a segment.
        first: targets before it in their segment do not count.
    """

    validation: tuple[TokenisedDocument, ...]
    test: tuple[TokenisedDocument, ...]
    segment: int
    first: int

    def up_to(self, length: int | None) -> "Texts":
        """The test texts as far as a model reads; the last token is a target alone."""
        if length is None:
            return self
        test = (x._replace(tokens=x.tokens[: length + 1]) for x in self.test)
        return self._replace(test=tuple(test))


class Tuning(NamedTuple):
    """What each row that is trained is trained with.

    Attributes:
        rates: learning rates to choose from.
        seeds: of new parameters and data order.
    """

    rates: tuple[float, ...]
    seeds: tuple[int, ...]


def measure(
    config: common.Config, row: Row, texts: Texts, tuning: Tuning, work: bool
) -> Measured | None:
    """Scores a row, and trains it before if it wants that.

    Args:
        config: of the experiment.
        row: of the table.
        texts: validation and test.
        tuning: rates and seeds.
        work: False takes what earlier calls left, and None where that is not all.
    """
    if not row.stages:
        return _untrained(config, row, texts, work)
    first, *more = tuning.seeds
    tried = {}
    for rate in tuning.rates:
        perplexity = _validation(config, row, texts, rate, first, work)
        if perplexity is None:
            return None
        tried[rate] = perplexity
    best = min(tried, key=lambda rate: tried[rate])
    runs = [
        _scored(config, row, texts.test, texts.segment, best, seed, work)
        for seed in (first, *more)
    ]
    # The first seed is a result; the others make it surer.
    found = [run for run in runs if run is not None]
    if runs[0] is None:
        return None
    losses = [run.losses for run in found]
    return Measured(
        mean_losses(losses),
        {
            "learning_rate": best,
            "validation_perplexity": {str(k): v for k, v in tried.items()},
            "seeds": len(found),
            "perplexity_by_seed": [
                evaluation.perplexity(_restrict(x, texts)) for x in losses
            ],
            "training_seconds": found[0].facts["training_seconds"],
            "scoring_seconds": found[0].facts["scoring_seconds"],
            "devices": sorted({x for run in found for x in run.facts["devices"]}),
        },
    )


def _untrained(
    config: common.Config, row: Row, texts: Texts, work: bool
) -> Measured | None:
    test = texts.up_to(row.longest).test
    backbone = str(common.backbone_path(config))
    key = common.digest([backbone, texts.segment, row.name, dict(row.sizes)])
    folder = config.run_dir / "scores" / key
    if not (work or scores.are_scored(test, folder)):
        return None

    def prepare():
        backbone, tokenizer = common.load_backbone(config)
        if row.order:
            # The documents that the backbone was trained on.
            train = load_tokens(config.source, tokenizer, "train")
            counted = NGram(train, row.order, tokenizer.vocab_size)
            return lambda text: counted.losses([text])
        assert row.build is not None
        return scores.scoring(row.build(backbone), texts.segment)

    scored = scores.score_once(prepare, test, folder)
    return Measured(scored.losses, _facts(scored))


def _validation(config, row, texts, rate, seed, work) -> float | None:
    """Perplexity of the validation texts, after training with this rate."""
    found = _scored(config, row, texts.validation, texts.segment, rate, seed, work)
    if found is None:
        return None
    return evaluation.perplexity(_restrict(found.losses, texts))


def _scored(config, row, texts, segment, rate, seed, work) -> Measured | None:
    """Losses of the row trained with a rate and a seed; None where that is to do."""
    folder, trained = None, 0.0
    for stage in row.stages:
        optimizer = dataclasses.replace(stage.optimizer, learning_rate=rate)
        stage = common.of_experiment(config, stage)
        stage = dataclasses.replace(stage, optimizer=optimizer, seed=seed)
        if not (work or common.is_trained(config, stage, folder)):
            return None
        folder = common.train_stage(config, stage, folder)
        trained += common.seconds(folder)
    last = folder
    assert last is not None
    if not (work or scores.are_scored(texts, last / "scores")):
        return None
    prepare = lambda: scores.scoring(common.load(last).model, segment)
    scored = scores.score_once(prepare, texts, last / "scores")
    return Measured(scored.losses, {"training_seconds": trained} | _facts(scored))


def _facts(scored: scores.Scored) -> dict[str, Any]:
    return {"scoring_seconds": scored.seconds, "devices": scored.devices}


def _restrict(losses: TokenLosses, texts: Texts) -> TokenLosses:
    mask = evaluation.scored_mask(losses.mask.shape[1], texts.segment, texts.first)
    return evaluation.mask_losses(losses, mask)
