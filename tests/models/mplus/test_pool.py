"""M+'s pool drops uniformly and keeps the order of what stays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.models.mplus import pool as short_term_pool

B, L, N, K, D = 2, 3, 6, 2, 1
PAIRS = [(i, j) for i in range(N) for j in range(i + 1, N)]

_replace = jax.jit(short_term_pool.replace, static_argnames="advance")


HELD = st.sampled_from(range(0, N + 1, K))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from(PAIRS), min_size=B * L, max_size=B * L),
    st.lists(st.tuples(HELD, st.booleans()), min_size=B, max_size=B),
    st.booleans(),
    st.integers(0, 2**31 - 1),
)
def test_kept_rows_keep_their_order(dropped, rows, advance, seed):
    dropped, rng = np.array(dropped).reshape(B, L, K), np.random.default_rng(seed)
    pool = rng.normal(size=(B, L, N, D)).astype(np.float32)
    ages = rng.integers(0, 50, (B, L, N)).astype(np.int32)
    new = rng.normal(size=(B, L, K, D)).astype(np.float32)
    after, after_ages, out = _replace(
        jnp.asarray(pool),
        jnp.asarray(ages),
        jnp.array([held for held, _ in rows], jnp.int32),
        jnp.asarray(new),
        jnp.asarray(dropped, jnp.int32),
        jnp.array([changes for _, changes in rows]),
        advance=advance,
    )
    same = np.testing.assert_array_equal
    for at in np.ndindex(B, L):
        held, changes = rows[at[0]]
        if not changes:
            same(after[at], pool[at])
            same(after_ages[at], ages[at])
            continue
        # Of a pool with empty room that room goes, whatever was drawn.
        gone = dropped[at].tolist() if held == N else list(range(K))
        stays = [row for row in range(N) if row not in gone]
        aged = ages[at] + (K if advance else 0)
        same(after[at], [*pool[at][stays], *new[at]])
        same(after_ages[at], [*aged[stays], *range(K - 1, -1, -1)])
        same(out.rows[at], pool[at][gone])
        same(out.ages[at], aged[gone])


def chi_square(counts):
    expected = counts.sum() / counts.size
    return ((counts - expected) ** 2 / expected).sum()


def test_drops_are_uniform_and_independent_by_layer():
    """Coarse chi-square tests: the bounds are five deviations above the mean."""
    draw = functools.partial(short_term_pool.draw_dropped, layers=L, rows=N, count=K)
    keys = jax.random.split(jax.random.key(0), 4000)
    dropped = np.asarray(jax.jit(jax.vmap(draw))(keys))
    assert np.all(dropped[..., 0] < dropped[..., 1])
    assert dropped.min() >= 0 and dropped.max() < N
    number = np.zeros((N, N), int)
    for i, pair in enumerate(PAIRS):
        number[pair] = i
    pairs = number[dropped[..., 0], dropped[..., 1]]
    for layer in range(L):
        counts = np.bincount(pairs[:, layer], minlength=len(PAIRS))
        assert chi_square(counts) < 14 + 5 * 28**0.5
    for a, b in ((0, 1), (1, 2), (0, 2)):
        both = np.bincount(pairs[:, a] * len(PAIRS) + pairs[:, b], minlength=225)
        assert chi_square(both) < 224 + 5 * 448**0.5
