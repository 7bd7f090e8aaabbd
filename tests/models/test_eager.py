"""Eager calls of a model's verbs compile once a shape, with the same results."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.models.mplus.read import ReadOptions
from tests import tiny

B, T = 2, 3
HMT = dataclasses.replace(tiny.HMT, activations="keep")


def build(name: str) -> Any:
    return tiny.make_model(name, hmt=HMT, num_layers=1)


def verbs(model, state, seed):
    """All that a user calls by hand, on new tokens of the same shapes."""
    tokens = tiny.tokens(seed, B, T)
    found = [model(state, tokens), model.reset(state, jnp.array([True, False]))]
    if hasattr(model, "inject"):
        state = model.inject(state, tokens)
        options = ReadOptions(prompt_length=2, max_new_tokens=1)
        cache, logits = model.read(state, tokens, options)
        found += [state, model.flush(state), logits, model.decode(cache, tokens[:, :1])]
        state = model.update(state, model.compress(state, tokens))
        found += [state, model.read(state, tokens, options)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["language model", "hmt", "mplus"])
def test_second_eager_call_does_not_compile(name, caplog):
    model = tiny.drawn(lambda: build(name))
    state, _ = model(model.init_state(B), tiny.tokens(0, B, T))
    with jax.log_compiles():
        verbs(model, state, 1)
        assert "Finished tracing" in caplog.text and "Compiling" in caplog.text
        caplog.clear()
        state, _ = model(state, tiny.tokens(0, B, T))
        verbs(model, state, 2)
    assert not caplog.text


@pytest.fixture(name="called", scope="module")
def _called():
    model, tokens = tiny.drawn(lambda: build("language model")), tiny.tokens(0, B, T)
    state = model.init_state(B)
    return model, state, tokens, model(state, tokens)


def test_eager_equals_compiled(called):
    model, state, tokens, found = called
    tiny.assert_close(nnx.jit(lambda m, s, x: m(s, x))(model, state, tokens), found)
    outer = jax.jit(lambda state, tokens: model(state, tokens))
    tiny.assert_close(outer(state, tokens), found)
    # In an enclosing program there is no program of its own.
    assert "_run" not in str(outer.trace(state, tokens).jaxpr)

    def one(state, x):
        return model(jax.tree.map(lambda s: s[None], state), x[None])[1][0]

    tiny.assert_close(jax.vmap(one)(state, tokens), found[1])


def test_eager_gradient_equals_compiled(called):
    model, state, tokens, _ = called

    def loss(model):
        return (model(state, tokens)[1] ** 2).mean()

    eager, compiled = nnx.grad(loss)(model), nnx.jit(nnx.grad(loss))(model)
    tiny.assert_close(nnx.to_pure_dict(eager), nnx.to_pure_dict(compiled))
    assert np.any(jax.tree.leaves(eager)[0])


def test_parameters_are_arguments(called):
    """A changed model is called by the same program with its new parameters."""
    model, state, tokens, (_, logits) = called
    other = nnx.clone(model)
    nnx.update(other, jax.tree.map(lambda x: 2 * x, nnx.state(other)))
    assert np.abs(other(state, tokens)[1] - logits).max() > 1e-3
    tiny.assert_close(model(state, tokens)[1], logits)
