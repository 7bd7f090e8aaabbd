"""Delta rules: a write replaces what the memory holds for its key.

Rows of `table`, as the other linear ops.
"""

from jaxtyping import Array, Bool, Float

from memjax_kernels._src.linear import chunks, delta_chunks, pallas_tpu, steps
from memjax_kernels._src.linear.steps import MatrixState
from memjax_kernels._src.linear.table import Implementation, LinearOp, run

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
    """The delta rule: S ← S + β k (v - Sᵀk)ᵀ, y = Sᵀ q, for T tokens, T at least 1.

    A write replaces what the memory holds for its key. Schlag, Irie & Schmidhuber
    (2021), https://arxiv.org/abs/2102.11174, equation 24.

    Args:
        q: queries, not scaled here; G divides H, and value head h reads h // (H / G).
        k: keys, not normalised here; stable for β |k|² <= 2.
        v: values.
        beta: write rates, in [0, 2].
        state: the memory before the segment, float32; None is empty.
        reset: True empties the memory of a batch element before that token.
        chunk_size: tokens of a chunk of `xla`, a power of two; the result is the same.
            None is the fastest known. Kernels have chunks of 64.
        implementation: which code runs; None is the fastest that can.

    Returns:
        The memory after the segment, float32, and the read after each token's write,
        in the dtype of v.

    Raises:
        ValueError: on arguments that do not fit each other, a rate outside [0, 2]
            where its value is known, or an implementation that cannot run.
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
    implementation: Implementation | None = None,
) -> tuple[MatrixState, Float[Array, "B T H V"]]:
    """The gated delta rule: S ← exp(g) S, then S ← S + β k (v - Sᵀk)ᵀ, y = Sᵀ q.

    For T tokens, T at least 1. Yang, Kautz & Hatamizadeh (2024),
    https://arxiv.org/abs/2412.06464, equation 10.

    Args:
        q: queries, not scaled here; G divides H, and value head h reads h // (H / G).
        k: keys, not normalised here; stable for β |k|² <= 2.
        v: values.
        beta: write rates, in [0, 2].
        g: log of the memory's decay factor, in [-inf, 0].
        state: the memory before the segment, float32; None is empty.
        reset: True empties the memory of a batch element before that token.
        chunk_size: tokens of a chunk of `xla`, a power of two; the result is the same.
            None is the fastest known. Kernels have chunks of 64.
        implementation: which code runs; None is the fastest that can.

    Returns:
        The memory after the segment, float32, and the read after each token's write,
        in the dtype of v.

    Raises:
        ValueError: on arguments that do not fit each other, a rate or gate outside
            its range where its value is known, or an implementation that cannot run.
    """
    tokens = (q, k, v, beta, g)
    return run(_GATED_DELTA_RULE, tokens, state, reset, chunk_size, implementation)


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
    implementation: Implementation | None = None,
) -> tuple[MatrixState, Float[Array, "B T H V"]]:
    """Kimi delta attention: S ← diag(exp(g)) S, then the delta rule, y = Sᵀ q.

    The gated delta rule with a decay for each key channel. For T tokens, T at least 1.
    Kimi Team (2025), https://arxiv.org/abs/2510.26692, equation 1.

    Args:
        q: queries, not scaled here; G divides H, and value head h reads h // (H / G).
        k: keys, not normalised here; stable for β |k|² <= 2.
        v: values.
        beta: write rates, in [0, 2].
        g: log of each key channel's decay factor, in [-inf, 0].
        state: the memory before the segment, float32; None is empty.
        reset: True empties the memory of a batch element before that token.
        chunk_size: tokens of a chunk of `xla`, a power of two; the result is the same.
            None is the fastest known. Kernels have chunks of 64.
        implementation: which code runs; None is the fastest that can.

    Returns:
        The memory after the segment, float32, and the read after each token's write,
        in the dtype of v.

    Raises:
        ValueError: on arguments that do not fit each other, a rate or gate outside
            its range where its value is known, or an implementation that cannot run.
    """
    tokens = (q, k, v, beta, g)
    return run(_KDA, tokens, state, reset, chunk_size, implementation)


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
    implementation: Implementation | None = None,
) -> tuple[MatrixState, Float[Array, "B T H V"]]:
    """Gated DeltaNet-2: S ← diag(exp(g)) S, S ← S + k (w ∘ v - Sᵀ(e ∘ k))ᵀ, y = Sᵀ q.

    `kda` with gates e and w of each channel in the place of β: what a token erases, and
    what it writes. For T tokens, T at least 1. The equation is that of
    https://github.com/NVlabs/GatedDeltaNet-2.

    Args:
        q: queries, not scaled here; G divides H, and value head h reads h // (H / G).
        k: keys, not normalised here; stable for kᵀ(e ∘ k) <= 2.
        v: values.
        erase: e, of each key channel, in [0, 2].
        write: w, of each value channel, in [0, 2].
        g: log of each key channel's decay factor, in [-inf, 0].
        state: the memory before the segment, float32; None is empty.
        reset: True empties the memory of a batch element before that token.
        chunk_size: tokens of a chunk of `xla`, a power of two; the result is the same.
            None is the fastest known. Kernels have chunks of 64.
        implementation: which code runs; None is the fastest that can.

    Returns:
        The memory after the segment, float32, and the read after each token's write,
        in the dtype of v.

    Raises:
        ValueError: on arguments that do not fit each other, a gate outside its range
            where its value is known, or an implementation that cannot run.
    """
    tokens = (q, k, v, erase, write, g)
    return run(_GDN2, tokens, state, reset, chunk_size, implementation)
