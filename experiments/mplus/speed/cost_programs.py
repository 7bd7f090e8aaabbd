"""Injecting and querying, compiled ahead of time for `cost.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.mplus.retention import methods
from memjax.models import LanguageModel
from memjax.models.mplus.model import MPlus


class Programs(NamedTuple):
    """Compiled for one model.

    Attributes:
        tell: (parameters, state, tokens [1, T]) -> state; the old one is gone
        ask: (parameters, state, prompt [1, P]) -> (state, tokens [1, N]); of M+, which
            does not change, the state is None, of others the old one is gone
        temporary: bytes that each takes beside what it is given and gives.
    """

    tell: Callable[..., Any]
    ask: Callable[..., Any]
    temporary: dict[str, int]


def compile_programs(
    model: LanguageModel | MPlus, state: Any, piece: int, prompt: int, answer: int
) -> Programs:
    """Compiles for a state like this one.

    Args:
        model: told and asked; its parameters are an argument of the programs.
        state: of one text.
        piece: tokens that are told at a time.
        prompt: tokens of the question.
        answer: tokens that are drawn.
    """
    graph, params = nnx.split(model)
    merged: Callable[[Any], Any] = lambda params: nnx.merge(graph, params)

    def tell(params, state, tokens):
        model = merged(params)
        if isinstance(model, MPlus):
            return model.inject(state, tokens)
        return model.features(state, tokens)[0]

    def ask(params, state, tokens):
        model = merged(params)
        if isinstance(model, MPlus):
            key = jax.random.key(0)
            return None, model.generate(
                state, tokens, answer, key=key, sampling=methods.GREEDY
            )
        return _greedy(model, state, tokens, answer)

    compiled, temporary = {}, {}
    given = {"tell": (tell, piece), "ask": (ask, prompt)}
    for name, (program, length) in given.items():
        donated = () if name == "ask" and isinstance(model, MPlus) else (1,)
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        lowered = jax.jit(program, donate_argnums=donated).lower(params, state, tokens)
        compiled[name] = lowered.compile()
        analysis: Any = compiled[name].memory_analysis()
        temporary[name] = analysis.temp_size_in_bytes
        temporary[f"{name}_host"] = analysis.host_temp_size_in_bytes
    return Programs(**compiled, temporary=temporary)


def _greedy(model, state, prompt, count):
    """The likeliest tokens behind a prompt, in one program; the last is not read."""
    best = lambda features: model.logits(features).argmax(axis=-1).astype(jnp.int32)
    state, features = model.features(state, prompt)

    def body(carry, _):
        state, token = carry
        state, features = model.features(state, token[:, None])
        return (state, best(features[:, 0])), token

    first = (state, best(features[:, -1]))
    (state, last), tokens = jax.lax.scan(body, first, length=count - 1)
    return state, jnp.concatenate([tokens, last[None]]).T
