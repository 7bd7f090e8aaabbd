"""A Llama-3-style decoder over any mixture of mechanisms.

    h ← h + mechanism(norm(h));   h ← h + W_down (silu(W_gate norm(h)) ∘ W_up norm(h))

Grattafiori et al. (2024), https://arxiv.org/abs/2407.21783. The model is a function
of its state: `model(state, tokens) -> (state, logits)`, one mechanism state a layer.
`ModelConfig.architecture` tells what other published decoders do differently; OPT's
learned positions are Zhang et al. (2022), https://arxiv.org/abs/2205.01068.

Shapes: B batch, T time, D model, E embedding (D but in OPT 350m), V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from memjax.checks import check_sizes, require_instance
from memjax.mechanisms.layers import documents
from memjax.mechanisms.layers.projections import linear, times
from memjax.mechanisms.layers.ragged import apply_ragged
from memjax.models import ragged
from memjax.models.adapters import merge_lora
from memjax.models.checkpoints.saving import (
    Contents,
    Savable,
    plain_contents,
    saved_type,
)
from memjax.models.language_model import caches, inputs
from memjax.models.language_model.config import Dtype, ModelConfig, build_once
from memjax.models.language_model.depth import Layer, run_layers
from memjax.models.language_model.inputs import next_positions, rows_of
from memjax.models.language_model.layers import (
    apply_or_step,
    draw_block,
    init_norm,
    normalize,
    run_layer,
)
from memjax.nnx.compilation import compiled
from memjax.nnx.params import as_arrays, as_params, params_key
from memjax_kernels._src.common.cpu import weigh
from memjax_kernels._src.common.partition import along_batch
from memjax_kernels._src.stored_product import Stored, stored_product

# One memory a layer; behind them, where positions are learned, how many tokens of each
# row have taken one.
State = tuple[PyTree, ...]


class LanguageModel(Savable, nnx.Module):
    """A decoder. Holds parameters only; the memory is an argument and a result.

    Example:
        model = LanguageModel(preset("elastic-tiny"), rngs=nnx.Rngs(0))
        state, logits = model(model.init_state(batch), tokens)
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        key: PRNGKeyArray | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        """Draws the parameters.

        Args:
            config: of the model.
            key: of the parameters; or
            rngs: the streams of flax, of which "params" is drawn from.

        Raises:
            ValueError: on both of key and rngs, or neither.
        """
        require_instance("config", config, ModelConfig)
        key = params_key(key, rngs)
        embed_key, head_key, *block_keys = jax.random.split(key, config.num_layers + 2)
        style, v, d = config.architecture, config.vocab_size, config.model_dim
        self.config = config
        e = self.width
        self.embedding = nnx.Param(jax.random.normal(embed_key, (v, e)) * e**-0.5)
        self.blocks = nnx.List(
            draw_block(config, build_once(mechanism), config.style(i), block_key)
            for i, (mechanism, block_key) in enumerate(
                zip(config.layers, block_keys, strict=True)
            )
        )
        if style.norm_last:
            self.norm = nnx.data(as_params(init_norm(config)))
        draw = jax.nn.initializers.lecun_normal()
        if not config.tied_head:
            self.head = nnx.Param(draw(head_key, (e, v)))
        # Keys of their own, so that the other parameters stay what they are.
        table_key, into_key, out_key = jax.random.split(jax.random.fold_in(key, 1), 3)
        if style.learned_positions:
            rows = style.learned_positions
            self.positions = nnx.Param(jax.random.normal(table_key, (rows, d)) * 0.02)
        if style.embedding_dim is not None:
            self.project_in = nnx.Param(draw(into_key, (e, d)))
            self.project_out = nnx.Param(draw(out_key, (d, e)))

    def init_state(self, batch: int, capacity: int | None = None) -> State:
        """Empty memories, one a layer; every leaf has the batch first.

        Args:
            batch: B.
            capacity: tokens that full attention gets room for, at most its config's;
                None is its config's `initial_slots`. Keys and values are kept in the
                model's dtype.

        Raises:
            ValueError: on a size below 1.
        """
        check_sizes(batch=batch, capacity=min(1 if capacity is None else capacity, 1))
        layers, dtype = self._mechanisms, self.config.dtype
        state = caches.init_state(layers, batch, capacity, dtype)
        if self.config.architecture.learned_positions:
            return (*state, jnp.zeros(batch, jnp.int32))
        return state

    @compiled
    def reset(self, state: State, mask: Bool[Array, " B"]) -> State:
        """Clears the memory of the batch elements in `mask`, at a document's start."""
        depth = len(self.blocks)
        after = caches.reset(self._mechanisms, state[:depth], mask)
        # Learned positions begin again from 0.
        return (*after, *(jnp.where(mask, 0, count) for count in state[depth:]))

    @property
    def backbone(self) -> "LanguageModel":
        """The model itself."""
        return self

    @property
    def model_type(self) -> str:
        """The model_type under which it is saved: of its family, or "memjax"."""
        return saved_type(self.config)

    def plain(self) -> "LanguageModel":
        """The model with its adapters merged."""
        return merge_lora(self)

    def contents(self, dtype: Dtype) -> Contents:
        """Content of the folder of `save`, adapters merged."""
        # No other program knows where our adapters are.
        return plain_contents(self.config, self.plain())

    @property
    def vocab_size(self) -> int:
        """V; tokens are in [0, V)."""
        return self.config.vocab_size

    @property
    def window(self) -> int:
        """Preferred number of tokens per call."""
        return self.config.window

    @property
    def reach(self) -> int | None:
        """The largest window, if all layers have one; else None."""
        windows = [
            layer.tokens_per_call if layer.plain_attention else None
            for layer in self.config.layers
        ]
        known = [window for window in windows if window is not None]
        return max(known) if len(known) == len(windows) else None

    @property
    def first_scored(self) -> int:
        """0: no logit has seen what it predicts."""
        return 0

    @property
    def can_pad(self) -> bool:
        """Whether calls may have `lengths`: all but SnapKV's models."""
        return all(mechanism.can_pad for mechanism in self._mechanisms)

    def remaining(self, state: State) -> int | None:
        """Number of further tokens that full attention can hold; None without it."""
        return caches.remaining(self._mechanisms, inputs.memories_of(self, state))

    def reserve(self, state: State, tokens: int) -> State:
        """The same memory with room for `tokens` more.

        Caches that have too few slots get a power of two of them, or their capacity:
        a text that grows compiles programs for few sizes. Not inside jit, where the
        lengths are unknown.

        Raises:
            ValueError: if full attention has no such capacity.
        """
        depth = len(self.blocks)
        after = caches.reserve(self._mechanisms, state[:depth], tokens)
        return (*after, *state[depth:])

    @property
    def _mechanisms(self):
        return [block.functions for block in self.blocks]

    @property
    def width(self) -> int:
        """E, the width of `embed` and of the features."""
        return self.config.architecture.embedding_dim or self.config.model_dim

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """Embeddings of tokens, without positions.

        Tokens must be in [0, V): values are not checked inside jit, and one out of
        range makes its row NaN.
        """
        if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim != 2:
            raise ValueError(
                f"tokens must be integers [B, T], got {tokens.dtype}"
                f"{list(tokens.shape)}"
            )
        tokens = along_batch(tokens)
        h = rows_of(self.embedding.get_value(), tokens).astype(self.config.dtype)
        if self.config.tied_head and self.config.architecture.scale_embedding:
            # The embedding is drawn for the head; the stream wants unit variance.
            h = h * self.width**0.5
        return times(h, self.config.architecture.embedding_multiplier)

    @compiled
    def read(
        self,
        state: State,
        x: Float[Array, "B T E"],
        mask: Bool[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[State, Float[Array, "B T E"]]:
        """Reads embeddings into the memories; returns the head's inputs.

        A text with more tokens than a cache has slots makes the cache larger, by the
        shapes alone; within the slots, see `reserve`.

        Args:
            state: the memories to go on from.
            x: what `embed` gives, or anything else of its width.
            mask: False at tokens that nobody may see, as padding. They keep their
                place in RoPE and take none of the learned positions, as in Hugging
                Face; their own features have no meaning. None is all True.
            lengths: batch element b reads its first `lengths[b]` tokens alone, 0 to T;
                features behind them have no meaning. Not checked inside jit. None is T.

        Raises:
            ValueError: on rows that the state does not have, a mask with a mechanism
                that compresses what it reads, or lengths that are not integers [B].
        """
        inputs.check_embeddings(self, state, x, mask)
        if lengths is not None:
            ragged.check_lengths(lengths, x, 0)
            if not self.can_pad:
                raise ValueError("lengths must be None with SnapKV, got some")
        depth = len(self.blocks)
        grown = caches.fit_call(self._mechanisms, state[:depth], x.shape[1])
        state = (*grown, *state[depth:])

        def mix(mechanism, params, memory, h):
            if lengths is not None:
                return apply_ragged(mechanism, params, memory, h, mask, lengths)
            if mask is not None:
                return mechanism.apply_masked(params, memory, h, mask, None)
            return apply_or_step(mechanism, params, memory, h)

        after, features = self._read(mix, state, x, mask)
        if lengths is not None and self.config.architecture.learned_positions:
            taken = jnp.arange(x.shape[1], dtype=lengths.dtype)[None] < lengths[:, None]
            # Padding takes no learned position.
            taken = taken if mask is None else taken & mask
            after = (*after[:-1], state[-1] + taken.sum(axis=1, dtype=jnp.int32))
        return after, features

    @compiled
    def encode(
        self, x: Float[Array, "B T E"], mask: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B T E"]:
        """Features of full sequences, without building a state.

        What `read` gives for the empty state; full attention needs no cache for it.

        Raises:
            ValueError: on a mask with a mechanism that compresses what it reads, or a
                text beyond the capacity of attention.
        """
        inputs.check_embeddings(self, None, x, mask)

        def mix(mechanism, params, memory, h):
            if mechanism.whole is not None:
                # No cache is filled, as nothing reads on from here.
                return memory, mechanism.whole(params, h, mask)
            # The state is made and dropped inside the layer: nothing of it is kept.
            return None, mechanism.apply(params, mechanism.init_state(h.shape[0]), h)[1]

        return self._read(mix, inputs.no_state(self, x), x, mask)[1]

    @compiled(check=inputs.check_starts)
    def encode_packed(
        self, x: Float[Array, "B T E"], starts: Bool[Array, "B T"]
    ) -> Float[Array, "B T E"]:
        """Features of packed rows: each document is read by itself.

        Args:
            x: what `embed` gives; padding behind a document may be anything.
            starts: True at each document's first token, at multiples of
                `start_multiple(config.mechanisms)` tokens: elsewhere NaN inside jit.
                A row's first token starts one in any case.

        Raises:
            ValueError: on a mechanism whose memory cannot be cleared inside a row,
                starts that are not bool [B, T] or are elsewhere, or a row beyond the
                capacity of attention.
        """
        inputs.check_embeddings(self, None, x, None)

        def mix(mechanism, params, memory, h):
            return memory, mechanism.packed.whole(params, h, starts)

        return self._read(mix, inputs.no_state(self, x), x, None, starts)[1]

    def features(
        self,
        state: State,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[State, Float[Array, "B T E"]]:
        """Reads tokens, which must be in [0, V); see `embed` and `read`.

        Outside of jit caches grow as the text needs, and tokens beyond the capacity of
        full attention are refused with a ValueError, as are those out of range; inside
        they give NaN.
        """
        return self._features(inputs.with_room(self, state, tokens), tokens, lengths)

    def logits(self, features: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Scores of the next token, in float32."""
        style, tied = self.config.architecture, self.config.tied_head
        head = (self.embedding if tied else self.head).get_value()
        if isinstance(head, Stored):
            scores = stored_product(features, head)
        else:
            # Sums in float32: a softmax over V needs the digits.
            head = (head.T if tied else head).astype(features.dtype)
            scores = weigh(features, head, jnp.float32)
        scores, cap = times(scores, style.logits_multiplier), style.logits_cap
        return scores if cap is None else cap * jnp.tanh(scores / cap)

    def __call__(
        self, state: State, tokens: Int[Array, "B T"]
    ) -> tuple[State, Float[Array, "B T V"]]:
        """Next-token logits at every position, and the memory after the last."""
        return self._logits_after(inputs.with_room(self, state, tokens), tokens)

    @compiled
    def _features(self, state, tokens, lengths):
        return self.read(state, self.embed(tokens), lengths=lengths)

    @compiled
    def _logits_after(self, state, tokens):
        state, features = self.read(state, self.embed(tokens))
        return state, self.logits(features)

    def _read(self, mix, state, x, mask, starts=None):
        """All layers; `mix(mechanism, params, memory, h)` runs the mechanism of one."""
        config, h = self.config, self.enter(x)
        memories, taken = state[: len(self.blocks)], state[len(self.blocks) :]
        if config.architecture.learned_positions:
            last, at = next_positions(taken[0], x, mask)
            if starts is not None:
                # Each document takes the rows that it takes alone.
                at -= documents.first_tokens(starts)
            h = h + rows_of(self.positions.get_value(), at).astype(h.dtype)
            taken = (last,)
        layers = [
            Layer(block.functions, block.parameters(), memory, block.style)
            for block, memory in zip(self.blocks, memories, strict=True)
        ]
        # A loop copies the memories: that would cost more than the work of one token.
        scan = config.scan_layers and x.shape[1] > 1
        run = functools.partial(run_layer, config, mix)
        after, h = run_layers(run, layers, h, scan)
        return (*after, *taken), self.leave(h)

    def enter(self, x: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        """Inputs of the first layer, without learned positions."""
        if self.config.architecture.embedding_dim is None:
            return x
        return linear(x, self.project_in.get_value())

    def leave(self, h: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Inputs of the head, from the last layer's output."""
        if self.config.architecture.norm_last:
            h = normalize(as_arrays(self.norm), h, self.config.norm_epsilon)
        if self.config.architecture.embedding_dim is None:
            return h
        return linear(h, self.project_out.get_value())
