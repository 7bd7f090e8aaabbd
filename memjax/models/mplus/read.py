"""How M+ reads: what stands before the tokens, and the cache of it.

Shapes: B batch, L layers, T time, K memory tokens, N rows of the pool, M capacity of
the store, R retrieved rows, S slots, h heads, D model, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from memjax.models import ragged as segments
from memjax.models.mplus import attention_retrieval, kv_cache
from memjax.models.mplus import pool as short_term_pool
from memjax.models.mplus import store as long_term_store
from memjax.models.mplus.state import MPlusState, Reading
from memjax.models.mplus.weights import MPlusWeights
from memjax.models.sampling import Sampling, draw


class Given(NamedTuple):
    """What a read is given beside its tokens; see `MPlus.read`."""

    new: Array | None
    beside_pool: bool
    kept: Array | None
    prompt: int | None
    room: int

    @property
    def alone(self) -> bool:
        """Whether the tokens read the new memory and nothing else."""
        return self.new is not None and not self.beside_pool


def check(
    weights: MPlusWeights, state: MPlusState, tokens: Int[Array, "B T"], given: Given
) -> None:
    """Raises ValueError on what `MPlus.read` refuses."""
    segments.check_tokens(tokens, state.held.shape[0], weights.backbone.vocab_size)
    b, t = tokens.shape
    if given.beside_pool and given.new is None:
        raise ValueError("beside_pool needs new memory, got new=None")
    count = 0
    if given.new is not None:
        count = given.new.shape[2]
        weights.check_rows("new", given.new, b, count)
        if not 1 <= count <= weights.config.pool:
            raise ValueError(
                f"new must have 1 to N={weights.config.pool} rows, got {count}"
            )
    if given.kept is not None:
        shape = (b, weights.layers, weights.config.pool - count)
        if not given.beside_pool or given.kept.shape != shape:
            raise ValueError(
                f"kept must be [B, L, N - n] = {list(shape)}, with beside_pool, "
                f"got {list(given.kept.shape)}, beside_pool={given.beside_pool}"
            )
    if given.prompt is not None and weights.config.by_attention:
        raise ValueError(
            "prompt must be None with retrieval='attention', where no token chooses "
            f"for another, got {given.prompt}"
        )
    if given.prompt is not None and not 1 <= given.prompt <= t:
        raise ValueError(f"prompt must be in [1, T={t}], got {given.prompt}")
    if given.room < 0:
        raise ValueError(f"room must be at least 0, got {given.room}")


class ReadTrace(NamedTuple):
    """What a read did.

    Attributes:
        hidden: what each layer was given, and the features.
        scores: p of the store's rows, -inf in empty ones; None without a retriever.
        chosen: their places in the store, as they were read: oldest first; those of
            each token and head with retrieval "attention". None without a store.
    """

    hidden: Float[Array, "L1 B T D"]
    scores: Float[Array, "L B M"] | None
    chosen: Int[Array, "L B R"] | Int[Array, "L B T h R"] | None


def read_on(
    weights: MPlusWeights,
    reading: Reading,
    tokens: Int[Array, "B T"],
    alone: bool,
    state: MPlusState | None,
) -> tuple[Reading, Float[Array, "B T V"]]:
    """Reads on from a reading; NaN for tokens beyond its slots.

    The learned retriever's rows stay those of the reading; attention finds each token
    its own.

    Args:
        weights: of M+.
        reading: what `read` gave.
        tokens: in [0, V).
        alone: whether it is of new memory alone, which the adapter that writes reads.
        state: the memory that was read; with retrieval "attention" alone, which seeks
            in its store.

    Raises:
        ValueError: on tokens of another shape, or a known value out of range; on a
            state where none is needed, or none where one is.
    """
    segments.check_tokens(tokens, reading.length.shape[0], weights.backbone.vocab_size)
    needed = weights.config.by_attention and not alone
    if (state is not None) != needed:
        raise ValueError(
            f"state must be {'that of the reading' if needed else 'None'} with "
            f"retrieval={weights.config.retrieval!r}, retrieved="
            f"{weights.config.retrieved} and alone={alone}, got "
            f"{'None' if state is None else 'a state'}"
        )
    lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    h = weights.backbone.embed(tokens)
    seeker = None if state is None else attention_retrieval.seeker(weights, state.store)
    reading, y, _ = kv_cache.read_tokens(
        weights, reading, h, lengths, alone, seeker=seeker
    )
    return reading, weights.backbone.logits(y)


def read(
    weights: MPlusWeights, state: MPlusState, tokens: Int[Array, "B T"], given: Given
) -> tuple[Reading, Float[Array, "B T D"], ReadTrace]:
    """A reading of the memory, the open chunk and the tokens; features of the last."""
    check(weights, state, tokens, given)
    run = functools.partial(_read, weights, given)
    if given.alone:
        return run(0, state, tokens)
    open_ = functools.partial(run, weights.config.chunk - 1)
    return jax.lax.cond(
        jnp.any(state.filled > 0), open_, functools.partial(run, 0), state, tokens
    )


def read_closed(
    weights: MPlusWeights, state: MPlusState, tokens: Int[Array, "B T"], given: Given
) -> tuple[Reading, Float[Array, "B T D"], ReadTrace]:
    """`read` where the caller knows that no row has an open chunk: half the program."""
    check(weights, state, tokens, given)
    return _read(weights, given, 0, state, tokens)


def generate(
    weights: MPlusWeights,
    count: int,
    sampling: Sampling,
    state: MPlusState,
    prompt: Int[Array, "B T"],
    key: PRNGKeyArray,
) -> Int[Array, "B n"]:
    """Answers of `count` tokens; see `MPlus.generate`."""
    told = state if weights.config.by_attention else None
    given = Given(None, False, None, None, count - 1)
    reading, features, _ = read(weights, state, prompt, given)
    logits = weights.backbone.logits(features)

    def body(carry, key):
        reading, logits = carry
        token = draw(logits, key, sampling)
        reading, logits = read_on(weights, reading, token[:, None], False, told)
        return (reading, logits[:, 0]), token

    *keys, last = jax.random.split(key, count)
    carry = (reading, logits[:, -1])
    tokens = jnp.zeros((0, prompt.shape[0]), jnp.int32)
    if keys:
        carry, tokens = jax.lax.scan(body, carry, jnp.stack(keys))
    token = draw(carry[1], last, sampling)
    return jnp.concatenate([tokens, token[None]]).T


def _read(weights, given, width, state, tokens):
    """`width` bounds the open chunk's tokens, which are read before these."""
    c, (b, t) = weights.config, tokens.shape
    if given.beside_pool and given.kept is None:
        given = given._replace(kept=_draw_kept(weights, state, given.new.shape[2]))
    filled = state.filled if width else jnp.zeros_like(state.filled)
    joined = segments.join(state.tokens, filled, tokens, width + t)
    h = weights.backbone.embed(joined)
    times = jnp.arange(width + t, dtype=jnp.int32)[None]
    after = times - filled[:, None]
    asked = (after >= 0) & (after < (given.prompt or t))
    memory = _alone if given.alone else _memory
    first = 1 + given.new.shape[2] if given.alone else c.prefix
    reading = kv_cache.empty(weights, b, first, first + (c.chunk - 1) + t + given.room)
    scores: list[Array] = []
    chosen: list[Array] = []

    def before(layer, h):
        rows, seen, found = memory(weights, given, state, layer, h, asked)
        if found is not None:
            scores.append(found.scores)
            chosen.append(found.chosen)
        return rows, seen

    seeker = None if given.alone else attention_retrieval.seeker(weights, state.store)
    reading, y, inputs = kv_cache.read_tokens(
        weights, reading, h, filled + t, given.alone, before, seeker
    )
    taken = filled[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    hidden = jnp.stack([segments.take(x, taken) for x in (*inputs, y)])
    if seeker is not None:
        chosen = [segments.take(x, taken) for x in seeker.chosen]
    stack = lambda xs: jnp.stack(xs) if xs else None
    return reading, hidden[-1], ReadTrace(hidden, stack(scores), stack(chosen))


def _alone(weights, given, state, layer, h, asked):
    """[bos ; new rows] of a layer."""
    del h, asked, state
    new = given.new[:, layer]
    return *kv_cache.with_bos(
        weights, layer, [(new, jnp.ones(new.shape[:2], bool))]
    ), None


def _memory(weights, given, state, layer, h, asked):
    """[bos ; retrieved ; pool] of a layer, whose rows its own tokens choose."""
    c = weights.config
    pool = short_term_pool.of_layer(state.pool, layer)
    seen = kv_cache.filled_rows(state.held, c.pool)
    if given.new is not None:
        new = given.new[:, layer]
        kept = given.kept[:, layer]
        seen = jnp.concatenate(
            [segments.take(seen, kept), jnp.ones(new.shape[:2], bool)], axis=1
        )
        pool = jnp.concatenate([segments.take(pool, kept), new], axis=1)
    memory, found = [(pool, seen)], None
    if c.has_retriever:
        queries = weights.retriever_queries(layer, h)
        found = long_term_store.retrieve(c, state.store, layer, queries, asked)
        memory.insert(0, (found.rows, found.real))
    return *kv_cache.with_bos(weights, layer, memory), found


def _draw_kept(weights, state, new):
    """Which rows of the pool stay beside `new` ones, without a change of the state."""
    rows = weights.config.pool
    draw = lambda key: short_term_pool.draw_dropped(
        key, weights.layers, rows, rows - new
    )
    return jax.vmap(draw)(jax.random.wrap_key_data(state.key))
