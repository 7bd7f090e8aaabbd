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

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.arguments import check_range
from memjax_kernels._src.common.steps import open_chunk, segment
from memjax_kernels._src.trellis import checks, chunk
from memjax_kernels._src.trellis.functions import bounded
from memjax_kernels._src.trellis.segment import normalised
from memjax_kernels._src.trellis.state import Rule, TrellisState, TrellisTokens


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
    bound_steps: bool = False,
    normalize: bool = False,
) -> tuple[TrellisState, Float[Array, "B H V"]]:
    """One token of `trellis`; its chunk size is the state's.

    Arguments, results and errors as there, with gates [B, H] for both passes or
    [B, H, 2] for each.
    """
    size = getattr(state, "chunk_size", 1)
    checks.check_options(size, phi, activation)
    sizes = checks.check_tokens(q, k, v, alpha, gamma, g, "B H")
    segment.check_state("state", state, checks.default(sizes, size))
    if bound_steps:
        check_range("gamma", gamma, 0.0, 1.0)
    rule = Rule(phi, activation, bound_steps, normalize)
    return step(q, k, v, alpha, gamma, g, state, rule=rule)


def step(
    q: Array,
    k: Array,
    v: Array,
    alpha: Array,
    gamma: Array,
    g: Array | None,
    state: TrellisState,
    rule: Rule,
) -> tuple[TrellisState, Array]:
    """`trellis_step` without checks, by all of a rule."""

    def options(multiply):
        return chunk.Options(*rule, multiply=multiply)

    def of_chunk(x, multiply):
        if not rule.bound_steps:
            return x
        pairs = (x.k, x.key_gamma), (x.v, x.value_gamma)
        keys, values = (bounded(*pair, multiply) for pair in pairs)
        return x._replace(key_gamma=keys, value_gamma=values)

    def read(multiply, q, tokens, memory):
        return chunk.read(q, of_chunk(tokens, multiply), memory, options(multiply))

    def write(multiply, tokens, memory):
        return chunk.write(of_chunk(tokens, multiply), memory, options(multiply))

    if rule.normalize:
        v, alpha = normalised(v, alpha)

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


def _per_pass(gate):
    """[B, H] for each of the two passes."""
    return (gate, gate) if gate.ndim == 2 else (gate[..., 0], gate[..., 1])
