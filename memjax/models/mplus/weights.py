"""Weights of M+ and their initialisation.

    write_adapter, read_adapter    LoRA for writing a chunk and for cache with memory
    bos [L, D], position [D]       first vector of every layer; mark of memory tokens
    query, key, encoder_query      the retriever, where there is a learned one

Wang et al. (2025), https://arxiv.org/abs/2502.00592, section 3.

Shapes: B batch, D model, L layers, d retriever's keys.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from memjax.checks import require_instance
from memjax.models.adapters import freeze
from memjax.models.language_model.config import kinds
from memjax.models.language_model.layers import BlockParams, normalize
from memjax.models.language_model.model import LanguageModel
from memjax.models.lora import LowRank, Target, adapted, init_changes, targets_in
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.layers import write_layer
from memjax.models.mplus.retriever import Retriever, init_retriever, project
from memjax.nnx.params import as_arrays

#: What the adapters change: not the attention's output.
TARGETS: tuple[Target, ...] = ("query", "key", "value", "gate", "up", "down")

#: Of one layer: of its "mechanism" and its "feed_forward", by target.
Changes = dict[str, dict[str, LowRank]]


class MPlusWeights(NamedTuple):
    """Weights of M+.

    Attributes:
        config: sizes of the memory.
        backbone: the frozen language model.
        write_adapter: low-rank changes of the layers that compress a chunk.
        read_adapter: those of the layers that read with memory.
        bos: in each layer, the vector before the first position.
        position: added to the last K positions before every layer that writes.
        query: of the tokens that read; None, as the next two, without a learned
            retriever.
        key: of memory tokens.
        encoder_query: of the newest memory tokens; trained, and not used by reads.
    """

    config: MPlusConfig
    backbone: LanguageModel
    write_adapter: tuple[Changes, ...]
    read_adapter: tuple[Changes, ...]
    bos: Float[Array, "L D"]
    position: Float[Array, " D"]
    query: Retriever | None = None
    key: Retriever | None = None
    encoder_query: Retriever | None = None

    @property
    def layers(self) -> int:
        """L."""
        return len(self.backbone.blocks)

    @property
    def width(self) -> int:
        """D, the width of memories and features."""
        return self.backbone.width

    @property
    def memory_dtype(self) -> str:
        """Number format of memory tokens and of the KV cache."""
        return self.config.memory_dtype or self.backbone.config.dtype

    def blocks(self, writes: bool) -> tuple[BlockParams, ...]:
        """The layers' parameters, with the adapter that writes or that which reads."""
        adapter = self.write_adapter if writes else self.read_adapter
        return adapt(self.backbone, adapter, self.config.alpha / self.config.rank)

    def normed(self, layer: int, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Inputs of the retriever: rows after the norm before attention."""
        norm = as_arrays(self.backbone.blocks[layer].mechanism_norm)
        return normalize(norm, x, self.backbone.config.norm_epsilon)

    def retriever_queries(
        self, layer: int, h: Float[Array, "*B D"]
    ) -> Float[Array, "*B d"]:
        """f_q of a layer's inputs; needs a learned retriever."""
        assert self.query is not None
        return project(self.query, layer, self.normed(layer, h))

    def retriever_keys(
        self, layer: int, rows: Float[Array, "*B D"]
    ) -> Float[Array, "*B d"]:
        """f_k of a layer's memory tokens; needs a learned retriever."""
        assert self.key is not None
        return project(self.key, layer, self.normed(layer, rows))

    def check_rows(self, name: str, rows: Array, batch: int, count: int) -> None:
        """Raises ValueError unless rows are [B, L, count, D]."""
        shape = (batch, self.layers, count, self.width)
        if rows.shape != shape:
            raise ValueError(
                f"{name} must be memory tokens {list(shape)}, got {list(rows.shape)}"
            )


def init_weights(
    backbone: LanguageModel, config: MPlusConfig, key: PRNGKeyArray
) -> MPlusWeights:
    """Weights before any training, which leave the backbone's layers as they are.

    Args:
        backbone: a model of Llama's kind; its arrays are shared, and frozen.
        config: sizes of the memory.
        key: of the adapters and the retriever.

    Raises:
        ValueError: on a backbone with other mechanisms than "attention", without RoPE,
            or with adapters.
    """
    require_backbone(backbone)
    backbone = freeze(backbone)
    write_key, read_key, *keys = jax.random.split(key, 5)
    adapter = functools.partial(init_adapter, backbone, config.rank)
    weights = MPlusWeights(
        config=config,
        backbone=backbone,
        write_adapter=adapter(write_key),
        read_adapter=adapter(read_key),
        bos=init_bos(backbone),
        # Together with adapters that change nothing yet, a new memory leaves the layers
        # as they are.
        position=jnp.zeros(backbone.width),
    )
    if not config.has_retriever:
        return weights
    draw = functools.partial(
        init_retriever, weights.layers, weights.width, config.key_dim
    )
    query, key_, encoder_query = map(draw, keys)
    return weights._replace(query=query, key=key_, encoder_query=encoder_query)


def init_adapter(
    backbone: LanguageModel, rank: int, key: PRNGKeyArray
) -> tuple[Changes, ...]:
    """LoRA on `TARGETS` in every layer, which changes nothing yet."""
    layers = []
    for i, block in enumerate(backbone.blocks):
        changes = {}
        for place, name in enumerate(("mechanism", "feed_forward")):
            params = getattr(block.parameters(), name)
            # One key a layer and part, independent of how many parts have targets.
            here = jax.random.fold_in(key, 2 * i + place)
            names = targets_in(params, TARGETS)
            changes[name] = init_changes(params, names, rank, here)
        layers.append(changes)
    return tuple(layers)


def adapt(
    backbone: LanguageModel, adapter: tuple[Changes, ...], scale: float
) -> tuple[BlockParams, ...]:
    """The layers' parameters with an adapter applied."""
    layers = []
    for block, changes in zip(backbone.blocks, adapter, strict=True):
        params = block.parameters()
        mechanism = adapted(params.mechanism, changes["mechanism"], scale)
        hidden = adapted(params.feed_forward, changes["feed_forward"], scale)
        layers.append(params._replace(mechanism=mechanism, feed_forward=hidden))
    return tuple(layers)


def init_bos(backbone: LanguageModel) -> Float[Array, "L D"]:
    """State of a text's first position in every layer, independent of its token."""
    # Heads that find nothing to attend to attend to the first position, which a
    # backbone marks by activations that no embedding has. Without such a vector before
    # the memory, SmolLM2 loses 12.3 nats a token after a compressed chunk, and 3.06
    # with it.
    # In float32, whatever the backbone computes in.
    config = dataclasses.replace(backbone.config, dtype="float32")
    mean = backbone.embedding.get_value().mean(axis=0, dtype=jnp.float32)
    h = mean[None, None]
    at, found = jnp.zeros((1, 1), jnp.int32), []
    for block in backbone.blocks:
        found.append(h[0, 0])
        h = _write_layer(config, block.parameters(), h, None, at, 1)
    return jnp.stack(found)


# One program for all layers.
_write_layer = jax.jit(write_layer, static_argnums=(0, 5))


def require_backbone(backbone: LanguageModel) -> None:
    """Raises ValueError unless a backbone is of Llama's kind."""
    require_instance("backbone", backbone, LanguageModel)
    config = backbone.config
    if not all(m.plain_attention and m.max_length for m in config.mechanisms):
        raise ValueError(
            f"backbone must have attention in every layer, got {kinds(config)}"
        )
    styles = {config.style(i) for i in range(config.num_layers)}
    if len(styles) > 1:
        raise ValueError(f"backbone must have layers of one style, got {len(styles)}")
    theta, norm_first = config.heads.rope_theta, styles.pop().norm_first
    if theta is None or not norm_first:
        raise ValueError(
            "backbone must be of Llama's kind, with RoPE and norms first, got "
            f"rope_theta={theta}, norm_first={norm_first}"
        )
