"""Facts in a log: questions agree with statements, and rivals are memories."""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.facts import answers, rivals, tables, task
from experiments.facts import study as program
from memjax.config_io import to_record
from memjax.models import LanguageModel
from tests.tiny import drawn

NAME = f"({'|'.join(task.NAMES)})"


def patterns(wordings):
    for wording in wordings:
        text = re.escape(wording).replace(r"\{\}", "{}")
        yield re.compile(text.format(NAME, "([0-9A-Z])").encode())


def found(text, wordings):
    """Names and codes of the texts of some wordings, in their order."""
    matches = [m for x in patterns(wordings) for m in x.finditer(text)]
    return [m.groups() for m in sorted(matches, key=lambda m: m.start())]


@pytest.fixture(name="text", scope="module")
def _text():
    # No statement is in it.
    return jnp.asarray(np.arange(5000) % 26 + ord("a"), jnp.uint8)


def test_a_training_text_asks_for_what_was_stated_last(text):
    draw = jax.jit(task.training_batch, static_argnums=(1, 2, 3))
    batch = draw(text, 6, (8, 16), 1024, jax.random.key(3))
    assert batch.tokens.shape == (6, 1024) and batch.tokens.max() < task.VOCAB_SIZE
    again = 0
    arrays = map(np.asarray, (batch.tokens, batch.mask, batch.targets))
    for row, mask, targets in zip(*arrays, strict=True):
        read = row.astype(np.uint8).tobytes()
        stated, asked = found(read, task.STATEMENTS), found(read, task.QUESTIONS)
        again += len(stated) - len(dict(stated))
        assert asked and dict(asked).items() <= dict(stated).items()
        # A code is predicted at the byte before it, and nothing else is.
        right = b"".join(code for _, code in asked)
        assert targets[mask > 0].astype(np.uint8).tobytes() == right
        np.testing.assert_array_equal(row[1:][mask[:-1] > 0], targets[mask > 0])
    assert again == 3 * 2 + 3 * 4


def test_a_stream_is_a_log_of_all_facts_and_then_documents():
    stream = task.draw_streams("validation", 2, 16, 1024, 512, seed=5)
    document = task.text_of("validation").tobytes()
    for row in range(2):
        log = np.asarray(stream.log.tokens[row]).astype(np.uint8).tobytes()
        stated = dict(found(log, task.STATEMENTS))
        for name, code, place in zip(*(x[row] for x in stream.log[1:]), strict=True):
            right = task.CODES[int(code)].encode()
            assert stated[task.NAMES[int(name)].encode()] == right
            at = int(place)
            there = dict(found(log[at : at + task.SLOT], task.STATEMENTS))
            assert there[task.NAMES[int(name)].encode()] == right
        assert stream.text[row].tobytes() in document + document
        asked = np.asarray(stream.questions.tokens[row]).astype(np.uint8).tobytes()
        assert dict(found(asked, task.QUESTIONS)) == stated


@pytest.mark.parametrize("kind", [rivals.LearnedCacheConfig, rivals.GRUConfig])
def test_a_rival_reads_a_segment_as_token_by_token(kind, monkeypatch):
    monkeypatch.setattr(rivals, "CHUNK", 5)
    mechanism = kind(8, 2, 4, 4).build()
    params = mechanism.init_params(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 12, 8))
    whole, y = jax.jit(mechanism.apply)(params, mechanism.init_state(2), x)

    def step(state, token):
        return mechanism.step(params, state, token)

    state, steps = jax.lax.scan(step, mechanism.init_state(2), jnp.moveaxis(x, 1, 0))
    np.testing.assert_allclose(jnp.moveaxis(steps, 0, 1), y, atol=1e-5)
    assert jax.tree.structure(state) == jax.tree.structure(whole)


def test_the_cache_attends_to_the_tokens_of_the_highest_scores():
    cell = rivals.LearnedCacheConfig(8, 1, 4, 4, entries=3).cell()
    params = cell.init_params(jax.random.key(0))
    x, q, k, v = (jax.random.normal(jax.random.key(i), (1, 9, 8)) for i in range(4))
    q, k, v = (z[..., None, :4] for z in (q, k, v))
    cache, y = jax.jit(cell.apply)(params, None, q, k, v, x)
    scores = np.asarray(x[0] @ params.score)[:, 0]
    best = np.argsort(scores)[::-1][:3]
    np.testing.assert_allclose(cache.scores[0], scores[best], rtol=1e-5)
    np.testing.assert_array_equal(cache.ages[0], 8 - best)
    # The last token reads the best before it, and itself.
    seen = np.asarray([*np.argsort(scores[:8])[::-1][:3], 8])
    logits = jax.nn.softplus(params.scale) * (k[0, seen, 0] @ q[0, 8, 0])
    logits -= jax.nn.softplus(params.slope) * np.log1p(8 - seen)
    read = jax.nn.softmax(logits) @ v[0, seen, 0]
    np.testing.assert_allclose(y[0, 8, 0], read, rtol=1e-4)

    # What is dropped by a hard choice still has a gradient.
    def total(params):
        return cell.apply(params, None, q, k, v, x)[1].sum()

    assert jnp.abs(jax.jit(jax.grad(total))(params).score).min() > 0


