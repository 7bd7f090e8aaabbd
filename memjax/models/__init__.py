"""Language models: a state and tokens in, a state and logits out."""

from memjax.models.config import ElasticOptions as ElasticOptions
from memjax.models.config import ModelConfig as ModelConfig
from memjax.models.generate import Sampling as Sampling
from memjax.models.generate import generate as generate
from memjax.models.hmt import HMTConfig as HMTConfig
from memjax.models.hmt import hmt as hmt
from memjax.models.language_model import LanguageModel as LanguageModel
from memjax.models.presets import preset as preset
from memjax.models.rmt import rmt as rmt
