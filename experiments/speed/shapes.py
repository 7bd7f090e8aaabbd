"""Backbones of random weights for the comparisons with the authors' programs."""

from typing import Any, Literal, NamedTuple

import jax

from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.config import Architecture

Size = Literal["tiny", "smollm2"]
#: Tokens that a backbone can read at once.
CAPACITY = 2048


class Shape(NamedTuple):
    """Sizes of a Llama; `tied` makes the embedding the head too."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    tied: bool


SHAPES: dict[Size, Shape] = {
    "tiny": Shape(4, 128, 4, 2, 256, 4096, False),
    "smollm2": Shape(30, 576, 9, 3, 1536, 49_152, True),
}


def backbone(shape: Shape) -> LanguageModel:
    """Our backbone of that shape, in float32."""
    attention = AttentionConfig(
        shape.width,
        shape.heads,
        shape.kv_heads,
        shape.width // shape.heads,
        capacity=CAPACITY,
    )
    config = ModelConfig(
        mechanisms=(attention,),
        num_layers=shape.layers,
        vocab_size=shape.vocab,
        model_dim=shape.width,
        hidden_dim=shape.hidden,
        tied_head=shape.tied,
        architecture=Architecture(scale_embedding=False),
        dtype="float32",
        remat=False,
    )
    return LanguageModel(config, key=jax.random.key(0))


def llama_config(shape: Shape, **more: Any) -> Any:
    """The settings of transformers for a Llama of that shape, and `more`."""
    # Optional, and no other implementation's process should load it.
    import transformers  # pyright: ignore[reportMissingImports]

    return transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=CAPACITY,
        tie_word_embeddings=shape.tied,
        **more,
    )
