"""The loss in chunks is the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType

from memjax.models import loss

B, T, D, V = 2, 7, 4, 5
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(B, T, D)).astype(np.float32)
HEAD = RNG.normal(size=(D, V)).astype(np.float32)
TARGETS = RNG.integers(0, V, (B, T), dtype=np.int32)


@pytest.fixture(autouse=True)
def _few_positions(monkeypatch):
    """Chunks of the few positions that the tests have."""
    monkeypatch.setattr(loss, "LEAST_POSITIONS", 1)


def losses_of(head, features):
    return loss.target_nll(lambda x: x @ head, features, jnp.asarray(TARGETS), V)


# 1, 2, 3 and all 7 positions of both rows at a time; a budget too small takes 1.
@pytest.mark.parametrize("at_a_time,chunk", [(0, 1), (20, 2), (39, 3), (70, 7)])
def test_chunked_losses_equal_unchunked(monkeypatch, at_a_time, chunk):
    monkeypatch.setattr(loss, "LOGITS_AT_A_TIME", at_a_time)
    shapes = []

    def logits(x):
        shapes.append(x.shape)
        return x @ HEAD

    losses = loss.target_nll(logits, jnp.asarray(FEATURES), jnp.asarray(TARGETS), V)
    scores = np.asarray(FEATURES, np.float64) @ np.asarray(HEAD, np.float64)
    expected = np.log(np.exp(scores).sum(-1)) - np.take_along_axis(
        scores, np.asarray(TARGETS)[..., None], -1
    ).squeeze(-1)
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
    assert set(shapes) == {(B, chunk, D)}


def test_compared_losses_equal_gathered():
    """The form of TPUs; a target that is no token has no loss."""
    logits, targets = jnp.asarray(FEATURES @ HEAD), jnp.asarray(TARGETS)

    def of(form):
        return jax.value_and_grad(lambda x: (form(x, targets) ** 2).sum())

    gathered = optax.softmax_cross_entropy_with_integer_labels
    found, expected = of(loss._compared_losses)(logits), of(gathered)(logits)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    for unknown in (-1, V):
        losses = loss._compared_losses(logits, targets.at[1, 2].set(unknown))
        assert np.isnan(losses[1, 2]) and np.isfinite(losses).sum() == B * T - 1


@pytest.mark.slow
def test_gradients_are_independent_of_chunks(monkeypatch):
    weights = jnp.linspace(0, 1, B * T).reshape(B, T)

    def gradient():
        return jax.grad(lambda *x: (losses_of(*x) * weights).sum(), (0, 1))(
            jnp.asarray(HEAD), jnp.asarray(FEATURES)
        )

    whole = gradient()
    monkeypatch.setattr(loss, "LOGITS_AT_A_TIME", 20)
    for a, b in zip(gradient(), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_gradients_of_loss_sum(monkeypatch, dtype):
    """Those of one pass over chunks are those of all logits at once."""
    mask = jnp.linspace(0, 1, B * T).reshape(B, T)
    features = jnp.asarray(FEATURES).astype(dtype)

    def total(head, features, scale):
        def logits(x):
            return jnp.matmul(
                x, head.astype(x.dtype), preferred_element_type=jnp.float32
            )

        found = loss.loss_sum(logits, features, jnp.asarray(TARGETS), mask, V)
        return scale * found

    def pull():
        return jax.value_and_grad(total, (0, 1, 2))(jnp.asarray(HEAD), features, 0.3)

    whole = pull()
    # Chunks of 2 of the 7 positions: the last is padded.
    monkeypatch.setattr(loss, "LOGITS_AT_A_TIME", 20)
    found = pull()
    assert found[1][1].dtype == dtype
    rtol, atol = (1e-5, 1e-6) if dtype == np.float32 else (2**-6, 2**-8)
    for one, other in zip(*map(jax.tree.leaves, (found, whole)), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)
    assert np.abs(np.asarray(found[1][0])).max() > 0.1


def _products(jaxpr) -> int:
    """Products of matrices in a program, those of a loop once."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == "dot_general"
        found += sum(map(_products, jaxprs_in_params(equation.params)))
    return found


@pytest.mark.parametrize("trained, products", [((0, 1), 3), ((1,), 2)])
def test_logits_are_computed_once(monkeypatch, trained, products):
    """And a head that is frozen has no gradient."""
    monkeypatch.setattr(loss, "LOGITS_AT_A_TIME", 20)

    def total(head, features):
        def logits(x):
            return x @ head

        return loss.loss_sum(
            logits, features, jnp.asarray(TARGETS), jnp.ones((B, T)), V
        )

    made = jax.make_jaxpr(jax.grad(total, trained))(
        jnp.asarray(HEAD), jnp.asarray(FEATURES)
    )
    assert _products(made.jaxpr) == products


def test_last_positions_and_targets():
    mask = jnp.asarray([[1.0, 1, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    places = loss.last_positions(mask, 3)
    assert places.tolist()[0] == [1, 3, 4]
    assert places.tolist()[1][-1] == 2
    assert places.tolist()[2] == [3, 4, 5]
    kept = jnp.take_along_axis(loss.last_targets(mask, 3), places, axis=1)
    assert kept.sum(axis=1).tolist() == [3, 1, 3]
    assert loss.last_positions(mask, 9).shape == mask.shape


@pytest.mark.parametrize("rows, chunk", [(1, 512), (4, 128), (1024, 1)])
def test_large_vocabularies_have_chunks_of_positions(monkeypatch, rows, chunk):
    monkeypatch.undo()
    assert loss._chunk_size(jnp.zeros((rows, 2048), jnp.int32), 248_320) == chunk


def test_chunk_size_is_per_device(monkeypatch):
    monkeypatch.setattr(loss, "LOGITS_AT_A_TIME", 20)
    assert loss._chunk_size(jnp.asarray(TARGETS), V) == 2
    axes = ("data", "fsdp", "tensor")
    for shape, chunk in {
        (2, 1, 1): 4,
        (1, 2, 1): 4,
        (1, 1, 2): 2,
        (4, 1, 1): 2,
    }.items():
        mesh = AbstractMesh(shape, axes, axis_types=(AxisType.Auto,) * 3)
        with jax.sharding.use_abstract_mesh(mesh):
            assert loss._chunk_size(jnp.asarray(TARGETS), V) == chunk, shape
