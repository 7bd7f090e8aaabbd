"""Compares a model with recurrent layers to recorded or computed numbers of its family.

A record has tokens [2, 21], their logits, 16 tokens that follow those of the first row,
and memories and inputs of convolutions after some of them, in transformers' layouts:
`state7.0.memory` is layer 0's. Those of flash-linear-attention are its own numbers, of
its kernels interpreted on a CPU, with memories in the layout here: slots' keys beside
their values, and RetNet's turned back by as many positions as there are tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

TOLERANCE = 1e-4
read = nnx.jit(lambda model, state, tokens: model(state, tokens))


def agree(found, expected, what=""):
    """Within 1e-4 of the largest."""
    scale = np.abs(expected).max()
    np.testing.assert_allclose(
        np.asarray(found), expected, rtol=0, atol=TOLERANCE * scale, err_msg=what
    )


def read_parts(model, golden, cuts):
    """Reads the tokens in parts; logits, and memories after each cut, are compared."""
    tokens = jnp.asarray(golden["tokens"], jnp.int32)
    state, logits, before = model.init_state(len(tokens)), [], 0
    for cut in (*cuts, tokens.shape[1]):
        state, part = read(model, state, tokens[:, before:cut])
        logits.append(np.asarray(part))
        compare_states(model, state, golden, cut)
        before = cut
    agree(np.concatenate(logits, axis=1), golden["logits"])
    return state, logits[-1]


def read_token_by_token(model, golden):
    """The same in steps, and 16 tokens more, each the likeliest."""
    state, logits = read_parts(model, golden, range(1, golden["tokens"].shape[1]))
    generated = []
    for _ in range(golden["generated"].shape[1]):
        # Both rows are read; the second goes its own way.
        best = jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32)
        generated.append(int(best[0]))
        state, logits = read(model, state, best[:, None])
    assert generated == golden["generated"][0].tolist()


def compare_states(model, state: Any, golden, count: int):
    """Memories and inputs of convolutions after `count` tokens, of the first row."""
    for name, expected in golden.items():
        after, layer, what = (*name.split("."), "", "")[:3]
        if after != f"state{count}":
            continue
        mine, kind = state[int(layer)], model.config.layers[int(layer)]
        if kind.name == "parallel":
            mine, kind = mine.memory, kind.memory
        if what == "memory":
            # Slots have keys and values.
            found = np.concatenate(jax.tree.leaves(mine.memory), axis=-1)[0]
            expected = expected.reshape(expected.shape[-found.ndim :])
            if kind.name in ("mamba", "mamba2"):
                expected = expected.swapaxes(-1, -2)
            agree(found, expected, name)
        elif what == "conv":
            # Theirs may have an input more than it needs, the oldest; channels first.
            if kind.name in ("deltanet", "gated_deltanet", "mamba2"):
                parts = [*np.asarray(mine.window)[0].swapaxes(0, 1), mine.values[0]]
                parts = [np.asarray(part).reshape(len(part), -1) for part in parts]
                parts = parts[::-1] if kind.name == "mamba2" else parts
                found = np.concatenate(parts, axis=1)
            else:
                found = np.asarray(mine.window)[0]
            agree(found, expected[0].T[-len(found) :], name)
