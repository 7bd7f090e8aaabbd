"""Causal attention on a TPU, interpreted, against the form of other devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from memjax.mechanisms import AttentionConfig, SlidingWindowConfig
from memjax.mechanisms.layers.softmax import cached, on_tpu
from memjax.mechanisms.layers.softmax import dot_product_attention as attend
from tests.kernels.on_tpu import interpret_attention, needs_libtpu

pytestmark = pytest.mark.usefixtures("all_platforms")

B, T, H, G, K = 2, 256, 2, 1, 64


def draw(seed, *shape):
    normal = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(normal, jnp.bfloat16)


def plain(query, key, value, window=None):
    """Softmax attention in float32."""
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    at = jnp.arange(query.shape[1])
    seen = at[:, None] >= at[None]
    if window is not None:
        seen &= at[:, None] - at[None] < window
    return jax.nn.dot_product_attention(query, key, value, mask=seen[None, None])


def plain_with_memory(query, key, value, memory_key, memory_value, remembers):
    """The same over the tokens of a block and its memory, block by block."""

    def join(*parts):
        return jnp.concatenate(parts, axis=2).astype(jnp.float32)

    keys, values = join(memory_key, key), join(memory_value, value)
    (blocks, time), samples = query.shape[1:3], memory_key.shape[2]
    own = jnp.tril(jnp.ones((time, time), bool))

    def memory(on):
        return jnp.broadcast_to(on[:, None, None], (B, time, samples))

    def seen(on):
        return jnp.concatenate([memory(on), jnp.stack([own] * B)], axis=2)

    y = [
        jax.nn.dot_product_attention(
            *(x[:, i] for x in (query.astype(jnp.float32), keys, values)),
            mask=seen(remembers[:, i])[:, None],
        )
        for i in range(blocks)
    ]
    return jnp.stack(y, axis=1)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(attention, weight, *tokens):
    y, pull_back = jax.vjp(attention, *tokens)
    return y, pull_back(weight.astype(y.dtype))


@pytest.mark.slow
# Whole and broken blocks and windows, by the kernels of either kind of heads. Our own
# has tests among the kernels.
@pytest.mark.parametrize(
    ("time", "groups", "window"), [(300, G, None), (300, H, 130), (T, G, 130)]
)
def test_outputs_and_gradients_are_those_of_softmax_attention(
    monkeypatch, time, groups, window
):
    heads = (H, groups, groups)
    tokens = [draw(seed, B, time, h, K) for seed, h in enumerate(heads)]
    forms = [
        functools.partial(form, window=window) for form in (plain, on_tpu.attention)
    ]
    interpret_attention(monkeypatch)
    weight = draw(3, B, time, H, K)
    close(*(with_gradients(form, weight, *tokens) for form in forms))


@pytest.mark.slow
def test_blocks_with_a_memory_are_softmax_attention_to_both(monkeypatch):
    time, samples = 300, 40
    sizes = [(time, H), (time, G), (time, G), (samples, G), (samples, G)]
    tokens = [draw(seed, B, 2, t, h, K) for seed, (t, h) in enumerate(sizes)]
    remembers = jnp.asarray([[False, True], [True, True]])
    interpret_attention(monkeypatch)
    forms = [
        functools.partial(form, remembers=remembers)
        for form in (plain_with_memory, on_tpu.with_memory)
    ]
    weight = draw(5, B, 2, time, H, K)
    expected, found = (with_gradients(form, weight, *tokens) for form in forms)
    close(expected, found)
    # A block that remembers nothing gives its memory no gradient.
    assert not np.asarray(found[1][3][0, 0], np.float32).any()


@pytest.mark.slow
@pytest.mark.parametrize(("time", "slots"), [(128, 300), (260, 512)])
def test_queries_behind_a_cache_see_its_slots_and_each_other(monkeypatch, time, slots):
    """In the order of their places, but for what is hidden, or did not fit."""
    query = draw(0, B, time, H, K)
    keys, values = (draw(seed, B, slots, G * K) for seed in (1, 2))
    # The first element's tokens reach beyond 300 slots.
    before = jnp.asarray([200, 37])
    visible = jnp.asarray(np.random.default_rng(3).random((B, slots)) < 0.9)
    visible = visible.at[1, 100].set(False)
    fits = (before[:, None] + jnp.arange(time)[None] < slots)[..., None, None]
    weight = jnp.where(fits, draw(4, B, time, H, K), 0)

    def attention(query, keys, values):
        y = cached.from_rows(query, keys, values, before, visible)
        return jnp.where(fits, y, 0)

    expected = with_gradients(attention, weight, query, keys, values)
    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_a_tpu)
    # One cache is read whole, and another without the slots behind the tokens.
    monkeypatch.setattr(cached, "LEAST_PREFIX", slots // 4)
    monkeypatch.setattr(on_tpu, "LEAST", 256)
    interpret_attention(monkeypatch)

    def kernels(*given):
        return attention(*given)

    close(expected, with_gradients(kernels, weight, query, keys, values))


def as_on_a_tpu(*given, tpu, default):
    return tpu(*given)


def close(expected, found):
    """To two hundredths of the largest, of bfloat16's products."""
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(
            np.asarray(ours, np.float32),
            np.asarray(theirs, np.float32),
            atol=0.02 * scale,
        )


