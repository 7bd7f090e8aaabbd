"""Evaluation: perplexity, LongPPL, loss by position, answers, statistics, plots."""

from memjax.evaluation.answer_scores import AnswerScores as AnswerScores
from memjax.evaluation.answer_scores import answer_perplexity as answer_perplexity
from memjax.evaluation.answer_scores import score_answers as score_answers
from memjax.evaluation.key_alignment import align_key_tokens as align_key_tokens
from memjax.evaluation.key_alignment import key_tokens_by as key_tokens_by
from memjax.evaluation.key_alignment import retokenise as retokenise
from memjax.evaluation.key_tokens import KeyTokens as KeyTokens
from memjax.evaluation.key_tokens import find_key_tokens as find_key_tokens
from memjax.evaluation.key_tokens import keep_key_tokens as keep_key_tokens
from memjax.evaluation.leaked_targets import drop_leaked_targets as drop_leaked_targets
from memjax.evaluation.leaked_targets import mask_losses as mask_losses
from memjax.evaluation.leaked_targets import recall_distances as recall_distances
from memjax.evaluation.leaked_targets import recall_summary as recall_summary
from memjax.evaluation.losses import TokenLosses as TokenLosses
from memjax.evaluation.losses import log2_bins as log2_bins
from memjax.evaluation.losses import loss_by_position as loss_by_position
from memjax.evaluation.losses import perplexity as perplexity
from memjax.evaluation.losses import token_losses as token_losses
from memjax.evaluation.sensitivity import layer_sensitivity as layer_sensitivity
from memjax.evaluation.sensitivity import most_sensitive as most_sensitive
from memjax.evaluation.statistics import LossDifference as LossDifference
from memjax.evaluation.statistics import (
    loss_difference_by_document as loss_difference_by_document,
)
from memjax.models.loss import scored_mask as scored_mask
