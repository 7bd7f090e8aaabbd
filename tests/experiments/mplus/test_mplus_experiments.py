"""The cost of M+: formulas against XLA's counts, and the program whole."""

import dataclasses
import json
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.mplus.methods import Reader
from experiments.mplus.speed import cost, cost_programs, operations
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.read import ReadOptions, read_closed
from tests.experiments.mplus.tiny import CHUNK as C
from tests.experiments.mplus.tiny import CONFIG, MEMORY

# Wide, so that matrices are nearly all that counts.
WIDE = ModelConfig(
    mechanisms=(AttentionConfig(128, 4, 2, 32, capacity=128),),
    num_layers=2,
    vocab_size=300,
    model_dim=128,
    hidden_dim=256,
    dtype="float32",
    remat=False,
)
TWO = MPlusConfig(
    num_memory_tokens=16,
    pool_size=32,
    chunk_size=32,
    num_retrieved=16,
    store_size=64,
    key_dim=32,
    rank=4,
)


def _counted(function, config, tokens) -> float:
    """Operations of a program of M+ and its state, as XLA counts them; none is run."""
    model = nnx.eval_shape(
        lambda: add_mplus(
            LanguageModel(WIDE, key=jax.random.key(0)), config, key=jax.random.key(1)
        )
    )
    graph, params = nnx.split(model)
    run = jax.jit(lambda params, *rest: function(nnx.merge(graph, params), *rest))
    state = jax.eval_shape(lambda: model.init_state(1))
    analysis: Any = run.lower(params, state, tokens).compile().cost_analysis()
    return analysis["flops"]


@pytest.mark.parametrize("stored", ["output", "input"])
@pytest.mark.slow
def test_the_formula_of_writing_counts_what_xla_counts(stored):
    memory = dataclasses.replace(TWO, stored=stored)
    tokens = jax.ShapeDtypeStruct((1, TWO.chunk_size), jnp.int32)

    def write(model, state, tokens):
        return model.update(state, model.compress(state, tokens))

    # XLA's attention multiplies what a token may not see, too.
    found = _counted(write, memory, tokens)
    assert found == pytest.approx(
        operations.inject(WIDE, memory, TWO.chunk_size), rel=0.1
    )


@pytest.mark.slow
def test_formulas_of_reading_count_what_xla_counts():
    tokens = jax.ShapeDtypeStruct((1, TWO.chunk_size), jnp.int32)
    x = jax.ShapeDtypeStruct((1, 64, 128), jnp.float32)

    def read(model, state, tokens):
        features = read_closed(model.weights, state, tokens, ReadOptions())[1]
        return model.logits(features[:, -1])

    found = _counted(read, TWO, tokens)
    assert found == pytest.approx(
        operations.read(WIDE, TWO, TWO.chunk_size, 1), rel=0.1
    )
    found = _counted(lambda model, _, x: model.backbone.encode(x), TWO, x)
    assert found == pytest.approx(operations.text(WIDE, 0, 64), rel=0.1)


def test_reads_by_attention_are_not_counted():
    attention = dataclasses.replace(TWO, retrieval="attention")
    with pytest.raises(ValueError, match="must be .learned., got .attention."):
        operations.read(WIDE, attention, 4, 1)


@pytest.mark.parametrize(("before", "tokens"), [(0, 3), (2, 9), (7, 4)])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_is_counted_pair_by_pair(before, tokens, window):
    pairs = sum(
        1
        for query in range(before, before + tokens)
        for key in range(query + 1)
        if window is None or query - key < window
    )
    dense = operations.text(WIDE, 0, tokens, 1) - 4 * 2 * 128 * tokens
    found = operations.text(WIDE, before, tokens, window) - dense
    assert found == 4 * 2 * 128 * pairs


def test_answers_are_decode():
    """A prompt and all but the last drawn token, and logits of each drawn one."""
    one, three = (operations.answer(WIDE, 10, 4, drawn) for drawn in (1, 3))
    head = 2 * 128 * 300
    assert one == operations.text(WIDE, 10, 4) + head
    assert three - one == operations.text(WIDE, 14, 2) + 2 * head


KINDS = get_args(cost.Kind)
COST = cost.Scale(MEMORY, (C, 3 * C), C)
# With a head of its own, which does not draw the token that was read last again.
SHALLOW = dataclasses.replace(CONFIG, num_layers=1, tied_head=False)


