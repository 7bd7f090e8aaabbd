"""HMT: hierarchical memory over any pretrained backbone, one memory a segment.

    S_n = BBM([T ‖ H_n[:j] ‖ T])_last                    summary of a segment's start
    P_n = softmax((S_n W_q) (M W_k)ᵀ / √d_h) M           memory search, M the last N
    Y   = BBM([P_n ‖ last k tokens of n-1 ‖ H_n ‖ P_n])  sensory memory before H_n
    logits = head(Y over H_n);   Mem_n = Y_last;   M ← [M, Mem_n], the newest N

P_0 = M_init, without sensory memory. Without retrieval (stage 1, and RMT) P_n is
Mem_{n-1}. BBM(X) are the backbone's states after its final norm, positions from 0.
He et al. (2024), https://arxiv.org/abs/2405.06067, sections 3.1 to 3.3; order, scale
and the two learned prompts are those of the official program.

**Reading ahead.** S_n has seen the segment's first j tokens, and P_n stands before
them: their logits have seen tokens up to j. Scores count tokens from j on
(`StepConfig.loss_on="scored"`, `evaluation.scored`). A state then carries on at a
segment's boundary exactly, and inside a segment for all tokens from j on: a call
reads its open segment again from the start, with the summary of all tokens that are
known; a call of a single token, which is how text is generated, keeps the prompt it
has, and for a segment that such calls began takes the last segment's summary until j
tokens are there. `summary_source="previous"` searches with S_{n-1} instead: nothing
reads ahead and every split is exact, as it is without retrieval.

Shapes: B batch, T time, E width of the backbone's embeddings, L segment, k sensory
tokens, N memories, d_h retrieval width, n segments.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from memjax import mechanisms
from memjax.models import ragged as segments
from memjax.models.hmt import decode as hmt_tokens
from memjax.models.hmt.retrieval import filled, search
from memjax.models.hmt.state import HMTConfig, HMTState, Memories, SegmentTrace, nothing
from memjax.models.language_model.model import LanguageModel
from memjax.models.language_model.windowed import with_texts_of

# Segments of a call that are compiled one by one instead of as a loop.
MOST_UNROLLED = 8


class HMT(nnx.Module):
    """A backbone with hierarchical memory: itself a language model.

    Holds parameters: `initial_memory` (M_init), `summary_prompt` (T), `query` and
    `key` (W_q, W_k), the last three with retrieval alone.

    Example:
        model = hmt(backbone, HMTConfig(segment=512), key=jax.random.key(0))
        state, logits = model(model.init_state(batch), tokens)
    """

    def __init__(
        self, backbone: LanguageModel, config: HMTConfig, *, key: PRNGKeyArray
    ):
        self.config = config
        #: The backbone's own config, with its mixers and its longest text.
        self.pretrained = backbone.config
        length = config.sensory + config.segment + 2
        self.backbone = with_texts_of(backbone, length, config.activations == "keep")
        memory_key, prompt_key, query_key, key_key = jax.random.split(key, 4)
        e = backbone.width
        vocabulary = jnp.arange(backbone.vocab_size, dtype=jnp.int32)[None]
        spread = backbone.embed(vocabulary).astype(jnp.float32).std()
        self.initial_memory = nnx.Param(jax.random.normal(memory_key, (e,)) * spread)
        if config.retrieval:
            shape = (e, config.retrieval_dim or e)
            bound = e**-0.5
            draw = lambda key: jax.random.uniform(
                key, shape, jnp.float32, -bound, bound
            )
            prompt = jax.random.normal(prompt_key, (e,)) * spread
            self.summary_prompt = nnx.Param(prompt)
            self.query = nnx.Param(draw(query_key))
            self.key = nnx.Param(draw(key_key))

    @property
    def vocab_size(self) -> int:
        """V; tokens are in [0, V)."""
        return self.backbone.vocab_size

    @property
    def window(self) -> int:
        """L: calls of whole segments are quick."""
        return self.config.segment

    @property
    def width(self) -> int:
        """E, the width of memories and features."""
        return self.backbone.width

    def init_state(self, batch: int, *, masked: bool = False) -> HMTState:
        """No memories; every leaf has the batch first.

        Args:
            batch: B.
            masked: whether calls may bring a mask, for rows with padding.
        """
        c, zeros = self.config, functools.partial(jnp.zeros, dtype=jnp.int32)
        slots = c.memories if c.retrieval else 1
        return HMTState(
            memories=Memories(
                bank=jnp.zeros((batch, slots, self.width), jnp.float32),
                held=zeros(batch),
                summary=jnp.zeros((batch, self.width), jnp.float32),
                sensory=zeros((batch, c.sensory)),
            ),
            tokens=zeros((batch, c.segment)),
            visible=jnp.zeros((batch, c.segment), bool) if masked else None,
            filled=zeros(batch),
            searched=jnp.zeros(batch, bool),
            backbone=self.backbone.init_state(batch),
        )

    def reset(self, state: HMTState, mask: Bool[Array, " B"]) -> HMTState:
        """Clears the memory of the rows in `mask`, at their document's start."""
        masked = state.visible is not None
        empty = self.init_state(mask.shape[0], masked=masked)
        return mechanisms.reset(state, empty, mask)

    def features(
        self,
        state: HMTState,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[HMTState, Float[Array, "B T E"]]:
        """Reads tokens into the memory; returns what the head sees.

        Args:
            state: the memory so far.
            tokens: in [0, V), T >= 1; values are not checked inside jit, where one out
                of range makes its row NaN.
            mask: False where a token is padding: it takes its place in the segment, as
                in the official program, but nobody sees it. None: nothing is padding.

        Raises:
            ValueError: on tokens of another shape, a known value out of range, or a
                mask for a state that was not made for masks.
        """
        self._check(state, tokens, mask)
        if tokens.shape[1] == 1:
            return hmt_tokens.read_token(self, state, tokens, mask)
        return self._read_segments(False, state, tokens, mask)[:2]

    def trace(
        self,
        state: HMTState,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[HMTState, Float[Array, "B T E"], SegmentTrace]:
        """As `features`, with what the memory did, from the open segment on."""
        self._check(state, tokens, mask)
        return self._read_segments(True, state, tokens, mask)

    def logits(self, features: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Scores of the next token, in float32."""
        return self.backbone.logits(features)

    def __call__(
        self,
        state: HMTState,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"] | None = None,
    ) -> tuple[HMTState, Float[Array, "B T V"]]:
        """Next-token logits at every position, and the memory after the last."""
        state, features = self.features(state, tokens, mask)
        return state, self.logits(features)

    def _check(self, state, tokens, mask):
        segments.check_tokens(tokens, state.filled.shape[0], self.vocab_size)
        if mask is not None:
            segments.check_mask(mask, tokens, state.visible is not None)

    def _read_segments(self, every, state, tokens, mask):
        """Runs the open segment again with what is new, and all after it.

        `every`: takes summaries also where no search needs them.
        """
        length = self.config.segment
        total = state.filled + tokens.shape[1]
        # So many are touched at most, wherever in its segment a row stands.
        count = -(-(length - 1 + tokens.shape[1]) // length)
        grid = segments.join(state.tokens, state.filled, tokens, count * length)
        visible = None
        if state.visible is not None:
            new = jnp.ones(tokens.shape, bool) if mask is None else mask
            visible = segments.join(state.visible, state.filled, new, count * length)
        cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], count, length), 1, 0)
        starts = jnp.arange(count, dtype=jnp.int32)[:, None] * length
        known = jnp.clip(total[None] - starts, 0, length)
        cuts = (cut(grid), None if visible is None else cut(visible), known)
        memories, features, trace = self._run_segments(every, state.memories, cuts)
        features = jnp.moveaxis(features, 0, 1)
        features = features.reshape(features.shape[0], count * length, -1)
        new = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        features = segments.take(features, state.filled[:, None] + new)
        state = self._open(memories, grid, visible, total, trace.prompt)
        return state, features, trace

    def _run_segments(self, every, memories, cuts):
        """All segments of a call; the last is skipped where no row has tokens in it."""
        size, dtype = self.config.segment, self.backbone.config.dtype
        # No branch inside the loop: the backward pass would keep the backbone's
        # parameters, which enter it, once a segment.
        scanned = jax.tree.map(lambda x: x[:-1], cuts)
        summaries = self._summaries(every, memories.held, scanned)
        activations = self.config.activations
        # Without a loop nothing that is kept is copied, but there is more to compile.
        unrolled = activations == "keep" and summaries.shape[0] <= MOST_UNROLLED
        memories, found = jax.lax.scan(
            segments.kept(activations, self._run_segment),
            memories,
            (*scanned, summaries),
            unroll=unrolled,
        )
        last = jax.tree.map(lambda x: x[-1], cuts)
        graph, parameters = nnx.split(self)
        run = lambda p, *cut: nnx.merge(graph, p).run_alone(every, *cut)
        if activations == "offload":
            run = segments.kept(activations, run)
        skip = lambda p, *cut: (cut[0], nothing(cut[0], size, dtype))
        memories, more = segments.run_if(
            jnp.any(last[2] > 0), run, skip, parameters, memories, last
        )
        join = lambda a, b: jnp.concatenate([a, b[None]])
        return memories, *jax.tree.map(join, found, more)

    def run_alone(self, every, memories, cut):
        """One segment with its own summary."""
        alone = jax.tree.map(lambda x: x[None], cut)
        summary = self._summaries(every, memories.held, alone)[0]
        return self._run_segment(memories, (*cut, summary))

    def _run_segment(self, memories, cut):
        """Equations (2) to (5) of one segment, and the memory update."""
        c = self.config
        tokens, visible, known, summary = cut
        words = self.backbone.embed(tokens)
        searching = summary if c.reads_ahead else memories.summary
        prompt, scores = self.search(memories, searching)
        x, start = self.augment(memories, prompt, words)
        x = segments.put(x, start + known, prompt.astype(x.dtype))
        mask = None
        if visible is not None:
            mask = segments.mask(visible, start, known, x.shape[1])
        y = self.backbone.encode(x, mask)
        places = start[:, None] + jnp.arange(c.segment, dtype=jnp.int32)[None]
        memory = segments.take(y, (start + known)[:, None])[:, 0].astype(jnp.float32)
        trace = SegmentTrace(memory, summary, prompt, scores, memories.held, known)
        full = known == c.segment
        added = jnp.concatenate([memories.bank[:, 1:], memory[:, None]], axis=1)
        chooses = memories.held >= c.choice
        grown = Memories(
            bank=added,
            held=jnp.minimum(memories.held + 1, memories.bank.shape[1]),
            summary=jnp.where(chooses[:, None], summary, 0.0),
            sensory=tokens[:, c.segment - c.sensory :],
        )
        memories = mechanisms.reset(memories, grown, full)
        return memories, (segments.take(y, places), trace)

    def _summaries(self, every, held, cuts):
        """(1) S of n segments, [n, B, E], the first of which comes after `held`.

        No memory enters them: they are made side by side, before the segments. Zeros
        where no row has memories to choose from, but for `every`.
        """
        c, n = self.config, cuts[0].shape[0]
        zeros = lambda n: jnp.zeros((n, *held.shape, self.width), jnp.float32)
        if not c.retrieval or n == 0:
            return zeros(n)
        # After so many segments every row has something to choose from, if ever.
        early = n if c.memories < c.choice else min(n, c.choice)
        most = jnp.minimum(held + early - 1, c.memories)
        needed = every | jnp.any(most >= c.choice)
        first = jax.tree.map(lambda x: x[:early], cuts)
        rest = jax.tree.map(lambda x: x[early:], cuts)
        graph, parameters = nnx.split(self)
        summaries = segments.run_if(
            needed,
            lambda parameters, cuts: nnx.merge(graph, parameters)._summarise_all(cuts),
            lambda parameters, cuts: zeros(early),
            parameters,
            first,
        )
        return jnp.concatenate([summaries, self._summarise_all(rest)])

    def _summarise_all(self, cuts):
        """S of n segments; at most as many tokens at once as a segment has."""
        c, n = self.config, cuts[0].shape[0]
        if n == 0:
            return jnp.zeros((0, cuts[0].shape[1], self.width), jnp.float32)

        def some(cuts):
            rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), cuts)
            return self.summarise(*rows).reshape(*cuts[2].shape, self.width)

        some = segments.kept(c.activations, some)
        together = n if c.activations == "keep" else max(1, c.segment // c.summary)
        whole = n - n % min(together, n)
        group = lambda x: x[:whole].reshape(-1, min(together, n), *x.shape[1:])
        done = jax.lax.map(some, jax.tree.map(group, cuts))
        done = done.reshape(whole, *done.shape[2:])
        if whole == n:
            return done
        return jnp.concatenate([done, some(jax.tree.map(lambda x: x[whole:], cuts))])

    def summarise(self, tokens, visible, known):
        """(1) S: the backbone's last state over [T, the first tokens, T]."""
        j = self.config.summary
        words = self.backbone.embed(tokens[:, :j])
        known = jnp.minimum(known, j)
        first = known + 1
        prompt = self.summary_prompt.get_value().astype(words.dtype)
        prompt = jnp.broadcast_to(prompt, (words.shape[0], prompt.shape[0]))
        x = jnp.concatenate([prompt[:, None], words, prompt[:, None]], axis=1)
        # Rows with fewer tokens end sooner; nothing before the end sees what follows.
        x = segments.put(x, first, prompt)
        mask = None
        if visible is not None:
            ones = jnp.ones_like(known)
            mask = segments.mask(visible[:, :j], ones, known, x.shape[1])
        y = self.backbone.encode(x, mask)
        return segments.take(y, first[:, None])[:, 0].astype(jnp.float32)

    def search(self, memories, summary):
        """(2)(3) P and the scores; M_init where there is no memory yet."""
        bank, held = memories.bank, memories.held
        if self.config.retrieval:
            learned = (self.query.get_value(), self.key.get_value())
            scores = search(bank, held, summary, *learned)
        else:
            scores = filled(bank, held).astype(jnp.float32)
        found = jnp.einsum("bn,bne->be", scores, bank)
        initial = self.initial_memory.get_value()[None]
        return jnp.where(held[:, None] > 0, found, initial), scores

    def augment(self, memories, prompt, words):
        """(4) [P, sensory, words, room for P] and where each row's words start."""
        k = self.config.sensory
        parts = [prompt[:, None].astype(words.dtype), words]
        if k:
            parts.insert(1, self.backbone.embed(memories.sensory))
        x = jnp.concatenate([*parts, jnp.zeros_like(parts[0])], axis=1)
        first = memories.held == 0
        start = jnp.where(first, 1, 1 + k)
        return (segments.drop(x, k, first) if k else x), start

    def _open(self, memories, grid, visible, total, prompts):
        """The state, whose open segment is what is left of the grid."""
        length = self.config.segment
        last = total // length
        filled = total - last * length
        tokens = segments.cut(grid, last, length, filled)
        if visible is not None:
            visible = segments.cut(visible, last, length, filled)
        index = jnp.minimum(last, prompts.shape[0] - 1)
        prompt = segments.take(jnp.moveaxis(prompts, 0, 1), index[:, None])[:, 0]
        is_open = filled > 0
        state = HMTState(
            memories=memories,
            tokens=tokens,
            visible=visible,
            filled=filled,
            searched=is_open & self.config.reads_ahead,
            backbone=self.backbone.init_state(filled.shape[0]),
        )
        return hmt_tokens.reread(self, state, prompt, length - 1, is_open)


def hmt(backbone: LanguageModel, config: HMTConfig, *, key: PRNGKeyArray) -> HMT:
    """Gives a backbone hierarchical memory.

    Args:
        backbone: any language model; its parameters are shared, not copied.
        config: sizes of the memory.
        key: of the memory's parameters, drawn as in the official program.

    Raises:
        ValueError: if an augmented segment, k + L + 2 tokens, is longer than the
            backbone's positions or capacity allow.
    """
    return HMT(backbone, config, key=key)
