"""Evaluation: perplexity over streams, loss by position, plots."""

from memjax.evaluation.perplexity import Losses as Losses
from memjax.evaluation.perplexity import by_position as by_position
from memjax.evaluation.perplexity import losses as losses
from memjax.evaluation.perplexity import octaves as octaves
from memjax.evaluation.perplexity import perplexity as perplexity
