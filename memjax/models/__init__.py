"""Language models: a state and tokens in, a state and logits out."""

from memjax.models.config import ElasticOptions as ElasticOptions
from memjax.models.config import ModelConfig as ModelConfig
from memjax.models.generate import generate as generate
from memjax.models.hmt import HMTConfig as HMTConfig
from memjax.models.hmt import hmt as hmt
from memjax.models.language_model import LanguageModel as LanguageModel
from memjax.models.mplus import memoryllm as memoryllm
from memjax.models.mplus import mplus as mplus
from memjax.models.mplus_state import MPlusConfig as MPlusConfig
from memjax.models.presets import preset as preset
from memjax.models.rmt import rmt as rmt
from memjax.models.sampling import Sampling as Sampling
