"""Mechanisms and models as flax.nnx users write them."""

from memjax.nnx.compilation import compiled as compiled
from memjax.nnx.memory import Memory as Memory
from memjax.nnx.params import as_arrays as as_arrays
from memjax.nnx.params import as_params as as_params
from memjax.nnx.table import tabulate as tabulate
