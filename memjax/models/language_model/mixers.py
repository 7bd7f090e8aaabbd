"""The mechanism of each layer, with the sizes of the model it is in."""

import dataclasses

from memjax import mechanisms
from memjax.mechanisms import Mechanism
from memjax.mechanisms.attention import AttentionConfig
from memjax.mechanisms.elastic_memory import ElasticMemoryConfig
from memjax.mechanisms.layers.projections import HeadsConfig
from memjax.mechanisms.layers.recurrent_block import BlockConfig
from memjax.mechanisms.sliding_window import SlidingWindowConfig
from memjax.models.language_model.config import Mixer, ModelConfig


def heads_config(config: ModelConfig) -> HeadsConfig:
    """Sizes of an attention layer's projections."""
    style = config.architecture
    return HeadsConfig(
        model_dim=config.model_dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope_theta=config.rope_theta if style.positions == "rope" else None,
        rope_scaling=style.rope_scaling,
        qkv_bias=style.qkv_bias,
        output_bias=style.output_bias,
    )


def build_mixer(config: ModelConfig, mixer: Mixer) -> Mechanism:
    """The mechanism of one layer, with the model's sizes."""
    heads = vars(heads_config(config))
    block = BlockConfig(
        model_dim=config.model_dim,
        num_heads=config.num_heads,
        key_dim=config.head_dim,
        value_dim=config.head_dim,
        norm_epsilon=config.norm_epsilon,
    )
    match mixer:
        case "attention":
            return mechanisms.attention(
                AttentionConfig(**heads, capacity=config.capacity)
            )
        case "sliding_window":
            return mechanisms.sliding_window(
                SlidingWindowConfig(**heads, window=config.window)
            )
        case "elastic_memory":
            options = vars(config.elastic)
            return mechanisms.elastic_memory(
                ElasticMemoryConfig(**heads, block=config.window, **options)
            )
        case "linear_attention":
            return mechanisms.linear_attention(block)
        case "mamba2":
            return mechanisms.mamba2(block)
        case "gla":
            return mechanisms.gla(block)
        case "deltanet":
            return mechanisms.deltanet(block)
        case "gated_deltanet":
            return mechanisms.gated_deltanet(block)
        case "ttt_linear":
            return mechanisms.ttt_linear(block, config.ttt)
        case "gsa":
            return mechanisms.gsa(block, config.slots)
        case "abc":
            return mechanisms.abc(block, config.slots)
        case "trellis":
            return mechanisms.trellis(block, config.slots, config.trellis)
        case "lattice":
            # Its queries and keys have one channel a slot.
            block = dataclasses.replace(block, key_dim=config.slots)
            return mechanisms.lattice(block, config.lattice)
