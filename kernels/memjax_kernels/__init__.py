"""Recurrent memory ops in JAX: each has a reference, chunk forms and kernels."""

from memjax_kernels.delta_rule import delta_rule as delta_rule
from memjax_kernels.delta_rule.gated import gated_delta_rule as gated_delta_rule
from memjax_kernels.gated_slots import gated_slots as gated_slots
from memjax_kernels.hippo import hippo as hippo
from memjax_kernels.lattice import lattice as lattice
from memjax_kernels.linear_attention import linear_attention as linear_attention
from memjax_kernels.linear_attention.gla import gla as gla
from memjax_kernels.linear_attention.ssd import ssd as ssd
from memjax_kernels.overlap import overlap as overlap
from memjax_kernels.trellis import trellis as trellis
from memjax_kernels.ttt_linear import ttt_linear as ttt_linear
