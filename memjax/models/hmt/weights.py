"""Weights of HMT.

Shapes: E width of the backbone's embeddings, d retrieval width d_h.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from memjax.models.hmt.config import HMTConfig
from memjax.models.language_model.model import LanguageModel


class RetrievalWeights(NamedTuple):
    """Weights of summaries and searches.

    Attributes:
        summary_prompt: T, which asks the backbone for a summary.
        query: W_q.
        key: W_k.
    """

    summary_prompt: Float[Array, " E"]
    query: Float[Array, "E d"]
    key: Float[Array, "E d"]


class Weights(NamedTuple):
    """Backbone and memory weights, a pytree.

    Attributes:
        backbone: the language model that reads the segments.
        initial_memory: M_init, the prompt of a document's first segment.
        retrieval: None without it.
    """

    backbone: LanguageModel
    initial_memory: Float[Array, " E"]
    retrieval: RetrievalWeights | None


def init_weights(
    backbone: LanguageModel, config: HMTConfig, key: PRNGKeyArray
) -> Weights:
    """Draws the memory's weights as the official program does.

    Prompts are normal with the spread of the backbone's embeddings, projections
    uniform as PyTorch draws those of a linear layer.
    """
    memory_key, prompt_key, query_key, key_key = jax.random.split(key, 4)
    e = backbone.width
    vocabulary = jnp.arange(backbone.vocab_size, dtype=jnp.int32)[None]
    # Prompts take the place of token embeddings.
    spread = backbone.embed(vocabulary).astype(jnp.float32).std()
    initial_memory = jax.random.normal(memory_key, (e,)) * spread
    if not config.retrieval:
        return Weights(backbone, initial_memory, None)
    shape, bound = (e, config.retrieval_dim or e), e**-0.5

    def uniform(key):
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

    retrieval = RetrievalWeights(
        summary_prompt=jax.random.normal(prompt_key, (e,)) * spread,
        query=uniform(query_key),
        key=uniform(key_key),
    )
    return Weights(backbone, initial_memory, retrieval)