@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "reason"),
    [
        (128, 64, jnp.bfloat16, ""),
        (128, 64, jnp.float32, "tokens are float32, not bfloat16"),
        (1100, 64, jnp.bfloat16, ""),
        (200, 64, jnp.bfloat16, "200 tokens are no multiple of 128, and fewer than"),
        (128, 80, jnp.bfloat16, "heads are 80 wide"),
    ],
)
def test_other_tokens_are_left_to_xla(tokens, width, dtype, reason):
    x = jax.ShapeDtypeStruct((B, tokens, H, width), dtype)
    found = on_tpu.unsupported(x, x)
    assert reason in found and bool(found) == bool(reason)
    text = jax.jit(attend.causal).trace(x, x, x).lower(lowering_platforms=("tpu",))
    assert ("tpu_custom_call" in text.as_text()) == (not reason)


@pytest.mark.parametrize(
    ("groups", "documents", "name"),
    [(H, False, "causal_attention"), (H, True, "splash"), (G, False, "splash")],
)
def test_one_document_without_cache_uses_our_kernel(groups, documents, name):
    q, k = (jax.ShapeDtypeStruct((B, T, h, K), jnp.bfloat16) for h in (H, groups))
    first = jax.ShapeDtypeStruct((B, T), jnp.int32) if documents else None

    def attention(q, k, first):
        return attend.causal(q, k, k, first=first)

    text = jax.jit(attention).trace(q, k, first).lower(lowering_platforms=("tpu",))
    # The names of kernels, past those of XLA.
    found = [x for x in ("causal_attention", "splash") if f'"{x}' in text.as_text()]
    assert found == [name]


def test_fewer_queries_than_keys_are_left_to_xla():
    key = jax.ShapeDtypeStruct((B, 256, H, K), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((B, 128, H, K), jnp.bfloat16)
    assert "queries must be those of all 256 keys" in on_tpu.unsupported(query, key)


SIZES: dict[str, Any] = dict(model_dim=128, num_heads=H, num_kv_heads=G, head_dim=K)


@pytest.mark.parametrize(
    "config",
    [AttentionConfig(**SIZES, capacity=256), SlidingWindowConfig(**SIZES, window=128)],
    ids=["attention", "sliding_window"],
)
def test_a_whole_sequence_is_one_kernel_on_a_tpu(config):
    mechanism = config.build()
    params = jax.eval_shape(mechanism.init_params, jax.random.key(0))
    x = jax.ShapeDtypeStruct((B, T, 128), jnp.bfloat16)
    whole = jax.jit(lambda params, x: mechanism.whole(params, x, None))

    def text(platform):
        return whole.trace(params, x).lower(lowering_platforms=(platform,)).as_text()

    assert text("tpu").count('kernel_name = "splash') == 1
    assert "tpu_custom_call" not in text("cpu")


def four(config):
    """A mesh of two by two chips."""
    devices = topologies.get_topology_desc(config, "tpu").devices[:4]
    return jax.sharding.Mesh(
        np.array(devices).reshape(2, 2), ("data", "tensor"), (AxisType.Auto,) * 2
    )


@needs_libtpu
def test_behind_a_cache_it_compiles_on_a_mesh():
    mesh = four("v5e:2x2")

    def of(dtype, spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    by_heads, rows = P("data", None, "tensor"), P("data")
    query = of(jnp.bfloat16, by_heads, B, T, 2 * H, K)
    slots = of(jnp.bfloat16, by_heads, B, 1024, H * K)
    given = (query, slots, slots, of(jnp.int32, rows, B), of(jnp.bool_, rows, B, 1024))

    def loss(*given):
        return cached.from_rows(*given).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*given).compile()
    text = compiled.as_text() or ""
    assert "splash" in text and "all-gather" not in text


@needs_libtpu
@pytest.mark.parametrize(("config", "heads"), [("v5e:2x2", H), ("v5p:2x2x1", 2 * H)])
def test_it_compiles_on_a_mesh(config, heads):
    # A device has one head of 64, which takes splash, or two, which take our kernel.
    mesh = four(config)
    place = NamedSharding(mesh, P("data", None, "tensor"))
    x = jax.ShapeDtypeStruct((B, T, heads, K), jnp.bfloat16, sharding=place)

    def loss(*tokens):
        return attend.causal(*tokens).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    text = compiled.as_text() or ""
    assert "all-gather" not in text
    assert ("causal_attention" if heads > H else "splash") in text
