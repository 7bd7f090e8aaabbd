"""Long-context memory as pure functions over explicit state."""

from memjax import mechanisms as mechanisms
from memjax import models as models
from memjax import nnx as nnx
