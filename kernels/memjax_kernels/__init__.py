"""Recurrent memory ops in JAX: each has a reference, chunk forms and kernels."""

from memjax_kernels._src.delta_rule import delta_rule as delta_rule
from memjax_kernels._src.delta_rule.gated import gated_delta_rule as gated_delta_rule
from memjax_kernels._src.gated_slots import gated_slots as gated_slots
from memjax_kernels._src.hippo import hippo as hippo
from memjax_kernels._src.lattice import lattice as lattice
from memjax_kernels._src.linear_attention import linear_attention as linear_attention
from memjax_kernels._src.linear_attention.gla import gla as gla
from memjax_kernels._src.linear_attention.ssd import ssd as ssd
from memjax_kernels._src.overlap import overlap as overlap
from memjax_kernels._src.trellis import trellis as trellis
from memjax_kernels._src.ttt_linear import ttt_linear as ttt_linear
