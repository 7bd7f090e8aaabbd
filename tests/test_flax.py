"""Mechanisms and models as users of flax write them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx

from memjax.mechanisms import (
    AttentionConfig,
    GatedDeltaNetConfig,
    HybridConfig,
    InfiniConfig,
    Mechanism,
    MechanismConfig,
    SlidingWindowConfig,
    TrellisConfig,
)
from memjax.models import (
    LanguageModel,
    ModelConfig,
    ReReadWindow,
    add_hmt,
    add_mplus,
)
from memjax.models.hmt.config import HMTConfig
from memjax.models.mplus.config import MPlusConfig
from memjax.nnx import Memory, as_arrays, tabulate
from tests import tiny

V, D, B, T = 11, 8, 2, 9
HEADS: dict[str, Any] = dict(model_dim=D, num_heads=2, num_kv_heads=2, head_dim=4)
BLOCK: dict[str, Any] = dict(model_dim=D, num_heads=2, key_dim=4, value_dim=4)
CONFIGS: dict[str, MechanismConfig] = {
    "attention": AttentionConfig(**HEADS, capacity=32),
    "sliding_window": SlidingWindowConfig(**HEADS, window=4),
    "hybrid": HybridConfig(
        SlidingWindowConfig(**HEADS, window=4), InfiniConfig(2, 2, 4, 4)
    ),
    "gated_deltanet": GatedDeltaNetConfig(**BLOCK),
    "trellis": TrellisConfig(**BLOCK, slots=4),
}
#: Of each class: RMT is that of HMT.
MODELS = ("language model", "hmt", "mplus", "reread")


def rows(names, fast):
    """Parameters of a test, of which all but some are slow."""
    slow = pytest.mark.slow
    return [n if n in fast else pytest.param(n, marks=slow) for n in names]


@pytest.fixture(scope="module", name="x")
def _x():
    return tiny.draw(1, B, T, D)


@pytest.fixture(scope="module", name="tokens")
def _tokens():
    return jnp.asarray(np.random.default_rng(2).integers(0, V, (B, T), np.int32))


def mechanism(name: str) -> Mechanism:
    return CONFIGS[name].build()


def model_config(*mechanisms: str) -> ModelConfig:
    return ModelConfig(
        mechanisms=tuple(CONFIGS[name] for name in mechanisms),
        num_layers=len(mechanisms),
        vocab_size=V,
        model_dim=D,
        hidden_dim=12,
        tied_head=False,
        dtype="float32",
        remat=False,
    )


def language_model(*mechanisms: str) -> LanguageModel:
    return LanguageModel(model_config(*mechanisms), rngs=nnx.Rngs(0))


def model(name: str) -> Any:
    """With drawn parameters: how they are drawn by flax's streams is tested below."""
    return tiny.drawn(lambda: made(name))


def made(name: str) -> Any:
    memory = MPlusConfig(
        num_memory_tokens=2,
        pool_size=4,
        chunk_size=4,
        min_chunk_size=1,
        num_retrieved=2,
        store_size=8,
        key_dim=2,
        rank=2,
    )
    match name:
        case "language model":
            return language_model("attention", "gated_deltanet")
        case "hmt":
            config = HMTConfig(
                segment_length=4, num_sensory_tokens=1, num_memories=3, retrieval=False
            )
            return add_hmt(language_model("attention"), config, rngs=nnx.Rngs(1))
        case "reread":
            return ReReadWindow(language_model("attention"), reread=3, segment=4)
        case _:
            return add_mplus(language_model("attention"), memory, rngs=nnx.Rngs(1))


class Layer(nnx.Module):
    """What a user writes around a memory."""

    def __init__(self, config, *, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.memory = Memory(config, rngs=rngs)

    def __call__(self, state, x):
        state, y = self.memory(state, self.norm(x))
        return state, x + y


def train(model, state, inputs, targets):
    """Losses of three steps, and the names of the parameters that stayed."""
    before = arrays(model)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, state):
        def loss(model):
            _, y = model(state, inputs)
            if targets.ndim == y.ndim:
                return ((y - targets) ** 2).mean()
            entropy = optax.softmax_cross_entropy_with_integer_labels
            return entropy(y, targets).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer, state)) for _ in range(3)]
    after = arrays(model)
    assert all(np.isfinite(x).all() for x in after.values())
    stayed = {name for name, x in after.items() if np.array_equal(x, before[name])}
    return losses, stayed


def arrays(model):
    """The arrays of all Params by name, of which no leaf holds more than one."""
    named = jax.tree_util.tree_leaves_with_path(
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        is_leaf=lambda node: not isinstance(node, dict),
    )
    assert named and all(isinstance(leaf, jax.Array) for _, leaf in named)

    def name(path):
        return jax.tree_util.keystr(path, simple=True, separator=".")

    return {name(path): np.array(leaf) for path, leaf in named}


# Others have gradients of all their parameters in the contract of mechanisms.
@pytest.mark.parametrize("name", rows(("attention", "hybrid"), ("attention",)))
def test_flaxs_optimizer_trains_every_parameter_of_a_memory(name, x):
    layer = Layer(CONFIGS[name], rngs=nnx.Rngs(0))
    losses, stayed = train(layer, layer.memory.init_state(B), x, jnp.roll(x, 1, 1))
    assert losses[0] > losses[1] > losses[2] and not stayed