def test_a_question_is_asked_of_the_state_at_its_distance(monkeypatch):
    monkeypatch.setattr(answers, "LOG", 512)
    streams = {4: task.draw_streams("validation", 2, 4, 512, 512, seed=1)}
    config = program.model("DeltaNet", 5632)
    model = drawn(lambda: LanguageModel(config, key=jax.random.key(0)))
    read = jax.jit(lambda model, state, tokens: model(state, tokens))
    found = answers.answer(model, streams, (256, 512))[4]
    assert found.shape == (2, 2, 4)
    stream = streams[4]
    log = jnp.concatenate([stream.log.tokens, stream.text], axis=1)
    log = log[:, : 512 + 256].astype(jnp.int32)
    state, _ = read(model, model.init_state(2), log)
    for n in range(4):
        _, logits = read(model, state, jnp.asarray(stream.questions.tokens[:, n]))
        at = np.asarray(stream.questions.mask[:, n]).argmax(axis=1)
        likeliest = np.asarray(logits)[np.arange(2), at].argmax(-1)
        right = np.asarray(stream.questions.targets[:, n])[np.arange(2), at]
        np.testing.assert_array_equal(found[0, :, n], likeliest == right)


def row(name, near, far):
    right = {"32": [[near], [far]], "64": [[near], [far]]}
    return {"name": name, "budget": 100, "runs": [{"right": right}] * 3}


def test_the_falsifiers_are_printed():
    def say(*rows, far=tables.FAR):
        config = {"counts": (32, 64), "distances": (256, far)}
        result = {"rows": {x["name"]: x for x in rows}, "config": config}
        return [*tables.verdict(result)]

    cache = row(tables.CACHE, 0.5, 0.4)
    assert say(cache) == ["100 bytes: not decided, rows are missing"]
    assert say(cache, row("DeltaNet", 0.6, 0.5)) == ["100 bytes: holds"]
    (near,) = say(cache, row("DeltaNet", 0.6, 0.1), far=512)
    assert near == "100 bytes: holds; 262,144 bytes later was not asked"
    (both,) = say(cache, row("DeltaNet", 0.4, 0.3))
    assert both == (
        "100 bytes: falsified: the learned cache is ahead of every memory; no memory "
        "holds half of 32 facts 262,144 bytes later"
    )


def test_a_budget_smaller_than_an_entry_is_refused():
    with pytest.raises(ValueError, match="goal must be at least the 2064 bytes of one"):
        program.model(program.CACHE, 1152)


@pytest.mark.parametrize("name", ["Trellis, slow gates", "Gated DeltaNet, slow gates"])
def test_gates_start_where_they_hardly_forget(name):
    config = program.model(name, 5632)
    slow = program.slow_gates(config, 0)
    fast = LanguageModel(config, key=jax.random.key(0))
    pairs = zip(*(jax.tree.leaves(nnx.state(x)) for x in (slow, fast)), strict=True)
    # A bias, or a rate, in each of two layers.
    assert 2 <= sum(not np.array_equal(a, b) for a, b in pairs) <= 4


@pytest.mark.slow
def test_the_study_runs_and_keeps_what_it_trained(tmp_path, capsys, monkeypatch):
    scale, counts = program.STAGES[0]
    monkeypatch.setattr(program, "STAGES", ((scale._replace(steps=1), counts),))
    monkeypatch.setattr(answers, "LOG", 512)
    given: Any = dict(counts=(4,), distances=(256, 512), streams=5, run_dir=tmp_path)
    config = program.Config(("DeltaNet",), **given)
    program.main(config)
    said = capsys.readouterr()
    assert "4 facts, asked 512 bytes later" in said.out and "wrong" in said.out
    result = json.loads((tmp_path / "results.json").read_text())
    assert np.shape(result["rows"]["DeltaNet, 5632"]["runs"][0]["right"]["4"]) == (2, 5)
    assert result["baselines"]["5632"]["text"]["4"] == [1.0, 1.0]
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    program.main(config)
    assert "compiling" not in capsys.readouterr().err


def test_a_cache_shrinks_and_nothing_else_changes():
    made = program.model(program.CACHE, 5632)
    found = [to_record(x) for x, _ in program.stages_of(made)]
    sizes = [x["mechanisms"][0].pop("entries") for x in found]
    assert sizes == [128, 32, 8, 8, 8] and all(x == found[0] for x in found)
    memory = program.model("DeltaNet", 5632)
    assert [*program.stages_of(memory)] == [(memory, x) for x in program.STAGES]