@pytest.fixture(name="config")
def _cost(monkeypatch, tmp_path):
    monkeypatch.setitem(cost.SCALES, "tiny", COST)
    monkeypatch.setattr(cost.Config, "backbone", SHALLOW)
    return cost.Config(chunk=C, prompt=4, answer=2, repeats=1, output=tmp_path / "cost")


@pytest.mark.slow
def test_cost_runs_whole(config, capsys):
    # Of the others, each a program of its own, the parts are tested below.
    kinds = ("M+ (offload)", "full attention")
    cost.main(dataclasses.replace(config, kinds=kinds))
    report = json.loads((config.output.parent / "cost.json").read_text())
    assert tuple(report["models"]) == kinds
    for kind, rows in report["models"].items():
        assert [row["length"] for row in rows] == [C, 3 * C]
        for row in rows:
            if kind == "full attention" and row["length"] > C:
                assert "seconds" not in row
                continue
            assert row["seconds"]["query"] > 0 and row["seconds"]["inject"] > 0
            assert row["temporary_bytes"]["inject"] > 0
            host = row["place_bytes"].get("pinned_host", 0)
            parts = row["state_bytes"]
            assert sum(row["place_bytes"].values()) == parts["total"]
            pool = 4 * MEMORY.pool_size * 16
            offloaded = parts["store_rows"] + pool if "M+" in kind else 0
            assert host == offloaded
        first, last = (row["state_bytes"]["total"] for row in rows)
        assert (last > first) == (kind == "full attention")
        inject = [row["operations"]["inject"] for row in rows]
        assert inject[1] >= 3 * inject[0]
    assert (config.output.parent / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert "nan" in capsys.readouterr().out


def test_the_parts_of_the_state_are_its_bytes(config):
    rows = {kind: cost.describe(config, kind, C) for kind in KINDS}
    for offload in ("M+, all on the device", "M+ (offload)"):
        assert rows[offload] == rows["M+"]
    parts = rows["M+"]["state_bytes"]
    layers, width = 1, 16
    assert parts["pool"] == 4 * layers * MEMORY.pool_size * (width + 1)
    assert parts["store_rows"] == 4 * layers * MEMORY.store_size * width
    assert parts["store_keys"] == 4 * layers * MEMORY.store_size * MEMORY.key_dim
    slots = MEMORY.prefix + C
    assert parts["reading"] == 2 * 4 * layers * slots * 8 + slots + 3 * 4
    assert sum(parts.values()) == 2 * parts["total"]
    assert rows["MemoryLLM"]["state_bytes"]["store_rows"] == 0
    assert rows["M+"]["parameter_bytes"] > rows["full attention"]["parameter_bytes"]
    # As much as M+ needs on the device, and not more than a token too many.
    window = rows["sliding window"]["state_bytes"]["total"]
    assert 0 <= window - (parts["total"] - parts["store_rows"]) < 2 * 4 * layers * 8 + 9


@pytest.mark.slow
def test_both_ways_to_draw_agree(config):
    """The compiled program gives what the public generation gives."""
    prompt = jnp.arange(4, dtype=jnp.int32)[None]
    injected = jnp.arange(C, dtype=jnp.int32)[None]
    start = lambda model: jax.jit(lambda: model.init_state(1))()
    model = cost.build_backbone(config, "full attention", C)
    programs = cost_programs.compile_programs(
        model, cost_programs.BACKBONE, start(model), C, 4, config.answer
    )
    params = nnx.split(model)[1]
    state = programs.inject(params, start(model), injected)
    drawn = programs.query(params, state, prompt)[1]
    method = Reader(model, C)
    memory = method.inject(method.start(1), np.asarray(injected))
    found = method.query(memory, np.asarray(prompt), config.answer)
    np.testing.assert_array_equal(drawn, found)
    assert found[0, 0] != found[0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": 0}, "prompt must be at least 1, got 0"),
        ({"kinds": ()}, "kinds must name at least one"),
        ({"chunk": 100}, "chunk must be a multiple of the chunk of 128, got 100"),
        ({"lengths": (4096, 2048)}, "lengths must rise"),
        ({"lengths": (1000,)}, "in multiples of chunk=512"),
    ],
)
def test_bad_costs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        cost.Config(**options)
