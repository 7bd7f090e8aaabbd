"""Recurrent memory ops in JAX: each has a reference, chunk forms and kernels."""

from memjax_kernels._src.cached_attention import cached_attention
from memjax_kernels._src.causal_attention import causal_attention
from memjax_kernels._src.common.steps.slots import step_at_slots
from memjax_kernels._src.documents import document_starts
from memjax_kernels._src.gated_slots import gated_slots
from memjax_kernels._src.gated_slots.step import (
    GatedSlotsState,
    gated_slots_init_state,
    gated_slots_step,
)
from memjax_kernels._src.heads import heads_first, heads_last, rotate
from memjax_kernels._src.hippo import (
    HippoImplementation,
    HippoState,
    hippo,
    hippo_update,
)
from memjax_kernels._src.hippo.bank import (
    HippoBank,
    HippoSampling,
    build_hippo_bank,
    hippo_reconstruction,
    hippo_sample_points,
)
from memjax_kernels._src.lattice import lattice
from memjax_kernels._src.lattice.memory import (
    LATTICE_VARIANTS,
    LatticeForget,
    LatticeInitial,
    LatticeState,
    LatticeVariant,
    lattice_init_state,
    lattice_state,
)
from memjax_kernels._src.lattice.reference import lattice_step
from memjax_kernels._src.linear import gla, linear_attention, ssd
from memjax_kernels._src.linear.convolved import convolved_gated_delta_rule
from memjax_kernels._src.linear.delta_rules import (
    delta_rule,
    gated_delta_rule,
    gdn2,
    kda,
)
from memjax_kernels._src.linear.steps import (
    MatrixState,
    delta_rule_step,
    gated_delta_rule_step,
    gdn2_step,
    gla_step,
    kda_step,
    linear_attention_init_state,
    linear_attention_step,
    ssd_step,
)
from memjax_kernels._src.linear.steps import (
    linear_attention_init_state as delta_rule_init_state,
)
from memjax_kernels._src.linear.steps import (
    linear_attention_init_state as gated_delta_rule_init_state,
)
from memjax_kernels._src.linear.steps import (
    linear_attention_init_state as gdn2_init_state,
)
from memjax_kernels._src.linear.steps import (
    linear_attention_init_state as gla_init_state,
)
from memjax_kernels._src.linear.steps import (
    linear_attention_init_state as kda_init_state,
)
from memjax_kernels._src.linear.steps import (
    linear_attention_init_state as ssd_init_state,
)
from memjax_kernels._src.linear.table import Decay
from memjax_kernels._src.recurrent_block import (
    gated_norm,
    l2_normalize,
    short_convolution,
)
from memjax_kernels._src.scans import gated_scan, selective_scan
from memjax_kernels._src.scans.steps import (
    GatedScanState,
    SelectiveScanState,
    gated_scan_init_state,
    gated_scan_step,
    selective_scan_init_state,
    selective_scan_step,
)
from memjax_kernels._src.sigmoid_scores import sigmoid_scores
from memjax_kernels._src.trellis import trellis
from memjax_kernels._src.trellis.functions import (
    TRELLIS_ACTIVATIONS,
    TRELLIS_PHIS,
    TrellisActivation,
    TrellisPhi,
)
from memjax_kernels._src.trellis.reference import trellis_step
from memjax_kernels._src.trellis.state import (
    TrellisState,
    trellis_init_state,
    trellis_state,
)
from memjax_kernels._src.ttt_linear import ttt_linear
from memjax_kernels._src.ttt_linear.reference import ttt_linear_step
from memjax_kernels._src.ttt_linear.state import (
    TTTLinearState,
    ttt_linear_init_state,
    ttt_linear_state,
)

__all__ = [
    "Decay",
    "GatedScanState",
    "GatedSlotsState",
    "HippoBank",
    "HippoImplementation",
    "HippoSampling",
    "HippoState",
    "LATTICE_VARIANTS",
    "LatticeForget",
    "LatticeInitial",
    "LatticeState",
    "LatticeVariant",
    "MatrixState",
    "SelectiveScanState",
    "TRELLIS_ACTIVATIONS",
    "TRELLIS_PHIS",
    "TTTLinearState",
    "TrellisActivation",
    "TrellisPhi",
    "TrellisState",
    "build_hippo_bank",
    "cached_attention",
    "causal_attention",
    "convolved_gated_delta_rule",
    "delta_rule",
    "delta_rule_init_state",
    "delta_rule_step",
    "document_starts",
    "gated_delta_rule",
    "gated_delta_rule_init_state",
    "gated_delta_rule_step",
    "gated_norm",
    "gated_scan",
    "gated_scan_init_state",
    "gated_scan_step",
    "gated_slots",
    "gated_slots_init_state",
    "gated_slots_step",
    "gdn2",
    "gdn2_init_state",
    "gdn2_step",
    "gla",
    "gla_init_state",
    "gla_step",
    "heads_first",
    "heads_last",
    "hippo",
    "hippo_reconstruction",
    "hippo_sample_points",
    "hippo_update",
    "kda",
    "kda_init_state",
    "kda_step",
    "l2_normalize",
    "lattice",
    "lattice_init_state",
    "lattice_state",
    "lattice_step",
    "linear_attention",
    "linear_attention_init_state",
    "linear_attention_step",
    "rotate",
    "selective_scan",
    "selective_scan_init_state",
    "selective_scan_step",
    "short_convolution",
    "sigmoid_scores",
    "ssd",
    "ssd_init_state",
    "ssd_step",
    "step_at_slots",
    "trellis",
    "trellis_init_state",
    "trellis_state",
    "trellis_step",
    "ttt_linear",
    "ttt_linear_init_state",
    "ttt_linear_state",
    "ttt_linear_step",
]
