"""The peer computes what the authors' program does: its losses, logits, gradients."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("torch", reason="the peer is written in PyTorch")
pytest.importorskip("transformers", reason="the peer's backbone is Hugging Face's")

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from experiments.hmt.speed import pytorch as hmt_peer

GOLDEN = Path(__file__).parents[2] / "models" / "golden" / "hmt"
CONFIG = json.loads((GOLDEN / "config.json").read_text())


@pytest.fixture(name="arrays", scope="module")
def _arrays():
    with np.load(GOLDEN / "golden.npz") as file:
        return dict(file)


def build(retrieval, sensory, memories, summary):
    """The peer with the weights of the authors' tiny model."""
    sizes = transformers.LlamaConfig(**CONFIG["backbone"])
    backbone = transformers.LlamaForCausalLM(sizes)
    config = hmt_peer.PeerConfig(
        segment=24,
        sensory=sensory,
        memories=memories,
        retrieval_dim=CONFIG["hmt"]["d_h"],
        summary=summary,
        retrieval=retrieval,
    )
    model = hmt_peer.PeerHMT(backbone, config)
    hmt_peer.load_official(model, load_file(GOLDEN / "tiny_model.safetensors"))
    return model


def run(case, arrays):
    """The peer on a golden case: model, segments, loss."""
    settings = CONFIG["cases"][case]
    assert settings["L"] == 24
    model = build(
        settings["retrieval"],
        settings["k_sensory"],
        settings["ltm_context_N"] or 1,
        round(settings["L"] * settings["sum_fraction"]),
    )
    names = ("input_ids", "labels")
    ids, labels = (torch.from_numpy(arrays[f"{case}/{n}"]).long() for n in names)
    segments = model(ids, torch.ones_like(ids))
    loss = hmt_peer.last_loss(segments, labels, settings["loss_tokens_mask_size"])
    return model, segments, loss


@pytest.mark.parametrize("case", ["hmt4", "hmt_window", "rmt4", "stage1_4"])
def test_losses_and_logits_are_the_authors(case, arrays):
    _, segments, loss = run(case, arrays)
    assert loss.item() == pytest.approx(float(arrays[f"{case}/loss"]), abs=1e-5)
    for i, segment in enumerate(segments):
        wanted = arrays[f"{case}/seg{i}/logits"]
        # Every fourth column is kept.
        assert np.abs(segment.logits.detach().numpy()[..., ::4] - wanted).max() < 5e-4
    assert f"{case}/seg{len(segments)}/logits" not in arrays


def test_gradients_are_the_authors(arrays):
    model, _, loss = run("hmt4", arrays)
    loss.backward()
    found = {n: p.grad.numpy() for n, p in hmt_peer.official_names(model)}
    for name, gradient in found.items():
        wanted = arrays[f"hmt4/grad/{name}"]
        error = np.linalg.norm(gradient - wanted) / np.linalg.norm(wanted)
        assert error < 1e-4, name


def test_a_step_trains_everything(arrays):
    model = build(True, 4, 100, 12)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = hmt_peer.adamw(model)
    tokens = torch.from_numpy(arrays["hmt4/input_ids"]).long()
    losses = [hmt_peer.training_step(model, optimizer, tokens, 24) for _ in range(2)]
    assert losses[1] < losses[0]
    for name, parameter in model.named_parameters():
        assert not torch.equal(before[name], parameter), name


def test_lora_starts_as_the_model_and_trains_only_what_it_adds(arrays):
    model = build(True, 4, 100, 12)
    tokens = torch.from_numpy(arrays["hmt4/input_ids"]).long()
    with torch.no_grad():
        before = model(tokens, torch.ones_like(tokens))[-1].logits
        hmt_peer.add_lora(model)
        assert torch.equal(model(tokens, torch.ones_like(tokens))[-1].logits, before)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    low_rank = {n for n in trained if n.endswith((".down.weight", ".up.weight"))}
    assert len(low_rank) == 2 * 7 * CONFIG["backbone"]["num_hidden_layers"]
    added = {"initial_memory", "summary_prompt", "query.weight", "key.weight"}
    assert trained - low_rank == added
    frozen = {n: p.clone() for n, p in model.named_parameters() if n not in trained}
    hmt_peer.training_step(model, hmt_peer.adamw(model), tokens, 24)
    for name, parameter in model.named_parameters():
        assert name not in frozen or torch.equal(frozen[name], parameter), name
