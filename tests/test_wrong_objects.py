"""An argument of the wrong kind is refused by name, at each public entrance."""

# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
import memjax_kernels
from memjax.evaluation import perplexity, token_losses
from memjax.evaluation.losses import TokenLosses
from memjax.mechanisms import TrellisConfig
from memjax.models import LanguageModel, add_hmt, add_memory, add_mplus, generate
from tests import tiny

KEY = jax.random.key(0)
CONFIG = TrellisConfig(16, 2, 8, 8)
X, TOKENS = jnp.zeros((1, 5, 16)), jnp.ones((1, 5), int)
LOSSES = TokenLosses(*[np.ones((1, 2))] * len(TokenLosses._fields))._replace(
    kinds=["prose"]
)


def _memory(state=None, x=X):
    memory = memjax.nnx.Memory(CONFIG, key=KEY)
    return memory(memory.init_state(1) if state is None else state, x)


def _mechanism(name, x):
    mechanism = CONFIG.build()
    read = getattr(mechanism, name)
    return read(mechanism.init_params(KEY), mechanism.init_state(1), x)


def _add_memory(layers):
    return add_memory(tiny.llama(), memory="trellis", layers=layers, window=4, key=KEY)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: _memory(x=X[:, :0]), r"x must be .* no axis empty, got \[1, 0, 16\]"),
        (lambda: _memory(x=X[0, 0]), r"x must be .* or \[B, D\], got \(16,\)"),
        (lambda: _memory(X, ()), "x must be .* got tuple"),
        (lambda: _memory(()), "state must be the arrays that init_state gives"),
        (lambda: _mechanism("step", X), r"x must be an array \[B, D\]"),
        (lambda: _mechanism("apply", X[0]), r"x must be an array \[B, T, D\]"),
        (lambda: memjax.nnx.Memory("trellis", key=KEY), "config must be .*'trellis'"),
        (lambda: LanguageModel("name", key=KEY), "config must be a ModelConfig"),
        (lambda: LanguageModel(tiny.LLAMA, key=0), "key must be a jax.random.key"),
        (lambda: LanguageModel(tiny.LLAMA, rngs=0), "rngs must be nnx.Rngs"),
        (lambda: add_hmt(tiny.llama(), {}, key=KEY), "config must be a HMTConfig"),
        (lambda: add_mplus(tiny.llama(), {}, key=KEY), "config must be a MPlusConfig"),
        (lambda: _add_memory("auto"), "layers must be numbers .* got 'auto'"),
        (lambda: tiny.llama()(None, TOKENS), "state must have 2 parts, .* NoneType"),
        (lambda: tiny.llama()(TOKENS, None), "state must have 2 parts"),
        (lambda: generate(tiny.llama(), None, TOKENS, 4, key=0), "key must be a jax"),
        (lambda: token_losses(tiny.llama(), [TOKENS[0]]), "a document must be a Tok"),
        (lambda: perplexity(LOSSES, kind="poem"), "kind must be one of .*'prose'"),
        (lambda: memjax.load("owner/name", dtype="float16"), "dtype must be one of"),
        (lambda: memjax_kernels.causal_attention(*[X[..., None]] * 3), "cannot run"),
        (lambda: memjax_kernels.hippo(X, X[0]), "features must have shape"),
    ],
)
def test_wrong_objects_are_refused_by_name(call, message, request):
    if request.config.getoption("--jaxtyping-packages", default=None):
        pytest.skip("the annotations' own check comes first")
    with pytest.raises(ValueError, match=message):
        call()
