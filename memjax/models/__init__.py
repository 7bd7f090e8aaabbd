"""Language models: a state and tokens in, a state and logits out."""

from memjax.models.adapters import freeze as freeze
from memjax.models.adapters import merge_lora as merge_lora
from memjax.models.base import Model as Model
from memjax.models.checkpoints.hf.peft import save_adapter as save_adapter
from memjax.models.generation import Generated as Generated
from memjax.models.generation import generate as generate
from memjax.models.generation import stop_strings as stop_strings
from memjax.models.hmt.config import HMTConfig as HMTConfig
from memjax.models.hmt.model import HMT as HMT
from memjax.models.hmt.model import add_hmt as add_hmt
from memjax.models.hmt.rmt import add_rmt as add_rmt
from memjax.models.language_model.config import Architecture as Architecture
from memjax.models.language_model.config import BlockStyle as BlockStyle
from memjax.models.language_model.config import ModelConfig as ModelConfig
from memjax.models.language_model.distillation_init import (
    initialise_from_teacher as initialise_from_teacher,
)
from memjax.models.language_model.hidden.router import ExpertsConfig as ExpertsConfig
from memjax.models.language_model.inputs import start_multiple as start_multiple
from memjax.models.language_model.model import LanguageModel as LanguageModel
from memjax.models.language_model.presets import PRESETS as PRESETS
from memjax.models.language_model.presets import preset as preset
from memjax.models.language_model.reread import ReReadWindow as ReReadWindow
from memjax.models.language_model.retrofit import MemoryOptions as MemoryOptions
from memjax.models.language_model.retrofit import add_memory as add_memory
from memjax.models.language_model.snapkv import SnapKVConfig as SnapKVConfig
from memjax.models.language_model.snapkv import add_snapkv as add_snapkv
from memjax.models.language_model.windowed import limit_attention as limit_attention
from memjax.models.lora import LoraConfig as LoraConfig
from memjax.models.lora import add_lora as add_lora
from memjax.models.mplus.build import add_memoryllm as add_memoryllm
from memjax.models.mplus.build import add_mplus as add_mplus
from memjax.models.mplus.config import MPlusConfig as MPlusConfig
from memjax.models.mplus.model import MPlus as MPlus
from memjax.models.mplus.read import ReadOptions as ReadOptions
from memjax.models.sampling import Sampling as Sampling
