"""Evaluation: perplexity, loss by position, answers, recall, statistics, plots."""

from memjax.evaluation.answers import Answers as Answers
from memjax.evaluation.answers import answer_perplexity as answer_perplexity
from memjax.evaluation.answers import answers as answers
from memjax.evaluation.leaked_targets import causal as causal
from memjax.evaluation.leaked_targets import recall_distances as recall_distances
from memjax.evaluation.leaked_targets import recall_summary as recall_summary
from memjax.evaluation.leaked_targets import restrict as restrict
from memjax.evaluation.perplexity import Losses as Losses
from memjax.evaluation.perplexity import by_position as by_position
from memjax.evaluation.perplexity import losses as losses
from memjax.evaluation.perplexity import octaves as octaves
from memjax.evaluation.perplexity import perplexity as perplexity
from memjax.evaluation.statistics import Gain as Gain
from memjax.evaluation.statistics import gain_by_document as gain_by_document
from memjax.models.loss import scored as scored
