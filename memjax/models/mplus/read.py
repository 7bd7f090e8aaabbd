"""How M+ reads: what stands before the tokens, and the cache of it.

Shapes: B batch, L layers, T time, K memory tokens, N rows of the pool, M capacity of
the store, R retrieved rows, S slots, h heads, D model, V vocabulary.
"""

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax import mechanisms
from memjax.models import ragged as segments
from memjax.models.language_model.layers import normalize
from memjax.models.mplus import attention_retrieval, retriever
from memjax.models.mplus import pool as short_term_pool
from memjax.models.mplus import store as long_term_store
from memjax.models.mplus.attention_retrieval import Seeker
from memjax.models.mplus.layers import Slots, prefix_slots, read_layer
from memjax.models.mplus.read_options import Given, check
from memjax.models.mplus.state import MPlusState, Reading
from memjax.nnx.params import as_arrays

if TYPE_CHECKING:
    from memjax.models.mplus.model import MPlus


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


def empty(model: "MPlus", batch: int, first: int, slots: int) -> Reading:
    """A reading of nothing, whose tokens begin at slot `first`."""
    config = model.backbone.config
    shape = (batch, slots, config.num_kv_heads, config.head_dim)
    layer = lambda: jnp.zeros(shape, jnp.float32)
    return Reading(
        keys=tuple(layer() for _ in range(model.layers)),
        values=tuple(layer() for _ in range(model.layers)),
        visible=jnp.zeros((batch, slots), bool),
        first=jnp.full(batch, first, jnp.int32),
        length=jnp.zeros(batch, jnp.int32),
        offset=jnp.zeros(batch, jnp.int32),
    )


def prepare(model: "MPlus", state: MPlusState, rows: Bool[Array, " B"]) -> MPlusState:
    """Makes the readings of `rows` anew, where they are not ready."""
    rows = rows & ~state.ready

    made = lambda state: (state.reading, state.queries, state.asked)

    def make():
        begun = state._replace(reading=_before_tokens(model, state))
        skip = lambda: made(begun)
        again = lambda: made(read_open(model, begun, begun.tokens, begun.filled)[0])
        after = jax.lax.cond(jnp.any(rows & (state.filled > 0)), again, skip)
        return mechanisms.reset(made(state), after, rows)

    # Pool and store, which may be on the host, stay outside.
    parts = jax.lax.cond(jnp.any(rows), make, lambda: made(state))
    reading, queries, asked = parts
    return state._replace(
        reading=reading, queries=queries, asked=asked, ready=state.ready | rows
    )


def _before_tokens(model, state):
    """[bos ; what the last tokens' queries find ; the pool], and no token yet.

    What attention finds has no slots, but positions.
    """
    c, blocks = model.config, model.blocks(writes=False)
    batch = state.held.shape[0]
    pool = _filled(state.held, c.pool)
    reading = empty(model, batch, c.prefix, c.prefix + c.chunk)
    beside = _beside(attention_retrieval.seeker(model, state.store))
    keys, values, seen = [], [], pool
    for layer, block in enumerate(blocks):
        memory = [(short_term_pool.of_layer(state.pool, layer), pool)]
        if c.has_retriever:
            asked = _first(state.asked, c.chunk)
            found = long_term_store.retrieve(
                c, state.store, layer, state.queries[:, layer], asked
            )
            memory.insert(0, (found.rows, found.real))
        rows, seen = _with_bos(model, layer, memory)
        made = prefix_slots(model.backbone.config, block, rows, seen, beside)
        keys.append(reading.keys[layer].at[:, : c.prefix].set(made.keys))
        values.append(reading.values[layer].at[:, : c.prefix].set(made.values))
    return reading._replace(
        keys=tuple(keys),
        values=tuple(values),
        visible=reading.visible.at[:, : c.prefix].set(seen),
        offset=_count(seen, beside),
    )


def _beside(seeker):
    """Rows that a token finds for itself, which have positions behind that of bos."""
    return None if seeker is None else seeker.found


def _count(seen, beside):
    count = seen.sum(axis=1, dtype=jnp.int32)
    return count if beside is None else count + beside


def _with_bos(model, layer, memory):
    """Rows that stand before the tokens, and which are seen: bos only with others."""
    rows, seen = zip(*memory, strict=True)
    bos = model.bos.get_value()[layer][None, None]
    bos = jnp.broadcast_to(bos, (rows[0].shape[0], 1, bos.shape[-1]))
    seen = jnp.concatenate(seen, axis=1)
    rows = jnp.concatenate([bos, *rows], axis=1).astype(model.backbone.config.dtype)
    some = jnp.any(seen, axis=1, keepdims=True)
    return rows, jnp.concatenate([some, seen], axis=1)


