"""Synthetic memory tasks: copying and associative recall; see also `niah`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, PRNGKeyArray, UInt32

from memjax.checks import check_key, check_sizes
from memjax.data.batches.batch import Batch

Key = PRNGKeyArray | UInt32[Array, "2"]


def copy_task(key: Key, batch: int, length: int, vocab: int) -> Batch:
    """Returns sequences `s, 0, s`; only the second `s` is scored.

    The symbols of s are uniform in [1, vocab); 0 is the delimiter. T = 2 * length.

    Args:
        key: JAX random key.
        batch: B, at least 1.
        length: number of symbols in s, at least 1.
        vocab: number of ids with the delimiter, at least 3.

    Raises:
        ValueError: an argument is out of its range.
    """
    check_key(key)
    _check("batch", batch, 1)
    _check("length", length, 1)
    _check("vocab", vocab, 3)
    symbols = jax.random.randint(key, (batch, length), 1, vocab, jnp.int32)
    delimiter = jnp.zeros((batch, 1), jnp.int32)
    sequence = jnp.concatenate([symbols, delimiter, symbols], axis=1)
    return _batch(sequence, jnp.arange(2 * length) >= length)


def associative_recall(key: Key, batch: int, pairs: int, vocab: int) -> Batch:
    """Returns key-value pairs, then the same pairs in another order; T = 4 pairs - 1.

    Keys are distinct in a row, in [0, vocab // 2); values are uniform in
    [vocab // 2, vocab). Only the values of the second half are scored: each follows
    from its pair in the first. (Multi-query associative recall without the filler and
    the gaps of `multi_query_recall`.)

    Args:
        key: JAX random key.
        batch: B, at least 1.
        pairs: number of pairs, at least 1.
        vocab: number of ids, at least 2 * pairs and at least 4.

    Raises:
        ValueError: an argument is out of its range.
    """
    check_key(key)
    _check("batch", batch, 1)
    _check("pairs", pairs, 1)
    _check("vocab", vocab, max(4, 2 * pairs))
    name_key, value_key, order_key = jax.random.split(key, 3)
    shape = (batch, pairs)
    half = vocab // 2
    everything = jnp.broadcast_to(jnp.arange(half, dtype=jnp.int32), (batch, half))
    names = jax.random.permutation(name_key, everything, axis=1, independent=True)
    values = jax.random.randint(value_key, shape, half, vocab, jnp.int32)
    first = jnp.stack([names[:, :pairs], values], axis=2)  # [B, pairs, 2]
    positions = jnp.broadcast_to(jnp.arange(pairs), shape)
    order = jax.random.permutation(order_key, positions, axis=1, independent=True)
    second = jnp.take_along_axis(first, order[:, :, None], axis=1)
    sequence = jnp.concatenate([first, second], axis=1).reshape(batch, 4 * pairs)
    position = jnp.arange(4 * pairs - 1)
    return _batch(sequence, (position >= 2 * pairs) & (position % 2 == 0))


def multi_query_recall(
    key: Key,
    batch: int,
    pairs: int,
    length: int,
    vocab: int,
    *,
    power: float = 0.01,
    fillers: int = 0,
) -> Batch:
    """Returns multi-query associative recall (MQAR) as Zoology defines it.

    Key-value pairs fill the first 2 * pairs positions. Each key is repeated at position
    2 * pairs + 2 * gap, with its value as the target. Gaps are sampled without
    replacement with weights (gap + 1) ** (power - 1), so that most queries come soon.
    Every other position has an id sampled from the whole vocabulary, which is not
    scored. Unlike elsewhere, `targets` are not the next tokens: the value of a query is
    never shown. Keys are in [1, vocab // 2), values in [vocab // 2, vocab), each
    distinct within a row. With `fillers` this divides the other ids.

    Arora et al. (2023), https://arxiv.org/abs/2312.04927, section 4 and appendix E.

    Args:
        key: JAX random key.
        batch: B, at least 1.
        pairs: number of pairs, at least 1.
        length: T, even, at least 4 * pairs.
        vocab: number of ids, at least 2 * pairs + 2.
        power: of the gaps, above 0; at 1 they are uniform.
        fillers: number of last ids of the vocabulary reserved for the other positions:
            filler then never repeats a key, which in a small vocabulary would
            overwrite its value.

    Raises:
        ValueError: an argument is out of its range.
    """
    check_key(key)
    _check("batch", batch, 1)
    _check("pairs", pairs, 1)
    _check("length", length, 4 * pairs)
    _check("fillers", fillers, 0)
    _check("vocab", vocab, 2 * pairs + 2 + fillers)
    if length % 2:
        raise ValueError(f"length={length} must be even")
    if not power > 0:
        raise ValueError(f"power={power} must be above 0")
    name_key, value_key, gap_key, filler_key = jax.random.split(key, 4)
    filler = vocab - fillers
    half = filler // 2
    weights = jnp.zeros(filler)
    names = 1 + _choose(name_key, batch, weights[: half - 1], pairs)
    values = half + _choose(value_key, batch, weights[half:], pairs)
    space = (length - 2 * pairs) // 2
    log_weights = (power - 1) * jnp.log(jnp.arange(1, space + 1, dtype=jnp.float32))
    positions = 2 * pairs + 2 * _choose(gap_key, batch, log_weights, pairs)
    rows = jnp.arange(batch)[:, None]
    shown = jnp.stack([names, values], axis=2).reshape(batch, 2 * pairs)
    least = filler if fillers else 0
    tokens = jax.random.randint(filler_key, (batch, length), least, vocab, jnp.int32)
    # Filler first: pairs and queries overwrite it.
    tokens = tokens.at[:, : 2 * pairs].set(shown).at[rows, positions].set(names)
    return Batch(
        tokens=tokens,
        targets=jnp.zeros_like(tokens).at[rows, positions].set(values),
        mask=jnp.zeros((batch, length)).at[rows, positions].set(1.0),
        reset=jnp.ones(batch, bool),
    )


def _choose(
    key: Key, batch: int, log_weights: Float32[Array, " n"], count: int
) -> Int32[Array, "B count"]:
    """Samples indices without replacement, by the Gumbel-top-k trick."""
    noise = jax.random.gumbel(key, (batch, log_weights.shape[0]))
    _, indices = jax.lax.top_k(log_weights[None] + noise, count)
    return indices.astype(jnp.int32)


def _batch(sequence: Int32[Array, "B T_plus_1"], counts: Array) -> Batch:
    rows, width = sequence.shape
    return Batch(
        tokens=sequence[:, :-1],
        targets=sequence[:, 1:],
        mask=jnp.broadcast_to(counts.astype(jnp.float32), (rows, width - 1)),
        reset=jnp.ones(rows, bool),
    )


def _check(name: str, value: int, least: int) -> None:
    check_sizes(least=least, **{name: value})
