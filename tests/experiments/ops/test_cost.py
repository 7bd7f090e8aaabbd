"""Costs add up and agree with XLA's count; a roofline is the slower of its sides."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import memjax_kernels
from experiments.ops import cost
from experiments.ops.cost import DEVICES, Cost, Device, Sizes, roofline_seconds
from memjax_kernels import LatticeVariant, TrellisState, ttt_linear_state


def test_costs_add_up():
    assert Cost(1.0, 10.0) + Cost(2.0, 20.0) == Cost(3.0, 30.0)
    assert sum([Cost(1.0, 10.0)] * 3, start=Cost(0.0, 0.0)) == Cost(3.0, 30.0)


@pytest.mark.parametrize(
    ("flops", "bytes_", "seconds"), [(100.0, 4.0, 10.0), (100.0, 40.0, 20.0)]
)
def test_the_roofline_is_the_slower_side(flops, bytes_, seconds):
    device = Device(flops=10.0, bandwidth=2.0)
    assert roofline_seconds(Cost(flops, bytes_), device) == seconds


def test_devices_turn_from_memory_to_compute_where_their_makers_say():
    """Operations a byte at the ridge, from the data sheets."""
    ridges = {name: round(d.flops / d.bandwidth) for name, d in DEVICES.items()}
    assert ridges == {"H100": 295, "H200": 206, "v5e": 241, "v5p": 166, "v6e": 560}


def test_bytes_of_trellis():
    # q, k, v, alpha, y in 2 bytes, kept memories once per chunk, four float32 gates.
    expected = 3 * (2 * (5 * 64 + 2 * 64 * 64 / 32) + 16)
    assert cost.trellis(Sizes(1, 3, 1, 64, 64, 64, 32), False).bytes == expected


def test_work_grows_with_the_tokens_and_the_memory_moves_once():
    short = Sizes(1, 64, 2, 64, 64, 64)
    for op in ("linear_attention", "ssd", "gla", "gated_slots", "delta_rule"):
        once, twice = (
            cost.COSTS[op](sizes, False)
            for sizes in (short, short._replace(time=2 * short.time))
        )
        assert twice.flops == 2 * once.flops
        assert once.bytes < twice.bytes < 2 * once.bytes


def test_a_backward_pass_of_lattice_is_two_to_three_forward_passes():
    cases: list[tuple[int, LatticeVariant]] = [(32, "dec"), (32, "sim"), (1, "enc")]
    for size, variant in cases:
        sizes = Sizes(1, size, 2, 0, 64, 32, size)
        forward, backward = (cost.lattice(sizes, b, variant) for b in (False, True))
        assert 2.4 <= backward.flops / forward.flops <= 3.0


def array(*sizes) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def counted(function, *arguments) -> float:
    """Operations by XLA's count, element by element as well."""
    lowered = jax.jit(function).lower(*arguments)
    analysis: Any = lowered.compile().cost_analysis()
    return analysis["flops"]


def pull(function):
    """(cotangents of the results, *arguments) -> cotangents of the arguments."""
    return lambda given, *arguments: jax.vjp(function, *arguments)[1](given)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["linear_attention", "ssd", "gla", "gated_slots"])
def test_both_passes_of_linear_recurrences_are_what_xla_counts(op):
    """In one chunk, where no loop hides work and forward values serve backward."""
    size = {"gla": cost.GLA_CHUNK, "gated_slots": cost.GATED_SLOTS_CHUNK}.get(op, 64)
    token, gate = array(1, size, 2, 64), array(1, size, 2)
    gates = {"ssd": [gate], "gla": [token], "gated_slots": [token, token]}
    tokens = [token] * 3 + gates.get(op, [])
    call = functools.partial(getattr(memjax_kernels, op), implementation="xla")
    results = jax.eval_shape(call, *tokens)
    state = results[0]

    def both(given, *arguments):
        values, back = jax.vjp(call, *arguments)
        return values, back(given)

    sizes = Sizes(1, size, 2, 64, 64, 64)
    forward, backward = (cost.COSTS[op](sizes, b) for b in (False, True))
    flops = counted(both, results, *tokens, state)
    assert 0.8 < flops / (forward.flops + backward.flops) < 1.1
    # Tokens, gates and memory once; their gradients once more.
    elements = 3 * size * 2 * 64
    assert forward.bytes >= 2 * elements and backward.bytes >= 2 * 2 * elements


