"""Two probes of a trained memory: noise in place of its block, and what it has lost.

Noise replaces keys and values of all heads at places drawn for each block, the same for
both: normal, with the mean square of the text's keys, or values, in that block. Only
attention inside of the block reads it. The memory, and a Memorizing Transformer's
queue, get the real keys and values of that input, which the paper leaves open. A window
is no memory: what it keeps has the noise too.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from memjax.mechanisms.layers import projections
from memjax.models import LanguageModel
from memjax.models.language_model.rebuilt import replace_mechanisms
from memjax_kernels import hippo_reconstruction

#: Mechanisms that keep what has left the block.
MEMORIES = ("elastic_memory", "memorizing")


def with_noise(model: LanguageModel, rate: float, everywhere: bool) -> LanguageModel:
    """The model with noise at a share of the places, for calls of one block each.

    `everywhere` is in all layers, else in those with memory alone.

    Raises:
        ValueError: in a call that is no block.
    """
    built = [block.functions for block in model.blocks]
    for i, config in enumerate(model.config.layers):
        if everywhere or config.name in MEMORIES:
            built[i] = built[i]._replace(apply=_noisy(config, rate, i))
    return replace_mechanisms(model, model.config, built)


# One function for all seeds of a model: programs are compiled once.
@functools.lru_cache(maxsize=64)
def _noisy(config, rate, layer):
    """`apply` with noise: keys and values are handed over beside the input.

    A mechanism of a wider input has weights of 0 and 1 that take them from there.
    """
    size, heads = config.num_kv_heads * config.head_dim, config.num_kv_heads
    width = config.model_dim + 2 * size
    wide, clean = dataclasses.replace(config, model_dim=width).build(), config.build()
    # Channels: the input, then keys, then values.
    taken = (jnp.eye(width, size, -config.model_dim - i * size) for i in (0, 1))
    key, value = (x.reshape(width, heads, -1) for x in taken)

    def apply(params, state, x):
        if x.shape[1] != config.tokens_per_call:
            raise ValueError(
                f"a call must be a block of {config.tokens_per_call}, got {x.shape[1]}"
            )
        own = getattr(params, "attention", params)
        pair = jnp.stack(projections.qkv_projection(config, own, x)[1:])
        # Drawn by the input, so that each block has another noise.
        seed = jax.lax.bitcast_convert_type(x.astype(jnp.float32).sum(), jnp.uint32)
        places, noise = jax.random.split(
            jax.random.fold_in(jax.random.key(layer), seed)
        )
        hit = jax.random.bernoulli(places, rate, x.shape[:2])[..., None, None]
        scale = jnp.sqrt((pair**2).mean(axis=(2, 3, 4), keepdims=True))
        pair = jnp.where(hit, scale * jax.random.normal(noise, pair.shape), pair)
        keys, values = pair.reshape(2, *x.shape[:2], size)
        none, more = (0, 0), (0, 2 * size)
        query = jnp.pad(own.query, (more, none, none))
        output = jnp.pad(own.output, (none, none, more))
        other = own._replace(query=query, key=key, value=value, output=output)
        if own is not params:
            other = params._replace(attention=other)
        after, y = wide.apply(other, state, jnp.concatenate([x, keys, values], -1))
        if config.name in MEMORIES:
            after, _ = clean.apply(params, state, x)
        return after, y[..., : config.model_dim]

    return apply


def reconstruction_error(model: LanguageModel, tokens: Int[np.ndarray, "R T"]) -> float:
    """Mean squared error of keys and values read back from the state after R texts.

    In units of their mean square; each token is read in the middle of its place. T is
    a multiple of the block.
    """
    names = [x.name for x in model.config.layers]
    layer, time = names.index("elastic_memory"), tokens.shape[1]
    config: Any = model.config.layers[layer]
    built = [block.functions for block in model.blocks]
    points = (np.arange(time) + 0.5) / time
    basis = hippo_reconstruction(config.order, points).astype(np.float32)
    clean = built[layer].apply

    def apply(params, state, x):
        state, y = clean(params, state, x)
        real = jnp.stack(projections.qkv_projection(config, params, x)[1:])
        kept = jnp.stack([state.keys, state.values])
        lost = jnp.einsum("tn,sbgnk->sbtgk", basis, kept) - real
        # In the place of the state, which is not needed.
        return (lost**2).mean((2, 3, 4)) / (real**2).mean((2, 3, 4)), y

    built[layer] = built[layer]._replace(apply=apply)
    graph, params = nnx.split(replace_mechanisms(model, model.config, built))

    @jax.jit
    def read(tokens):
        model = nnx.merge(graph, params)
        return model.features(model.init_state(len(tokens)), tokens)[0][layer]

    errors = [read(jnp.asarray(tokens[i : i + 8])) for i in range(0, len(tokens), 8)]
    return float(jnp.concatenate(errors, axis=1).mean())
