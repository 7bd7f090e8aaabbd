"""Save HMT and RMT, under the tensor names of the official program.

memory_cell.model.*          the backbone, as Hugging Face names it
memory_cell.memory  [1, E]   M_init
mem                 [1, E]   T, with retrieval
cross_attn.wq.weight, cross_attn.wk.weight  [d_h, E], with retrieval
"""

import numpy as np

from memjax.config_io import to_record
from memjax.models.checkpoints import own_format
from memjax.models.checkpoints.saving import Contents, plain_contents
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.weights import Weights
from memjax.models.language_model.model import LanguageModel

BACKBONE, INITIAL_MEMORY, SUMMARY_PROMPT = (
    "memory_cell.model.",
    "memory_cell.memory",
    "mem",
)
QUERY, KEY = "cross_attn.wq.weight", "cross_attn.wk.weight"
MODEL_TYPE = "hmt"
#: Key of the `HMTConfig` in the backbone's `config.json`.
CONFIG_KEY = "memjax_hmt"


def contents(config: HMTConfig, weights: Weights, plain: LanguageModel) -> Contents:
    """Content of the folder of `HMT.save` and `load_hmt`."""
    inside = plain_contents(plain.config, plain)
    memory = {CONFIG_KEY: to_record(config)}
    described = own_format.around_backbone(inside.config, MODEL_TYPE, memory)
    return Contents(described, _named(weights, inside.tensors), is_public=False)


def _named(weights, backbone):
    for name, value in backbone:
        yield BACKBONE + name, value
    yield INITIAL_MEMORY, np.asarray(weights.initial_memory)[None]
    if weights.retrieval is not None:
        yield SUMMARY_PROMPT, np.asarray(weights.retrieval.summary_prompt)[None]
        # PyTorch stores a linear layer as [out, in].
        yield QUERY, np.asarray(weights.retrieval.query).T
        yield KEY, np.asarray(weights.retrieval.key).T
