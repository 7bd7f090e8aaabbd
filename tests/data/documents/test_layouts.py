"""Files as data sets are published: compressed, split by name, a row a line."""

import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet

from memjax.data import RowConfig, open_documents
from memjax.data.documents import sources

BOM = b"\xef\xbb\xbf"


def lay_out(root, files):
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return str(root)


def lines(*texts):
    return "\n".join(json.dumps({"text": text}) for text in texts).encode()


def zstd(content):
    return pyarrow.compress(content, codec="zstd", asbytes=True)


def splits(spec):
    return sorted((d.split, d.text) for d in open_documents(spec))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", BOM + lines("one", "two")),
        ("a.jsonl.gz", gzip.compress(BOM + lines("one", "two"), mtime=0)),
        ("a.json.gz", gzip.compress(lines("one", "two"), mtime=0)),
        # Parallel compressors write one frame after the other.
        ("a.jsonl.zst", zstd(lines("one") + b"\n") + zstd(lines("two"))),
        ("a.json", b' [{"text": "one"}, {"text": "two"}]'),
    ],
)
def test_one_file_is_a_source_plain_or_compressed(tmp_path, name, content):
    lay_out(tmp_path, {name: content, "b.txt": b"another source"})
    assert [d.text for d in open_documents(str(tmp_path / name))] == ["one", "two"]


def test_a_byte_order_mark_is_no_character_of_a_text(tmp_path):
    spec = lay_out(tmp_path, {"a.txt": BOM + b"text", "b.md.gz": gzip.compress(BOM)})
    assert [d.text for d in open_documents(spec)] == ["text"]


PILE = {
    "train/00.jsonl.zst": zstd(lines("a")),
    "train/01.jsonl.zst": zstd(lines("b")),
    "val.jsonl.zst": zstd(lines("c")),
    "test.jsonl.zst": zstd(lines("d")),
    "README.md": b"# The card",
    "dataset_infos.json": b'{"default": {}}',
}
C4 = {
    "en/c4-train.00000-of-00002.json.gz": gzip.compress(lines("a")),
    "en/c4-train.00001-of-00002.json.gz": gzip.compress(lines("b")),
    "en/c4-validation.00000-of-00001.json.gz": gzip.compress(lines("c")),
    "en/eval.jsonl": lines("d"),
}
WORDS = {
    "my_train_a.jsonl": lines("a"),
    "my_train_b.jsonl": lines("b"),
    "my_dev_set.jsonl": lines("c"),
    "a.test.of.jsonl": lines("d"),
}
HUB = {
    "data/Train/x/a.txt": b"a",
    "data/Train/x/b.txt": b"b",
    "data/dev-00000-of-00001.jsonl": lines("c"),
    "data/test/a.txt": b"d",
}


@pytest.mark.parametrize("files", [PILE, C4, WORDS, HUB], ids=[*"PCWH"])
def test_names_of_files_and_folders_give_the_splits(tmp_path, files):
    expected = [("test", "d"), ("train", "a"), ("train", "b"), ("validation", "c")]
    assert splits(lay_out(tmp_path, files)) == expected


def test_notes_say_what_is_read_for_which_split_and_what_is_not(tmp_path):
    files = PILE | {"a.pdf": b"%", "more/b.pdf": b"%", "c.raw": b"x"}
    notes = sources.check_source(lay_out(tmp_path, files))
    assert notes == (
        "train is train/",
        "validation is val.jsonl.zst",
        "test is test.jsonl.zst",
        "left out: 2 x .pdf, 1 x .raw, README.md, dataset_infos.json",
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("train.jsonl", "val.jsonl", "dev.jsonl"), "as dev.jsonl and val.jsonl"),
        (("train.jsonl", "train/a.jsonl", "test.jsonl"), "as train/ and train.jsonl"),
        (("train.jsonl", "train.jsonl.gz"), "as train.jsonl and train.jsonl.gz"),
        (("train.jsonl", "rows.jsonl"), "train.jsonl and .*rows.jsonl"),
    ],
)
def test_two_sources_of_a_split_and_files_without_one_are_refused(
    tmp_path, names, message
):
    content = {n: gzip.compress(b"") if n.endswith("z") else b"" for n in names}
    with pytest.raises(ValueError, match=message):
        sources.open_source(lay_out(tmp_path, content))


