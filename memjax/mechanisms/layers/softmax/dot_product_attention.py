"""Softmax attention with bounded memory for scores, at any length.

Queries go through in blocks. Each block is `jax.nn.dot_product_attention`, but on a
CPU, where the library's form is slow: see `_masked`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax.mechanisms.layers.softmax import on_tpu
from memjax_kernels._src.common.cpu import by_platform, scale_rows

# Scores of one attention call, in elements: 2**26 float32 are 256 MiB.
MAX_SCORES = 2**26
# Scores that stay in a CPU's cache, in elements, and the fewest keys at a time: more
# go to memory and back between every two steps of the softmax.
CACHED_SCORES, LEAST_KEYS = 2**21, 256
# Key heads x rows of queries of all heads, up to which one product over all channels of
# a key takes less time than a product for each head, although all channels of a row but
# those of one head are zeros.
MOST_JOINED = 128
# Rows of a head, up to which keys come first in its product, as XLA is faster.
FEW_ROWS = 32
# Slots of a cache that are read or left out together on a CPU, at least.
LEAST_BLOCK = 1024
# A causal sequence of at least so many tokens is read in parts, each with what is
# before it: 3 parts have two thirds of the scores. More gain little and take time to
# compile.
LEAST_CUT, PARTS = 96, 3


def causal(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G K"],
    visible: Bool[Array, "B S"] | None = None,
    first: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H K"]:
    """Every query sees the keys up to its own position, those that are visible.

    The queries are those of the last T of the S positions. Where `first` is given, S is
    T and a query sees no key before its own `first`, where its document begins.

    Where all are, half precision takes cuDNN's flash attention on a GPU, and bfloat16 a
    kernel of `on_tpu` on a TPU; elsewhere queries go through in blocks, so that scores
    never need T * T memory at once, and a third of the scores that nobody sees is not
    computed.
    """
    # What cuDNN's flash attention takes: half precision, heads of up to 128, no mask.
    half = query.dtype in (jnp.bfloat16, jnp.float16) and query.shape[-1] <= 128
    whole = visible is None and first is None and query.shape[1] == key.shape[1]
    if jax.default_backend() == "gpu" and half and whole:
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation="cudnn"
        )
    if visible is not None or on_tpu.unsupported(query, key):
        return _causal_in_parts(query, key, value, visible, first)

    def in_one_kernel(query, key, value, first):
        # Tokens of a document have the place of its first token in common.
        return on_tpu.attention(query, key, value, documents=first)

    return jax.lax.platform_dependent(
        query,
        key,
        value,
        first,
        tpu=in_one_kernel,
        default=lambda q, k, v, first: _causal_in_parts(q, k, v, visible, first),
    )


def _causal_in_parts(query, key, value, visible, first):
    """`causal`, a third of the queries at a time."""
    (b, t), earlier = query.shape[:2], key.shape[1] - query.shape[1]
    part = t if t < LEAST_CUT else -(-t // PARTS)
    parts = []
    for begin in range(0, t, part):
        end = min(begin + part, t)
        before = jnp.full(b, earlier + begin, jnp.int32)
        seen = None if visible is None else visible[:, : earlier + end]
        slots = (key[:, : earlier + end], value[:, : earlier + end])
        text = (query[:, begin:end], *slots)
        since = None if first is None else first[:, begin:end]
        # Every key is seen by some query.
        parts.append(in_pieces(*text, before, seen, first=since))
    return jnp.concatenate(parts, axis=1)


def in_pieces(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G K"],
    before: Int[Array, " B"],
    visible: Bool[Array, "B S"] | None,
    filled: Int[Array, ""] | None = None,
    first: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H K"]:
    """Query t sees the visible ones of the keys 0 to before + t.

    Where `first` is given, no query sees a key before its own. As many queries go
    through at a time as scores allow; see `_masked`.
    """
    b, t, h, _ = query.shape
    s = key.shape[1]
    rows = max(1, min(t, MAX_SCORES // (b * h * s)))
    positions = before[:, None] + jnp.arange(t, dtype=jnp.int32)[None]

    def some_queries(query, positions, first):
        def shows(start, size):
            at = start + jnp.arange(size, dtype=jnp.int32)
            mask = at[None, None] <= positions[..., None]
            if first is not None:
                mask &= at[None, None] >= first[..., None]
            if visible is None:
                return mask
            here = jax.lax.dynamic_slice_in_dim(visible, start, size, axis=1)
            return mask & here[:, None]

        return _masked(query, key, value, shows, filled)[0]

    if rows == t:
        return some_queries(query, positions, first)
    pad = -t % rows

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, -1, rows, *x.shape[2:]), 1, 0)

    y = jax.lax.map(
        # The backward pass computes scores again: kept, those of all blocks would be in
        # memory at once.
        jax.checkpoint(lambda xs: some_queries(*xs)),
        jax.tree.map(split, (query, positions, first)),
    )
    return jnp.moveaxis(y, 0, 1).reshape(b, t + pad, *y.shape[3:])[:, :t]


def blocks(
    query: Float[Array, "B n Q H K"],
    key: Float[Array, "B n S G K"],
    value: Float[Array, "B n S G K"],
    mask: Bool[Array, "B n Q S"],
) -> Float[Array, "B n Q H K"]:
    """Attention inside each block; as many blocks at a time as scores allow."""
    return blocks_with_mass(query, key, value, mask)[0]


def blocks_with_mass(
    query: Float[Array, "B n Q H K"],
    key: Float[Array, "B n S G K"],
    value: Float[Array, "B n S G K"],
    mask: Bool[Array, "B n Q S"],
) -> tuple[Float[Array, "B n Q H K"], Float[Array, "B n Q H"]]:
    """`blocks`, and the mass of each query: log Σ_s exp(score_s), in float32."""
    b, n, q, h, _ = query.shape
    s = key.shape[2]
    together = max(1, MAX_SCORES // (b * h * q * s))

    def attend(block):
        query, key, value, mask = block
        part = functools.partial(jax.lax.dynamic_slice_in_dim, mask, axis=2)
        return _masked(query, key, value, part)

    if n <= together:
        merged = jax.tree.map(
            lambda x: x.reshape(b * n, *x.shape[2:]), (query, key, value, mask)
        )
        y, mass = attend(merged)
        return y.reshape(query.shape), mass.reshape(query.shape[:-1])
    # The scores of all blocks at once do not fit: one block after the other, and again
    # in the backward pass.
    block_first = jax.tree.map(
        lambda x: jnp.moveaxis(x, 1, 0), (query, key, value, mask)
    )
    y, mass = jax.lax.map(jax.checkpoint(attend), block_first)
    return jnp.moveaxis(y, 0, 1), jnp.moveaxis(mass, 0, 1)


def masked_with_mass(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G K"],
    mask: Bool[Array, "B T S"],
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """Attention to a few keys, and the mass of each query: log Σ_s exp(score_s)."""
    part = functools.partial(jax.lax.dynamic_slice_in_dim, mask, axis=2)
    return _masked(query, key, value, part)


def join(
    first: tuple[Float[Array, "B T H K"], Float[Array, "B T H"]],
    second: tuple[Float[Array, "B T H K"], Float[Array, "B T H"]],
) -> Float[Array, "B T H K"]:
    """Attention to the keys of both, from the outputs and masses over each.

    A query must see a key of one of them.
    """
    (y1, mass1), (y2, mass2) = first, second
    # exp(m2) / (exp(m1) + exp(m2)), without overflow.
    share = jax.nn.sigmoid(mass2 - mass1)[..., None].astype(y1.dtype)
    return y1 + share * (y2 - y1)


def _masked(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G K"],
    shows: Callable[..., Bool[Array, "B T n"]],
    filled: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """Softmax attention over some of the keys, and log Σ_s exp(score_s), its mass.

    `shows` is (start, n) -> which of the n keys from `start` on each query sees. On a
    CPU, no query sees the keys from `filled` on; None is S.
    """
    return by_platform(
        functools.partial(_masked_on_cpu, shows=shows, filled=filled),
        functools.partial(_masked_elsewhere, shows=shows),
    )(query, key, value)


def _masked_elsewhere(query, key, value, shows):
    mask = shows(0, key.shape[1])
    y, mass = jax.nn.dot_product_attention(
        query, key, value, mask=mask[:, None], return_residual=True
    )
    # The library's is in the dtype of the queries.
    return y, mass.astype(jnp.float32)


def _masked_on_cpu(query, key, value, shows, filled):
    # What takes the time on a CPU, that the library does not do: all queries of a key
    # head are rows of one product, sums divide the values instead of the scores, and
    # scores never leave the cache.
    b, t, h, d = query.shape
    s, g, r = key.shape[1], key.shape[2], h // key.shape[2]
    rows = query.reshape(b, t, g, r, d).transpose(0, 2, 3, 1, 4).reshape(b, g, r * t, d)
    # Scaled before the product: a query has fewer numbers than it has scores.
    rows = rows * d**-0.5
    joined = g * h * t <= MOST_JOINED
    if joined:
        own = jnp.eye(g, dtype=rows.dtype)[None, :, None, :, None]
        rows = (rows[:, :, :, None] * own).reshape(b, 1, h * t, g * d)
    # Few keys at a time keep the scores in the cache, but make more steps.
    size = max(LEAST_KEYS, CACHED_SCORES // (b * h * t))
    if filled is not None:
        size = min(size, max(LEAST_BLOCK, s // 16))
    if size >= s:
        largest, total, y = _some_keys(rows, key, value, shows(0, s))
    else:
        largest, total, y = _by_keys(rows, key, value, shows, filled, size)
    if joined:
        y = jnp.einsum("bgqgd->bgqd", y.reshape(b, g, r * t, g, d))
        y = y.reshape(b, 1, h * t, d)
    y = scale_rows(y, 1 / total).astype(query.dtype)
    mass = largest + jnp.log(total)

    def by_head(x):
        return x.reshape(b, g, r, t, -1).transpose(0, 3, 1, 2, 4).reshape(b, t, h, -1)

    return by_head(y), by_head(mass)[..., 0]


def _some_keys(rows, key, value, mask):
    """Largest score, sum of weights and weighted values of rows [B, G, r T, K].

    Or of rows [B, 1, H T, G K], each with zeros in the channels of other key heads.
    """
    b, g, count, _ = rows.shape
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    if g == 1:
        # Without an axis of heads, keys and values are read as they lie. With one, XLA
        # copies them first, head by head.
        key, value = (x.reshape(*x.shape[:2], -1) for x in (key, value))
        scores = product("bqd,bsd->bqs", rows[:, 0], key)
    elif count <= FEW_ROWS:
        scores = product("bsgd,bgqd->bgsq", key, rows).swapaxes(-1, -2)
    else:
        scores = product("bgqd,bsgd->bgqs", rows, key)
    scores = scores.reshape(b, g, -1, *mask.shape[1:])
    # Finite: a query that sees nothing gets equal weights instead of NaN.
    scores = jnp.where(mask[:, None, None], scores, -1e30)
    scores = scores.reshape(b, g, count, -1)
    # The shift cancels in the softmax, and so has no gradient.
    largest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - largest)
    given = weights.astype(value.dtype)
    if g == 1:
        y = product("bqs,bsd->bqd", given[:, 0], value)[:, None]
    else:
        y = product("bgqs,bsgd->bgqd", given, value)
    return largest, weights.sum(axis=-1, keepdims=True), y


def _by_keys(rows, key, value, shows, filled, size):
    """`_some_keys` of `size` keys at a time."""
    s = key.shape[1]
    n = -(-s // size)
    # As many blocks, but of equal size: the last one is not nearly empty.
    size = -(-s // n)

    @jax.checkpoint
    def more(before, block):
        # The last block begins sooner, so that all are as long.
        start = jnp.minimum(block * size, s - size)

        def here(x):
            return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)

        given = (before, rows, here(key), here(value), start, block)
        if filled is None:
            return added(*given), None
        # Saves what it is given: else both branches save all that the longer one does.
        some, none = jax.checkpoint(added), lambda before, *_: before
        return jax.lax.cond(block * size < filled, some, none, *given), None

    def added(before, rows, key, value, start, block):
        new = start + jnp.arange(size, dtype=jnp.int32) >= block * size
        # Keys that the block before has counted are not counted again.
        seen = shows(start, size) & new[None, None]
        after = _some_keys(rows, key, value, seen)
        # Both sums are brought to the larger of the two shifts before they are added.
        largest = jnp.maximum(before[0], after[0])
        old, new = (jnp.exp(part[0] - largest) for part in (before, after))
        sums = (x * old + y * new for x, y in zip(before[1:], after[1:], strict=True))
        return (largest, *sums)

    none = jnp.zeros((*rows.shape[:3], 1), jnp.float32)
    y = jnp.zeros(rows.shape, jnp.float32)
    # A largest score of -inf gives the start the weight exp(-inf) = 0.
    begin = (none - jnp.inf, none, y)
    return jax.lax.scan(more, begin, jnp.arange(n, dtype=jnp.int32))[0]
