"""Language models: a state and tokens in, a state and logits out."""

from memjax.models.generate import generate as generate
from memjax.models.hmt.config import HMTConfig as HMTConfig
from memjax.models.hmt.model import hmt as hmt
from memjax.models.hmt.rmt import rmt as rmt
from memjax.models.language_model.config import ModelConfig as ModelConfig
from memjax.models.language_model.inputs import start_multiple as start_multiple
from memjax.models.language_model.model import LanguageModel as LanguageModel
from memjax.models.language_model.presets import preset as preset
from memjax.models.language_model.reread import ReReadWindow as ReReadWindow
from memjax.models.language_model.retrofit import retrofit as retrofit
from memjax.models.mplus.build import memoryllm as memoryllm
from memjax.models.mplus.build import mplus as mplus
from memjax.models.mplus.config import MPlusConfig as MPlusConfig
from memjax.models.sampling import Sampling as Sampling
