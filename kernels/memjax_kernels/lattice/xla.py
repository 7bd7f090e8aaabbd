"""Lattice in chunks of matrix products: the retraction is put off, not left out.

With the gradients of a chunk taken at its start M', token t's memory before the
division by its norm is b_t M' + cwp_t phi(M') - A_t, A_t = mu_t A_{t-1} + w_t h_t^T.
The second and third term are across the slots of M', so their norms follow from
H, P = H phi(M')^T and the Gram matrix G = H H^T without A_t:

    cwp_t = sum_{i<=t} D_ti w_i p_i
    n2_t = sum_{i<=t} D_ti^2 (2 w_i (stril(D G) W)_i + w_i^2 |h_i|^2) - cwp_t^2
    rho_t = (b_t^2 + n2_t)^{-1/2}
    Y = (Q rho b) M' + (Q rho cwp) phi(M') - (D (Q rho) W^T) H

D_ti = mu_{i+1} ... mu_t, all ones without forgetting, and b_t = mu_1 ... mu_t. Not
normalised, rho = 1. A chunk of one token is the exact recurrence and has its own body.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels import chunks
from memjax_kernels.lattice.aligned import Chunks, Memory
from memjax_kernels.lattice.memory import Rule
from memjax_kernels.lattice.reference import (
    directions,
    inverse_norm,
    residual,
    shrink,
    unit,
)


def lattice_xla(
    tokens: Chunks,
    start: Float[Array, "B H M V"],
    empty: Float[Array, "B H M V"],
    rule: Rule,
) -> tuple[Memory, Float[Array, "B n C H V"]]:
    """The form of `aligned`: a scan over chunks, or tokens where C = 1."""
    b, h = start.shape[:2]
    memory = start, jnp.zeros_like(start), jnp.ones((b, h), jnp.float32)
    count, size = tokens.q.shape[1:3]
    if size > 1:
        body = functools.partial(_chunk, rule=rule, empty=empty, entering=False)
        return _scan(body, tokens, memory, remat_every=min(4, count))
    body = functools.partial(_token, rule=rule, empty=empty)
    # Kept and recomputed states are fewest together at the root.
    start, y = _scan(body, tokens, start, remat_every=max(1, math.isqrt(count)))
    return (start, memory[1], memory[2]), y


def lattice_xla_head(
    tokens: Chunks,
    memory: Memory,
    empty: Float[Array, "B H M V"],
    rule: Rule,
) -> tuple[Memory, Float[Array, "B n C H V"]]:
    """The head of `aligned`: one chunk, of which a part may be pending."""
    body = functools.partial(_chunk, rule=rule, empty=empty, entering=True)
    return _scan(body, tokens, memory, remat_every=1)


def _scan(body, tokens, memory, remat_every):
    """Scans [B, n, C, H, ...] as n items [B, H, C, ...] with flags [B]."""
    chunk_first = lambda x: jnp.moveaxis(x, (1, 3), (0, 2))
    fields = (tokens.q, tokens.k, tokens.v, tokens.gamma, tokens.g)
    flags = (tokens.complete, tokens.cleared)
    items = jax.tree.map(chunk_first, fields), jax.tree.map(jnp.transpose, flags)
    memory, y = chunks.scan(body, memory, items, remat_every=remat_every)
    return memory, jnp.moveaxis(y, (0, 2), (1, 3)).astype(tokens.v.dtype)


def _clear(start, cleared, empty):
    if cleared is None:
        return start
    return jnp.where(cleared[:, None, None, None], empty, start)


def _chunk(memory, item, *, rule, empty, entering):
    """One chunk; `entering` says that something may be pending before it."""
    (q, k, v, gamma, g), (complete, cleared) = item
    start, pending, decay = memory
    start = _clear(start, cleared, empty)
    product = functools.partial(_product, v.dtype)
    q, k, v, gamma = (x.astype(jnp.float32) for x in (q, k, v, gamma))
    direction, inverse = directions(start, rule)
    h, c = _residuals(product, direction, k, v, rule.variant)
    along = product("bhcv,bhmv->bhcm", h, direction)
    write = gamma[..., None] * c * inverse[:, :, None]
    between, inside = _decays(g, q.shape[2])
    kept = inside * decay[..., None]

    gram = between * product("bhiv,bhjv->bhij", h, h)
    before = product("bhij,bhjm->bhim", jnp.tril(gram, -1), write)
    squares = jnp.sum(h * h, axis=-1, keepdims=True)
    added = 2 * write * before + write * write * squares
    if entering:
        met = product("bhcv,bhmv->bhcm", h, pending)
        added += 2 * inside[..., None] * write * met
    taken = _cumulative(between, write * along)
    size = _cumulative(between * between, added)
    if entering:
        taken += inside[..., None] * jnp.sum(direction * pending, axis=-1)[:, :, None]
        norms = jnp.sum(pending * pending, axis=-1)
        size += (inside * inside)[..., None] * norms[:, :, None]

    if rule.normalize:
        q = q * inverse_norm(kept[..., None], size - taken * taken)
        y = product("bhcm,bhmv->bhcv", q * (kept[..., None] + taken), start)
    else:
        y = product("bhcm,bhmv->bhcv", q * kept[..., None], start)
        y += product("bhcm,bhmv->bhcv", q * taken, direction)
    scores = between * product("bhim,bhjm->bhij", q, write)
    y -= product("bhij,bhjv->bhiv", scores, h)
    if entering:
        y -= product("bhcm,bhmv->bhcv", q * inside[..., None], pending)

    last = between[:, :, -1, :, None]
    pending = inside[:, :, -1, None, None] * pending
    pending += product("bhcm,bhcv->bhmv", last * write, h)
    after = (
        kept[:, :, -1, None, None] * start
        + taken[:, :, -1, :, None] * direction
        - pending
    )
    if rule.normalize:
        after = unit(after)
    done = complete[:, None, None, None]
    memory = (
        jnp.where(done, after, start),
        jnp.where(done, 0.0, pending),
        jnp.where(done[..., 0, 0], 1.0, kept[:, :, -1]),
    )
    return memory, y


def _token(start, item, *, rule, empty):
    """A chunk of one token: equations 13 and 14, or 16, or 18."""
    (q, k, v, gamma, g), (_, cleared) = item
    tokens = (q, k, v, gamma)
    q, k, v, gamma = (x[:, :, 0].astype(jnp.float32) for x in tokens)
    start = _clear(start, cleared, empty)
    direction, inverse = directions(start, rule)
    h, c = residual(direction, k, v, rule.variant)
    along = jnp.einsum("bhmv,bhv->bhm", direction, h)
    write = gamma[..., None] * c * inverse
    log_gate = 0.0 if g is None else g[:, :, 0].astype(jnp.float32)[..., None]
    kept = jnp.exp(log_gate) if rule.forget == "l2" else jnp.ones_like(write[..., :1])
    across = direction * (write * along)[..., None] - write[..., None] * h[:, :, None]
    memory = kept[..., None] * start + across
    if rule.forget == "l1":
        memory = shrink(memory, log_gate[..., None])
    after = unit(memory) if rule.normalize else memory
    read = after
    if rule.normalize and rule.forget != "l1":
        squares = jnp.sum(h * h, axis=-1, keepdims=True)
        norms = write * write * (squares - along * along)
        read = inverse_norm(kept, norms)[..., None] * memory
    return after, jnp.einsum("bhmv,bhm->bhv", read, q)[:, :, None]


def _residuals(product, direction, k, v, variant):
    """`reference.residual` of every token of a chunk."""
    match variant:
        case "dec":
            return product("bhcm,bhmv->bhcv", k, direction) - v, k
        case "enc":
            return v, product("bhcv,bhmv->bhcm", v, direction) - k
        case "sim":
            return -v, k


def _decays(g, size):
    """D [., ., C, C] and the products of gates from the chunk's start [., ., C]."""
    if g is None:
        return jnp.tril(jnp.ones((1, 1, size, size))), jnp.ones((1, 1, size))
    g = g.astype(jnp.float32)
    return chunks.decay(g), jnp.exp(jnp.cumsum(g, axis=-1))


def _cumulative(between, x):
    """Decayed sums over the tokens before and at each: small terms of differences."""
    between = jnp.broadcast_to(between, (*x.shape[:2], *between.shape[2:]))
    return jnp.einsum(
        "bhij,bhjm->bhim", between, x, precision=jax.lax.Precision.HIGHEST
    )


def _product(dtype, spec, x, y):
    """Operands as precise as the tokens came, sums in float32."""
    if dtype == jnp.bfloat16:
        x, y = x.astype(dtype), y.astype(dtype)
        return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)
    return jnp.einsum(spec, x, y, precision=jax.lax.Precision.HIGHEST)
