"""HMT and RMT against the contract of models, over attention and recurrent backbones.

One call equals its tokens one by one, every split of a text gives the same, no logit
depends on later tokens, and batch elements are independent.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.mechanisms import AttentionConfig, GatedDeltaNetConfig
from memjax.models import (
    HMTConfig,
    LanguageModel,
    ModelConfig,
    Sampling,
    add_hmt,
    add_rmt,
    generate,
)
from memjax.models.hmt import decode, segment
from memjax.models.lora import LoraConfig, add_lora
from tests import tiny

B, V, D, L, K, N = 2, 23, 16, 5, 2, 2
T = 3 * L + 2
ATTENTION = ModelConfig(
    mechanisms=(AttentionConfig(D, 4, 2, 4, capacity=64),),
    num_layers=1,
    vocab_size=V,
    model_dim=D,
    hidden_dim=24,
    dtype="float32",
    remat=False,
)
BACKBONES = {
    "attention": ATTENTION,
    "recurrent": dataclasses.replace(
        ATTENTION, mechanisms=(GatedDeltaNetConfig(D, 4, 4, 4),)
    ),
}
CAUSAL = HMTConfig(
    segment_length=L,
    num_sensory_tokens=K,
    num_memories=N,
    retrieval_dim=6,
    summary_source="previous",
    activations="keep",
)
# A loop over segments takes less to compile than one by one.
LOOP = dataclasses.replace(CAUSAL, activations="recompute")
STAGE_1 = dataclasses.replace(LOOP, retrieval=False)
PAPER = dataclasses.replace(LOOP, summary_source="current", summary_fraction=0.6)
J = PAPER.summary
# Calls of T tokens go on from the state after every token of a segment and more.
LONG = np.random.default_rng(1).integers(0, V, (B, 2 * T - L), np.int32)
TOKENS = LONG[:, :T]


def change(tokens, element, position):
    """Another token at one position."""
    tokens = tokens.copy()
    tokens[element, position] = (tokens[element, position] + 1) % V
    return tokens


@functools.cache
def build(kind="attention", config=CAUSAL, **backbone):
    sizes = dataclasses.replace(BACKBONES[kind], **backbone)

    def model():
        model = LanguageModel(sizes, key=jax.random.key(0))
        if isinstance(config, str):
            form = "offload" if config == "rmt, offload" else "recompute"
            return add_rmt(model, L, key=jax.random.key(2), activations=form)
        return add_hmt(model, config, key=jax.random.key(2))

    return tiny.drawn(model)


@functools.partial(jax.jit, static_argnums=0)
def _call(graph, params, state, tokens, mask):
    return nnx.merge(graph, params)(state, tokens, mask)


def call(model, state, tokens, mask=None):
    state, logits = _call(*nnx.split(model), state, tokens, mask)
    return state, np.asarray(logits)


def by_steps(model, state, tokens):
    states, logits = [state], []
    for t in range(tokens.shape[1]):
        state, y = call(model, state, tokens[:, t : t + 1])
        states.append(state)
        logits.append(y)
    return states, np.concatenate(logits, axis=1)


def close(actual, expected, tolerance=2e-5):
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


EXACT = {
    "rmt": ("attention", "rmt"),
    "previous": ("attention", CAUSAL),
    "previous, recurrent": ("recurrent", LOOP),
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name == "previous" else pytest.mark.slow)
        for name in EXACT
    ],
    name="case",
    scope="module",
)
def _case(request):
    return stepped(request.param)


@functools.cache
def stepped(name):
    """A model, and its states and logits token by token."""
    model = build(*EXACT[name])
    return model, *by_steps(model, model.init_state(B), LONG)


def test_call_equals_single_tokens_from_every_state(case):
    """So that any split of a text gives what its tokens give."""
    model, states, logits = case
    for t in range(T - L + 1):
        result = call(model, states[t], LONG[:, t : t + T])
        close(result, (states[t + T], logits[:, t : t + T]))


def test_causality_and_dependence(case):
    model, states, logits = case
    at = L + 1
    _, other = call(model, states[0], change(TOKENS, slice(None), at))
    np.testing.assert_allclose(other[:, :at], logits[:, :at], atol=1e-5)
    assert np.all(np.abs(other - logits[:, :T])[:, -1].max(axis=-1) > 1e-5)


def test_ragged_batch_elements_are_independent(case):
    model, states, logits = case
    at = L + 3
    state = model.reset(states[at], jnp.array([True, False]))
    tokens = LONG[:, at : at + T]
    after, y = call(model, state, tokens)
    _, fresh = call(model, states[0], tokens)
    close(y[0], fresh[0])
    close(y[1], logits[1, at : at + T])
    stepped, steps = by_steps(model, state, tokens)
    close((after, y), (stepped[-1], steps))
    assert after.length.tolist() == [T % L, (at + T) % L]
    chex.assert_tree_all_finite(after)


def test_the_state_is_a_fixed_point_in_float32(case):
    model, states, _ = case

    def kind(x):
        return (x.shape, x.dtype, x.weak_type)

    for length in (1, T):
        after, _ = jax.eval_shape(
            functools.partial(_call, nnx.graphdef(model)),
            nnx.state(model),
            states[0],
            TOKENS[:, :length],
            None,
        )
        assert jax.tree.map(kind, after) == jax.tree.map(kind, states[0])
    for leaf in jax.tree.leaves(states[0]):
        assert leaf.shape[0] == B
        assert leaf.dtype in (jnp.float32, jnp.int32, bool)


@functools.cache
def gradients(config):
    """Of parameters and memories, over the rest of a segment and one more."""
    model = build("attention", config)
    graph, params = nnx.split(model)
    # How activations are saved changes no state.
    read = build("attention", "rmt" if isinstance(config, str) else PAPER)
    state, _ = call(read, read.init_state(B), TOKENS)
    # One batch element starts, with the initial memory; the other has memories.
    state = model.reset(state, jnp.array([True, False]))
    tokens = jnp.asarray(TOKENS[:, : L + 1])

    def loss(params, bank):
        model = nnx.merge(graph, params)
        memories = state.memories._replace(bank=bank)
        after, y = model(state._replace(memories=memories), tokens)
        return (y**2).mean() + (after.memories.bank**2).mean()

    with pytest.MonkeyPatch.context() as patch:
        # A loop over segments takes less to compile.
        patch.setattr(segment, "MAX_UNROLLED", 0)
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, state.memories.bank)


# "recompute" has the authors' gradients, in `test_official.py`.
KEEP = dataclasses.replace(PAPER, activations="keep")


@pytest.mark.slow
@pytest.mark.parametrize("config", [KEEP, "rmt"], ids=["paper", "rmt"])
def test_gradients_reach_every_parameter_and_the_state(config):
    by = gradients(config)
    chex.assert_tree_all_finite(by)
    for path, leaf in jax.tree_util.tree_leaves_with_path(by):
        assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.slow
def test_offloading_changes_no_gradient():
    found = gradients("rmt, offload")

    def pure(by):
        return (nnx.to_pure_dict(by[0]), by[1])

    close(pure(found), pure(gradients("rmt")), 1e-5)


def test_layers_in_a_loop_are_computed_again_one_by_one():
    """Else all of them are with the segment."""
    forms = [dict(num_layers=2, scan_layers=scan, remat=True) for scan in (True, False)]
    kept = [build("attention", STAGE_1, **form).backbone.config.remat for form in forms]
    assert kept == [True, False]


@pytest.mark.slow
def test_a_backbone_with_adapters_has_gradients():
    """Its modules hold a Python number, LoRA's scale, on which tracing could fail.

    "recompute" is that of Mamba with adapters, in `test_hybrid_models.py`.
    """
    config = dataclasses.replace(STAGE_1, activations="offload")

    def make():
        backbone = LanguageModel(ATTENTION, key=jax.random.key(0))
        adapted = add_lora(backbone, LoraConfig(rank=2), jax.random.key(1))
        return add_hmt(adapted, config, key=jax.random.key(2))

    graph, params, frozen = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

    def loss(params, frozen, tokens):
        model = nnx.merge(graph, params, frozen)
        return (model(model.init_state(B), tokens)[1] ** 2).mean()

    tokens = jax.ShapeDtypeStruct((B, 2 * L), jnp.int32)
    by = jax.eval_shape(jax.grad(loss), params, frozen, tokens)

    def shapes(tree):
        return jax.tree.map(lambda x: x.shape, tree)

    assert shapes(by) == shapes(params)


@pytest.mark.slow
def test_bfloat16_is_close_to_float32():
    low = build("attention", PAPER, dtype="bfloat16")
    state, y = call(low, low.init_state(B), TOKENS)
    high = build("attention", PAPER)
    _, expected = call(high, high.init_state(B), TOKENS)
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    assert error < 5e-2
    assert state.memories.bank.dtype == jnp.float32


# As in the paper: P_n stands before the tokens whose summary found it.


@functools.cache
def paper():
    model = build("attention", PAPER)
    return model, call(model, model.init_state(B), TOKENS)


@pytest.mark.slow
def test_current_summary_reads_ahead_j_tokens():
    model, (_, logits) = paper()
    # With one memory there is nothing to choose: the third segment is the first.
    for at, first in ((2 * L + J - 1, 2 * L), (2 * L + J, 2 * L + J)):
        changed = change(TOKENS, slice(None), at)
        _, other = call(model, model.init_state(B), changed)
        differs = np.abs(other - logits).max(axis=(0, 2)) > 1e-6
        assert differs.argmax() == first


@pytest.mark.slow
def test_current_summary_split_invariance_from_token_j():
    """In calls that end in a segment, in the next one, and with a segment."""
    model, (after, logits) = paper()
    state, start, size = model.init_state(B), 0, 3
    while start + size <= T:
        state, y = call(model, state, TOKENS[:, start : start + size])
        positions = np.arange(start, start + size)
        summarized = start + size - positions // L * L >= J
        close(y[:, summarized], logits[:, positions[summarized]])
        start += size
    # The last memory is that of the last segment, or of the one before.
    last, segments = start // L, T // L
    assert segments - N < last <= segments
    bank = np.asarray(state.memories.bank)[:, -1]
    close(bank, np.asarray(after.memories.bank)[:, last - segments - 1])


@pytest.mark.slow
def test_single_tokens_use_current_summary_from_token_j():
    model, (after, logits) = paper()
    states, stepped = by_steps(model, model.init_state(B), TOKENS)
    from_j = np.arange(T) % L >= J - 1
    close(stepped[:, from_j], logits[:, from_j])
    close(states[-1].memories, after.memories)
    early = (np.arange(T) >= L) & ~from_j
    assert np.abs(stepped - logits)[:, early].max() > 1e-4


@pytest.mark.slow
def test_generation_continues_beyond_a_segment():
    model = build("attention", "rmt")
    greedy, count = Sampling(temperature=0.0), T - L - 1
    state, drawn, *_ = generate(
        model, model.init_state(B), TOKENS[:, : L + 1], count,
        key=jax.random.key(0), sampling=greedy, tokens_per_call=3,
    )  # fmt: skip
    tokens = np.concatenate([TOKENS[:, : L + 1], drawn], axis=1)
    after, logits = call(model, model.init_state(B), tokens)
    np.testing.assert_array_equal(drawn, np.argmax(logits[:, L:-1], axis=-1))
    close(state, after)


# Padding.


@pytest.mark.slow
def test_no_logit_depends_on_masked_tokens():
    model = build("attention", PAPER)
    mask = np.ones((B, T), bool)
    mask[0, :2] = False
    empty = model.init_state(B, masked=True)
    state, logits = call(model, empty, TOKENS, mask)
    changed = change(TOKENS, 0, slice(2))
    _, other = call(model, empty, changed, mask)
    close(other[0, 2:], logits[0, 2:])
    _, (_, unmasked) = paper()
    close(logits[1], unmasked[1])
    assert np.abs(logits - unmasked)[0, 2:].max() > 1e-4
    # The open segment's padding stays masked when tokens follow one by one.
    after, following = empty, logits
    for t in range(5):
        token = slice(t, t + 1)
        after, following = call(model, after, TOKENS[:, token], mask[:, token])
    close(following[:, 0], logits[:, 4])
    chex.assert_trees_all_equal_shapes_and_dtypes(state, empty)


def test_every_bad_input_is_refused():
    model = build("attention", CAUSAL)
    state, tokens = model.init_state(B), jnp.asarray(TOKENS)
    above, below = TOKENS.copy(), TOKENS.copy()
    above[1, 3], below[1, 3] = V, -1
    with pytest.raises(ValueError, match=rf"tokens must be in \[0, {V}\), got {V}"):
        model(state, jnp.asarray(above))
    with pytest.raises(ValueError, match=r"tokens must be in .*, got -1"):
        model(state, jnp.asarray(below))
    with pytest.raises(ValueError, match="tokens must be integers .* 2 rows"):
        model(state, tokens[:1])
    with pytest.raises(ValueError, match="T >= 1"):
        model(state, tokens[:, :0])
    with pytest.raises(ValueError, match="mask needs a state made for it"):
        model(state, tokens, jnp.ones((B, T), bool))
    with pytest.raises(ValueError, match="sequences of 9 tokens .* allow 8"):
        short = AttentionConfig(D, 4, 2, 4, capacity=L + K + 1)
        build("attention", CAUSAL, mechanisms=(short,))
    recurrent = build("recurrent", CAUSAL)
    with pytest.raises(ValueError, match="mask"):
        masked = recurrent.init_state(B, masked=True)
        recurrent(masked, tokens, jnp.ones((B, T), bool))


@pytest.mark.parametrize(
    "options,message",
    [
        (
            dict(segment_length=4, num_sensory_tokens=5),
            r"num_sensory_tokens must be in \[0, segment_length=4\], got 5",
        ),
        (
            dict(segment_length=4, num_sensory_tokens=0, summary_fraction=0.1),
            "j=0, which must be in",
        ),
        (dict(summary_fraction=1.5), "must be in"),
        (dict(num_memories=0), "num_memories must be at least 1, got 0"),
        (dict(segment_length=0), "segment_length must be at least 1, got 0"),
        (dict(retrieval_dim=0), "retrieval_dim must be at least 1"),
    ],
)
def test_every_bad_size_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HMTConfig(**options)


def test_bank_fills_and_first_segment_has_no_summary():
    """No search has a choice before two memories: a summary kept before is wasted."""
    _, states, _ = stepped("previous")
    num_valid, summarized = [], []
    for state in states[L : 3 * L + 1 : L]:
        num_valid.append(state.memories.num_valid.tolist())
        summarized.append(bool(np.any(np.asarray(state.memories.summary) != 0)))
    assert num_valid == [[1] * B, [N] * B, [N] * B]
    assert summarized == [False, True, True]


def test_summary_is_zero_without_a_search():
    model, states, _ = stepped("previous")
    state = model.reset(states[L], jnp.array([True, False]))
    *_, state = by_steps(model, state, TOKENS[:, L : 2 * L])[0]
    assert state.memories.num_valid.tolist() == [1, N]
    summarized = np.any(np.asarray(state.memories.summary) != 0, axis=1)
    assert summarized.tolist() == [False, True]


def test_no_search_without_memories():
    """The prompt is the initial memory for any summary, which costs a reading."""
    model = build("attention", PAPER)
    state = model.init_state(B)._replace(length=jnp.full(B, J - 1, jnp.int32))
    memories = state.memories._replace(num_valid=jnp.array([0, N], jnp.int32))
    find = jax.jit(decode._find_prompt, static_argnums=0)
    after = find(PAPER, model.weights, state._replace(memories=memories))
    assert after.searched.tolist() == [False, True]
