"""Projections: biases, and weights with a low-rank change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms.layers import projections
from memjax.mechanisms.layers.projections import (
    Adapted,
    AttentionParams,
    HeadsConfig,
    linear,
)

B, T, D, H, G, K, R = 2, 3, 8, 4, 2, 6, 2


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def config(**options):
    return HeadsConfig(model_dim=D, num_heads=H, num_kv_heads=G, head_dim=K, **options)


def shapes(params):
    return [leaf.shape for leaf in jax.tree.leaves(params)]


def test_absent_biases_are_no_parameters():
    plain = projections.init_params(config(), jax.random.key(0))
    assert shapes(plain) == [(D, H, K), (D, G, K), (D, G, K), (H, K, D)]
    full = projections.init_params(
        config(qkv_bias=True, output_bias=True), jax.random.key(0)
    )
    assert shapes(full)[4:] == [(H, K), (G, K), (G, K), (D,)]
    np.testing.assert_array_equal(plain.query, full.query)


def test_biases_are_added_once():
    biases = (draw(4, H, K), draw(5, G, K), draw(6, G, K))
    bare = projections.init_params(config(), jax.random.key(0))
    params = bare._replace(
        query_bias=biases[0],
        key_bias=biases[1],
        value_bias=biases[2],
        output_bias=draw(7, D),
    )
    x, y = draw(8, B, T, D), draw(9, B, T, H, K)
    for with_bias, without, bias in zip(
        projections.qkv_projection(config(), params, x),
        projections.qkv_projection(config(), bare, x),
        biases,
        strict=True,
    ):
        close(with_bias - without, np.broadcast_to(bias, without.shape))
    added, without = (projections.output_projection(p, y, x) for p in (params, bare))
    difference = added - without
    close(difference, np.broadcast_to(draw(7, D), difference.shape))


@pytest.mark.parametrize("into,out_of", [((D,), (H, K)), ((H, K), (D,)), ((D,), (7,))])
def test_an_adapted_weight_is_the_weight_plus_the_product(into, out_of):
    weight, down, up = draw(0, *into, *out_of), draw(1, *into, R), draw(2, R, *out_of)
    adapted, axes = Adapted(weight, down, up, 4.0), len(into)
    x, bias = draw(3, B, T, *into), draw(4, *out_of)
    formed = np.asarray(weight) + 4 * np.tensordot(down, up, 1)
    expected = np.tensordot(x, formed, axes) + np.asarray(bias)
    close(linear(x, adapted, bias, axes), expected)
    # Also where the scale has become an array, as any leaf of an argument does.
    run = jax.jit(lambda w, x: linear(x, w, bias, axes))
    close(run(adapted, x), expected)
    assert run(adapted, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_attention_takes_adapted_weights():
    plain = projections.init_params(config(), jax.random.key(0))
    x, y = draw(1, B, T, D), draw(2, B, T, H, K)

    def adapt(weight, axes):
        into, out_of = weight.shape[:axes], weight.shape[axes:]
        return Adapted(weight, draw(3, *into, R), draw(4, R, *out_of), 0.5)

    weights = [adapt(w, n) for w, n in zip(plain[:4], (1, 1, 1, 2), strict=True)]
    query, key, value, output = weights
    adapted = AttentionParams(query, key, value, output)
    query, key, value, output = (
        w.weight + 0.5 * jnp.tensordot(w.down, w.up, 1) for w in weights
    )
    formed = AttentionParams(query, key, value, output)
    for a, b in zip(
        projections.qkv_projection(config(), adapted, x),
        projections.qkv_projection(config(), formed, x),
        strict=True,
    ):
        close(a, b)
    close(
        projections.output_projection(adapted, y, x),
        projections.output_projection(formed, y, x),
    )
