"""HMT against numbers of the authors' program: forward, loss, gradients, training.

The numbers are in `golden/hmt`, whose README says how they were made.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from memjax.evaluation import recall_distances
from memjax.models import HMTConfig, Sampling, add_hmt, generate
from memjax.models.checkpoints.hf.safetensors_file import SafetensorsFile
from memjax.models.hmt import segment
from memjax.models.hmt.checkpoint import load_official

GOLDEN = Path(__file__).parents[1] / "golden" / "hmt"
WEIGHTS = GOLDEN / "tiny_model.safetensors"
OFFICIAL = json.loads((GOLDEN / "config.json").read_text())
MORE = json.loads((GOLDEN / "more.json").read_text())
Activations = Literal["keep", "recompute", "offload"]
CASES = ("hmt4", "hmt_window")
# RMT and the first stage, a last segment of fewer than j tokens and an odd length are
# in other cases: with padding, with N = 2, and of 27.
IN_OTHERS = {"shorter_than_j", "odd_25"}


@pytest.fixture
def in_a_loop(monkeypatch):
    """Programs with a loop over segments, as of long texts: half as much to compile."""
    monkeypatch.setattr(segment, "MAX_UNROLLED", 0)


@functools.cache
def numbers(name="more.npz"):
    return np.load(GOLDEN / name)


@functools.cache
def build(
    length, sensory, memories, retrieval, fraction, activations: Activations = "keep"
):
    """The tiny model, split into its graph and its parameters."""
    config = HMTConfig(
        segment_length=length,
        num_sensory_tokens=sensory,
        num_memories=memories or 1,
        retrieval_dim=OFFICIAL["hmt"]["d_h"],
        summary_fraction=fraction,
        activations=activations,
    )
    backbone = OFFICIAL["backbone"] | {"model_type": "llama"}
    model = load_official(WEIGHTS, backbone, config)
    # Three layers in a loop compile as one.
    sizes = dataclasses.replace(model.backbone.config, scan_layers=True)
    model.backbone.config = sizes
    if not retrieval:
        config = dataclasses.replace(config, retrieval=False)
        plain = add_hmt(model.backbone, config, key=jax.random.key(0))
        plain.initial_memory = model.initial_memory
        model = plain
    return nnx.split(model, nnx.Param)


@functools.partial(jax.jit, static_argnums=0)
def read(graph, params, tokens, mask):
    model = nnx.merge(graph, params)
    state = model.init_state(tokens.shape[0], masked=mask is not None)
    _, features, trace = model.trace(state, tokens, mask)
    return model.logits(features), trace


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradients(graph, params, tokens):
    """The official loss: of the last segment's tokens."""

    def loss(params):
        model = nnx.merge(graph, params)
        _, features = model.features(model.init_state(tokens.shape[0]), tokens)
        logits = model.logits(features[:, -model.window - 1 : -1])
        targets = tokens[:, -model.window :]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean()

    return jax.value_and_grad(loss)(params)


