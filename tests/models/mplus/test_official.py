"""M+ computes what the authors' program computes: memory tokens, stores, reads.

`golden/mplus` holds numbers of that program; its README says how they were made. Its
gradients and its retriever's loss are in `tests/training`.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.models.mplus import write as mplus_writing
from memjax.models.mplus.checkpoints.checkpoint import load_official
from memjax.models.mplus.checkpoints.hf_config import mplus_config_from_hf
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.read import ReadOptions

GOLDEN = Path(__file__).parents[1] / "golden" / "mplus"
HF = json.loads((GOLDEN / "config.json").read_text())
# The longest chunk of any scenario: 24 tokens.
# As in the program, every token that is read chooses rows.
SIZES = dataclasses.replace(
    mplus_config_from_hf(HF), chunk_size=24, min_chunk_size=1, retrieval_source="all"
)
FROM_CREATION = dataclasses.replace(SIZES, eviction="frequency")
CONFIGS = {
    "C": FROM_CREATION,
    "P": FROM_CREATION,
    # Its reads were made again with equal ages in the order of their index.
    "A": dataclasses.replace(SIZES, legacy=True, equal_ages="rising"),
    "B": dataclasses.replace(SIZES, legacy=True, equal_ages="rising", merge_every=1),
}
LAYERS = range(HF["num_hidden_layers"])

near = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=0)
same = np.testing.assert_array_equal


@functools.cache
def numbers(scenario):
    """Arrays of a scenario, by what follows its name."""
    arrays = np.load(GOLDEN / ("golden.npz" if scenario == "C" else "more.npz"))
    start = f"{scenario}/"
    return {k.removeprefix(start): arrays[k] for k in arrays if k.startswith(start)}


@functools.cache
def model(scenario) -> MPlus:
    config = CONFIGS[scenario]
    found = load_official(GOLDEN / "tiny_model.safetensors", HF, SIZES)
    found.config = config
    found.backbone.config = dataclasses.replace(found.backbone.config, remat=False)
    return found


def ids(golden, step):
    return np.asarray(golden[f"{step}/ids"], np.int32)


def begin(scenario):
    """The checkpoint's memory, with the ages that the scenario starts from."""
    golden, state = numbers(scenario), model(scenario).init_state(1)
    ages = golden.get("init/ltm_ages")
    if ages is None:
        ages = np.stack([golden[f"init/ltm_ages_{i}"] for i in LAYERS])
    assert state.store is not None

    def born(i, layer):
        known = np.array(layer.born)
        known[0, : ages.shape[1]] = -ages[i].astype(int)
        return layer._replace(born=known)

    layers = tuple(born(i, layer) for i, layer in enumerate(state.store.layers))
    return state._replace(
        ages=np.asarray(golden["init/memory_ages"], np.int32)[None],
        store=state.store._replace(layers=layers),
    )


@functools.cache
def writer():
    """Compresses chunks of any length in one program, padded behind."""
    graph, params = nnx.split(model("C"))

    @jax.jit
    def run(params, state, tokens, length):
        model = nnx.merge(graph, params)
        return mplus_writing.compress(model.weights, state, tokens, length, None)

    def write(state, tokens):
        length = tokens.shape[1]
        padded = np.pad(tokens, ((0, 0), (0, SIZES.chunk_size - length)))
        return run(params, state, padded, jnp.array([length], jnp.int32))

    return write


@functools.partial(jax.jit, static_argnums=0)
def _update(graph, params, state, new, dropped):
    return nnx.merge(graph, params).update(state, new, dropped)


@functools.partial(jax.jit, static_argnums=0)
def _trace_read(graph, params, state, tokens, lengths, new, kept):
    model, beside = nnx.merge(graph, params), kept is not None
    return model.trace_read(state, tokens, ReadOptions(new, beside, kept), lengths)


def trace_read(split, state, tokens, new=None, kept=None):
    """Reads of up to eight tokens in one program, padded behind."""
    length = tokens.shape[1]
    padded = np.pad(tokens, ((0, 0), (0, 8 - length)))
    lengths = jnp.array([length], jnp.int32)
    found = _trace_read(*split, state, padded, lengths, new, kept)
    # Slices of numpy arrays: of jax's each would be a program.
    logits, trace = jax.tree.map(np.asarray, found)
    trace = trace._replace(hidden=trace.hidden[:, :, :length])
    return logits[:, :length], trace


def replay(scenario, check):
    """The state after all steps, each of which `check` is shown."""
    golden, state, m = numbers(scenario), begin(scenario), model(scenario)
    split = nnx.split(m)
    steps = {k.split("/")[0] for k in golden} - {"init"}
    # An inject and a query of one number come in this order.
    for step in sorted(steps, key=lambda step: (step[-2:], step)):
        if step.startswith("query"):
            check(step, state, None)
            continue
        new = writer()(state, ids(golden, step))
        dropped = np.asarray(golden[f"{step}/dropped_idx"], np.int32)[None]
        state = _update(*split, state, new, dropped)
        check(step, state, new)
    return state


