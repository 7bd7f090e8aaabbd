"""The peer computes what the authors' M+ program does, step by step."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("torch", reason="the peer is written in PyTorch")
pytest.importorskip("transformers", reason="the peer's backbone is Hugging Face's")

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from experiments.mplus.speed import pytorch as mplus_peer

GOLDEN = Path(__file__).parents[2] / "models" / "golden" / "mplus"
CONFIG = json.loads((GOLDEN / "config.json").read_text())


@pytest.fixture(name="arrays", scope="module")
def _arrays():
    with np.load(GOLDEN / "golden.npz") as file, np.load(GOLDEN / "more.npz") as more:
        return dict(file) | dict(more)


def build(creation_ages, merge_every=CONFIG["update_ltm_frequency"]):
    """The peer with the weights and the memory of the authors' tiny model."""
    backbone = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    config = mplus_peer.PeerConfig(
        tokens=CONFIG["num_tokens"],
        pool=CONFIG["num_tokens"] * (CONFIG["num_blocks"] - CONFIG["num_ltm_blocks"]),
        retrieved=CONFIG["num_tokens"] * CONFIG["num_ltm_blocks"],
        store=CONFIG["ltm_initial_size"],
        key_dim=CONFIG["selector_hidden_dim"],
        rank=CONFIG["lora_config"]["r"],
        alpha=CONFIG["lora_config"]["lora_alpha"],
        merge_every=merge_every,
        recalls=CONFIG["initial_rf_when_moving_stm_to_ltm"],
        creation_ages=creation_ages,
    )
    model = mplus_peer.PeerMPlus(backbone, config)
    mplus_peer.load_official(model, load_file(GOLDEN / "tiny_model.safetensors"))
    if creation_ages:
        rows, held = config.pool, config.store
        ages = np.tile(np.arange(rows + held)[::-1], (len(model.pool), 1))
        for store in model.stores:
            store.ages = ages[0, :held]
        model.start(ages[:, held:], model.stores)
    return model


def tokens(array):
    return torch.from_numpy(array).long()


def differs(found, wanted):
    """The largest difference."""
    return np.abs(found.numpy() - wanted).max()


def check_inject(model, arrays, name):
    """Injects as the golden run did, and compares all that is held after it."""
    delta = model.inject(tokens(arrays[f"{name}/ids"]), arrays[f"{name}/dropped_idx"])
    assert differs(delta, arrays[f"{name}/delta_memory"]) < 1e-4
    assert (np.stack(model.ages) == arrays[f"{name}/memory_ages"]).all()
    for layer, store in enumerate(model.stores):
        assert (store.ages == arrays[f"{name}/ltm_ages_{layer}"]).all()
        assert (store.recalls == arrays[f"{name}/ltm_rf_{layer}"]).all()
        if f"{name}/ltm_{layer}" in arrays:
            assert differs(store.rows, arrays[f"{name}/ltm_{layer}"]) < 1e-4
            assert differs(store.keys, arrays[f"{name}/ltm_keys_{layer}"]) < 1e-4
        assert (store.dropped is not None) == arrays[f"{name}/has_cache"]
        if store.dropped is not None:
            assert (store.dropped[2] == arrays[f"{name}/cache_ages"][layer]).all()
    if f"{name}/memory" in arrays:
        assert differs(model.pool, arrays[f"{name}/memory"]) < 1e-4
    if f"{name}/cache_mem" in arrays:
        rows, keys, _ = zip(*(store.dropped for store in model.stores), strict=True)
        assert differs(torch.stack(rows), arrays[f"{name}/cache_mem"]) < 1e-4
        assert differs(torch.stack(keys), arrays[f"{name}/cache_keys"]) < 1e-4


def check_read(model, arrays, name):
    """Logits, and the input of every layer retrieves what the golden run retrieved."""
    logits, cache = model.read(tokens(arrays[f"{name}/ids"]))
    assert differs(logits[0], arrays[f"{name}/logits"]) < 1e-4
    count = model.config.retrieved
    for layer, store in enumerate(model.stores):
        if f"{name}/hidden" in arrays:
            norm = model.backbone.model.layers[layer].input_layernorm
            with torch.no_grad():
                hidden = torch.from_numpy(arrays[f"{name}/hidden"][layer])
                _, chosen = store.search(model.query[layer](norm(hidden)), count)
            assert (chosen.numpy() == arrays[f"{name}/retr_final_{layer}"]).all()
    return cache


@pytest.mark.parametrize(
    "scenario, options",
    [
        ("C", {"creation_ages": True}),
        ("A", {"creation_ages": False}),
        ("B", {"creation_ages": False, "merge_every": 1}),
    ],
)
def test_injects_and_reads_are_the_authors(scenario, options, arrays):
    model, done = build(**options), 0
    for number in range(13):
        name = f"{scenario}/inject{number:02d}"
        if f"{name}/ids" in arrays:
            check_inject(model, arrays, name)
            done += 1
        name = f"{scenario}/query{number:02d}"
        if f"{name}/ids" in arrays:
            check_read(model, arrays, name)
            done += 1
    assert done == {"A": 14, "B": 10, "C": 16}[scenario]


def test_decoding_goes_on_from_the_cache(arrays):
    model = build(creation_ages=True)
    for number in range(1, 5):
        check_inject(model, arrays, f"P/inject{number:02d}")
    cache = check_read(model, arrays, "D/pool/prefill")
    for step in range(6):
        name = f"D/pool/step{step}"
        logits, cache = model.read(tokens(arrays[f"{name}/ids"]), cache)
        assert differs(logits[0], arrays[f"{name}/logits"]) < 1e-4


def test_rows_to_drop_are_drawn_anew_for_every_layer():
    model = build(creation_ages=False)
    before = model.pool.clone()
    torch.manual_seed(0)
    delta = model.inject(tokens(np.arange(8)[None]))
    assert torch.equal(model.pool[:, -8:], delta)
    pairs = zip(before, model.pool, strict=True)
    kept = [torch.isin(old[:, 0], new[:, 0]) for old, new in pairs]
    assert [int(rows.sum()) for rows in kept] == [24, 24, 24]
    assert not torch.equal(kept[0], kept[1])
    for layer, rows in enumerate(kept):
        dropped = model.stores[layer].dropped
        assert dropped is not None
        assert torch.equal(dropped[0], before[layer][~rows])