@pytest.mark.slow
@pytest.mark.parametrize("op", ["delta_rule", "gated_delta_rule"])
@pytest.mark.parametrize("backward", [False, True])
def test_the_delta_rule_is_what_xla_counts(op, backward):
    key, value, gate = array(2, 64, 2, 32), array(2, 64, 2, 64), array(2, 64, 2)
    gates = [gate] * (2 if op == "gated_delta_rule" else 1)
    arguments = (key, key, value, *gates, array(2, 2, 32, 64))
    forward = functools.partial(getattr(memjax_kernels, op), implementation="xla")
    call = forward
    if backward:
        call, arguments = pull(lambda *a: forward(*a)[1]), (value, *arguments)
    expected = cost.COSTS[op](Sizes(2, 64, 2, 32, 64, itemsize=4), backward)
    assert 0.85 < counted(call, *arguments) / expected.flops < 1.15
    moved = jax.tree.leaves((arguments, jax.eval_shape(call, *arguments)))
    assert expected.bytes == 4 * sum(x.size for x in moved)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_ttt_linear_is_what_xla_counts(backward):
    q, eta, norm = array(2, 16, 2, 128), array(2, 16, 2), array(2, 128)
    arguments = (q, q, q, eta, norm, norm, array(2, 2, 128, 128), array(2, 2, 128))

    def forward(q, k, v, eta, scale, bias, weights, offset):
        start = ttt_linear_state(weights, offset, 16)
        state, y = memjax_kernels.ttt_linear(q, k, v, eta, scale, bias, empty=start)
        return (state.weights, state.bias), y

    call = forward
    if backward:
        call, arguments = pull(lambda *a: forward(*a)[1]), (q, *arguments)
    expected = cost.ttt_linear(Sizes(2, 16, 2, 128, 128, 0, 16, 4), backward)
    # XLA also counts the layer norms, and leaves out the last step, not read here.
    assert 0.9 < counted(call, *arguments) / expected.flops < 1.15
    moved = jax.tree.leaves((arguments, jax.eval_shape(call, *arguments)))
    assert 1.0 < 4 * sum(x.size for x in moved) / expected.bytes < 1.02


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_trellis_is_what_xla_counts(backward):
    """Within 15 %: XLA counts elementwise operations as well."""
    width, size = 64, 32
    token, gate = array(1, size, 1, width), array(1, size, 1)
    arguments = (token, token, token, token, gate, gate, array(1, 1, width, width))

    def forward(q, k, v, alpha, gamma, g, memory):
        position = jnp.zeros(1, jnp.int32)
        fields = (memory, memory, memory, memory, position, size)
        empty = TrellisState(*fields)
        options = {"chunk_size": size, "implementation": "xla"}
        return memjax_kernels.trellis(q, k, v, alpha, gamma, g, empty=empty, **options)

    call = forward
    if backward:
        results = jax.eval_shape(forward, *arguments)
        call, arguments = pull(forward), (results, *arguments)
    expected = cost.trellis(Sizes(1, size, 1, 64, 64, 64, size), backward).flops
    assert expected <= counted(call, *arguments) <= 1.15 * expected


@pytest.mark.slow
@pytest.mark.parametrize("size, variant", [(32, "dec"), (32, "sim"), (1, "enc")])
def test_lattice_is_what_xla_counts(size, variant):
    """One chunk, so that no loop hides work; elementwise work is not in the formula."""
    slots, width = 32, 64
    token = lambda width: array(1, size, 2, width)
    options = {"chunk_size": size, "variant": variant, "implementation": "xla"}
    call = functools.partial(memjax_kernels.lattice, **options)
    arguments = (token(slots), token(slots), token(width), array(1, size, 2))
    sizes = Sizes(1, size, 2, 0, width, slots, size, 4)
    expected = cost.lattice(sizes, False, variant)
    assert 0.8 <= counted(call, *arguments) / expected.flops <= 1.2
