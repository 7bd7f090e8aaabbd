"""Files of a tokenizer mean what they mean in transformers, and are carried on."""

import json
from typing import Any

import pytest

import memjax
from memjax.models import Sampling
from memjax.models.checkpoints.hf import text_keys
from memjax.models.checkpoints.hf.generation_config import GenerationConfig
from memjax.models.checkpoints.text_interface import TextInterface, read_text_interface
from tests import tiny

FILES: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "a",
        "eos_token": "<end>",
        "unk_token": "b",
        "pad_token": "c",
        "padding_side": "left",
        "truncation_side": "left",
        "model_max_length": 77,
        "chat_template": [
            {"name": "default", "template": "plain {{ bos_token }}"},
            {"name": "tool_use", "template": "tools {{ tools | length }}"},
        ],
        "extra_special_tokens": {"image_token": "d"},
    },
    "generation_config.json": {
        "do_sample": True,
        "temperature": 0.7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "max_new_tokens": 9,
        "eos_token_id": [0, 3],
    },
}


@pytest.fixture(name="folder")
def _folder(tmp_path):
    """A folder that transformers reads."""
    folder = tmp_path / "a"
    tiny.llama().save(folder, TextInterface(tiny.tokenizer()))
    for name, record in FILES.items():
        (folder / name).write_text(json.dumps(record))
    config = json.loads((folder / "config.json").read_text())
    config |= {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 3}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    return folder


def test_export_keeps_what_transformers_reads(folder, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    loaded = memjax.load(folder)
    loaded.model.save(tmp_path / "b", loaded.text)
    for name in ("tokenizer.json", *FILES, "additional_chat_templates/rag.jinja"):
        assert (tmp_path / "b" / name).read_bytes() == (folder / name).read_bytes()
    one, two = (
        transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / name)
        for name in "ab"
    )
    assert one.chat_template == two.chat_template and one.padding_side == "left"
    for name in ("special_tokens_map", "padding_side", "model_max_length"):
        assert getattr(one, name) == getattr(two, name)
    assert one.encode("abc<end>") == two.encode("abc<end>")
    one, two = (
        transformers.GenerationConfig.from_pretrained(tmp_path / name).to_dict()
        for name in "ab"
    )
    assert one == two and one["repetition_penalty"] == 1.2
    one, two = (json.loads((tmp_path / n / "config.json").read_text()) for n in "ab")
    assert {k: one[k] for k in one if k.endswith("_id")} == {
        k: two[k] for k in two if k.endswith("_id")
    }


def test_ids_of_config_are_kept_where_there_is_none(folder, tmp_path):
    """A run's folder has another `config.json`."""
    (folder / "generation_config.json").write_text('{"top_k": 3}')
    text = read_text_interface(folder, 31)
    for name, content in text.files().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    again = read_text_interface(tmp_path, 31)
    assert again == text and again.generation.eos_ids == (0,)
    assert again.template_tokens() == text.template_tokens()


def test_names_of_tokens_are_the_tokenizers_own(folder):
    text = read_text_interface(folder, 31)
    named = dict(bos_token="a", eos_token="<end>", unk_token="b", pad_token="c")
    assert text.template_tokens() == named | {"image_token": "d"}
    assert text.chat_template == "plain {{ bos_token }}"


@pytest.mark.parametrize(
    "record,expected",
    [
        ({}, None),
        ({"max_length": 9}, None),
        # As transformers draws: 50 tokens unless the file says otherwise, and the
        # likeliest one without do_sample.
        (FILES["generation_config.json"], Sampling(0.7, 50, 1.0, 0.1, 1.2)),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, Sampling(1.0, 64, 0.95)),
        ({"do_sample": True, "top_k": 0, "top_p": None}, Sampling(1.0)),
        ({"temperature": 0.6, "top_p": 0.9}, Sampling(0.0)),
        (
            {"do_sample": False, "repetition_penalty": 1.1},
            Sampling(0.0, repetition_penalty=1.1),
        ),
        ({"do_sample": True, "num_beams": 1, "typical_p": 1.0}, Sampling(1.0, 50)),
        ({"do_sample": True, "top_k": -1}, "top_k must be >= 0, got -1; say how"),
        ({"do_sample": True, "temperature": "0.6"}, "temperature='0.6' must be a num"),
        ({"do_sample": "yes"}, "do_sample='yes' must be true or false"),
        ({"do_sample": True, "temperature": 10**400}, "int too large to convert"),
        ({"do_sample": True, "top_k": True}, "top_k=True must be a number"),
        ({"do_sample": True, "num_beams": 4}, "num_beams=4 is not built here; say"),
        ({"do_sample": False, "no_repeat_ngram_size": 3}, "no_repeat_ngram_size=3"),
    ],
)
def test_makers_sampling_is_that_of_transformers(record, expected):
    config = GenerationConfig(record=record)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            assert config.sampling
    else:
        assert config.sampling == expected


def test_what_is_not_followed_is_reported_once(folder, caplog):
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [0, 99], "stop_strings": ["x"], "num_return_sequences": 1}'
    )
    record = json.loads((folder / "tokenizer.json").read_text())
    record["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(record))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    end = {"content": "<end>", "special": True}
    # Token 31 has no parameters.
    added = {"0": end, "30": {"content": "<tool>"}, "31": {"content": "<image>"}}
    added["29"] = end | {"lstrip": True}
    settings |= {"cls_token": "<cls>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"added_tokens_decoder": added})
    )
    memjax.load(folder)
    notes = caplog.messages
    for part in (
        "no token of the model: 99",
        "stop_strings=['x']",
        "dropout of 0.5",
        "tokens not in tokenizer.json, or otherwise, and not added: "
        "'<tool>', '<end>', '<cls>'",
    ):
        assert sum(part in note for note in notes) == 1
    assert len(notes) == 4


@pytest.mark.parametrize("added", [["<tool>"], {"x": {"content": "a"}}, {"1": "a"}])
def test_added_tokens_that_are_none_are_named(folder, added):
    record = json.dumps({"added_tokens_decoder": added})
    (folder / "tokenizer_config.json").write_text(record)
    with pytest.raises(ValueError, match="added_tokens_decoder must hold"):
        read_text_interface(folder, 31)


def test_template_that_is_not_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="chat_template.jinja is not UTF-8"):
        read_text_interface(folder, 31)


def test_every_key_of_transformers_has_its_place():
    """`text_keys` against transformers' own attributes."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    known = {
        *text_keys.GENERATION_USED,
        *text_keys.GENERATION_REFUSED,
        *text_keys.GENERATION_NOTED,
        *text_keys.GENERATION_CARRIED,
    }
    assert vars(transformers.GenerationConfig()).keys() <= known
    defaults = transformers.GenerationConfig._get_default_generation_params()
    for name, values in text_keys.GENERATION_REFUSED.items():
        assert defaults.get(name) in values, name
    known = {
        *text_keys.TOKENIZER_USED,
        *text_keys.TOKENIZER_NOTED,
        *text_keys.TOKENIZER_CARRIED,
    }
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer().backend
    )
    attributes = {name for name in vars(made) if not name.startswith("_")}
    assert attributes | {*made.SPECIAL_TOKENS_ATTRIBUTES} <= known
    file = json.loads(tiny.tokenizer().serialised)
    assert file.keys() <= {*text_keys.TOKENIZER_JSON}
