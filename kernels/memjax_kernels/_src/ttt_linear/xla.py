"""TTT-linear in mini-batches of matrix products: the dual form.

All gradients G of a mini-batch are taken at its start, so that its updates are one
product, and each read is a causal attention over the updates so far:

    G = ∇ℓ(K W + b)     Q W_t + b_t = Q W + b - (tril(Q Kᵀ + 1) ∘ η_j) G
    W ← W - Kᵀ (η G)    b ← b - Σ η G

Sun et al. (2024), https://arxiv.org/abs/2407.04620, section 2.5. Where a segment begins
inside a mini-batch, gradients are taken at that mini-batch's start, and updates add to
the memory as it is.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import chunks
from memjax_kernels._src.ttt_linear.reference import layer_norm, loss_gradient, select
from memjax_kernels._src.ttt_linear.state import TTTLinearState


def ttt_linear_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    eta: Float[Array, "B T H"],
    ln_scale: Float[Array, "H V"],
    ln_bias: Float[Array, "H V"],
    state: TTTLinearState,
    reset: Bool[Array, "B T"] | None,
    empty: TTTLinearState,
    *,
    aligned: bool = False,
    remat_every: int = 4,
) -> tuple[TTTLinearState, Float[Array, "B T H V"]]:
    """The recurrence of `ttt_linear_reference`, a mini-batch at a time, in float32.

    A reset counts at the start of a mini-batch. `aligned` says that every batch element
    is known to start one; every `remat_every`-th memory is saved for the backward pass.
    """
    batch, time = q.shape[:2]
    size = state.chunk_size
    # A known start of a mini-batch saves shifting every array.
    position = None if aligned else state.position

    def chunked(x):
        # A token of zeros has no rate, so it does not train; its read is dropped.
        x = jnp.moveaxis(chunks.split(x.astype(jnp.float32), size, position), 1, 0)
        return jnp.moveaxis(x, 2, 3)

    count = chunks.count_chunks(time, size, aligned)
    ends = chunks.completed(count, size, time, position, batch)
    starts = None
    if reset is not None:
        starts = chunks.split(reset, size, position)[:, :, 0].T
    scale, shift = (x.astype(jnp.float32)[None, :, None] for x in (ln_scale, ln_bias))

    def advance(state, item):
        q, k, v, eta, end, start = item
        if start is not None:
            state = select(start, empty, state)
        return _mini_batch(state, q, k, v, eta, scale, shift, end)

    items = (chunked(q), chunked(k), chunked(v), chunked(eta), ends.T, starts)
    after, y = chunks.scan(advance, state, items, remat_every=remat_every)
    y = chunks.join(jnp.moveaxis(y, (0, 2), (1, 3)), time, position)
    after = TTTLinearState(
        after.weights_start,
        after.weights,
        after.bias_start,
        after.bias,
        (state.position + time) % size,
        size,
    )
    return after, y.astype(v.dtype)


def _mini_batch(state, q, k, v, eta, scale, shift, end):
    """One mini-batch, [B, H, C, ...]; `end` [B] says whether it is full."""
    bias_start, bias = (b[:, :, None] for b in (state.bias_start, state.bias))
    hidden = jnp.einsum("bhck,bhkv->bhcv", k, state.weights_start) + bias_start
    update = -eta[..., None] * loss_gradient(hidden, v - k, scale, shift)
    # The 1 is the bias's share: an update of b adds to every later read.
    overlap = jnp.tril(jnp.einsum("bhik,bhjk->bhij", q, k) + 1.0)
    hidden = jnp.einsum("bhck,bhkv->bhcv", q, state.weights) + bias
    hidden += jnp.einsum("bhij,bhjv->bhiv", overlap, update)
    y = q + layer_norm(hidden, scale, shift)

    weights = state.weights + jnp.einsum("bhck,bhcv->bhkv", k, update)
    bias = state.bias + update.sum(axis=2)
    after = TTTLinearState(
        # The next tokens of an open mini-batch take gradients at its start.
        weights_start=jnp.where(end[:, None, None, None], weights, state.weights_start),
        weights=weights,
        bias_start=jnp.where(end[:, None, None], bias, state.bias_start),
        bias=bias,
        position=state.position,
        chunk_size=state.chunk_size,
    )
    return after, y
