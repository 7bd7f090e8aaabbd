"""An op's argument of the wrong kind, shape or range is refused by name."""

# pyright: reportArgumentType=false, reportCallIssue=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax_kernels as ops

B, T, H, D = 2, 3, 1, 4
X = jnp.ones((B, T, H, D))
GATE = jnp.full((B, T, H), 0.5)
TOKEN, ONE = X[:, 0], GATE[:, 0]
MATRIX = jnp.zeros((B, H, D, D))
SLOTS = (jnp.zeros((B, H, D, D)),) * 2
BLOCKS = jnp.ones((B, 2, 3, D))
BASIS = np.ones((2, 5), np.float32)


@functools.cache
def lattice_state(chunk_size=4):
    return ops.lattice_init_state(B, H, D, D, chunk_size)


def lattice_step(g=None, **options):
    return ops.lattice_step(TOKEN, TOKEN, TOKEN, ONE, g, lattice_state(), **options)


def trellis_step(gamma=ONE, g=None, **options):
    state = ops.trellis_init_state(B, H, D, D, D, chunk_size=4)
    return ops.trellis_step(TOKEN, TOKEN, TOKEN, TOKEN, gamma, g, state, **options)


def hippo(**options):
    return ops.hippo(BLOCKS, BASIS, jnp.ones((B, 5, D)), **options)


def test_rates_up_to_two_are_taken_where_they_are_known():
    two = jnp.full((B, T, H), 2.0)
    _, reads = ops.delta_rule(X, X, X, two, implementation="reference")
    _, y = ops.delta_rule_step(TOKEN, TOKEN, TOKEN, two[:, 0], MATRIX)
    np.testing.assert_array_equal(reads[:, 0], y)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        # No arrays.
        (lambda: ops.linear_attention([1.0], X, X), "q must be an array .* got list"),
        (lambda: ops.ssd(X, X, X, None), "g must be an array .* got NoneType"),
        (lambda: ops.delta_rule(X, X, X, GATE, ()), "state must be an array .* tuple"),
        (lambda: ops.lattice(X, X, X, GATE, None, ()), "state must be a LatticeState"),
        (lambda: ops.ttt_linear(X, X, X, GATE, X[0, 0], X[0, 0], 3), "a TTTLinearSt"),
        (lambda: hippo(bank=()), "bank must be a HippoBank, got tuple"),
        (lambda: ops.sigmoid_scores(X[:, 0], None, X[:, 0]), "query_mask must be an"),
        (lambda: ops.l2_normalize(jnp.ones(3)), "x must have shape"),
        # Batches and widths that would be broadcast.
        (
            lambda: ops.linear_attention_step(TOKEN, TOKEN, TOKEN, MATRIX[:1]),
            r"state must have shape \[B, H, K, V\] = \[2, 1, 4, 4\]",
        ),
        (
            lambda: ops.delta_rule_step(TOKEN, TOKEN, TOKEN, ONE[:1], MATRIX),
            r"beta must have shape \[B, H\] = \[2, 1\].* got \[1, 1\]",
        ),
        (
            lambda: ops.gated_slots_step(
                *[TOKEN] * 3, TOKEN[..., :1], None, ops.GatedSlotsState(*SLOTS)
            ),
            r"state must begin with \[2, 1, 1\].* got an array \[2, 1, 4, 4\]",
        ),
        (
            lambda: ops.rotate(X, *[jnp.ones((3, T, 2))] * 2),
            r"cos must end in \(3, 2\), got \(3, 3, 2\)",
        ),
        (lambda: hippo(start=jnp.array([4])), r"start must be integers of shape \[B\]"),
        (lambda: ops.heads_first(X[0]), r"x must have shape \[B, T, H, K\]"),
        # Values.
        (lambda: hippo(count=jnp.array([9, 0])), r"count must lie in \[0.0, 2.0\]"),
        (lambda: hippo(start=jnp.array([-4, 4])), "start must lie in"),
        (lambda: lattice_step(-ONE), "g must be given if and only if forget is"),
        (lambda: lattice_step(-ONE, forget="l1"), "forget='l1' .*chunk_size=1 only"),
        (lambda: lattice_step(variant="x"), "variant must be one of"),
        (lambda: lattice_step(normalize="no"), "normalize must be True or False"),
        (lambda: hippo(in_step="no"), "in_step must be True or False, got 'no'"),
        (lambda: trellis_step(activation="x"), "activation must be one of"),
        # The ranges of a step's gates are those of the op's.
        (lambda: trellis_step(gamma=-ONE), r"gamma must lie in \[0.0, 3"),
        (lambda: trellis_step(g=ONE), r"g must lie in \[-inf, 0.0\], .* 0.5 to 0.5"),
        (
            lambda: ops.delta_rule_step(TOKEN, TOKEN, TOKEN, 6 * ONE, MATRIX),
            r"beta must lie in \[0.0, 2.0\], got values from 3.0",
        ),
        (
            lambda: ops.gated_scan_step(ONE, ONE, ONE),
            r"g must lie in \[-inf, 0.0\]",
        ),
        # Sizes.
        (lambda: ops.ssd(X, X, X, -GATE, chunk_size=2.0), "chunk_size must .* got 2.0"),
        (lambda: ops.ssd_init_state(0, 1, 1, 1), "batch must be at least 1, got 0"),
        (lambda: ops.lattice_state(MATRIX, 0), "chunk_size must be at least 1, got 0"),
        (
            lambda: ops.causal_attention(
                *[jnp.ones((1, 128, 2, 64), "bfloat16")] * 3, 0, interpret=True
            ),
            "window must be at least 1, got 0",
        ),
        # Devices.
        (
            lambda: ops.causal_attention(*[jnp.ones((1, 128, 2, 64), "bfloat16")] * 3),
            "cannot run here: .*; jax.nn.dot_product_attention",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_checks_of_a_step_see_shapes_inside_jit_and_vmap():
    def step(k):
        return ops.linear_attention_step(TOKEN, k, TOKEN, MATRIX)

    with pytest.raises(ValueError, match="k must have shape"):
        jax.jit(step)(TOKEN[..., :1])
    _, y = jax.vmap(step)(TOKEN[None])
    assert y.shape == (1, B, H, D)


def test_traced_gates_are_the_callers_promise():
    """No value is read, which would wait for the device."""
    jax.jit(lambda gamma: trellis_step(gamma))(-ONE)

    def reads(beta):
        return ops.delta_rule_step(TOKEN, TOKEN, TOKEN, beta, MATRIX)[1].sum()

    jax.grad(reads)(-ONE)
