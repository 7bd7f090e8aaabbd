"""Trellis on a TPU for packs of heads: one chunk, the kernels, and compiling them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels import trellis_init_state
from memjax_kernels._src.common import gate_sums, packs, products
from memjax_kernels._src.common.packs import decays as pack_decays
from memjax_kernels._src.common.packs.staggered import staggered
from memjax_kernels._src.trellis import chunk as one_chunk
from memjax_kernels._src.trellis import (
    functions,
    packed,
    packed_functions,
    packed_gradient,
)
from memjax_kernels._src.trellis.state import Rule, TrellisTokens
from memjax_kernels._src.trellis.xla import trellis_xla
from tests.kernels.distances import close, distances
from tests.kernels.trellis.against_xla import (
    INTERPRETED,
    both,
    draw,
    open_state,
    opened,
    perturbed,
)

EXACT = functools.partial(products.multiply, dtype=jnp.dtype("float32"))


def pack_heads(heads, x):
    """[H, ., D] -> [P, ., DD]."""
    return jnp.concatenate([x[i::heads] for i in range(heads)], axis=-1)


def two_memories(heads, x):
    """Undoes `pack_heads`."""
    split = jnp.stack(jnp.split(x, heads, axis=-1), axis=1)
    return split.reshape(-1, *split.shape[2:])


def gates_of(heads, gamma, g):
    """The gates of a pass, [H, C], as `packed` takes them."""
    coarse = jnp.floor(g * gate_sums.STEPS) / gate_sums.STEPS
    sums = gate_sums.Sums(jnp.cumsum(coarse, -1), jnp.cumsum(g - coarse, -1))

    def row(x):
        return pack_heads(heads, x[:, None])

    row_sums = gate_sums.Sums(*map(row, sums))
    columns = [[x[head::heads, :, None] for x in sums] for head in range(heads)]
    wide = [packs.widen(x, heads * g.shape[-1]) for x in zip(*columns, strict=True)]
    end = tuple(gate_sums.Sums(*(x[:, -1:] for x in part)) for part in columns)
    total = pack_decays.Totals(row_sums, gate_sums.Sums(*wide), end)
    return packed.Gates(row(gamma), total, None)


@pytest.mark.slow
def test_packed_chunk_and_gradient_equal_unpacked():
    """Of other functions than the kernels below, and three heads a pack."""
    sizes = {"P": 2, "C": 4, "K": 3, "V": 2, "M": 4, "heads": 3}
    size, slots, heads = sizes["C"], sizes["M"], sizes["heads"]
    paired = functools.partial(pack_heads, heads)
    split = functools.partial(two_memories, heads)
    random = np.random.default_rng(0)

    def normal(*s):
        return jnp.asarray(random.normal(size=(heads * sizes["P"], *s)), "float32")

    q, k, v = (normal(size, sizes[width]) for width in ("K", "K", "V"))
    alpha = 0.3 * normal(size, slots)
    gamma = jax.nn.sigmoid(jnp.stack([normal(size), normal(size)]))
    g = jax.nn.log_sigmoid(jnp.stack([normal(size), normal(size)]))
    memory = [normal(slots, sizes[width]) for width in ("K", "V")]
    d_after = normal(slots, sizes["K"]), normal(slots, sizes["V"])
    d_y = normal(size, sizes["V"])
    options = one_chunk.Options(*Rule("softmax", "l2_silu"), EXACT)

    def slots_last(q, k, v, alpha, gamma, g, *memory: Any):
        tokens = TrellisTokens(k, v, alpha, *gamma, *g)
        return one_chunk.advance(q, tokens, memory, options)

    @jax.jit
    def unpacked(*primals):
        values, pull = jax.vjp(slots_last, *primals)
        return values, pull((d_after, d_y))

    def advance(x, gates, keys, values):
        new, ready = [], (yield from packed.prepare(x, gates, options))
        given = ready, gates, keys, values, options, new.append
        read = yield from packed.advance(*given)
        return new[0], read

    def vjp(x, gates, keys, values, d_after, d_y):
        before, ready = [], (yield from packed.prepare(x, gates, options))
        given = ready, gates, (keys, values), d_y, options
        chunk = packed_gradient.write(*given)
        found = yield from packed_gradient.vjp(
            chunk, lambda: d_after, options, before.append
        )
        return before[0], found

    @jax.jit
    def in_packs(q, k, v, alpha, gamma, g, *memory):
        x = packed.Chunk(*map(paired, (q, k, v, alpha)))
        gates = gates_of(heads, gamma[0], g[0]), gates_of(heads, gamma[1], g[1])
        keys, values = map(paired, memory)
        given = x, gates, keys, values
        d = (paired(d_after[0]), paired(d_after[1])), paired(d_y)
        # Packs one behind the other, as groups of them are in the kernels.
        new, read = staggered(advance, given, sizes["P"], lag=2)
        before, found = staggered(vjp, (*given, *d), sizes["P"], lag=2)
        return jax.tree.map(split, (new, read)), (
            *map(split, found.x),
            tokens(found.gamma),
            from_sums(tokens(found.total)),
            *map(split, before),
        )

    def tokens(parts):
        return jnp.stack([split(part)[:, 0] for part in parts])

    # Of a sum: what all gates up to it have in common.
    def from_sums(d):
        return jnp.flip(jnp.cumsum(jnp.flip(d, -1), -1), -1)

    primals = (q, k, v, alpha, gamma, g, *memory)
    values, gradients = unpacked(*primals)
    found, actual = in_packs(*primals)
    close(found, values, 1e-5)
    for mine, theirs in zip(actual, gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=3e-5 * (1 + np.abs(theirs).max()))


@pytest.mark.parametrize("phi", ["silu", "l2_silu"])
def test_gradients_of_writes_by_hand_equal_those_of_jax(phi):
    random = np.random.default_rng(0)
    shapes = {"z": (2, 8, 16), "target": (2, 8, 16), "gamma": (2, 1, 16)}
    given = [jnp.asarray(random.normal(size=s), "float32") for s in shapes.values()]
    d_u = jnp.asarray(random.normal(size=shapes["z"]), "float32")

    def write(z, target, gamma):
        over, sigmoid = packs.over_slots, packs.sigmoid
        return gamma * functions.error_gradient(phi, z, target, over, sigmoid)

    expected, back = jax.vjp(write, *given)
    options = one_chunk.Options(*Rule(phi, "ln_silu"), EXACT)
    u, by_hand = packed_functions.write_vjp(options, *given)
    close((u, by_hand(d_u)), (expected, back(d_u)), 1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_block_diagonal_and_its_inverse(dtype):
    x = jax.random.normal(jax.random.key(0), (2, 16, 96)).astype(dtype)
    wide = jax.jit(packs.block_diagonal, static_argnums=1)(x, 3)
    assert wide.shape == (2, 48, 96) and wide.dtype == dtype
    for i in range(3):
        rows, lanes = slice(16 * i, 16 * i + 16), slice(32 * i, 32 * i + 32)
        np.testing.assert_array_equal(wide[:, rows, lanes], x[:, :, lanes])
        assert not wide[:, rows].at[:, :, lanes].set(0).any()
    np.testing.assert_array_equal(packs.diagonal_blocks(wide, 3), x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "place", "resets"),
    [
        # Open chunks, another width of values, two groups of heads.
        ((2, 40, 4, 64, 128, 64, 16), [0, 5], [16, 27]),
        # A block of two chunks, both of whose memories are saved.
        ((1, 128, 2, 64, 64, 64, 64), [0], [64]),
        # Packs of more heads than fill the lanes of keys.
        ((2, 22, 4, 64, 32, 64, 16), [0, 3], [16, 13]),
    ],
)
def test_values_and_gradients_agree_with_xla(sizes, place, resets):
    b, t, h, k, v, m, c = sizes
    tokens = draw(b, t, h, k, v, m)
    state = open_state((b, h, m, k, v, c), place)
    empty = perturbed(trellis_init_state(b, h, m, k, v, c), 2)
    reset = np.arange(t) == np.array(resets)[:, None]
    arguments = (tokens, state, empty)
    expected = both(trellis_xla, arguments, reset)
    close(both(INTERPRETED, arguments, reset), expected, 3e-6)


def with_unit_values(tokens):
    values = tokens[2] / jnp.linalg.norm(tokens[2], axis=-1, keepdims=True)
    # Every third key is the first once more: its step leaves little to theirs.
    k, v = (x.at[:, ::3].set(x[:, :1]) for x in (tokens[1], values))
    return tokens[0], k, v.astype(tokens[2].dtype), *tokens[3:]


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("gates", [(), (2,)])
def test_bounded_steps_agree_with_xla(gates, normalize):
    b, t, h, d, c = 2, 22, 4, 64, 16
    tokens = with_unit_values(draw(b, t, h, d, d, d, gates=gates))
    empty = perturbed(trellis_init_state(b, h, d, d, d, c), 2)
    state, reset = None, None
    if gates:
        before = with_unit_values(draw(b, c, h, d, d, d, seed=1))
        state = opened(perturbed(empty, 3), before, [3, 5])
        reset = np.arange(t) == np.array([13, t])[:, None]
    arguments = (tokens, state, empty)
    if normalize:
        # Of other norms, with a value and a target of zeros.
        tokens = (
            *tokens[:2],
            *(3 * x.at[:, 1].set(0) for x in tokens[2:4]),
            *tokens[4:],
        )
        arguments = (tokens, state, empty)
    rule = Rule(bound_steps=True, normalize=normalize)
    expected = both(trellis_xla, arguments, reset, rule)
    close(both(INTERPRETED, arguments, reset, rule), expected, 3e-6)


# Relative errors of the XLA form in bfloat16, in thousandths, for the tokens of the
# test below: of memories and reads, gradients of tokens and memories. With steps that
# are bounded the sums over pairs are in another order.
XLA_ERRORS = 1.60, 1.97, 2.60, 4.36, 4.99, 4.33, 6.29, 1.63, 2.65, 4.44, 4.43
XLA_ERRORS_BOUNDED = 1.80, 1.97, 3.34, 4.65, 6.67, 3.62, 5.30, 2.91, 2.83, 5.53, 3.12
XLA_ERRORS_NORMALIZED = (
    *(2.41, 2.56, 4.17, 7.25, 7.76, 5.04),
    *(8.02, 4.17, 3.77, 4.25, 4.61),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "errors", "most"),
    [
        (Rule(), XLA_ERRORS, 1.05e-3),
        (Rule(bound_steps=True), XLA_ERRORS_BOUNDED, 1.25e-3),
        (Rule(bound_steps=True, normalize=True), XLA_ERRORS_NORMALIZED, 1.25e-3),
    ],
)
def test_bfloat16_error_is_no_larger_than_xla(rule, errors, most):
    """From an empty memory, with one gate for both passes.

    The last chunk is not complete.
    """
    b, t, h, d, c = 1, 24, 2, 64, 16
    low = draw(b, t, h, d, d, d, jnp.bfloat16, gates=(), seed=11)
    low = with_unit_values(low) if rule.bound_steps else low
    empty = trellis_init_state(b, h, d, d, d, c)
    high = jax.tree.map(lambda x: x.astype(jnp.float32), low)
    exact = both(trellis_xla, (high, None, empty), rule=rule)
    kernel = both(INTERPRETED, (low, None, empty), rule=rule)
    # The open tokens are those given, and have no gradient.
    found = {path: x for path, x in distances(kernel, exact).items() if x}
    for (path, distance), xla in zip(found.items(), errors, strict=True):
        assert distance <= most * xla + 1e-4, (path, distance, xla)
    assert kernel[0][1].dtype == jnp.bfloat16
