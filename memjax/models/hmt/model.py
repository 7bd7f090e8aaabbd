"""HMT: a language model with a hierarchical memory, one memory vector a segment.

A document is read in segments of L tokens. The backbone, any language model, sees one
segment at a time, and with it three levels of memory: sensory memory, the last tokens
of the segment before; short-term memory, the segment's own tokens H_n; and long-term
memory, a prompt P_n that a search finds among the memories Mem of all segments read.

    S_n = BBM([T ‖ H_n[:j] ‖ T])_last                    summary of the segment's start
    P_n = softmax((S_n W_q) (M W_k)ᵀ / √d_h) M           search; M are the last N Mem
    Y   = BBM([P_n ‖ last k tokens of n-1 ‖ H_n ‖ P_n])  sensory memory before H_n
    logits = head(Y over H_n);   Mem_n = Y_last;   M ← [M, Mem_n], the newest N

BBM(X) are the backbone's states after its final norm, positions from 0. P_0 is M_init,
without sensory memory; M_init, T, W_q and W_k are learned. Without retrieval (training
stage 1, and RMT) P_n is Mem_{n-1}. He et al. (2024), https://arxiv.org/abs/2405.06067,
sections 3.1 to 3.3; order, scale and the two learned prompts are those of the official
program. `retrieval.py` has the first two equations, `segment.py` the others.

**Reading ahead.** S_n depends on the segment's first j tokens, and P_n precedes
them: their logits depend on tokens up to j. Scores count tokens from j on
(`StepConfig.loss_on="scored"`, `evaluation.scored_mask`). Splitting a text into calls
is then exact at segment boundaries, and inside a segment for all tokens from j on:
a call reads the open segment again from its start, with the summary of all its tokens.
A call of a single token, which is how text is generated, keeps the prompt that the
segment has; a segment that such calls began uses the previous segment's summary until
it has j tokens. With `summary_source="previous"` S_{n-1} searches instead of S_n: no
logit depends on later tokens and every split is exact, as it is without retrieval.

Shapes: B batch, T time, E width of the backbone's embeddings, V vocabulary, L segment,
k sensory tokens, N memories, d_h retrieval width.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from memjax import mechanisms
from memjax.checks import require_instance
from memjax.models import ragged
from memjax.models.adapters import merge_lora
from memjax.models.base import FixedSizeMemory
from memjax.models.checkpoints.saving import Contents, Savable
from memjax.models.hmt import saving
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.decode import open_last_segment, read_tokens
from memjax.models.hmt.segment import join_open_segment, read_segments
from memjax.models.hmt.state import HMTState, SegmentTrace, init_state
from memjax.models.hmt.weights import RetrievalWeights, Weights, init_weights
from memjax.models.language_model.config import Dtype
from memjax.models.language_model.model import LanguageModel
from memjax.models.language_model.rebuilt import replace_config
from memjax.models.language_model.windowed import limit_length
from memjax.nnx.compilation import compiled
from memjax.nnx.params import params_key


class HMT(FixedSizeMemory, Savable, nnx.Module):
    """A backbone with hierarchical memory: itself a language model.

    Holds parameters only: `initial_memory` (M_init), and with retrieval
    `summary_prompt` (T), `query` and `key` (W_q, W_k). The memory is an argument and a
    result.

    Example:
        model = add_hmt(backbone, HMTConfig(segment_length=512), rngs=nnx.Rngs(0))
        state, logits = model(model.init_state(batch), tokens)
    """

    def __init__(
        self,
        backbone: LanguageModel,
        config: HMTConfig,
        *,
        key: PRNGKeyArray | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        require_instance("backbone", backbone, LanguageModel)
        require_instance("config", config, HMTConfig)
        self.config = config
        #: The backbone's own config: its mechanisms, and the longest text it reads.
        self.pretrained = backbone.config
        # A segment between two prompts, with sensory memory before it.
        length = config.num_sensory_tokens + config.segment_length + 2
        # What a loop over layers keeps of each is copied into arrays of all, casts of
        # its weights too: there a segment is computed again layer by layer.
        by_layer = config.activations == "recompute" and backbone.config.scan_layers
        remat = config.activations == "keep" or by_layer
        self.backbone = limit_length(backbone, length, remat)
        weights = init_weights(self.backbone, config, params_key(key, rngs))
        self.initial_memory = nnx.Param(weights.initial_memory)
        if weights.retrieval is not None:
            self.summary_prompt = nnx.Param(weights.retrieval.summary_prompt)
            self.query = nnx.Param(weights.retrieval.query)
            self.key = nnx.Param(weights.retrieval.key)

    @property
    def window(self) -> int:
        """L: calls of whole segments are fast."""
        return self.config.segment_length

    @property
    def first_scored(self) -> int:
        """j where the summary reads ahead, else 0."""
        return self.config.summary if self.config.reads_ahead else 0

    @property
    def weights(self) -> Weights:
        """The parameters as plain arrays; those of the memory in float32, as it is."""

        def high(param):
            return param.get_value().astype(jnp.float32)

        retrieval = None
        if self.config.retrieval:
            retrieval = RetrievalWeights(
                summary_prompt=high(self.summary_prompt),
                query=high(self.query),
                key=high(self.key),
            )
        return Weights(self.backbone, high(self.initial_memory), retrieval)

    @property
    def model_type(self) -> str:
        """The model_type under which it is saved."""
        return saving.MODEL_TYPE

    def plain(self) -> LanguageModel:
        """The original backbone, without the memory, adapters merged."""
        # The memory shortened the caches and may have changed remat.
        own = self.pretrained
        return replace_config(
            merge_lora(self.backbone), mechanisms=own.mechanisms, remat=own.remat
        )

    def contents(self, dtype: Dtype) -> Contents:
        """Content of the folder of `save`: official names, adapters merged.

        transformers refuses the model_type "hmt": by the backbone's it would load the
        folder and draw every parameter anew.
        """
        return saving.contents(self.config, self.weights, self.plain())

    def init_state(
        self, batch: int, capacity: int | None = None, *, masked: bool = False
    ) -> HMTState:
        """No memories; every leaf has the batch first.

        Args:
            batch: B.
            capacity: without a meaning, as the memory has one size.
            masked: whether calls may have a mask, for batch elements with padding.
        """
        return init_state(self.config, self.backbone, batch, masked)

    @compiled
    def reset(self, state: HMTState, mask: Bool[Array, " B"]) -> HMTState:
        """Clears the memory of batch elements in `mask`, at their document's start."""
        # A state has masks or has none; `reset` needs both of one kind.
        masked = state.visible is not None
        empty = self.init_state(state.length.shape[0], masked=masked)
        return mechanisms.replace_rows(state, empty, mask)

    def _check(self, state, tokens, mask=None, lengths=None):
        ragged.check_kind(state, HMTState)
        ragged.check_tokens(tokens, state.length.shape[0], self.vocab_size)
        ragged.check_lengths(lengths, tokens, 0)
        if mask is not None:
            ragged.check_mask(mask, tokens, state.visible is not None)

    @compiled(check=_check)
    def features(
        self,
        state: HMTState,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[HMTState, Float[Array, "B T E"]]:
        """Reads tokens into the memory; returns the backbone's states at them.

        Args:
            state: the memory so far.
            tokens: in [0, V), T >= 1; values are not checked inside jit, where one out
                of range makes its batch element NaN.
            mask: False where a token is padding: it has a position in the segment, as
                in the official program, but no token attends to it. None: nothing is
                padding.
            lengths: batch element b reads its first `lengths[b]` tokens, 0 to T;
                features behind them have no meaning. None is T for all.

        Raises:
            ValueError: on tokens of another shape, a known value out of range, or a
                mask for a state that was not made for masks.
        """
        config, count = self.config, tokens.shape[1]

        # Generation: tokens extend the backbone's state and the segment is not read
        # again.
        def extend(state):
            return read_tokens(config, self.weights, state, tokens, mask)

        def again(state):
            return self._read_segments(state, tokens, mask, False, lengths)

        if count == 1:
            after, features = extend(state)
        elif (
            config.reads_ahead or count >= config.segment_length or lengths is not None
        ):
            # Where the summary reads ahead, more tokens may find another prompt.
            after, features, _ = again(state)
        else:
            fits = jnp.all(state.length + count <= config.segment_length)

            def read_again(state):
                return again(state)[:2]

            after, features = jax.lax.cond(fits, extend, read_again, state)
        if lengths is None:
            return after, features
        # Without tokens an open segment is not read again either.
        return mechanisms.replace_rows(after, state, lengths == 0), features

    @compiled(check=_check)
    def trace(
        self,
        state: HMTState,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[HMTState, Float[Array, "B T E"], SegmentTrace]:
        """`features` with a trace of the memory, from the open segment on."""
        # Traces show summaries of all segments, those too that no search needs.
        return self._read_segments(state, tokens, mask, True)

    @compiled(check=_check)
    def __call__(
        self,
        state: HMTState,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[HMTState, Float[Array, "B T V"]]:
        """Next-token logits at every position, and the memory after the last."""
        state, features = self.features(state, tokens, mask)
        return state, self.logits(features)

    def _read_segments(self, state, tokens, mask, always_summarize, lengths=None):
        """Reads the open segment again with the new tokens, and all after it."""
        config, weights = self.config, self.weights
        segments = join_open_segment(state, tokens, mask, lengths)
        memories, features, trace = read_segments(
            config, weights, state.memories, segments, always_summarize
        )
        features = jnp.moveaxis(features, 0, 1)
        features = features.reshape(features.shape[0], -1, features.shape[-1])
        new = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        # The open segment was read again from its start; only the new tokens' features
        # go out.
        features = ragged.take(features, state.length[:, None] + new)
        state = open_last_segment(config, weights, memories, segments, trace.prompt)
        return state, features, trace


def add_hmt(
    backbone: LanguageModel,
    config: HMTConfig,
    *,
    key: PRNGKeyArray | None = None,
    rngs: nnx.Rngs | None = None,
) -> HMT:
    """Gives a backbone hierarchical memory.

    Args:
        backbone: any language model; its parameters are shared, not copied.
        config: sizes of the memory.
        key: of the memory's parameters, drawn as in the official program; or
        rngs: the streams of flax, of which "params" is drawn from.

    Raises:
        ValueError: on both of key and rngs, or neither; or if an augmented segment,
            k + L + 2 tokens, is longer than the backbone's positions or capacity allow.
    """
    return HMT(backbone, config, key=key, rngs=rngs)