# Gradients of the others are in their own tests.
@pytest.mark.slow
def test_flaxs_optimizer_trains_a_model(tokens):
    whole = model("hmt")
    losses, stayed = train(whole, whole.init_state(B), tokens, jnp.roll(tokens, -1, 1))
    assert losses[0] > losses[2] and not stayed


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_flaxs_optimizer_updates_every_parameter_of_a_model(name):
    whole = model(name)
    before, optimizer = (
        arrays(whole),
        nnx.Optimizer(whole, optax.sgd(1.0), wrt=nnx.Param),
    )
    optimizer.update(whole, jax.tree.map(jnp.ones_like, nnx.state(whole, nnx.Param)))
    after = arrays(whole)
    assert all(np.allclose(after[name], before[name] - 1) for name in before)


@pytest.mark.slow
def test_a_layer_is_split_merged_and_printed(x):
    # With a learned initial memory.
    layer = Layer(CONFIGS["trellis"], rngs=nnx.Rngs(0))
    state = layer.memory.init_state(B)
    merged = nnx.merge(*nnx.split(layer))
    assert type(merged.memory.params) is type(layer.memory.params)
    read = nnx.jit(lambda layer: layer(state, x))
    same = jax.tree.map(np.array_equal, read(layer), read(merged))
    assert all(jax.tree.leaves(same))
    table = tabulate(layer, state, x, console_kwargs=dict(force_terminal=False))
    total = sum(value.size for value in arrays(layer).values())
    assert "Memory" in table and f"Total Parameters: {total:,}" in table


def test_a_layer_is_printed_by_its_config():
    config = CONFIGS["trellis"]
    layer = Memory(config, key=jax.random.key(0))
    assert " ".join(repr(layer).split()) == f"Memory(config={config!r})"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_printed(name):
    """With the configuration of what is around a backbone."""
    whole = model(name)
    printed = repr(whole)
    count = sum(x.size for x in jax.tree.leaves(nnx.state(whole)))
    assert len(printed) < 600 and f"parameters={count}, size='" in printed


@pytest.mark.parametrize("name", rows(("language model", "mplus"), ("language model",)))
def test_a_model_has_a_table(name, tokens):
    whole = model(name)
    table = tabulate(whole, whole.init_state(B), tokens)
    assert type(whole).__name__ in table and "embedding" in table
    assert "Total Parameters" in table


def test_step_equals_apply_and_reset_clears(x):
    memory = Memory(CONFIGS["sliding_window"], key=jax.random.key(0))
    empty, read = memory.init_state(B), nnx.jit(Memory.__call__)
    state, y = read(memory, empty, x)
    _, first = read(memory, empty, x[:, 0])
    np.testing.assert_allclose(first, y[:, 0], atol=1e-6)
    cleared = memory.reset(state, jnp.array([True, False]))
    leaves = map(jax.tree.leaves, (cleared, state, empty))
    for part, full, none in zip(*leaves, strict=True):
        np.testing.assert_array_equal(part[0], none[0])
        np.testing.assert_array_equal(part[1], full[1])
    with pytest.raises(ValueError, match=r"or \[B, D\], got \(2, 1, 9, 8\)"):
        memory(empty, x[:, None])


def test_a_block_is_a_layer(x):
    block = language_model("gated_deltanet").blocks[0]
    read = nnx.jit(type(block).__call__)
    _, h = read(block, block.init_state(B), x)
    first, one = read(block, block.init_state(B), x[:, :1])
    np.testing.assert_allclose(one, h[:, :1], atol=1e-5)
    _, two = read(block, first, x[:, 1:])
    np.testing.assert_allclose(two, h[:, 1:], atol=1e-5)


class Reader(nnx.Module):
    """A user's model that keeps its memory in variables of its own."""

    def __init__(self, config, *, rngs):
        self.memory = Memory(config, rngs=rngs)
        state = self.memory.init_state(B)
        self.state = nnx.data(jax.tree.map(nnx.Cache, state))

    def __call__(self, x):
        state, y = self.memory(as_arrays(self.state), x)
        nnx.update(self, nnx.state({"state": jax.tree.map(nnx.Cache, state)}))
        return y


def test_orbax_saves_and_restores_a_users_model_with_its_memory_bit_exactly(
    x, tmp_path
):
    config = CONFIGS["gated_deltanet"]
    reader = Reader(config, rngs=nnx.Rngs(0))
    read = nnx.jit(lambda reader, x: reader(x))
    read(reader, x)
    saver = ocp.StandardCheckpointer()
    saver.save(tmp_path / "saved", nnx.to_pure_dict(nnx.state(reader)))
    saver.wait_until_finished()
    other = Reader(config, rngs=nnx.Rngs(1))
    state = nnx.state(other)
    empty = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, saver.restore(tmp_path / "saved", empty))
    nnx.update(other, state)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(as_arrays(other.state)))
    np.testing.assert_array_equal(read(other, x), read(reader, x))


def test_linen_needs_no_layer(x):
    cell = mechanism("gated_deltanet")

    class Linen(linen.Module):
        @linen.compact
        def __call__(self, state, x):
            params = self.param("memory", cell.init_params)
            return cell.apply(params, state, x)

    module, state = Linen(), cell.init_state(B)
    variables = jax.jit(module.init)(jax.random.key(0), state, x)
    read: Any = module.apply

    def loss(variables):
        return (read(variables, state, x)[1] ** 2).mean()

    gradients = jax.jit(jax.grad(loss))(variables)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradients))


def test_parameters_are_drawn_by_key_or_rngs():
    rngs = arrays(language_model("trellis"))
    config = model_config("trellis")
    keyed = arrays(LanguageModel(config, key=nnx.Rngs(0).params()))
    assert all(np.array_equal(rngs[name], keyed[name]) for name in keyed)
    with pytest.raises(ValueError, match="give either key=... or rngs=.*, got neither"):
        LanguageModel(config)
    with pytest.raises(ValueError, match="got both"):
        LanguageModel(config, key=jax.random.key(0), rngs=nnx.Rngs(0))
