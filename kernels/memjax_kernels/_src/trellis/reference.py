"""Trellis one token at a time, in plain JAX: the definition.

Memory M [M, K], token k, target alpha, step size gamma, log forget gate g; M' is the
memory at the start of the token's chunk of C tokens:

    z = M' k        u = J_phi(z)^T (phi(z) - alpha)        M <- exp(g) M - gamma u k^T

Karami et al., "Trellis", eqs. 8 and 9; the factor 2 of eq. 9 is absorbed in gamma, as
in eqs. 8 and 10-12. With C = 1 this is the fully non-linear recurrence.

Two passes (eqs. 13 and 14) share alpha: the first compresses keys and reads
y1 = M_K q; the second compresses values and reads y = M_V^T f(y1).

A state has M' and the chunk's tokens since, whose writes a step adds before it reads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common.steps import open_chunk
from memjax_kernels._src.trellis import checks, chunk
from memjax_kernels._src.trellis.functions import bounded_tokens
from memjax_kernels._src.trellis.state import TrellisState, TrellisTokens


def trellis_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    alpha: Float[Array, "B H M"],
    gamma: Float[Array, "B H ..."],
    g: Float[Array, "B H ..."] | None,
    state: TrellisState,
    *,
    phi: str = "l2_silu",
    activation: str = "ln_silu",
) -> tuple[TrellisState, Float[Array, "B H V"]]:
    """One token of `trellis`; its chunk size is the state's.

    Args:
        q: query.
        k: key.
        v: value.
        alpha: target of both passes.
        gamma: step sizes >= 0, shared by the passes, or [B, H, 2].
        g: log forget gates <= 0, likewise; None forgets nothing.
        state: the memory before the token.
        phi: as in `trellis`.
        activation: as in `trellis`.

    Returns:
        The memory after the token, and its read in the dtype of v.

    Raises:
        ValueError: as `trellis`.
    """
    checks.check_step(q, k, v, alpha, gamma, g, state, phi, activation)
    return _step(q, k, v, alpha, gamma, g, state, phi, activation, False)


def _step(q, k, v, alpha, gamma, g, state, phi, activation, bound_steps):
    def read(multiply, q, tokens, memory):
        tokens = bounded_tokens(tokens) if bound_steps else tokens
        return chunk.read(q, tokens, memory, chunk.Options(phi, activation, multiply))

    def write(multiply, tokens, memory):
        tokens = bounded_tokens(tokens) if bound_steps else tokens
        return chunk.write(tokens, memory, chunk.Options(phi, activation, multiply))

    gates: Any = (
        *_per_pass(gamma),
        *_per_pass(jnp.zeros(k.shape[:2]) if g is None else g),
    )
    ((keys, values), tokens, position), y = open_chunk.step(
        read,
        write,
        q,
        TrellisTokens(k, v, alpha, *gates),
        ((state.keys, state.values), state.tokens, state.position),
    )
    return TrellisState(keys, values, tokens, position, state.chunk_size), y.astype(
        v.dtype
    )


def trellis_reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    alpha: Float[Array, "B T H M"],
    gamma: Float[Array, "B T H ..."],
    g: Float[Array, "B T H ..."] | None,
    state: TrellisState | None,
    reset: Bool[Array, "B T"] | None,
    empty: TrellisState,
    *,
    phi: str,
    activation: str,
    bound_steps: bool = False,
) -> tuple[TrellisState, Float[Array, "B T H V"]]:
    """A loop of steps; the arguments are those of `trellis`."""

    def one_token(state, item):
        (q, k, v, alpha, gamma, g), clear = item
        if clear is not None:
            state = open_chunk.replace(clear, empty, state)
        return _step(q, k, v, alpha, gamma, g, state, phi, activation, bound_steps)

    tokens = (q, k, v, alpha, gamma, g)
    items = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, reset))
    state, y = jax.lax.scan(one_token, empty if state is None else state, items)
    return state, jnp.moveaxis(y, 0, 1)


def _per_pass(gate):
    """[B, H] for each of the two passes."""
    return (gate, gate) if gate.ndim == 2 else (gate[..., 0], gate[..., 1])
