"""Costs add up, and a roofline is the slower of its two sides."""

import pytest

from memjax_kernels.cost import DEVICES, Cost, Device, roofline_seconds


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
