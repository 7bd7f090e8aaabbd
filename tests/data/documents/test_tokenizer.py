"""Tokenizers: round trips, ids, refusals."""

import base64
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.data import Document, load_tokenizer
from memjax.data.documents import tokenizer
from memjax.data.documents.tokenizer import Tokenizer, encode_prompt, parse_tokenizer
from memjax.data.documents.tokens import tokenise
from tests import tiny
from tests.data.documents import tokenizer_training

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SHIPPED = {name: load_tokenizer(name) for name in ("bytes", "bpe4k")}


@pytest.mark.parametrize("name", SHIPPED)
@settings(deadline=None)
@given(text=TEXT)
def test_decode_inverts_encode(name, text):
    shipped = SHIPPED[name]
    ids = shipped.encode(text)
    assert ids.dtype == np.int32
    assert shipped.decode(ids) == text
    assert not ids.size or 0 <= ids.min() <= ids.max() < shipped.vocab_size


def test_vocabularies_and_digests():
    assert SHIPPED["bytes"].vocab_size == 256
    assert SHIPPED["bpe4k"].vocab_size == 4096
    assert SHIPPED["bytes"].digest != SHIPPED["bpe4k"].digest
    assert all(isinstance(shipped, Tokenizer) for shipped in SHIPPED.values())


def test_bpe_is_shorter_than_bytes_and_splits_digits():
    text = "the whole of the theorem in 1234"
    bpe = SHIPPED["bpe4k"]
    assert len(bpe.encode(text)) < len(SHIPPED["bytes"].encode(text)) / 2
    assert len(bpe.encode("1234")) == 4


def test_a_json_file_is_read_from_its_path(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(tokenizer_training.train_tokenizer(["aaab abab"] * 20, 260))
    own = load_tokenizer(str(file))
    assert own.decode(own.encode("ab aab")) == "ab aab"
    assert 256 <= own.vocab_size <= 260


def test_a_folder_or_a_repository_of_the_hub_has_a_tokenizer(tmp_path, monkeypatch):
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer_training.train_tokenizer(["aaab abab"] * 20, 260))
    asked = []

    def download(repository, name, revision):
        asked.append((repository, name, revision))
        if revision is None:
            raise OSError("no network")
        return str(file)

    monkeypatch.setattr(tokenizer.huggingface_hub, "hf_hub_download", download)
    digest = load_tokenizer(str(tmp_path)).digest
    assert load_tokenizer("owner/name@v1").digest == digest
    with pytest.raises(ValueError, match="'owner/name' was not found.*no network"):
        load_tokenizer("owner/name")
    with pytest.raises(ValueError, match="neither"):
        load_tokenizer("owner/missing.json")
    assert asked == [
        ("owner/name", "tokenizer.json", revision) for revision in ("v1", None)
    ]


@pytest.mark.parametrize("sides", ["<s> $A", "<s> $A </s>", "$A"])
def test_prompt_begins_with_the_tokenizers_first_tokens(sides):
    vocabulary = {"a": 0, "<s>": 1, "</s>": 2}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=sides, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made_of = parse_tokenizer(made.to_str().encode(), "made")
    first = [1] if "<s>" in sides else []
    assert made_of.encode("aa").tolist() == [0, 0]
    assert encode_prompt(made_of, "aa").tolist() == [*first, 0, 0]
    document = Document("d", "text", "train", "aa")
    assert tokenise(document, made_of).tolist() == [*first, 0, 0]
    # As chat templates have it; once is enough.
    assert encode_prompt(made_of, "<s>a").tolist() == [1, 0]
    assert encode_prompt(SHIPPED["bytes"], "a").tolist() == [97]


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    content = json.loads(tokenizer_training.train_tokenizer(["ab"], 256))
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file = tmp_path / "cuts.json"
    file.write_text(json.dumps(content))
    assert len(load_tokenizer(str(file)).encode("a b c d e")) == 9


def test_tokenizer_has_an_id_for_every_byte():
    with pytest.raises(ValueError, match="vocab_size=255"):
        tokenizer_training.train_tokenizer(["ab"], 255)


def test_unknown_name_gets_its_near_match():
    with pytest.raises(ValueError, match="'bpe4'.*did you mean 'bpe4k'"):
        load_tokenizer("bpe4")


@pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="bad.json.*not a tokenizers JSON"):
        load_tokenizer(str(file))


def _file(**parts):
    empty = dict.fromkeys(
        "truncation padding normalizer pre_tokenizer post_processor decoder".split()
    )
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    content = {"version": "1.0", "added_tokens": [], "model": model} | empty | parts
    return json.dumps(content).encode()


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
# A table of one entry that leads to its 421,058,657th.
PANICS = base64.b64encode(b"\x04\0\0\0abcdefgh").decode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_file(), r"Missing \[UNK\]"),
        (
            _file(normalizer={"type": "Precompiled", "precompiled_charsmap": PANICS}),
            "bad.json.*index out of bounds",
        ),
        (
            _file(normalizer={"type": "Sequence", "normalizers": [REPLACE] * 4}),
            r"bad.json.*up to 1e\+08 times as long, of at most 1000",
        ),
        (
            _file(decoder={"type": "Sequence", "decoders": [REPLACE] * 4}),
            r"bad.json.*up to 1e\+08 times as long",
        ),
        (b'{"a":' * 100_000, "bad.json.*nested too deeply"),
    ],
)
def test_tokenizer_that_would_abort_the_process_is_refused(tmp_path, content, message):
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(str(file)).encode("z \u1234")


@pytest.mark.parametrize("name", SHIPPED)
def test_ids_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match="range from -1 to 5000"):
        SHIPPED[name].decode(np.array([-1, 5000], np.int32))


@pytest.mark.parametrize("name", SHIPPED)
def test_lone_surrogates_are_refused(name):
    with pytest.raises(ValueError, match="surrogates"):
        SHIPPED[name].encode("a\ud800")


def record(**changes):
    return json.loads(tiny.tokenizer().serialised) | changes


def test_damaged_map_of_a_normalizer_ends_in_one_line(capfd, monkeypatch):
    """Also where it would end the process, which is not this one."""
    damaged = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    file = json.dumps(record(normalizer=damaged)).encode()
    with pytest.raises(ValueError, match="'x' is not .*Cannot parse precompiled"):
        parse_tokenizer(file, "x")
    monkeypatch.setattr(tokenizer, "TRIAL", "import os; os.abort()")
    with pytest.raises(ValueError, match="it ends with -6"):
        parse_tokenizer(file, "x")
    assert capfd.readouterr().err == ""


def test_dropout_of_a_file_is_left_out_and_noted(caplog):
    made = record()
    made["model"] |= {"merges": ["a b"], "dropout": 0.5}
    made["model"]["vocab"]["ab"] = 27
    found = parse_tokenizer(json.dumps(made).encode(), "x")
    assert {tuple(found.encode("abab").tolist()) for _ in range(20)} == {(27, 27)}
    assert caplog.messages == ["x: a dropout of 0.5 is for training, and left out"]
