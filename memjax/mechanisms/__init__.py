"""Memory mechanisms, one file each; a new one is its file and its names here."""

from memjax.mechanisms.attention import AttentionConfig as AttentionConfig
from memjax.mechanisms.attention import attention as attention
from memjax.mechanisms.base import Mechanism as Mechanism
from memjax.mechanisms.base import MixerConfig as MixerConfig
from memjax.mechanisms.base import reset as reset
from memjax.mechanisms.beside import BesideConfig as BesideConfig
from memjax.mechanisms.beside import beside as beside
from memjax.mechanisms.cores.elastic import ElasticCoreConfig as ElasticCoreConfig
from memjax.mechanisms.cores.infini import InfiniConfig as InfiniConfig
from memjax.mechanisms.deltanet import DeltaNetConfig as DeltaNetConfig
from memjax.mechanisms.deltanet import deltanet as deltanet
from memjax.mechanisms.elastic_memory import ElasticMemoryConfig as ElasticMemoryConfig
from memjax.mechanisms.elastic_memory import elastic_memory as elastic_memory
from memjax.mechanisms.gated_deltanet import GatedDeltaNetConfig as GatedDeltaNetConfig
from memjax.mechanisms.gated_deltanet import gated_deltanet as gated_deltanet
from memjax.mechanisms.gla import GLAConfig as GLAConfig
from memjax.mechanisms.gla import gla as gla
from memjax.mechanisms.gsa import ABCConfig as ABCConfig
from memjax.mechanisms.gsa import GSAConfig as GSAConfig
from memjax.mechanisms.gsa import abc as abc
from memjax.mechanisms.gsa import gsa as gsa
from memjax.mechanisms.lattice import LatticeConfig as LatticeConfig
from memjax.mechanisms.lattice import lattice as lattice
from memjax.mechanisms.linear_attention import (
    LinearAttentionConfig as LinearAttentionConfig,
)
from memjax.mechanisms.linear_attention import linear_attention as linear_attention
from memjax.mechanisms.mamba2 import Mamba2Config as Mamba2Config
from memjax.mechanisms.mamba2 import mamba2 as mamba2
from memjax.mechanisms.sliding_window import SlidingWindowConfig as SlidingWindowConfig
from memjax.mechanisms.sliding_window import sliding_window as sliding_window
from memjax.mechanisms.trellis import TrellisConfig as TrellisConfig
from memjax.mechanisms.trellis import trellis as trellis
from memjax.mechanisms.ttt_linear import TTTLinearConfig as TTTLinearConfig
from memjax.mechanisms.ttt_linear import ttt_linear as ttt_linear
