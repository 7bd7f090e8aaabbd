"""TTT-linear: a linear layer as the memory, trained on every token.

    f(x) = x + LN(xᵀW + b)        (W, b) ← (W, b) - η ∇ℓ        y = f(q)

with the loss ℓ = ½ |LN(kᵀW + b) - (v - k)|². Sun et al. (2024),
https://arxiv.org/abs/2407.04620.
"""

import functools
from collections.abc import Callable
from typing import Literal

from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import chunks, partition
from memjax_kernels._src.common.arguments import check_mask, check_sizes
from memjax_kernels._src.common.implementations import choose
from memjax_kernels._src.common.steps.segment import by_tokens, check_states
from memjax_kernels._src.ttt_linear import pallas_tpu
from memjax_kernels._src.ttt_linear.reference import check_tokens, ttt_linear_step
from memjax_kernels._src.ttt_linear.segment import in_chunks
from memjax_kernels._src.ttt_linear.state import TTTLinearState, ttt_linear_init_state
from memjax_kernels._src.ttt_linear.xla import ttt_linear_xla

Implementation = Literal["reference", "xla", "pallas_tpu"]
# `common.steps.segment` says what a chunk implementation takes and returns.
_CHUNKWISE: dict[str, Callable] = {
    "xla": ttt_linear_xla,
    "pallas_tpu": partition.chunkwise(pallas_tpu.ttt_linear_tpu),
}


def ttt_linear(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    eta: Float[Array, "B T H"],
    ln_scale: Float[Array, "H V"],
    ln_bias: Float[Array, "H V"],
    state: TTTLinearState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    empty: TTTLinearState | None = None,
    chunk_size: int = 16,
    implementation: Implementation | None = None,
) -> tuple[TTTLinearState, Float[Array, "B T H V"]]:
    """Trains f to map k to v and reads y = f(q) at every token, T at least 1.

    The gradient of a token's loss is taken at the start of its mini-batch of C tokens.
    Its step, of rate η, is taken before the token's own read. See sections 2.4, 2.5 and
    2.7 of the paper. Here η stands for all rates: the paper's code also divides by the
    position in the mini-batch, so that rates of η / C here give its W after a
    full mini-batch. LN has eps 1e-6 under the root.

    At a width of 2 LN gives (1, -1) or (-1, 1) whatever x is, so that gradients with
    respect to k, v and eta are about 1e-11, and float32 has no digit of them. From a
    width of 4 on they are right to 2e-5 of their scale.

    Args:
        q: queries, not scaled here; K = V, for residual and target.
        k: keys, not normalised here.
        v: values.
        eta: learning rates, at least 0.
        ln_scale: scale of LN.
        ln_bias: bias of LN.
        state: the memory before the segment; None is `empty`. Batch elements may be at
            different positions in a mini-batch, which goes on.
        chunk_size: C, tokens of a mini-batch, at least 1; part of what is computed.
        reset: True makes the memory of a batch element `empty` before that token, which
            must start a mini-batch. Where that is not known before the call, the reads
            from a misplaced reset on are NaN, and so is the memory after the segment.
        empty: the memory after a reset, at position 0; None is
            `ttt_linear_init_state`, zero weights.
        implementation: which code runs; None is the fastest that can.

    Returns:
        The memory after the segment, float32, and the read after each token's write,
        in the dtype of v.

    Raises:
        ValueError: on arguments that do not fit each other, a state of another chunk
            size, a rate below 0 or a misplaced reset where that is known, or an
            implementation that cannot run.
    """
    check_sizes(chunk_size=chunk_size)
    sizes = check_tokens(q, k, v, eta, ln_scale, ln_bias)
    check_mask("reset", reset, sizes["B"], sizes["T"])
    shape = (sizes[letter] for letter in "BHV")
    default = functools.partial(ttt_linear_init_state, *shape, chunk_size)
    blank: TTTLinearState = check_states(state, empty, default)
    wrong = chunks.misplaced_resets(reset, chunk_size, state and state.position)
    form = choose(
        "ttt_linear",
        implementation,
        {"reference": by_tokens} | _CHUNKWISE,
        {"pallas_tpu": pallas_tpu.unsupported(q, k, v, chunk_size)},
    )
    tokens, memories = (q, k, v, eta), (state, reset, blank)
    if implementation == "reference":

        def step(q, k, v, eta, state):
            given = (q, k, v, eta, ln_scale, ln_bias, state)
            return ttt_linear_step(*given, chunk_size=chunk_size)

        after, y = by_tokens(step, tokens, *memories)
    else:
        after, y = in_chunks(form, *tokens, ln_scale, ln_bias, *memories)
    return chunks.mask_with_nan(after, y, wrong)
