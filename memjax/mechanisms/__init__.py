"""Memory mechanisms, one file each; a new one is its file and an import here."""

from memjax.mechanisms.attention import AttentionConfig as AttentionConfig
from memjax.mechanisms.base import Mechanism as Mechanism
from memjax.mechanisms.base import Packed as Packed
from memjax.mechanisms.base import replace_rows as replace_rows
from memjax.mechanisms.cells.base import Cell as Cell
from memjax.mechanisms.cells.base import CellConfig as CellConfig
from memjax.mechanisms.cells.elastic import ElasticCellConfig as ElasticCellConfig
from memjax.mechanisms.cells.infini import InfiniConfig as InfiniConfig
from memjax.mechanisms.config import MechanismConfig as MechanismConfig
from memjax.mechanisms.config import MechanismDefaults as MechanismDefaults
from memjax.mechanisms.deltanet import DeltaNetConfig as DeltaNetConfig
from memjax.mechanisms.elastic_memory import ElasticMemoryConfig as ElasticMemoryConfig
from memjax.mechanisms.gated_deltanet import GatedDeltaNetConfig as GatedDeltaNetConfig
from memjax.mechanisms.gla import GLAConfig as GLAConfig
from memjax.mechanisms.gsa import ABCConfig as ABCConfig
from memjax.mechanisms.gsa import GSAConfig as GSAConfig
from memjax.mechanisms.hybrid import HybridConfig as HybridConfig
from memjax.mechanisms.lattice import LatticeConfig as LatticeConfig
from memjax.mechanisms.layers.heads import HeadsConfig as HeadsConfig
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig as RecurrentConfig
from memjax.mechanisms.layers.recurrent.style import (
    RecurrentStyle as RecurrentStyle,
)
from memjax.mechanisms.linear_attention import (
    LinearAttentionConfig as LinearAttentionConfig,
)
from memjax.mechanisms.mamba2 import Mamba2Config as Mamba2Config
from memjax.mechanisms.mixers.kda import GDN2Config as GDN2Config
from memjax.mechanisms.mixers.kda import KDAConfig as KDAConfig
from memjax.mechanisms.mixers.kda import kda_style as kda_style
from memjax.mechanisms.mixers.mamba import MambaConfig as MambaConfig
from memjax.mechanisms.mixers.melodi import MelodiConfig as MelodiConfig
from memjax.mechanisms.mixers.memorizing import MemorizingConfig as MemorizingConfig
from memjax.mechanisms.mixers.parallel import ParallelConfig as ParallelConfig
from memjax.mechanisms.mixers.rg_lru import RGLRUConfig as RGLRUConfig
from memjax.mechanisms.mixers.short_conv import ShortConvConfig as ShortConvConfig
from memjax.mechanisms.sliding_window import SlidingWindowConfig as SlidingWindowConfig
from memjax.mechanisms.trellis import TrellisConfig as TrellisConfig
from memjax.mechanisms.ttt_linear import TTTLinearConfig as TTTLinearConfig

_NAMED = [kind for kind in [*globals().values()] if hasattr(kind, "name")]
#: Configurations of mechanisms by name.
MECHANISMS = {kind.name: kind for kind in _NAMED if hasattr(kind, "build")}
#: Configurations of cells, the memories of a hybrid, by name.
CELLS = {kind.name: kind for kind in _NAMED if hasattr(kind, "cell")}
