"""Language models: a state and tokens in, a state and logits out."""

from memjax.models.generation import generate as generate
from memjax.models.hmt.config import HMTConfig as HMTConfig
from memjax.models.hmt.model import add_hmt as add_hmt
from memjax.models.hmt.rmt import add_rmt as add_rmt
from memjax.models.language_model.config import ModelConfig as ModelConfig
from memjax.models.language_model.inputs import start_multiple as start_multiple
from memjax.models.language_model.model import LanguageModel as LanguageModel
from memjax.models.language_model.presets import preset as preset
from memjax.models.language_model.reread import ReReadWindow as ReReadWindow
from memjax.models.language_model.retrofit import add_memory as add_memory
from memjax.models.mplus.build import add_memoryllm as add_memoryllm
from memjax.models.mplus.build import add_mplus as add_mplus
from memjax.models.mplus.config import MPlusConfig as MPlusConfig
from memjax.models.sampling import Sampling as Sampling
