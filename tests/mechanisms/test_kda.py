"""KDA and Gated DeltaNet-2 against their published layer, in NumPy token by token."""

import jax
import numpy as np
import pytest

from memjax.mechanisms import GDN2Config, KDAConfig, kda_style
from memjax.mechanisms.mixers.kda import init_params, log_decays
from memjax_kernels._src.common.packs.channels import MILD

D, H, K, V, T = 8, 2, 4, 6, 5


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def convolved(x, filters):
    """Each channel's filter over its last inputs, the newest last, with silu."""
    width = len(filters)
    padded = np.concatenate([np.zeros((width - 1, *x.shape[1:])), x])
    return silu(np.stack([(padded[t : t + width] * filters).sum(0) for t in range(T)]))


def unit(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def layer(p, x):
    """The output [T, D] for the tokens x [T, D] of one sequence."""
    q, k = (
        unit(convolved(np.tensordot(x, p.query_key[:, i], 1), p.filters[:, i]))
        for i in range(2)
    )
    v = convolved(np.tensordot(x, p.value, 1), p.value_filters)
    logits = np.tensordot(x @ p.cell.narrow, p.cell.widen, 1) + p.cell.bias
    g = -np.exp(p.cell.log_rate)[:, None] * np.log1p(np.exp(logits))
    erase = 2 * sigmoid(np.tensordot(x, p.cell.rate, 1)).reshape(T, H, -1)
    write = erase
    if p.cell.write is not None:
        write = sigmoid(np.tensordot(x, p.cell.write, 1))
    memory, reads = np.zeros((H, K, V)), np.zeros((T, H, V))
    for t, h in np.ndindex(T, H):
        s = np.exp(g[t, h])[:, None] * memory[h]
        error = write[t, h] * v[t, h] - s.T @ (erase[t, h] * k[t, h])
        memory[h] = s + np.outer(k[t, h], error)
        reads[t, h] = memory[h].T @ q[t, h] / np.sqrt(K)
    gate = np.tensordot(x @ p.gate_narrow, p.gate, 1) + p.gate_bias
    normed = reads / np.sqrt((reads**2).mean(-1, keepdims=True) + 1e-5) * p.norm
    return np.tensordot(normed * sigmoid(gate), p.output, 2)


@pytest.mark.parametrize("kind", [KDAConfig, GDN2Config])
def test_a_layer_is_the_published_one(kind):
    config = kind(D, H, K, V, max_rate=2.0, style=kda_style(K, V))
    mechanism = config.build()
    params = mechanism.init_params(jax.random.key(0))
    # Biases start at 0, and would hide that they are left out.
    params = params._replace(gate_bias=params.gate_bias + 0.7)
    x = jax.random.normal(jax.random.key(1), (1, T, D))
    _, y = mechanism.apply(params, mechanism.init_state(1), x)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    np.testing.assert_allclose(y[0], layer(exact, np.float64(x[0])), rtol=2e-4)
    # Ranks are those of a head.
    assert params.gate_narrow.shape == params.cell.narrow.shape == (D, V)


def test_ranks_are_refused_by_name():
    with pytest.raises(ValueError, match="decay_rank must be at least 1, got 0"):
        KDAConfig(D, H, K, V, decay_rank=0)
    with pytest.raises(ValueError, match="key_dim must be at least 1, got 0"):
        kda_style(0, V)


def test_gates_begin_so_that_kernels_take_the_shorter_code():
    """Of most chunks all quarters, in all 16 heads, forget less than the limit."""
    config = KDAConfig(model_dim=512, num_heads=16, key_dim=128, value_dim=128)
    x = jax.random.normal(jax.random.key(0), (32, 4, 16, 512))
    largest = []
    for seed in range(1, 4):
        g = log_decays(init_params(config, jax.random.key(seed)), x)
        largest.append((-g).sum(axis=2).max(axis=(1, 2, 3)))
    assert np.mean(np.array(largest) < MILD) > 0.8
