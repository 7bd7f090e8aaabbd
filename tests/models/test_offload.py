"""M+ with memory on the host: the same bits, and what of it is on the device."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models import offload as host_memory
from memjax.models.checkpoints.memory_state import load_memory, save_memory
from memjax.models.mplus.build import add_mplus
from memjax.models.offload import device_bytes, near, put, require_place
from tests import tiny

SIZES = ModelConfig(
    mechanisms=(AttentionConfig(8, 2, 1, 4, capacity=32),),
    num_layers=1,
    vocab_size=19,
    model_dim=8,
    hidden_dim=12,
    dtype="float32",
    tied_head=False,
    remat=False,
)
OLDEST = dataclasses.replace(
    tiny.MPLUS, chunk_size=3, num_retrieved=3, store_size=6, key_dim=5
)
FREQUENCY = dataclasses.replace(
    OLDEST, eviction="frequency", merge_every=2, recalls=2.0, store_size=12
)
KEY = jax.random.key(0)
TOKENS = jax.random.randint(jax.random.key(5), (2, 20), 0, 19)


def build(config, place):
    config = dataclasses.replace(config, store_memory=place, pool_memory=place)
    return tiny.drawn(lambda: add_mplus(LanguageModel(SIZES, key=KEY), config, key=KEY))


@pytest.fixture(scope="module", params=[OLDEST, FREQUENCY], ids=["oldest", "frequency"])
def runs(request):
    """For each place: the model; its state after a text and a reset, and logits."""
    found = {}
    for place in ("device", "host"):
        model = build(request.param, place)

        def run(state, model=model):
            told, logits = model.inject(state, TOKENS), ()
            # Reading is the same for both.
            if model.config.by_frequency:
                _, logits = model.read(told, TOKENS[:, :4])
            return told, model.reset(told, jnp.array([False, True])), logits

        found[place] = (model, jax.jit(run)(model.init_state(2, key=KEY)))
    return found


@pytest.mark.slow
def test_offloading_is_exact(runs):
    told = runs["device"][1][0]
    assert told.store.num_valid.min() > 3 and (told.num_valid == 4).all()
    on_host = jax.tree.map(np.asarray, runs["host"][1])
    chex.assert_trees_all_equal(on_host, jax.tree.map(np.asarray, runs["device"][1]))


@pytest.mark.slow
def test_rows_stay_on_the_host_and_keys_on_the_device(runs):
    for state in runs["host"][1][:2]:

        def kind(leaf):
            return leaf.sharding.memory_kind

        assert kind(state.pool) == "pinned_host"
        for layer in state.store.layers:
            assert kind(layer.rows) == "pinned_host"
            assert {kind(layer.keys), kind(layer.born)} == {"device"}
        count = state.pool.size + sum(x.rows.size for x in state.store.layers)
        assert device_bytes(state)["pinned_host"] == 4 * count
    before = device_bytes(runs["device"][1][0])
    after = device_bytes(runs["host"][1][0])
    assert before == {"device": sum(after.values())}


@pytest.mark.slow
def test_load_to_host_memory(runs, tmp_path):
    model, (told, *_) = runs["device"]
    save_memory(tmp_path / "memory", model, told)
    there = load_memory(tmp_path / "memory", runs["host"][0])
    assert device_bytes(there) == device_bytes(runs["host"][1][0])
    save_memory(tmp_path / "again", runs["host"][0], there)
    back = load_memory(tmp_path / "again", model)
    chex.assert_trees_all_equal(back, told)
    assert device_bytes(back) == device_bytes(told)


def test_only_results_are_transferred():
    store = jnp.arange(12.0).reshape(4, 3)

    def take(store, at):
        return (store, store[at])

    on_host = put("host", store)
    assert put("device", store) is store
    kept, rows = jax.jit(lambda *x: near(take, *x, stays=(True, False)))(
        on_host, jnp.array([2, 0])
    )
    assert kept.sharding.memory_kind == "pinned_host"
    assert rows.sharding.memory_kind == "device"
    np.testing.assert_array_equal(rows, store[jnp.array([2, 0])])


def test_missing_host_memory_is_refused(monkeypatch):
    class Memory:
        kind = "device"

    class Device:
        device_kind = "some chip"

        def addressable_memories(self):
            return [Memory()]

    monkeypatch.setattr(host_memory.jax, "devices", lambda: [Device()])
    message = r"store_memory must be 'device' on some chip, .*\['device'\], got 'host'"
    with pytest.raises(ValueError, match=message):
        build(OLDEST, "host")
    build(OLDEST, "device")
    with pytest.raises(ValueError, match="pool_memory must be one of .*'device'"):
        require_place("pool_memory", "hots")
