"""Read and decode with M+'s memory, which is not changed.

Shapes: B batch, L layers, T time, n new tokens or memory tokens, N rows of the pool, M
capacity of the store, R retrieved rows, h heads, D model, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from memjax.models import ragged
from memjax.models.mplus import attention_retrieval, kv_cache
from memjax.models.mplus import pool as short_term_pool
from memjax.models.mplus import store as long_term_store
from memjax.models.mplus.state import KVCache, MPlusState
from memjax.models.mplus.weights import MPlusWeights
from memjax.models.sampling import Sampling, Seen, Settings, draw


class ReadOptions(NamedTuple):
    """Options of a read.

    Attributes:
        new: [B, L, n, D], memory tokens of `compress` that are not stored. They are
            read alone, by the adapter that writes, without the open chunk; with
            `beside_pool` in the place of n rows of the pool, n in [1, N]: of empty
            ones first, and of random ones where these are too few.
        beside_pool: see `new`.
        kept_rows: [B, L, N - n], rising: the rows of the pool that stay with `new`;
            None draws them.
        prompt_length: number of first tokens that choose rows of the long-term store,
            in [1, T]; logits before the last of them have then seen it. T is right
            where only what follows the tokens counts, as in `MPlus.generate`. None is
            what `MPlusConfig.retrieval_source` says: with "prefix" the tokens of the
            open chunk and the first token choose, so that no logit has seen a later
            token; with "all" every token does. With retrieval "attention" it must be
            None, as each token chooses for itself.
        max_new_tokens: at least 0, how many tokens `decode` can read afterwards.
    """

    new: Array | None = None
    beside_pool: bool = False
    kept_rows: Array | None = None
    prompt_length: int | None = None
    max_new_tokens: int = 0

    @property
    def only_new(self) -> bool:
        """Whether the tokens read the new memory and nothing else."""
        return self.new is not None and not self.beside_pool


def check(
    weights: MPlusWeights,
    state: MPlusState,
    tokens: Int[Array, "B T"],
    options: ReadOptions,
    lengths: Int[Array, " B"] | None = None,
) -> None:
    """Raises ValueError on tokens or options that `MPlus.read` refuses."""
    ragged.check_kind(state, MPlusState)
    ragged.check_tokens(tokens, state.num_valid.shape[0], weights.backbone.vocab_size)
    ragged.check_lengths(lengths, tokens, 1)
    b, t = tokens.shape
    if options.beside_pool and options.new is None:
        raise ValueError("beside_pool needs new memory, got new=None")
    count = 0
    if options.new is not None:
        count = options.new.shape[2]
        weights.check_rows("new", options.new, b, count)
        if not 1 <= count <= weights.config.pool_size:
            raise ValueError(
                f"new must have 1 to N={weights.config.pool_size} rows, got {count}"
            )
    if options.kept_rows is not None:
        shape = (b, weights.layers, weights.config.pool_size - count)
        if not options.beside_pool or options.kept_rows.shape != shape:
            raise ValueError(
                f"kept_rows must be [B, L, N - n] = {list(shape)}, with beside_pool, "
                f"got {list(options.kept_rows.shape)}, "
                f"beside_pool={options.beside_pool}"
            )
        short_term_pool.check_rows(
            "kept_rows", options.kept_rows, weights.config.pool_size
        )
    if options.prompt_length is not None and weights.config.by_attention:
        raise ValueError(
            "prompt_length must be None with retrieval='attention', where no token "
            f"chooses for another, got {options.prompt_length}"
        )
    if options.prompt_length is not None and not 1 <= options.prompt_length <= t:
        raise ValueError(
            f"prompt_length must be in [1, T={t}], got {options.prompt_length}"
        )
    if options.max_new_tokens < 0:
        raise ValueError(
            f"max_new_tokens must be at least 0, got {options.max_new_tokens}"
        )


class ReadTrace(NamedTuple):
    """Trace of a read, layer by layer.

    Attributes:
        hidden: the input of each layer, and the features.
        scores: the retriever's p of every row of the store, -inf where there is none.
            None without a learned retriever.
        chosen: indices of the retrieved rows in the store, oldest first; with
            retrieval="attention" those of each token and head. None without a store.
    """

    hidden: Float[Array, "L1 B T D"]
    scores: Float[Array, "L B M"] | None
    chosen: Int[Array, "L B R"] | Int[Array, "L B T h R"] | None


def check_decode(
    weights: MPlusWeights,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    only_new: bool,
    state: MPlusState | None,
) -> None:
    """Raises ValueError on what `MPlus.decode` refuses."""
    ragged.check_tokens(tokens, cache.length.shape[0], weights.backbone.vocab_size)
    needed = weights.config.by_attention and not only_new
    if (state is not None) != needed:
        raise ValueError(
            f"state must be {'that of the cache' if needed else 'None'} with "
            f"retrieval={weights.config.retrieval!r}, num_retrieved="
            f"{weights.config.num_retrieved} and only_new={only_new}, got "
            f"{'None' if state is None else 'a state'}"
        )


def decode(
    weights: MPlusWeights,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    only_new: bool,
    state: MPlusState | None,
) -> tuple[KVCache, Float[Array, "B T V"]]:
    """Reads the next tokens with a KV cache.

    The rows of the learned retriever stay those of the cache; with
    retrieval="attention" each new token retrieves its own. Logits are NaN for tokens
    that do not fit into the cache.

    Args:
        weights: of M+.
        cache: what `read` gave.
        tokens: in [0, V).
        only_new: whether it is of new memory alone, read by the adapter that writes.
        state: the memory that was read; only with retrieval="attention", which
            searches its store.
    """
    lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    h = weights.backbone.embed(tokens)
    attention_retriever = (
        None if state is None else attention_retrieval.of_store(weights, state.store)
    )
    cache, y, _ = kv_cache.read_tokens(
        weights, cache, h, lengths, only_new, attention_retriever=attention_retriever
    )
    return cache, weights.backbone.logits(y)


def read(
    weights: MPlusWeights,
    state: MPlusState,
    tokens: Int[Array, "B T"],
    options: ReadOptions,
    lengths: Int[Array, " B"] | None = None,
) -> tuple[KVCache, Float[Array, "B T D"], ReadTrace]:
    """Reads the memory, the open chunk and the first `lengths[b]` tokens.

    Returns:
        The KV cache, the tokens' features, and a trace of what happened.
    """
    if lengths is None:
        lengths = _all(tokens)
    read_with = functools.partial(_read_with_open_chunk, weights, options)
    if options.only_new:
        return read_with(0, state, tokens, lengths)
    # An open chunk adds up to C - 1 positions before the tokens. Often all are empty,
    # and a program without those positions is about half the work.
    with_open_chunk = functools.partial(read_with, weights.config.chunk_size - 1)
    without_open_chunk = functools.partial(read_with, 0)
    return jax.lax.cond(
        jnp.any(state.length > 0),
        with_open_chunk,
        without_open_chunk,
        state,
        tokens,
        lengths,
    )


def read_closed(
    weights: MPlusWeights,
    state: MPlusState,
    tokens: Int[Array, "B T"],
    options: ReadOptions,
) -> tuple[KVCache, Float[Array, "B T D"], ReadTrace]:
    """`read` where every open chunk is known to be empty: half the program."""
    check(weights, state, tokens, options)
    return _read_with_open_chunk(weights, options, 0, state, tokens, _all(tokens))


def generate(
    weights: MPlusWeights,
    count: int,
    sampling: Sampling,
    state: MPlusState,
    prompt: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None,
    key: PRNGKeyArray,
) -> Int[Array, "B n"]:
    """Samples `count` tokens after a prompt; see `MPlus.generate`."""
    searched = state if weights.config.by_attention else None
    # The last token is sampled and never read.
    # Nothing before the prompt's last logit counts, so that all of it may choose rows.
    length = None if weights.config.by_attention else prompt.shape[1]
    options = ReadOptions(prompt_length=length, max_new_tokens=count - 1)
    cache, features, _ = read(weights, state, prompt, options, lengths)
    ends = (_all(prompt) if lengths is None else lengths) - 1
    features = ragged.take(features, ends[:, None])
    logits = weights.backbone.logits(features)

    settings = Settings.of(sampling)
    places = jnp.arange(prompt.shape[1], dtype=jnp.int32)[None]
    # Padding is of no row.
    known = jnp.where(places <= ends[:, None], prompt, logits.shape[-1])

    def sample_and_read(carry, key):
        cache, logits, seen = carry
        token = draw(logits, key, settings, seen)
        cache, logits = decode(weights, cache, token[:, None], False, searched)
        return (cache, logits[:, 0], seen and seen.after(token)), token

    *keys, last = jax.random.split(key, count)
    read_before = jnp.zeros((len(prompt), logits.shape[-1]), bool)
    rows = jnp.arange(len(prompt), dtype=jnp.int32)[:, None]
    seen = Seen.of(sampling, read_before.at[rows, known].set(True, mode="drop"))
    carry = (cache, logits[:, -1], seen)
    tokens = jnp.zeros((0, prompt.shape[0]), jnp.int32)
    if keys:
        carry, tokens = jax.lax.scan(sample_and_read, carry, jnp.stack(keys))
    token = draw(carry[1], last, settings, carry[2])
    return jnp.concatenate([tokens, token[None]]).T


def _all(tokens):
    return jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)


def _read_with_open_chunk(weights, options, width, state, tokens, lengths):
    """`width` is the most tokens that an open chunk has; 0 if all are empty."""
    c, (b, t) = weights.config, tokens.shape
    if options.beside_pool and options.kept_rows is None:
        options = options._replace(
            kept_rows=_draw_kept(weights, state, options.new.shape[2])
        )
    # With a width of 0 every open chunk is empty, as the caller has checked.
    length = state.length if width else jnp.zeros_like(state.length)
    joined = ragged.join(state.tokens, length, tokens, width + t)
    h = weights.backbone.embed(joined)
    times = jnp.arange(width + t, dtype=jnp.int32)[None]
    after = times - length[:, None]
    # Padding chooses nothing.
    query_mask = _query_mask(c, options.prompt_length, after, t)
    query_mask = query_mask & (after < lengths[:, None])
    memory = _only_new if options.only_new else _memory
    first = 1 + options.new.shape[2] if options.only_new else c.prefix
    cache = kv_cache.empty(
        # Room for the longest open chunk in either branch, which must return one shape.
        weights,
        b,
        first,
        first + (c.chunk_size - 1) + t + options.max_new_tokens,
    )
    scores: list[Array] = []
    chosen: list[Array] = []

    def before(layer, h):
        rows, seen, found = memory(weights, options, state, layer, h, query_mask)
        if found is not None:
            scores.append(found.scores)
            chosen.append(found.chosen)
        return rows, seen

    attention_retriever = (
        None if options.only_new else attention_retrieval.of_store(weights, state.store)
    )
    cache, y, inputs = kv_cache.read_tokens(
        weights,
        cache,
        h,
        length + lengths,
        options.only_new,
        before,
        attention_retriever,
    )
    # The open chunk was read for context; features are of the new tokens alone.
    taken = length[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    hidden = jnp.stack([ragged.take(x, taken) for x in (*inputs, y)])
    if attention_retriever is not None:
        chosen = [ragged.take(x, taken) for x in attention_retriever.chosen]

    def stack(xs):
        return jnp.stack(xs) if xs else None

    return cache, hidden[-1], ReadTrace(hidden, stack(scores), stack(chosen))


def _query_mask(config, prompt_length, after, count):
    """Mask of the tokens that choose rows; `after` counts from the first token read."""
    if prompt_length is None and config.retrieval_source == "prefix":
        # Every later token is scored, and must not take part.
        return after < 1
    return (after >= 0) & (after < (prompt_length or count))


def _only_new(weights, options, state, layer, h, query_mask):
    """[bos ; new rows] of a layer."""
    del h, query_mask, state
    new = options.new[:, layer]
    return *kv_cache.with_bos(
        weights, layer, [(new, jnp.ones(new.shape[:2], bool))]
    ), None


def _memory(weights, options, state, layer, h, query_mask):
    """[bos ; retrieved rows ; pool] of a layer, retrieved by the tokens' queries."""
    c = weights.config
    pool = short_term_pool.of_layer(state.pool, layer)
    seen = kv_cache.valid_rows(state.num_valid, c.pool_size)
    if options.new is not None:
        new = options.new[:, layer].astype(pool.dtype)
        kept = options.kept_rows[:, layer]
        seen = jnp.concatenate(
            [ragged.take(seen, kept), jnp.ones(new.shape[:2], bool)], axis=1
        )
        pool = jnp.concatenate([ragged.take(pool, kept), new], axis=1)
    # Retrieved rows are older than those of the pool, and precede them.
    memory, found = [(pool, seen)], None
    if c.has_retriever:
        queries = weights.retriever_queries(layer, h)
        found = long_term_store.retrieve(c, state.store, layer, queries, query_mask)
        memory.insert(0, (found.rows, found.real))
    return *kv_cache.with_bos(weights, layer, memory), found


def _draw_kept(weights, state, new):
    """Draws the rows of the pool that stay with `new` ones; the key is not changed."""
    rows = weights.config.pool_size

    def draw(key, num_valid):
        return short_term_pool.draw_kept(
            key, weights.layers, rows, rows - new, num_valid
        )

    # A read leaves the state's key alone: two reads of one state draw the same rows.
    return jax.vmap(draw)(jax.random.wrap_key_data(state.key), state.num_valid)
