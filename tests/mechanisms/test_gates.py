"""Gates, scales and options of the papers, against their formulas in numpy."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from memjax.mechanisms import (
    ABCConfig,
    GLAConfig,
    GSAConfig,
    LatticeConfig,
    Mamba2Config,
    TTTLinearConfig,
)
from memjax.mechanisms.layers.recurrent import block as recurrent_block

B, D, H, K = 2, 8, 2, 4
SIZES: dict[str, Any] = dict(model_dim=D, num_heads=H, key_dim=K, value_dim=K)


def build(config) -> Any:
    """A mechanism, its parameters, its empty state and two tokens."""
    mechanism = config.build()
    mechanism = mechanism._replace(
        step=jax.jit(mechanism.step), apply=jax.jit(mechanism.apply)
    )
    params = jax.device_get(mechanism.init_params(jax.random.key(0)))
    x = np.random.default_rng(1).standard_normal((B, 2, D), np.float32)
    return mechanism, params, mechanism.init_state(B), x


@functools.partial(jax.jit, static_argnums=0)
def project(config, params, state, x):
    """Queries, keys and values of a block."""
    return recurrent_block.qkv_projection(config, params, state, x)[1]


@functools.partial(jax.jit, static_argnums=0)
def output(config, params, x, y):
    return recurrent_block.output_projection(config, params, x, y)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def test_ttt_learns_in_proportion_to_its_rate():
    written = []
    for rate in (1.0, 0.25):
        mechanism, params, state, x = build(
            TTTLinearConfig(**SIZES, chunk_size=1, rate=rate)
        )
        state, _ = mechanism.apply(params, state, x[:, :1])
        written.append(state.memory.memory.weights - params.cell.weights[None])
    assert np.abs(written[0]).max() > 1e-4
    np.testing.assert_allclose(written[1], 0.25 * written[0], rtol=1e-4, atol=1e-7)


def test_gla_keeps_the_sixteenth_root_of_its_sigmoid():
    mechanism, params, state, x = build(GLAConfig(**SIZES))
    before, _ = mechanism.step(params, state, x[:, 0])
    # Values of zero write nothing: what is left of the first token is the gate's.
    silent = params._replace(value=np.zeros_like(params.value))
    after, _ = mechanism.step(silent, before, x[:, 1])
    logits = np.einsum("bd,dr,rhk->bhk", x[:, 1], params.cell.narrow, params.cell.widen)
    kept = sigmoid(logits)[..., None] ** (1 / 16)
    np.testing.assert_allclose(after.memory, kept * before.memory, rtol=1e-4)


@pytest.mark.parametrize("skip", [1.0, -0.5])
def test_mamba2_reads_by_the_root_of_its_width_and_adds_its_skip(skip):
    config = Mamba2Config(**SIZES)
    mechanism, params, state, x = build(config)
    cell = params.cell._replace(skip=np.full(H, skip, np.float32))
    # Paces near 1, so that the memory weighs as much as the skip, and a rate that
    # keeps half of it.
    bias = np.ones_like(cell.decay.pace.bias)
    pace_gate = cell.decay.pace._replace(bias=bias)
    rate = np.full(H, np.log(0.5), np.float32)
    cell = cell._replace(decay=cell.decay._replace(pace=pace_gate, log_rate=rate))
    params = params._replace(cell=cell)
    q, k, v = jax.device_get(project(config, params, state, x))

    logits = np.einsum("btd,dh->bth", x, cell.decay.pace.weight) + bias[None, None]
    pace = np.log1p(np.exp(logits))
    kept = np.exp(-np.exp(cell.decay.log_rate) * pace[:, 1])
    written = np.einsum("bthk,bthv->bthkv", k, v * pace[..., None])
    memory = kept[..., None, None] * written[:, 0] + written[:, 1]
    y = np.einsum("bhk,bhkv->bhv", q[:, 1], memory) / np.sqrt(K) + skip * v[:, 1]
    expected = output(config, params, x[:, 1], y.astype(np.float32))
    _, found = mechanism.apply(params, state, x)
    np.testing.assert_allclose(np.asarray(found)[:, 1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [GSAConfig, ABCConfig])
def test_slots_are_read_with_the_scale_of_the_query(config):
    """GSA: √K, gates of the eighth root; ABC: 1/√K, shares of a token among slots."""
    config = config(**SIZES, slots=3)
    mechanism, params, state, x = build(config)
    q, k, v = jax.device_get(project(config, params, state, x))
    logits = np.einsum("btd,dhm->bthm", x, params.cell[0])
    if isinstance(config, GSAConfig):
        kept = sigmoid(logits) ** (1 / GSAConfig.damping)
        write, scale = 1 - kept, K**0.5
    else:
        kept, scale = np.ones_like(logits), K**-0.5
        write = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    written = [np.einsum("bthm,bthk->bthmk", write, z) for z in (k, v)]
    keys, values = (kept[:, 1, ..., None] * z[:, 0] + z[:, 1] for z in written)
    scores = scale * np.einsum("bhk,bhmk->bhm", q[:, 1], keys)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    y = np.einsum("bhm,bhmv->bhv", weights, values)
    expected = output(config, params, x[:, 1], y.astype(np.float32))
    _, found = mechanism.apply(params, state, x)
    np.testing.assert_allclose(np.asarray(found)[:, 1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant,changes", [("enc", False), ("dec", True)])
def test_lattice_enc_takes_values_of_unit_norm(variant, changes):
    mechanism, params, state, x = build(
        LatticeConfig(D, H, slots=K, value_dim=K, variant=variant, chunk_size=2)
    )
    larger = params._replace(value=np.float32(5.0) * params.value)
    (once, _), (scaled, _) = (mechanism.apply(p, state, x) for p in (params, larger))
    slots = [after.memory.memory.start for after in (once, scaled)]
    assert np.abs(slots[0]).max() > 1e-3
    difference = np.abs(np.subtract(*slots)).max()
    assert difference > 1e-2 if changes else difference < 1e-4
