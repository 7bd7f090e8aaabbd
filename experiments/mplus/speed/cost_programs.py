"""Injecting and querying, compiled ahead of time for `cost.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.mplus import methods
from memjax.models import LanguageModel
from memjax.models.mplus.model import MPlus


class Calls(NamedTuple):
    """How a kind of model takes a text in, and how it answers.

    Attributes:
        inject: (model, state, tokens [1, T]) -> state
        query: (model, state, prompt [1, P], N) -> (state, tokens [1, N]); the state is
            None where the query leaves it as it is.
        query_changes_state: whether it does not.
    """

    inject: Callable[..., Any]
    query: Callable[..., Any]
    query_changes_state: bool


class Programs(NamedTuple):
    """Compiled for one model.

    Attributes:
        inject: (parameters, state, tokens [1, T]) -> state; the old one is donated.
        query: (parameters, state, prompt [1, P]) -> (state, tokens [1, N]); the old
            state is donated where the query changes it.
        temporary: bytes that each takes beside its arguments and results.
    """

    inject: Callable[..., Any]
    query: Callable[..., Any]
    temporary: dict[str, int]


def compile_programs(
    model: LanguageModel | MPlus,
    calls: Calls,
    state: Any,
    chunk: int,
    prompt: int,
    answer: int,
) -> Programs:
    """Compiles for a state like this one.

    Args:
        model: its parameters are an argument of the programs.
        calls: of this kind of model.
        state: of one text.
        chunk: tokens that are injected at a time.
        prompt: tokens of the question.
        answer: tokens that are generated.
    """
    graph, params = nnx.split(model)
    merged: Callable[[Any], Any] = lambda params: nnx.merge(graph, params)

    def inject(params, state, tokens):
        return calls.inject(merged(params), state, tokens)

    def query(params, state, tokens):
        return calls.query(merged(params), state, tokens, answer)

    query_donates = (1,) if calls.query_changes_state else ()
    compiled, temporary = {}, {}
    for name, program, length, donated in (
        ("inject", inject, chunk, (1,)),
        ("query", query, prompt, query_donates),
    ):
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        lowered = jax.jit(program, donate_argnums=donated).lower(params, state, tokens)
        compiled[name] = lowered.compile()
        analysis: Any = compiled[name].memory_analysis()
        temporary[name] = analysis.temp_size_in_bytes
        temporary[f"{name}_host"] = analysis.host_temp_size_in_bytes
    return Programs(**compiled, temporary=temporary)


def _generate(model, state, prompt, count):
    """M+ answers from its memory, which stays as it is."""
    key = jax.random.key(0)
    tokens = model.generate(state, prompt, count, key=key, sampling=methods.GREEDY)
    return None, tokens


def _greedy(model, state, prompt, count):
    """Greedy continuation of a prompt, in one program; the last token is not read."""
    best = lambda features: model.logits(features).argmax(axis=-1).astype(jnp.int32)
    state, features = model.features(state, prompt)

    def body(carry, _):
        state, token = carry
        state, features = model.features(state, token[:, None])
        return (state, best(features[:, 0])), token

    first = (state, best(features[:, -1]))
    (state, last), tokens = jax.lax.scan(body, first, length=count - 1)
    return state, jnp.concatenate([tokens, last[None]]).T


MEMORY = Calls(
    lambda model, state, tokens: model.inject(state, tokens), _generate, False
)
BACKBONE = Calls(
    lambda model, state, tokens: model.features(state, tokens)[0], _greedy, True
)