def test_words_of_titles_are_no_splits(tmp_path):
    spec = lay_out(
        tmp_path, {"a test.txt": b"x", "the-big-test.txt": b"y", "c.md": b"z"}
    )
    assert splits(spec) == [("test", "y"), ("train", "x"), ("validation", "z")]
    alone = str(tmp_path / "the-big-test.txt")
    assert splits(alone) == [("test", "y")]


def test_numbered_files_that_are_missing_are_said(tmp_path):
    names = ("data/train-00001-of-00003.jsonl", "data/test-0-of-1.jsonl")
    notes = sources.check_source(lay_out(tmp_path, {n: lines("a") for n in names}))
    assert notes[2:] == ("data/train-*-of-00003.jsonl: 1 of 3 files are there",)


def test_linked_folders_are_read_once(tmp_path):
    spec = lay_out(tmp_path / "texts", {"a.txt": b"here", "b/a.txt": b"below"})
    lay_out(tmp_path / "far", {"a.txt": b"far"})
    (tmp_path / "texts/far").symlink_to(tmp_path / "far")
    (tmp_path / "texts/b/around").symlink_to(tmp_path / "texts")
    (tmp_path / "texts/gone.txt").symlink_to("nowhere")
    assert sorted(text for _, text in splits(spec)) == ["below", "far", "here"]
    assert sources.check_source(spec) == ("left out: 1 x links to nothing",)


def test_hidden_files_are_no_documents(tmp_path):
    hidden = (".git/a.txt", ".ipynb_checkpoints/a.txt", "b/._a.txt", ".a.jsonl")
    spec = lay_out(tmp_path, {name: b"hidden" for name in hidden} | {"a.txt": b"text"})
    assert splits(spec) == [("train", "text")]
    assert sources.check_source(spec) == ()


WIKITEXT = (
    "\n = One = \n\n Text . \n\n = = Part = = \n\n More . \n = no title = \n"
    "\n = Two = \n\n End = 1 . \n"
)


def test_rows_of_wikitext_are_joined_to_articles(tmp_path):
    rows = WIKITEXT.splitlines(keepends=True)
    rows = ["" if row == "\n" else row for row in rows]
    lay_out(tmp_path, {"train.txt": WIKITEXT.encode()})
    # An article may begin in one file and end in the next.
    for i, part in enumerate((rows[:4], rows[4:])):
        table = pyarrow.table({"text": part})
        parquet.write_table(table, tmp_path / f"test-{i}.parquet")
    articles = RowConfig(join="articles")
    found = {(d.split, d.text) for d in open_documents(str(tmp_path), articles)}
    one, two = WIKITEXT[1:].split("\n = Two")
    texts = (one, " = Two" + two)
    assert found == {(split, text) for split in ("train", "test") for text in texts}


def test_rows_are_joined_by_number_and_by_empty_rows(tmp_path):
    spec = lay_out(tmp_path, {"a.jsonl": lines("a", "b", "", "c", "d", "", "", "e")})

    def texts(join):
        return [d.text for d in open_documents(spec, RowConfig(join=join))]

    assert texts("blank") == ["a\nb\n", "c\nd\n", "e\n"]
    assert texts("3") == ["a\nb\n", "c\nd\n", "e\n"]
    assert texts("100") == ["a\nb\n\nc\nd\n\n\ne\n"]


def test_rows_that_cannot_be_joined_are_refused_by_name(tmp_path):
    spec = lay_out(tmp_path, {"a.jsonl": lines("no title")})
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the row is behind no title"):
        open_documents(spec, RowConfig(join="articles"))
    with pytest.raises(ValueError, match="join='0' must be a number of rows, 'blank'"):
        RowConfig(join="0")
    with pytest.raises(ValueError, match="source='embedded' has whole documents"):
        open_documents("embedded", RowConfig(join="3"))
    with pytest.raises(ValueError, match="has tokens already"):
        sources.check_source("prepared:x", RowConfig(join="3"))
