"""With activations="keep" there are derivatives of every mode and order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.models import add_rmt
from memjax.models.remat import cond_with_remat
from tests import tiny


def both(needed, x, count):
    """One float and one whole number, as memories have."""

    def one(x, count):
        return (jnp.sin(x) * x.sum(), count + 1)

    def other(x, count):
        return (x * 2.0, count)

    return cond_with_remat("keep", needed, one, other, x, count)


def plain(needed, x, count):
    def one(x):
        return jnp.sin(x) * x.sum()

    return jax.lax.cond(needed, one, lambda x: x * 2.0, x)


@pytest.mark.parametrize("needed", [True, False])
def test_derivatives_equal_lax_cond(needed):
    x, change, count = tiny.draw(0, 3), tiny.draw(1, 3), jnp.int32(4)

    def ours(x):
        return both(jnp.bool_(needed), x, count)

    def theirs(x):
        return plain(jnp.bool_(needed), x, count)

    def run(f, x, change):
        return jax.jvp(f, (x,), (change,))

    run = jax.jit(run, static_argnums=0)
    (y, counted), (by, none) = run(ours, x, change)
    tiny.assert_close((y, by), run(theirs, x, change))
    assert counted == 4 + needed and none.dtype == jax.dtypes.float0

    def first(x):
        return ours(x)[0]

    expected = jax.jit(jax.jacfwd(theirs))(x)
    tiny.assert_close(jax.jit(jax.jacfwd(first))(x), expected)
    tiny.assert_close(jax.jit(jax.jacrev(first))(x), expected)
    tiny.assert_close(jax.linearize(first, x)[1](change), by)
    tiny.assert_close(
        jax.jit(jax.hessian(lambda x: first(x).sum()))(x),
        jax.jit(jax.hessian(lambda x: theirs(x).sum()))(x),
    )


@pytest.mark.slow
def test_hmt_has_a_forward_derivative():
    def make():
        backbone = tiny.make_llama(num_layers=1)
        return add_rmt(backbone, 2, key=jax.random.key(0), activations="keep")

    model, tokens = tiny.drawn(make), tiny.tokens(0, 1, 3)
    state = model.init_state(1)

    def loss(bank):
        memories = state.memories._replace(bank=bank)
        return (model(state._replace(memories=memories), tokens)[1] ** 2).mean()

    state, _ = tiny.method(model, "__call__", state, tokens)
    bank = state.memories.bank
    change = tiny.draw(1, *bank.shape)

    @jax.jit
    def both(bank, change):
        return jax.jvp(loss, (bank,), (change,))[1], jax.grad(loss)(bank)

    forward, by = both(bank, change)
    np.testing.assert_allclose(forward, (by * change).sum(), rtol=1e-4)
    assert abs(float(forward)) > 1e-8
