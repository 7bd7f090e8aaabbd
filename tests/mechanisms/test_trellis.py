"""Targets of Trellis: for which sizes of them its recurrence is stable."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.mechanisms import TrellisConfig

TIME, WORDS = 512, 32


def _outputs_and_gradient(target_scale, **options):
    """Outputs for a long text, and the norm of the last one's gradient."""
    config = TrellisConfig(16, 2, 8, 8, slots=16, chunk_size=4, **options)
    memory = config.build()
    params = memory.init_params(jax.random.key(0))
    target = params.cell.target * target_scale
    params = params._replace(cell=params.cell._replace(target=target))
    # A few vectors that come again and again, as words do.
    words = jax.random.normal(jax.random.key(1), (WORDS, config.model_dim))
    x = words[jax.random.randint(jax.random.key(2), (1, TIME), 0, WORDS)]

    def last(params):
        _, y = memory.apply(params, memory.init_state(1), x)
        return jnp.sum(y[:, -1] ** 2), y

    gradients, y = jax.jit(jax.grad(last, has_aux=True))(params)
    return y, float(optax.tree.norm(gradients))


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_gradients_through_a_long_text_stay_small(scale):
    assert _outputs_and_gradient(scale)[1] < 10


def test_large_targets_make_gradients_explode_unless_normalised():
    _, norm = _outputs_and_gradient(100.0, normalize_target=False)
    assert norm > 1000


def test_outputs_do_not_depend_on_the_scale_of_targets():
    one, other = (_outputs_and_gradient(scale)[0] for scale in (1.0, 100.0))
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
