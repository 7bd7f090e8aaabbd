"""Gives a backbone the memory of M+ or of MemoryLLM."""

import dataclasses

from flax import nnx
from jaxtyping import PRNGKeyArray

from memjax.checks import require_instance
from memjax.models.language_model.model import LanguageModel
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.weights import init_weights
from memjax.models.offload import require_place
from memjax.nnx.params import params_key


def add_mplus(
    backbone: LanguageModel,
    config: MPlusConfig,
    *,
    key: PRNGKeyArray | None = None,
    rngs: nnx.Rngs | None = None,
) -> MPlus:
    """Wraps a backbone with a pool of memory tokens and a long-term store.

    Args:
        backbone: a model of Llama's kind; its arrays are shared, and frozen.
        config: sizes and options of the memory.
        key: draws the adapters and the retriever; or
        rngs: the streams of flax, of which "params" is drawn from.

    Raises:
        ValueError: on both of key and rngs, or neither; on a backbone with other
            mechanisms than "attention", without RoPE, or with adapters.
    """
    require_instance("config", config, MPlusConfig)
    require_place("store_memory", config.store_memory)
    require_place("pool_memory", config.pool_memory)
    return MPlus(init_weights(backbone, config, params_key(key, rngs)))


def add_memoryllm(
    backbone: LanguageModel,
    config: MPlusConfig,
    *,
    key: PRNGKeyArray | None = None,
    rngs: nnx.Rngs | None = None,
) -> MPlus:
    """MemoryLLM: the pool alone, without a long-term store; see `add_mplus`."""
    # Without retrieved rows there is no store, and nothing else differs.
    require_instance("config", config, MPlusConfig)
    config = dataclasses.replace(config, num_retrieved=0)
    return add_mplus(backbone, config, key=key, rngs=rngs)
