"""Delta rules: a write replaces what the memory holds for its key.

Rows of `table`, as the other linear ops.
"""

from jaxtyping import Array, Bool, Float

from memjax_kernels._src.linear import chunks, delta_chunks, pallas_tpu, steps
from memjax_kernels._src.linear.steps import MatrixState
from memjax_kernels._src.linear.table import Decay, Implementation, LinearOp, run

_DELTA_RULE = LinearOp(
    name="delta_rule",
    gates={"beta": "B T H"},
    step=steps.delta_rule_step,
    advance=chunks.ungated(delta_chunks.delta_group),
    kernels=pallas_tpu.delta_rule_tpu,
    chunk_size=chunks.CHUNK_SIZE,
    init_state=steps.linear_attention_init_state,
)
_GATED_DELTA_RULE = _DELTA_RULE._replace(
    name="gated_delta_rule",
    gates={"beta": "B T H", "g": "B T H"},
    step=steps.gated_delta_rule_step,
    advance=delta_chunks.delta_group,
    kernels=pallas_tpu.gated_delta_rule_tpu,
)
_KDA = _GATED_DELTA_RULE._replace(
    name="kda",
    gates={"beta": "B T H", "g": "B T H K"},
    step=steps.kda_step,
    kernels=pallas_tpu.kda_tpu,
    chunk_size=None,
)
_GDN2 = _KDA._replace(
    name="gdn2",
    gates={"erase": "B T H K", "write": "B T H V", "g": "B T H K"},
    step=steps.gdn2_step,
    advance=delta_chunks.gdn2_group,
    kernels=pallas_tpu.gdn2_tpu,
)


def delta_rule(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    state: MatrixState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[MatrixState, Float[Array, "B T H V"]]:
    """The delta rule: S ← S + β k (v - Sᵀk)ᵀ, y = Sᵀ q, for T tokens.

    A write replaces what the memory holds for its key. Schlag, Irie & Schmidhuber
    (2021), https://arxiv.org/abs/2102.11174, equation 24. Other arguments, results and
    errors are those of `linear_attention`.

    Args:
        k: keys, not normalised here; stable for β |k|² <= 2.
        beta: write rates, in [0, 2]; inside jit the range is the caller's promise.
    """
    tokens = (q, k, v, beta)
    return run(_DELTA_RULE, tokens, state, reset, chunk_size, implementation)


def gated_delta_rule(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    g: Float[Array, "B T H"],
    state: MatrixState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    decay: Decay | None = None,
    implementation: Implementation | None = None,
) -> tuple[MatrixState, Float[Array, "B T H V"]]:
    """The gated delta rule: S ← exp(g) S, then S ← S + β k (v - Sᵀk)ᵀ, y = Sᵀ q.

    Yang, Kautz & Hatamizadeh (2024), https://arxiv.org/abs/2412.06464, equation 10.
    Other arguments, results and errors are those of `delta_rule`.

    Args:
        g: log of the memory's decay factor, in [-inf, 0]; with `decay` its logits.
        decay: see `Decay`.
    """
    tokens = (q, k, v, beta, g)
    return run(
        _GATED_DELTA_RULE, tokens, state, reset, chunk_size, implementation, decay
    )


def kda(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    g: Float[Array, "B T H K"],
    state: MatrixState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    decay: Decay | None = None,
    implementation: Implementation | None = None,
) -> tuple[MatrixState, Float[Array, "B T H V"]]:
    """Kimi delta attention: S ← diag(exp(g)) S, then the delta rule, y = Sᵀ q.

    The gated delta rule with a decay for each key channel. Kimi Team (2025),
    https://arxiv.org/abs/2510.26692, equation 1. Other arguments, results and errors
    are those of `delta_rule`.

    Args:
        g: log of each key channel's decay factor, in [-inf, 0]; with `decay` its
            logits.
        decay: see `Decay`.
    """
    tokens = (q, k, v, beta, g)
    return run(_KDA, tokens, state, reset, chunk_size, implementation, decay)


def gdn2(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    erase: Float[Array, "B T H K"],
    write: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    state: MatrixState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    decay: Decay | None = None,
    implementation: Implementation | None = None,
) -> tuple[MatrixState, Float[Array, "B T H V"]]:
    """Gated DeltaNet-2: S ← diag(exp(g)) S, S ← S + k (w ∘ v - Sᵀ(e ∘ k))ᵀ, y = Sᵀ q.

    `kda` with gates e and w of each channel in the place of β: what a token erases, and
    what it writes. The equation is that of https://github.com/NVlabs/GatedDeltaNet-2.
    Other arguments, results and errors are those of `delta_rule`.

    Args:
        k: keys, not normalised here; stable for kᵀ(e ∘ k) <= 2.
        erase: e, of each key channel, in [0, 2].
        write: w, of each value channel, in [0, 2].
        g: log of each key channel's decay factor, in [-inf, 0]; with `decay` its
            logits.
        decay: see `Decay`.
    """
    tokens = (q, k, v, erase, write, g)
    return run(_GDN2, tokens, state, reset, chunk_size, implementation, decay)