def logits_and_trace(case, tokens, mask=None):
    """Logits, and the trace of the segments that have tokens."""
    graph, params = build(*case)
    mask = None if mask is None else jnp.asarray(mask)
    logits, trace = read(graph, params, jnp.asarray(tokens, jnp.int32), mask)
    return np.asarray(logits), jax.tree.map(
        lambda x: np.asarray(x)[: -(-tokens.shape[1] // case[0])], trace
    )


def mean_loss(logits, tokens, mask, count):
    """Of the last `count` targets of each element, in float64, without padding."""
    count = min(count, tokens.shape[1] - 1)
    logits = logits[:, -count - 1 : -1].astype(np.float64)
    targets = tokens[:, -count:].astype(int)
    best = logits.max(-1)
    total = best + np.log(np.exp(logits - best[..., None]).sum(-1))
    nll = total - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return nll.mean() if mask is None else nll[mask[:, -count:]].mean()


def parameters(model):
    """Arrays of a model under the official names, in their layout."""
    c = model.backbone.config
    named = {
        "memory_cell.memory": model.initial_memory.get_value()[None],
        "memory_cell.model.lm_head.weight": model.backbone.head.get_value().T,
    }
    if model.config.retrieval:
        named["mem"] = model.summary_prompt.get_value()[None]
        named["cross_attn.wq.weight"] = model.query.get_value().T
        named["cross_attn.wk.weight"] = model.key.get_value().T
    inner = "memory_cell.model.model."
    named[inner + "embed_tokens.weight"] = model.backbone.embedding.get_value()
    named[inner + "norm.weight"] = model.backbone.norm.get_value()
    for i, block in enumerate(model.backbone.blocks):
        mechanism, hidden = (
            block.parameters().mechanism,
            block.parameters().feed_forward,
        )

        def flat(w):
            return w.reshape(c.model_dim, -1).T

        layer = {
            "self_attn.q_proj": flat(mechanism.query),
            "self_attn.k_proj": flat(mechanism.key),
            "self_attn.v_proj": flat(mechanism.value),
            "self_attn.o_proj": mechanism.output.reshape(-1, c.model_dim).T,
            "mlp.gate_proj": hidden.gate.T,
            "mlp.up_proj": hidden.up.T,
            "mlp.down_proj": hidden.down.T,
            "input_layernorm": block.mechanism_norm.get_value(),
            "post_attention_layernorm": block.feed_forward_norm.get_value(),
        }
        for name, value in layer.items():
            named[f"{inner}layers.{i}.{name}.weight"] = value
    return {name: np.asarray(value) for name, value in named.items()}


def golden_case(name):
    c = OFFICIAL["cases"][name]
    return c["L"], c["k_sensory"], c["ltm_context_N"], c["retrieval"], c["sum_fraction"]


def more_case(c):
    return c["L"], c["k"], c["N"], c["retrieval"], c["fraction"]


@pytest.mark.parametrize(
    "name",
    [CASES[0], pytest.param(CASES[1], marks=pytest.mark.slow)],
)
def test_golden_forward(name, request):
    if name != CASES[1]:
        request.getfixturevalue("in_a_loop")
    golden = numbers("golden.npz")
    case, tokens = golden_case(name), golden[f"{name}/input_ids"]
    logits, trace = logits_and_trace(case, tokens)
    length, retrieval = case[0], case[3]
    for n in range(-(-tokens.shape[1] // length)):
        key = f"{name}/seg{n}/"
        near = functools.partial(np.testing.assert_allclose, atol=5e-4, rtol=0)
        found = logits[:, n * length : (n + 1) * length, ::4]
        near(found, golden[key + "logits"])
        near(trace.memory[n], golden[key + "Mem"][:, 0])
        if retrieval:
            near(trace.summary[n], golden[key + "S"][:, 0])
        if retrieval and n > 0:
            near(trace.prompt[n], golden[key + "P"][:, 0])
            scores, valid = golden[key + "scores"][:, 0], trace.num_valid[n, 0]
            near(trace.scores[n, :, -valid:], scores, atol=1e-5)
            assert not trace.scores[n, :, :-valid].any()
    loss = mean_loss(logits, tokens, None, length)
    np.testing.assert_allclose(loss, golden[f"{name}/loss"], atol=1e-5, rtol=0)
    if retrieval:
        distances, _ = recall_distances(trace.scores, trace.num_valid, trace.length)
        np.testing.assert_array_equal(distances, golden[f"{name}/hist"])


@pytest.mark.slow
@pytest.mark.usefixtures("in_a_loop")
def test_golden_gradients():
    golden = numbers("golden.npz")
    # The gradient of "keep" is that of the first stage below.
    graph, params = build(*golden_case("hmt4"), "recompute")
    tokens = jnp.asarray(golden["hmt4/input_ids"])
    loss, gradients = loss_and_gradients(graph, params, tokens)
    np.testing.assert_allclose(loss, golden["hmt4/loss"], atol=1e-5, rtol=0)
    found = parameters(nnx.merge(graph, gradients))
    names = {k.removeprefix("hmt4/grad/") for k in golden if "/grad/" in k}
    assert found.keys() == names
    assert names == {n for n in SafetensorsFile(WEIGHTS).shapes if "mem_map" not in n}
    for name in names:
        expected = golden[f"hmt4/grad/{name}"]
        error = np.linalg.norm(found[name] - expected) / np.linalg.norm(expected)
        assert error < 1e-4, (name, error)


def test_half_a_segment_is_rounded_as_by_the_authors():
    """To the even one; longer and shorter prompts would have other numbers below."""
    found = [HMTConfig(size, num_sensory_tokens=4).summary for size in (25, 27)]
    assert found == [12, 14]


@pytest.mark.slow
@pytest.mark.usefixtures("in_a_loop")
@pytest.mark.parametrize("name", [n for n in MORE["cases"] if n not in IN_OTHERS])
def test_more_forward(name):
    """Padding, odd L, other fractions, k = 0 and k = L, N = 1, short last segments."""
    c, golden = MORE["cases"][name], numbers()
    tokens = golden[f"{name}/input_ids"]
    mask = golden.get(f"{name}/attention_mask")
    logits, trace = logits_and_trace(more_case(c), tokens, mask)
    visible = np.ones(tokens.shape, bool) if mask is None else mask
    near = functools.partial(np.testing.assert_allclose, atol=5e-4, rtol=0)
    step = MORE["logits_column_step"]
    near(logits[visible][:, ::step], golden[f"{name}/logits"][visible])
    near(trace.memory, golden[f"{name}/Mem"])
    if c["retrieval"]:
        near(trace.summary, golden[f"{name}/S"])
        prompts = golden.get(f"{name}/P", trace.prompt[1:])
        near(trace.prompt[1:], prompts)
        distances, _ = recall_distances(trace.scores, trace.num_valid, trace.length)
        np.testing.assert_array_equal(distances, golden[f"{name}/hist"])
    for count, expected in c["losses"].items():
        loss = mean_loss(logits, tokens, mask, int(count))
        np.testing.assert_allclose(loss, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("in_a_loop")
@pytest.mark.parametrize("name", [x for x in MORE["generate"] if "retrieval" in x])
def test_greedy_generation(name):
    """Token for token, as far as the prompt's last segment goes.

    From L tokens on the official program writes on in the same segment, where memjax
    makes a memory of it: of a prompt of whole segments one token compares. Prompts of
    all lengths are read in pieces of 6 tokens and a last one of 5, by two programs.
    """
    c, golden = MORE["generate"][name], numbers()
    model = nnx.merge(*build(*more_case(c)))
    prompt, expected = (golden[f"generate/{name}/{k}"] for k in ("prompt", "tokens"))
    _, tokens, *_ = generate(
        model,
        model.init_state(prompt.shape[0]),
        prompt,
        expected.shape[1],
        key=jax.random.key(0),
        sampling=Sampling(temperature=0.0),
        tokens_per_call=6,
    )
    count = c["comparable"]
    np.testing.assert_array_equal(tokens[:, :count], expected[:, :count])


@pytest.mark.slow
@pytest.mark.usefixtures("in_a_loop")
def test_training_of_both_stages():
    """AdamW; stage 2 keeps the backbone and M_init of stage 1.

    Adam's first step is lr * sign(g), whatever the size of g. Where g is next to 0
    rounding decides its sign, hence the wider bounds after it.
    """
    o = MORE["train"]["optimizer"]
    optimizer = optax.adamw(
        o["learning_rate"],
        *o["betas"],
        eps=o["epsilon"],
        weight_decay=o["weight_decay"],
    )

    @jax.jit
    def update(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    stage_1 = train("stage1", optimizer, update, None)
    train("stage2", optimizer, update, stage_1)


def train(stage, optimizer, update, before):
    """Three steps, each loss and the parameters afterwards checked."""
    c, golden = MORE["train"][stage], numbers()
    form = "keep" if before is None else "recompute"
    model = nnx.merge(*build(*more_case(c), form))
    if before is not None:
        # Values alone, into the same graph: its program is that of the gradients above.
        nnx.update(model.backbone, nnx.state(before.backbone))
        nnx.update(model, {"initial_memory": before.initial_memory.get_value()})
    graph, params = nnx.split(model, nnx.Param)
    state = jax.jit(optimizer.init)(params)
    batches = golden[f"train/{stage}/input_ids"]
    for i, tokens in enumerate(batches):
        tokens = jnp.asarray(tokens, jnp.int32)
        loss, gradients = loss_and_gradients(graph, params, tokens)
        bound = 1e-5 if before is None and i == 0 else 1e-4
        np.testing.assert_allclose(loss, c["losses"][i], atol=bound, rtol=0)
        params, state = update(params, state, gradients)
    model = nnx.merge(graph, params)
    found, start = parameters(model), f"train/{stage}/param/"
    saved = [key for key in golden if key.startswith(start)]
    assert saved
    for key in saved:
        value, expected = found[key.removeprefix(start)], golden[key]
        if value.shape != expected.shape:
            value = value[:: MORE["parameter_row_step"]]
        # Half of what weight decay alone moves a weight of 1 in these steps.
        assert np.quantile(np.abs(value - expected), 0.99) < 1.5e-5, key
    return model
