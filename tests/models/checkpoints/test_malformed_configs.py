"""Entries of a config.json that are no such value: a model, or a refusal by name."""

import re

import pytest

from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.models.checkpoints.hf.known_keys import USED, report_unread
from tests.models.checkpoints import test_families, test_hybrids

CONFIGS = (*test_families.CONFIGS, *test_hybrids.CONFIGS)
#: Of other types, and numbers that are out of any range.
WRONG = ("x", [["x"]], {"a": 1}, -1, 0, 10**400, float("inf"), float("nan"))
ROPE = ({"rope_type": ["x"]}, {"rope_theta": "x"}, {"full_attention": 3})


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_wrong_values_are_refused_by_the_name_of_their_key(config):
    family = config["model_type"]
    for key in USED[family] - {"model_type"}:
        for value in WRONG + ROPE * key.startswith("rope_"):
            try:
                from_hf_config(config | {key: value})
            except ValueError as error:
                assert re.search(rf"\b{key}\b", str(error)), (key, value, error)


@pytest.mark.parametrize(
    "changes, shown",
    [
        ({"rms_norm_eps": -1}, "got -1.0 (from rms_norm_eps=-1)"),
        ({"max_position_embeddings": 2**30}, "(from max_position_embeddings=10737"),
        (
            {"hidden_size": 12, "num_attention_heads": 4, "head_dim": None},
            "got 3 (from num_attention_heads=4, hidden_size=12)",
        ),
        ({"rope_scaling": {"rope_type": 3}}, "got 3 (from rope_scaling.rope_type=3)"),
        ({"hidden_size": None}, "hidden_size is missing from config.json"),
    ],
)
def test_refusals_of_our_options_show_the_entries_of_the_file(changes, shown):
    with pytest.raises(ValueError, match=re.escape(shown)):
        from_hf_config(test_families.LLAMA | changes)


@pytest.mark.parametrize(
    "rope,unread",
    [
        ({"rope_type": "default", "mrope_section": [1, 1]}, ""),
        ({"rope_type": "linear", "factor": 2.0, "gain": 3}, "rope_scaling.gain"),
        ({"full_attention": {"gain": 3}}, "rope_scaling.full_attention.gain"),
    ],
)
def test_entries_of_rope_that_are_not_read_are_reported(rope, unread, caplog):
    report_unread(test_families.LLAMA | {"rope_scaling": rope}, "llama", "here")
    found = [record.getMessage() for record in caplog.records]
    assert found == [f"here: not read of config.json: {unread}"] * bool(unread)
