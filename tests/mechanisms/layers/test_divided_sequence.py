"""Recurrences over tokens divided among devices equal those of one device."""

import json

import pytest

from tests.mechanisms.layers import divided_run
from tests.training.processes import Process

MEMORIES = 4 * 2 * 3 * 4 * 4  # n B H K K
COEFFICIENTS = 4 * 2 * 5 * 24  # n B N X


@pytest.fixture(scope="module")
def found(with_devices):
    process = Process(divided_run.main, environment=with_devices(divided_run.WAYS))
    return json.loads(process.require_end().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", (*divided_run.MECHANISMS, *divided_run.ELASTIC))
def test_divided_tokens_equal_one_device(found, name):
    for program, result in found[name].items():
        assert result["difference"] < 2e-5, program


@pytest.mark.slow
@pytest.mark.parametrize("name", divided_run.MECHANISMS)
def test_only_memories_and_the_edge_of_the_convolution_are_sent(found, name):
    for program in {"segment", "packed"} & {*found[name]}:
        assert found[name][program]["permutes"]
        assert not found[name][program]["exchanges"]
        assert 0 < found[name][program]["gathered"] <= MEMORIES


@pytest.mark.slow
@pytest.mark.parametrize("name", divided_run.ELASTIC)
def test_only_coefficients_are_sent(found, name):
    assert found[name]["later"]["gathered"] == COEFFICIENTS
    assert not found[name]["later"]["exchanges"]
