"""Memory mechanisms, one file each; a new one is its file and a line here."""

from memjax.mechanisms.abc import abc as abc
from memjax.mechanisms.attention import attention as attention
from memjax.mechanisms.base import Mechanism as Mechanism
from memjax.mechanisms.base import reset as reset
from memjax.mechanisms.deltanet import deltanet as deltanet
from memjax.mechanisms.elastic_memory import elastic_memory as elastic_memory
from memjax.mechanisms.gated_deltanet import gated_deltanet as gated_deltanet
from memjax.mechanisms.gla import gla as gla
from memjax.mechanisms.gsa import gsa as gsa
from memjax.mechanisms.lattice import lattice as lattice
from memjax.mechanisms.linear_attention import linear_attention as linear_attention
from memjax.mechanisms.mamba2 import mamba2 as mamba2
from memjax.mechanisms.sliding_window import sliding_window as sliding_window
from memjax.mechanisms.trellis import trellis as trellis
from memjax.mechanisms.ttt_linear import ttt_linear as ttt_linear
