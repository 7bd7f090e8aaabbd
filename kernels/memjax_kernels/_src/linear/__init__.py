"""Linear ops: a memory matrix per head, decayed by gates and written by keys.

Every op is a row of `table`: the axes of its gates, a step, a chunk form and TPU
kernels. The state is float32 [B, H, K, V]. `delta_rules` has the ops whose writes
correct what the memory holds.
"""

from jaxtyping import Array, Bool, Float

from memjax_kernels._src.linear import chunks, pallas_tpu, steps
from memjax_kernels._src.linear.steps import MatrixState
from memjax_kernels._src.linear.table import Decay, Implementation, LinearOp, run

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
    chunk_size=None,
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
        ValueError: on shapes or dtypes that do not fit, known gates and rates out of
            range, or an implementation that is unknown or cannot run here.
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

    Dao and Gu (2024), https://arxiv.org/abs/2405.21060, equation 1 with scalar
    A = exp(g), B = k, C = q, x = v. Other arguments, results and errors are those of
    `linear_attention`.

    Args:
        g: log of the memory's decay factor, in [-inf, 0]; inside jit the range is the
            caller's promise.
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
    decay: Decay | None = None,
    implementation: Implementation | None = None,
) -> tuple[MatrixState, Float[Array, "B T H V"]]:
    """Gated linear attention: S ← diag(exp(g)) S + k vᵀ, y = Sᵀ q, for T tokens.

    Yang et al. (2023), https://arxiv.org/abs/2312.06635, equation 3 with
    alpha = exp(g). Other arguments, results and errors are those of `linear_attention`.

    Args:
        g: log of each key channel's decay factor, in [-inf, 0]; inside jit the range
            is the caller's promise. With `decay` its logits.
        decay: see `Decay`.
    """
    tokens = (q, k, v, g)
    return run(_GLA, tokens, state, reset, chunk_size, implementation, decay)
