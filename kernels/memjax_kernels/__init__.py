"""Ops, one folder each: `reference.py` is the meaning, the rest is speed."""

from memjax_kernels.delta_rule import delta_rule as delta_rule
from memjax_kernels.hippo import hippo as hippo
