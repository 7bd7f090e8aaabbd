"""Linear ops: a memory matrix per head, decayed by gates and written by keys.

Every op is a row of `table`: the axes of its gates, a step, a chunk form and TPU
kernels. The state is float32 [B, H, K, V].
"""

from typing import Literal

from jaxtyping import Array, Bool, Float

from memjax_kernels._src.linear import chunks, delta_chunks, pallas_tpu, steps
from memjax_kernels._src.linear.steps import MatrixState
from memjax_kernels._src.linear.table import LinearOp, run

Implementation = Literal["reference", "xla", "pallas_tpu"]

_LINEAR_ATTENTION = LinearOp(
    name="linear_attention",
    gates={},
    step=steps.linear_attention_step,
    advance=chunks.ungated(chunks.linear_group),
    kernels=pallas_tpu.linear_attention_tpu,
    chunk_size=chunks.CHUNK_SIZE,
    init_state=steps.linear_attention_init_state,
)
_SSD = _LINEAR_ATTENTION._replace(
    name="ssd",
    gates={"g": "B T H"},
    step=steps.ssd_step,
    advance=chunks.linear_group,
    kernels=pallas_tpu.ssd_tpu,
)
_GLA = _SSD._replace(
    name="gla",
    gates={"g": "B T H K"},
    step=steps.gla_step,
    kernels=pallas_tpu.gla_tpu,
    chunk_size=chunks.CHANNEL_CHUNK_SIZE,
)
_DELTA_RULE = _LINEAR_ATTENTION._replace(
    name="delta_rule",
    gates={"beta": "B T H"},
    step=steps.delta_rule_step,
    advance=chunks.ungated(delta_chunks.delta_group),
    kernels=pallas_tpu.delta_rule_tpu,
)
_GATED_DELTA_RULE = _DELTA_RULE._replace(
    name="gated_delta_rule",
    gates={"beta": "B T H", "g": "B T H"},
    step=steps.gated_delta_rule_step,
    advance=delta_chunks.delta_group,
    kernels=pallas_tpu.gated_delta_rule_tpu,
)


def linear_attention(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    state: MatrixState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[MatrixState, Float[Array, "B T H V"]]:
    """Linear attention: S ← S + k vᵀ, y = Sᵀ q, for T tokens, T at least 1.

    Katharopoulos et al. (2020), https://arxiv.org/abs/2006.16236, equations 16 to 20,
    with feature maps and normalisation left to the layer.

    Args:
        q: queries, not scaled here; G divides H, and value head h reads h // (H / G).
        k: keys.
        v: values.
        state: the memory before the segment, float32; None is empty.
        reset: True empties the memory of a batch element before that token.
        chunk_size: tokens of a chunk of `xla`, a power of two; the result is the same.
            None is the fastest known. Kernels have chunks of 64.
        implementation: which code runs; None is the fastest that can.

    Returns:
        The memory after the segment, float32, and the read after each token's write,
        in the dtype of v.

    Raises:
        ValueError: on shapes or dtypes that do not fit, or an implementation that is
            unknown or cannot run here.
    """
    tokens = (q, k, v)
    return run(_LINEAR_ATTENTION, tokens, state, reset, chunk_size, implementation)


def ssd(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    state: MatrixState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[MatrixState, Float[Array, "B T H V"]]:
    """State-space duality (Mamba-2): S ← exp(g) S + k vᵀ, y = Sᵀ q, for T tokens.

    T is at least 1. Dao and Gu (2024), https://arxiv.org/abs/2405.21060, equation 1
    with scalar A = exp(g), B = k, C = q, x = v.

    Args:
        q: queries, not scaled here; G divides H, and value head h reads h // (H / G).
        k: keys.
        v: values.
        g: log of the memory's decay factor, in [-inf, 0]; inside jit the range is the
            caller's promise.
        state: the memory before the segment, float32; None is empty.
        reset: True empties the memory of a batch element before that token.
        chunk_size: tokens of a chunk of `xla`, a power of two; the result is the same.
            None is the fastest known. Kernels have chunks of 64.
        implementation: which code runs; None is the fastest that can.

    Returns:
        The memory after the segment, float32, and the read after each token's write,
        in the dtype of v.

    Raises:
        ValueError: on shapes or dtypes that do not fit, gates out of range, or an
            implementation that is unknown or cannot run here.
    """
    tokens = (q, k, v, g)
    return run(_SSD, tokens, state, reset, chunk_size, implementation)


def gla(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    state: MatrixState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[MatrixState, Float[Array, "B T H V"]]:
    """Gated linear attention: S ← diag(exp(g)) S + k vᵀ, y = Sᵀ q, for T tokens.

    T is at least 1. Yang et al. (2023), https://arxiv.org/abs/2312.06635, equation 3
    with alpha = exp(g).

    Args:
        q: queries, not scaled here; G divides H, and value head h reads h // (H / G).
        k: keys.
        v: values.
        g: log of each key channel's decay factor, in [-inf, 0]; inside jit the range
            is the caller's promise.
        state: the memory before the segment, float32; None is empty.
        reset: True empties the memory of a batch element before that token.
        chunk_size: tokens of a chunk of `xla`, a power of two; the result is the same.
            None is the fastest known. Kernels have chunks of 64.
        implementation: which code runs; None is the fastest that can.

    Returns:
        The memory after the segment, float32, and the read after each token's write,
        in the dtype of v.

    Raises:
        ValueError: on shapes or dtypes that do not fit, gates out of range, or an
            implementation that is unknown or cannot run here.
    """
    tokens = (q, k, v, g)
    return run(_GLA, tokens, state, reset, chunk_size, implementation)


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
