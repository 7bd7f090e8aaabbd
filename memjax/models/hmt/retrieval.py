"""HMT's memory retrieval: a summary of the segment searches the memories.

    S = BBM([T ‖ first j tokens ‖ T])_last                  summary, eq. (1)
    A = softmax((S W_q) (M W_k)ᵀ / √d_h);   P = A M         search, eqs. (2) and (3)

One head, in float32 unless `retrieval_dtype` says otherwise, whose values are the
memories themselves. The backbone BBM reads a summary's tokens with no memory, so the
summaries of many segments are computed in parallel, before the segments are read in
turn. He et al. (2024), https://arxiv.org/abs/2405.06067, section 3.2.

Shapes: B batch, n segments, L segment, N slots, E width, d retrieval width d_h.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax.models import ragged
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.state import Memories
from memjax.models.hmt.weights import Weights
from memjax.models.language_model.model import LanguageModel
from memjax.models.remat import cond_with_remat, remat


class Segment(NamedTuple):
    """A segment of each batch element, or n of them along a first axis.

    Attributes:
        tokens: 0 from `length` on.
        visible: False where a token is padding; None where nothing is.
        length: number of tokens, 0 to L.
    """

    tokens: Int[Array, "*n B L"]
    visible: Bool[Array, "*n B L"] | None
    length: Int[Array, "*n B"]


def search(
    config: HMTConfig,
    weights: Weights,
    memories: Memories,
    summary: Float[Array, "B E"],
) -> tuple[Float[Array, "B E"], Float[Array, "B N"]]:
    """Equations (2) and (3): P_n, and the scores A, 0 in empty slots.

    P_n is M_init where there is no memory yet, and without retrieval the last memory.
    """
    bank, num_valid = memories.bank, memories.num_valid
    slots = jnp.arange(bank.shape[1], dtype=jnp.int32)[None]
    valid = slots >= bank.shape[1] - num_valid[:, None]
    learned = weights.retrieval
    if learned is None:
        scores = valid.astype(jnp.float32)
    else:
        # Finite, so that batch elements without memories have finite gradients.
        scores = _products(config, learned, bank, summary)
        scores = jax.nn.softmax(jnp.where(valid, scores, -1e30), axis=-1)
        scores = jnp.where(valid, scores, 0.0)
    # The values are the memories themselves: there is no value projection.
    low = functools.partial(_rounded, config)
    found = low(jnp.einsum("bn,bne->be", low(scores), low(bank)))
    initial = weights.initial_memory[None]
    return jnp.where(num_valid[:, None] > 0, found, initial), scores


def _products(config, learned, bank, summary):
    """(S W_q) (M W_k)^T / sqrt(d_h) in float32, rounded as `retrieval_dtype` says."""
    scale = learned.query.shape[-1] ** -0.5
    if config.retrieval_dtype == "float32":
        # (S W_q) W_k^T first costs E d + N E products instead of N E d.
        query = (summary @ learned.query) @ learned.key.T
        return jnp.einsum("be,bne->bn", query, bank) * scale
    # Every product is rounded, in the program's order.
    low = functools.partial(_rounded, config)
    query = low(low(summary) @ low(learned.query))
    keys = low(low(bank) @ low(learned.key))
    return low(low(jnp.einsum("bd,bnd->bn", query, keys)) * scale)


def _rounded(config, x):
    """float32 numbers rounded to `retrieval_dtype`; unchanged without retrieval.

    Not by casts, which a compiler may leave out.
    """
    if config.retrieval_dtype == "float32" or not config.retrieval:
        return x
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def summarize(
    config: HMTConfig,
    backbone: LanguageModel,
    summary_prompt: Float[Array, " E"],
    segment: Segment,
) -> Float[Array, "B E"]:
    """Equation (1): the backbone's last state over [T, first j tokens, T]."""
    j = config.summary
    x = backbone.embed(segment.tokens[:, :j])
    length = jnp.minimum(segment.length, j)
    end = length + 1
    prompt = summary_prompt.astype(x.dtype)
    prompt = jnp.broadcast_to(prompt, (x.shape[0], prompt.shape[0]))
    x = jnp.concatenate([prompt[:, None], x, prompt[:, None]], axis=1)
    # With fewer than j tokens T comes sooner; nothing before it sees what follows.
    x = ragged.put(x, end, prompt)
    mask = None
    if segment.visible is not None:
        start = jnp.ones_like(length)
        mask = ragged.mask(segment.visible[:, :j], start, length, x.shape[1])
    y = backbone.encode(x, mask)
    return ragged.take(y, end[:, None])[:, 0].astype(jnp.float32)


def summarize_segments(
    config: HMTConfig,
    weights: Weights,
    num_valid: Int[Array, " B"],
    segments: Segment,
    always: bool,
) -> Float[Array, "n B E"]:
    """S of n segments, of which the first sees `num_valid` memories.

    With `always` also where no search depends on a summary, which is zero otherwise;
    `num_valid` counts the memories before the first segment.
    """
    n, least = segments.length.shape[0], config.min_memories_to_choose

    def zeros(n):
        return jnp.zeros((n, *num_valid.shape, weights.backbone.width), jnp.float32)

    if weights.retrieval is None or n == 0:
        # Without retrieval no search needs a summary.
        return zeros(n)
    # Every later segment has enough memories to choose from, if the bank has.
    early = n if config.num_memories < least else min(n, least)
    most = jnp.minimum(num_valid + early - 1, config.num_memories)
    summaries = cond_with_remat(
        config.activations,
        always | jnp.any(most >= least),
        lambda weights, segments: _summarize_all(config, weights, segments),
        lambda weights, segments: zeros(early),
        weights,
        jax.tree.map(lambda x: x[:early], segments),
    )
    later = jax.tree.map(lambda x: x[early:], segments)
    return jnp.concatenate([summaries, _summarize_all(config, weights, later)])


def _summarize_all(config, weights, segments):
    """S of n segments, in groups of at most one segment's tokens."""
    n, batch = segments.length.shape
    if n == 0:
        return jnp.zeros((0, batch, weights.backbone.width), jnp.float32)

    def summarize_group(group):
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), group)
        prompt = weights.retrieval.summary_prompt
        summaries = summarize(config, weights.backbone, prompt, flat)
        return summaries.reshape(*group.length.shape, -1)

    summarize_group = remat(config.activations, summarize_group)
    # A group has about as many tokens as one segment, so that summaries take no more
    # memory than reading does.
    size = (
        n if config.activations == "keep" else config.segment_length // config.summary
    )
    size = min(n, max(1, size))
    whole = n - n % size

    def groups(x):
        return x[:whole].reshape(-1, size, *x.shape[1:])

    summaries = jax.lax.map(summarize_group, jax.tree.map(groups, segments))
    summaries = summaries.reshape(whole, *summaries.shape[2:])
    if whole == n:
        return summaries
    # The last group is smaller: padding it would summarize segments for nothing.
    rest = summarize_group(jax.tree.map(lambda x: x[whole:], segments))
    return jnp.concatenate([summaries, rest])
