"""Configurations survive JSON, and damaged ones are refused by field."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.config_io import completed, from_record, to_record
from memjax.mechanisms import (
    MECHANISMS,
    AttentionConfig,
    HybridConfig,
    InfiniConfig,
    Mamba2Config,
    ParallelConfig,
    SlidingWindowConfig,
)
from memjax.models import ModelConfig
from memjax.training import pretrain as run


@pytest.mark.slow
@pytest.mark.parametrize("name", run.presets())
def test_every_preset_survives_json(name):
    config = run.presets()[name]
    text = json.dumps(to_record(config))
    assert from_record(run.RunConfig, json.loads(text)) == config


def test_optional_values_and_paths_survive():
    config = run.presets()["elastic-tiny"]
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, cache_dir=Path("a") / "b"),
        loop=dataclasses.replace(config.loop, profile=(2, 3), minutes=1.5),
    )
    record = json.loads(json.dumps(to_record(config)))
    back = from_record(run.RunConfig, record)
    assert back == config
    assert isinstance(back.data.cache_dir, Path) and back.loop.profile == (2, 3)


@dataclasses.dataclass(frozen=True)
class Inner:
    """Held by Outer."""

    ratio: float = 0.5
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Outer:
    """One field of each kind that configurations use."""

    size: int
    flag: bool
    choice: Literal["a", "b"]
    many: tuple[int, ...] = ()
    maybe: float | None = None
    inner: Inner = Inner()


outers = st.builds(
    Outer,
    size=st.integers(),
    flag=st.booleans(),
    choice=st.sampled_from(["a", "b"]),
    many=st.lists(st.integers(), max_size=3).map(tuple),
    maybe=st.none() | st.floats(allow_nan=False),
    inner=st.builds(Inner, st.floats(allow_nan=False), st.text()),
)


@settings(max_examples=60, deadline=None)
@given(outers)
def test_any_values_survive_json(outer):
    assert from_record(Outer, json.loads(json.dumps(to_record(outer)))) == outer


GOOD = dict(size=1, flag=True, choice="a", inner=dict(ratio=0.25))


@pytest.mark.parametrize(
    "change,field",
    [
        (dict(size="1"), "config.size must be"),
        (dict(size=1.0), "config.size must be"),
        (dict(size=True), "config.size must be"),
        (dict(size=None), "config.size must be"),
        (dict(flag=1), "config.flag must be"),
        (dict(choice="c"), "config.choice must be"),
        (dict(many=[1, "2"]), "config.many must be"),
        (dict(many=3), "config.many must be"),
        (dict(maybe="x"), "config.maybe must be"),
        (dict(inner=dict(ratio="x")), "config.inner.ratio must be"),
        (dict(inner=dict(ratio=10**400)), "config.inner.ratio is too large, got 10"),
        (dict(inner=dict(name=1)), "config.inner.name must be"),
        (dict(inner=3), "config.inner must be an object"),
        (dict(sise=1), "config.sise is not a field of Outer"),
        (dict(inner=dict(rtio=1)), "config.inner.rtio is not a field of Inner"),
    ],
)
def test_invalid_records_are_refused_by_field(change, field):
    from_record(Outer, GOOD)
    with pytest.raises(ValueError, match=field):
        from_record(Outer, GOOD | change)


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="config.size is missing"):
        from_record(Outer, dict(flag=True, choice="a"))
    with pytest.raises(ValueError, match="config must be an object, got 3"):
        from_record(Outer, 3)


def test_integers_become_floats_and_defaults_fill_in():
    back = from_record(Outer, dict(size=1, flag=True, choice="b", maybe=2))
    assert back == Outer(1, True, "b", maybe=2.0) and type(back.maybe) is float
    whole = completed(Outer, dict(size=1, flag=True, choice="b"))
    assert whole == to_record(Outer(1, True, "b")) and "inner" in whole
    with pytest.raises(ValueError, match="checkpoint.sise is not a field"):
        completed(Outer, dict(sise=1))


def test_values_are_checked_as_in_code():
    record = to_record(ModelConfig())
    with pytest.raises(ValueError, match="vocab_size must be at least 1, got 0"):
        from_record(ModelConfig, record | dict(vocab_size=0))
    (mechanism,) = record["mechanisms"]
    with pytest.raises(
        ValueError, match=r"config.mechanisms\[0\].window must be .*'2'"
    ):
        from_record(
            ModelConfig, record | dict(mechanisms=[mechanism | dict(window="2")])
        )


@pytest.mark.parametrize(
    "mechanism,message",
    [
        (dict(type="Trelis"), r"mechanisms\[0\].type must be one of .* got 'Trelis'"),
        (dict(type="TreliConfig"), r"did you mean 'TrellisConfig'"),
        (
            dict(type="RecurrentConfig"),
            "mechanisms.0..type must be one of .*AttentionC",
        ),
        (dict(type="os.system"), "must be one of .*, got 'os.system'"),
        (dict(type=["TrellisConfig"]), "must be an object with a type, got {'type': "),
        (dict(type="GLAConfig"), r"config.mechanisms\[0\].model_dim is missing"),
        (
            dict(model_dim=8),
            r"mechanisms\[0\] must be an object with a type, got {'model",
        ),
        (
            "TrellisConfig",
            r"mechanisms\[0\] must be an object with a type, got 'Trellis",
        ),
    ],
)
def test_unknown_mechanism_in_a_file_is_refused(mechanism, message):
    record = to_record(ModelConfig())
    with pytest.raises(ValueError, match=message):
        from_record(ModelConfig, record | dict(mechanisms=[mechanism]))


def test_every_exported_mechanism_survives_json():
    window = SlidingWindowConfig(8, 2, 2, 4, window=4)
    sizes = dict(num_heads=2, num_kv_heads=2, head_dim=4, key_dim=4, value_dim=4)
    sizes |= dict(inner_dim=16, state_dim=4, dt_rank=1, width=8, num_blocks=2)
    for name, kind in MECHANISMS.items():
        # Of a hybrid two configurations in one, the memory by its name.
        mechanism: Any = HybridConfig(window, InfiniConfig(2, 2, 4, 4))
        if name == "parallel":
            mechanism = ParallelConfig(
                AttentionConfig(8, 2, 2, 4), Mamba2Config(8, 2, 4, 4)
            )
        elif name != "hybrid":
            fields = {field.name for field in dataclasses.fields(kind) if field.init}
            own = {field: sizes[field] for field in fields & {*sizes}}
            mechanism = kind(model_dim=8, **own)
        model = ModelConfig(mechanisms=(mechanism,), model_dim=8)
        record = json.loads(json.dumps(to_record(model)))
        assert record["mechanisms"][0]["type"] == kind.__name__
        assert from_record(ModelConfig, record) == model