def _filled(held, rows):
    """Which rows of the pool are filled: the last."""
    return jnp.arange(rows, dtype=jnp.int32)[None] >= rows - held[:, None]


def _first(count, total):
    return jnp.arange(total, dtype=jnp.int32)[None] < count[:, None]


def read_piece(
    model: "MPlus",
    state: MPlusState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[MPlusState, Float[Array, "B T D"]]:
    """Reads `lengths[b]` more tokens of a text in its open chunk; features of all."""
    return read_open(model, prepare(model, state, lengths > 0), tokens, lengths)


def read_open(
    model: "MPlus",
    state: MPlusState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[MPlusState, Float[Array, "B T D"]]:
    """The open chunk's reading goes on by `lengths[b]` tokens; keeps their queries."""
    h = model.backbone.embed(tokens)
    before = state.reading.length
    seeker = attention_retrieval.seeker(model, state.store)
    reading, y, inputs = _read_tokens(model, state.reading, h, lengths, seeker=seeker)
    state = state._replace(reading=reading)
    if state.queries is None:
        return state, y
    asked = jnp.maximum(state.asked, reading.length)
    new = jnp.stack([_queries(model, i, x) for i, x in enumerate(inputs)], axis=1)
    times = jnp.arange(h.shape[1], dtype=jnp.int32)[None]
    places = jnp.where(
        times < lengths[:, None], before[:, None] + times, model.config.chunk
    )
    write = jax.vmap(lambda old, new, at: old.at[:, at].set(new, mode="drop"))
    return state._replace(asked=asked, queries=write(state.queries, new, places)), y


def read_on(
    model: "MPlus",
    reading: Reading,
    tokens: Int[Array, "B T"],
    alone: bool,
    state: MPlusState | None,
) -> tuple[Reading, Float[Array, "B T V"]]:
    """Reads on from a reading; NaN for tokens beyond its slots.

    The learned retriever's rows stay those of the reading; attention finds each token
    its own.

    Args:
        model: M+.
        reading: what `read` gave.
        tokens: in [0, V).
        alone: whether it is of new memory alone, which the adapter that writes reads.
        state: the memory that was read; with retrieval "attention" alone, which seeks
            in its store.

    Raises:
        ValueError: on tokens of another shape, or a known value out of range; on a
            state where none is needed, or none where one is.
    """
    segments.check_tokens(tokens, reading.length.shape[0], model.vocab_size)
    needed = model.config.by_attention and not alone
    if (state is not None) != needed:
        raise ValueError(
            f"state must be {'that of the reading' if needed else 'None'} with "
            f"retrieval={model.config.retrieval!r}, retrieved="
            f"{model.config.retrieved} and alone={alone}, got "
            f"{'None' if state is None else 'a state'}"
        )
    lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    h = model.backbone.embed(tokens)
    seeker = None if state is None else attention_retrieval.seeker(model, state.store)
    reading, y, _ = _read_tokens(model, reading, h, lengths, alone, seeker=seeker)
    return reading, model.logits(y)


def _read_tokens(
    model,
    reading,
    h,
    lengths,
    writes=False,
    before=None,
    seeker: Seeker | None = None,
):
    """All layers; also what each was given.

    `before(layer, h)` gives the rows that stand before the tokens, and which are seen,
    for a reading that has none yet; `seeker` finds each token others.
    """
    config, slots = model.backbone.config, reading.visible.shape[1]
    times = jnp.arange(h.shape[1], dtype=jnp.int32)[None]
    start = reading.first + reading.length
    places = jnp.where(times < lengths[:, None], start[:, None] + times, slots)
    fits = start[:, None] + times < slots
    all_slots = jnp.arange(slots, dtype=jnp.int32)[None]
    new = (all_slots >= start[:, None]) & (all_slots < (start + lengths)[:, None])
    visible, offset = reading.visible | new, reading.offset
    keys, values, inputs = [], [], []
    beside = _beside(seeker)
    for layer, block in enumerate(model.blocks(writes)):
        inputs.append(h)
        old = Slots(reading.keys[layer], reading.values[layer])
        if before is not None:
            rows, seen = before(layer, h)
            made = prefix_slots(config, block, rows, seen, beside)
            put = lambda slots, made: slots.at[:, : made.shape[1]].set(made)
            old = jax.tree.map(put, old, made)
            visible = visible.at[:, : seen.shape[1]].set(seen)
            offset = _count(seen, beside)
        positions = (offset + reading.length)[:, None] + times
        attention = seeker and functools.partial(seeker.attend, layer)
        made, h = read_layer(
            config, block, old, visible, start, places, positions, h, attention
        )
        keys.append(made.keys)
        values.append(made.values)
    reading = reading._replace(
        keys=tuple(keys),
        values=tuple(values),
        visible=visible,
        length=reading.length + lengths,
        offset=offset,
    )
    y = jnp.where(fits[..., None], _last_norm(model, h), jnp.nan)
    return reading, y, inputs


def _last_norm(model, h):
    norm = as_arrays(model.backbone.norm)
    return normalize(norm, h, model.backbone.config.norm_epsilon)


def _queries(model, layer, h):
    return retriever.project(as_arrays(model.query), layer, model.normed(layer, h))


def read(
    model: "MPlus", state: MPlusState, tokens: Int[Array, "B T"], given: Given
) -> tuple[Reading, Float[Array, "B T D"], ReadTrace]:
    """A reading of the memory, the open chunk and the tokens; features of the last."""
    check(model, state, tokens, given)
    run = functools.partial(_read, model, given)
    if given.alone:
        return run(0, state, tokens)
    open_ = functools.partial(run, model.config.chunk - 1)
    return jax.lax.cond(
        jnp.any(state.filled > 0), open_, functools.partial(run, 0), state, tokens
    )


def read_closed(
    model: "MPlus", state: MPlusState, tokens: Int[Array, "B T"], given: Given
) -> tuple[Reading, Float[Array, "B T D"], ReadTrace]:
    """`read` where the caller knows that no row has an open chunk: half the program."""
    check(model, state, tokens, given)
    return _read(model, given, 0, state, tokens)


def _read(model, given, width, state, tokens):
    """`width` bounds the open chunk's tokens, which are read before these."""
    c, (b, t) = model.config, tokens.shape
    if given.beside_pool and given.kept is None:
        given = given._replace(kept=_draw_kept(model, state, given.new.shape[2]))
    filled = state.filled if width else jnp.zeros_like(state.filled)
    joined = segments.join(state.tokens, filled, tokens, width + t)
    h = model.backbone.embed(joined)
    times = jnp.arange(width + t, dtype=jnp.int32)[None]
    after = times - filled[:, None]
    asked = (after >= 0) & (after < (given.prompt or t))
    memory = _alone if given.alone else _memory
    first = 1 + given.new.shape[2] if given.alone else c.prefix
    reading = empty(model, b, first, first + (c.chunk - 1) + t + given.room)
    scores: list[Array] = []
    chosen: list[Array] = []

    def before(layer, h):
        rows, seen, found = memory(model, given, state, layer, h, asked)
        if found is not None:
            scores.append(found.scores)
            chosen.append(found.chosen)
        return rows, seen

    seeker = None if given.alone else attention_retrieval.seeker(model, state.store)
    reading, y, inputs = _read_tokens(
        model, reading, h, filled + t, given.alone, before, seeker
    )
    taken = filled[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    hidden = jnp.stack([segments.take(x, taken) for x in (*inputs, y)])
    if seeker is not None:
        chosen = [segments.take(x, taken) for x in seeker.chosen]
    stack = lambda xs: jnp.stack(xs) if xs else None
    return reading, hidden[-1], ReadTrace(hidden, stack(scores), stack(chosen))


def _alone(model, given, state, layer, h, asked):
    """[bos ; new rows] of a layer."""
    del h, asked, state
    new = given.new[:, layer]
    return *_with_bos(model, layer, [(new, jnp.ones(new.shape[:2], bool))]), None


def _memory(model, given, state, layer, h, asked):
    """[bos ; retrieved ; pool] of a layer, whose rows its own tokens choose."""
    c = model.config
    pool = short_term_pool.of_layer(state.pool, layer)
    seen = _filled(state.held, c.pool)
    if given.new is not None:
        new = given.new[:, layer]
        kept = given.kept[:, layer]
        seen = jnp.concatenate(
            [segments.take(seen, kept), jnp.ones(new.shape[:2], bool)], axis=1
        )
        pool = jnp.concatenate([segments.take(pool, kept), new], axis=1)
    memory, found = [(pool, seen)], None
    if c.has_retriever:
        queries = _queries(model, layer, h)
        found = long_term_store.retrieve(c, state.store, layer, queries, asked)
        memory.insert(0, (found.rows, found.real))
    return *_with_bos(model, layer, memory), found


def _draw_kept(model, state, new):
    """Which rows of the pool stay beside `new` ones, without a change of the state."""
    rows = model.config.pool
    draw = lambda key: short_term_pool.draw_dropped(key, model.layers, rows, rows - new)
    return jax.vmap(draw)(jax.random.wrap_key_data(state.key))