def check_memory(golden, step, state, new):
    def get(name):
        return golden[f"{step}/{name}"]

    near(new[0], get("delta_memory"))
    # Slices of numpy arrays: of jax's each would be a program.
    state = jax.tree.map(np.asarray, state)
    same(state.ages[0], get("memory_ages"))
    store = state.store
    fresh = int(store.num_pending[0])
    merged = int(store.num_valid[0]) - fresh
    # `update_step` is reckoned in memory tokens, as the cache is.
    assert fresh == get("update_step") and bool(fresh) == bool(get("has_cache"))
    whole = f"{step}/memory" in golden
    if whole:
        near(state.pool[0], get("memory"))
    for i, layer in enumerate(store.layers):
        ages = state.clock[0] - layer.born[0]
        old, cached = slice(merged), slice(merged, merged + fresh)
        same(ages[old], get(f"ltm_ages_{i}"))
        same(store.recalls[0, old], get(f"ltm_rf_{i}"))
        if whole:
            near(layer.rows[0, old], get(f"ltm_{i}"))
            near(layer.keys[0, old], get(f"ltm_keys_{i}"))
        if fresh:
            same(ages[cached], get("cache_ages")[i])
        if fresh and whole:
            near(layer.rows[0, cached], get("cache_mem")[i])
            near(layer.keys[0, cached], get("cache_keys")[i])


def check_read(golden, step, state, found):
    def get(name):
        return golden[f"{step}/{name}"]

    logits, trace = found
    near(logits[0], get("logits"))
    state = jax.tree.map(np.asarray, state)
    near(trace.hidden[:, 0], get("hidden"))
    if trace.chosen is None:
        return
    for i in LAYERS:
        same(trace.chosen[i, 0], get(f"retr_final_{i}"))
        born = state.store.layers[i].born[0, trace.chosen[i, 0]]
        same(state.clock[0] - born, get(f"retr_final_ages_{i}"))
        # The program scores nothing where it reads a short store again and again.
        scores = golden.get(f"{step}/retr_scores_{i}")
        if scores is not None:
            near(trace.scores[i, 0, : len(scores)], scores)
            assert np.all(np.isneginf(trace.scores[i, 0, len(scores) :]))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["C", "A", "B"])
def test_memory_and_reads(scenario):
    """C: ages from creation. A: the release. B: the same, merged at every update.

    The release gives equal ages no order; its reads were made again in that of their
    index.
    """
    golden, seen = numbers(scenario), []
    # How often rows are merged changes no read: one program reads A and B.
    split = nnx.split(model("A" if scenario == "B" else scenario))

    def check(step, state, new):
        seen.append(step)
        if new is not None:
            return check_memory(golden, step, state, new)
        at = f"{step}/by_index" if f"{step}/by_index/ids" in golden else step
        assert at != step or scenario == "C"
        read = trace_read(split, state, ids(golden, at))
        check_read(golden, at, state, read)

    replay(scenario, check)
    injects = sum(step.startswith("inject") for step in seen)
    counts = {"C": (11, 5), "A": (10, 4), "B": (7, 3)}
    assert (injects, len(seen) - injects) == counts[scenario]


@pytest.fixture(name="prepared", scope="module")
def _prepared():
    """Memory after P, and its model."""
    golden = numbers("P")

    def check(step, state, new):
        return check_memory(golden, step, state, new)

    return model("P"), replay("P", check)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _read(graph, params, state, tokens, room, new=None):
    return nnx.merge(graph, params).read(
        state, tokens, ReadOptions(new, max_new_tokens=room)
    )


@functools.partial(jax.jit, static_argnums=(0, 4))
def _decode(graph, params, reading, tokens, alone):
    return nnx.merge(graph, params).decode(reading, tokens, only_new=alone)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["pool", "delta"])
def test_decoding_with_the_cache(prepared, memory):
    """Five tokens one by one, then three at once, without another retrieval."""
    m, state = prepared
    split, golden = nnx.split(m), numbers("D")
    new = golden["delta/delta_memory"][None]
    tokens = ids(golden, f"{memory}/prefill")
    new = new if memory == "delta" else None
    reading, logits = _read(*split, state, tokens, 8, new)
    near(logits[0], golden[f"{memory}/prefill/logits"])
    for step in range(6):
        at, found = f"{memory}/step{step}", []
        given = ids(golden, at)
        # Those of new memory alone all one by one.
        for tokens in np.split(given, 1 if memory == "pool" else given.shape[1], 1):
            reading, logits = _decode(*split, reading, tokens, memory == "delta")
            found.append(logits[0])
        near(np.concatenate(found), golden[f"{at}/logits"])
    assert reading.length.tolist() == [6 + 5 + 3]


@functools.partial(jax.jit, static_argnums=0)
def _compress(graph, params, state, tokens, memory=None):
    return nnx.merge(graph, params).compress(state, tokens, memory)


@pytest.mark.slow
def test_memory_tokens_by_hand(prepared):
    m, state = prepared
    split, golden = nnx.split(m), numbers("E")
    first = writer()(state, ids(golden, "compress"))
    near(first[0], golden["compress/delta_memory"])
    chained = _compress(*split, state, ids(golden, "chained"), first)
    near(chained[0], golden["chained/delta_memory"])
    # Reads of new memory alone are in the test above.
    both = np.concatenate([first, chained], axis=2)
    kept = np.asarray(golden["beside_two/kept_idx"], np.int32)[None]
    found = trace_read(split, state, ids(golden, "beside_two"), both, kept)
    check_read(golden, "beside_two", state, found)
