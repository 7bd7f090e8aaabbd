"""Sources: folders, tensorflow-datasets, Hugging Face, and the split rule."""

import json
import os
import subprocess
import sys
import types

import pyarrow
import pytest
from pyarrow import parquet

from memjax.data import Document, RowConfig, assign_splits, open_documents
from memjax.data.documents import readers, sources
from memjax.data.documents.documents import read_documents, scan
from memjax.data.documents.tables import huggingface_source


def folder_documents(path):
    return open_documents(f"folder:{path}")


def of_split(spec, split):
    source = sources.open_source(spec)
    return list(read_documents(source, scan(source, split), split))


def _documents(kind, count):
    return [
        Document(f"{kind}{i}", kind, "train", f"{kind}{i}" + "x" * i)
        for i in range(count)
    ]


def _splits(documents):
    return {document.name: document.split for document in documents}


def test_split_rule_puts_a_long_text_of_each_kind_in_each_split():
    documents = assign_splits(_documents("a", 3) + _documents("b", 20))
    splits = _splits(documents)
    assert (splits["a2"], splits["a1"], splits["a0"]) == ("train", "validation", "test")
    counts = {s: list(splits.values()).count(s) for s in set(splits.values())}
    assert counts == {"train": 17, "validation": 3, "test": 3}
    assert {splits[f"b{i}"] for i in (17, 18, 19)} == {"train", "validation", "test"}


def test_split_rule_ignores_the_order_of_arrival():
    documents = _documents("a", 25)
    assert _splits(assign_splits(documents)) == _splits(assign_splits(documents[::-1]))


def test_small_kinds_start_with_train():
    assert _splits(assign_splits(_documents("a", 1))) == {"a0": "train"}
    both = _splits(assign_splits(_documents("a", 2)))
    assert both == {"a1": "train", "a0": "validation"}


def test_equal_texts_share_a_split():
    twins = [Document(f"twin{i}", "a", "train", "same text") for i in range(3)]
    splits = _splits(assign_splits(twins + _documents("a", 2)))
    assert splits["twin0"] == splits["twin1"] == splits["twin2"] == "train"
    assert {splits["a0"], splits["a1"]} == {"validation", "test"}


def _write_folder(root):
    (root / "essays").mkdir()
    (root / "essays" / "one.txt").write_text("first essay ü", "utf-8")
    (root / "essays" / "two.md").write_text("second")
    lines = [{"text": "from json"}, {"text": "again", "other": 1}]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    table = pyarrow.table({"id": [1, 2], "text": ["from parquet", "row two"]})
    parquet.write_table(table, root / "table.parquet")
    (root / "picture.png").write_bytes(b"\x89PNG")


def test_folder_reads_every_format(tmp_path):
    _write_folder(tmp_path)
    found = {d.name: (d.kind, d.text) for d in open_documents(f"folder:{tmp_path}")}
    assert found == {
        "essays/one.txt": ("essays", "first essay ü"),
        "essays/two.md": ("essays", "second"),
        "rows.jsonl:1": ("text", "from json"),
        "rows.jsonl:2": ("text", "again"),
        "table.parquet:1": ("text", "from parquet"),
        "table.parquet:2": ("text", "row two"),
    }


def test_folder_takes_the_splits_that_it_is_given(tmp_path):
    for split in ("train", "validation", "test"):
        (tmp_path / split / "poems").mkdir(parents=True)
        (tmp_path / split / "poems" / "a.txt").write_text(split)
    documents = folder_documents(tmp_path)
    assert {(d.split, d.kind, d.text) for d in documents} == {
        (split, "poems", split) for split in ("train", "validation", "test")
    }
    assert [d.text for d in of_split(f"folder:{tmp_path}", "test")] == ["test"]
    (tmp_path / "stray.txt").write_text("outside")
    with pytest.raises(ValueError, match="stray.txt"):
        folder_documents(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nthen \xff", r"a\.txt:2: not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n\xff', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'{"txt": "x"}', r"a\.jsonl:1: no column 'text' or"),
        ("a.jsonl", b'["text"]', r"a\.jsonl:1: needs an object"),
        ("a.jsonl", b'{"text": 3}', r"a\.jsonl:1: text is int"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl:1: not valid Unicode"),
        ("a.jsonl", b'{"text":' + b"[" * 200_000, r"a\.jsonl:1: not JSON \(nested too"),
        ("a.parquet", b"PAR1 nonsense", r"a\.parquet: not a readable parquet"),
        ("a.pdf", b"%PDF", r"holds no file ending in \.txt, \.md"),
        ("a.jsonl.gz", b"\x1f\x8b\x08 cut", r"a\.jsonl\.gz cannot be read"),
        ("a.txt.zst", b"not zstandard", r"a\.txt\.zst cannot be read"),
    ],
)
def test_malformed_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        folder_documents(tmp_path)


def test_parquet_needs_its_column(tmp_path):
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["x"]}), file)
    with pytest.raises(ValueError, match=r"no column 'text' or.*has 'body'"):
        folder_documents(tmp_path)
    (found,) = open_documents(str(file), RowConfig(column="body"))
    assert found.text == "x"


def test_empty_and_null_texts_are_left_out_and_counted(tmp_path, caplog):
    rows = ["x", None, "", "y"]
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet")
    lines = "\n".join(json.dumps({"text": text}) for text in rows)
    (tmp_path / "b.jsonl").write_text(lines)
    (tmp_path / "c.txt").write_text("")
    source = sources.open_source(str(tmp_path))
    entries = scan(source, None)
    assert "5 empty texts left out, the first is a.parquet:2" in caplog.text
    found = [d.text for d in read_documents(source, entries, None)]
    assert found == ["x", "y", "x", "y"]
    assert sorted(d.text for d in folder_documents(tmp_path)) == sorted(found)


def test_texts_that_are_far_too_large_are_refused_by_name(tmp_path, monkeypatch):
    """Small files may decode to gigabytes: 33 kB of parquet to a text of one."""
    monkeypatch.setattr(readers, "MAX_DOCUMENT", 1000)
    monkeypatch.setattr(readers, "MAX_ROW_GROUP", 5000)
    row = pyarrow.table({"text": ["x" * 1001]})
    for name, write in (
        ("a.txt", lambda file: file.write_text("x" * 1001)),
        ("a.jsonl", lambda file: file.write_text(json.dumps({"text": "x" * 1001}))),
        ("a.parquet", lambda file: parquet.write_table(row, file)),
    ):
        write(tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name}.*more than 1,000 bytes"):
            folder_documents(tmp_path)
        (tmp_path / name).unlink()
    many = pyarrow.table({"text": [str(i) * 900 for i in range(9)]})
    parquet.write_table(many, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="decodes to .* bytes of text, of at most"):
        folder_documents(tmp_path)


def test_pipes_and_devices_of_a_folder_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "a.txt").write_text("text")
    assert [d.name for d in folder_documents(tmp_path)] == ["a.txt"]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        folder_documents(tmp_path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("embeded", "did you mean 'embedded'"),
        ("folder", "did you mean 'folder:PATH'"),
        ("folder:", "is no path, and none of embedded, PATH, folder:PATH, tfds:NAME"),
        ("", "source='' is no path"),
        ("s3:bucket", "is no path"),
        ("folder:/no/such/place", "is neither a file nor a folder"),
    ],
)
def test_unknown_sources_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        open_documents(spec)


TFDS_PROGRAM = """
import pathlib
import sys
import tensorflow_datasets as tfds
from memjax.data import assign_splits
from memjax.data.documents import sources, tables

class Tiny(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    SPLITS = ("train", "test")

    def _info(self):
        features = {"book_text": tfds.features.Text(), "id": tfds.features.Text()}
        features = tfds.features.FeaturesDict(features)
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, manager):
        return {split: self._generate_examples(split) for split in self.SPLITS}

    def _generate_examples(self, split):
        for i in range(3):
            text = f"{split} text {i} \\u00fc" if i else ""
            yield i, {"book_text": text, "id": f"id {i}"}

class Whole(Tiny):
    SPLITS = ("train",)

    def _generate_examples(self, split):
        for i in range(3):
            yield i, {"book_text": "x" * (i + 1), "id": "same"}

def documents(name, split=None, **options):
    source = tables.tfds_source(name, **options)
    found = list(source.read(split))
    return found if source.has_splits else assign_splits(found)

def with_class(prepared, name):
    file = pathlib.Path(prepared, "features.json")
    own = "tensorflow_datasets.core.features.text_feature.Text"
    file.write_text(file.read_text().replace(own, name))
    return prepared

def as_tfrecord(prepared):
    info = pathlib.Path(prepared, "dataset_info.json")
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    return prepared

folder = sys.argv[1]
say = lambda *found: print(">", *found)
show = lambda found: sorted((d.split, d.kind, d.text) for d in found)
say(show(documents("tiny", data_dir=folder)))
say(show(documents("tiny", "test", data_dir=folder, text_key="id")))
prepared = folder + "/tiny/1.0.0"
say(sources.open_documents("tfds:" + prepared)[0].text.startswith("train text"))
say(show(documents("whole", data_dir=folder)))
for call in (
    lambda: sources.open_documents("tfds:tinny"),
    lambda: documents("tiny", data_dir=folder, text_key="body"),
    lambda: sources.open_documents("tfds:" + folder),
    lambda: sources.open_documents("tfds:" + as_tfrecord(prepared)),
    lambda: sources.open_documents("tfds:" + with_class(prepared, "evil.Text")),
):
    try:
        call()
    except ValueError as error:
        say(str(error).splitlines()[0])
say("tensorflow" in sys.modules)
"""


@pytest.mark.slow
def test_tfds_without_tensorflow(tmp_path):
    """In a process of its own: tfds warns on import and registers builders."""
    program = tmp_path / "program" / "tiny.py"
    program.parent.mkdir()
    program.write_text(TFDS_PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "data")],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={
            "PATH": "",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "HOME": str(tmp_path),
            "JAX_PLATFORMS": "cpu",
        },
    )
    texts = {s: ["", f"{s} text 1 ü", f"{s} text 2 ü"] for s in ("test", "train")}
    # Empty ones are left out, and counted, where they are encoded.
    both = [(split, "tiny", text) for split in texts for text in texts[split]]
    ids = [("test", "tiny", f"id {i}") for i in range(3)]
    dealt = [("test", "x"), ("train", "xxx"), ("validation", "xx")]
    # tfds prints its progress to the same place.
    lines = [s[2:] for s in done.stdout.splitlines() if s.startswith("> ")]
    assert lines[:4] == [
        str(both),
        str(ids),
        "True",
        str([(split, "whole", text) for split, text in dealt]),
    ]
    assert lines[4] == ("tfds:tinny: tfds knows no such dataset; did you mean 'tiny'?")
    assert "no column 'body'; it has 'book_text', 'id'" in lines[5]
    assert lines[6].endswith("is not a prepared folder: no dataset_info.json")
    assert "file format FileFormat.TFRECORD is not supported" in lines[7]
    assert "pythonClassName='evil.Text' must be a class of tensorflow" in lines[8]
    assert lines[9:] == ["False"]


class _Table:
    def __init__(self, rows):
        self._rows = rows
        self.column_names = list(rows[0])
        known = {"train": types.SimpleNamespace(num_examples=len(rows))}
        self.info = types.SimpleNamespace(splits=known)

    def __iter__(self):
        return iter(self._rows)


def _fake_datasets(monkeypatch, tables, calls):
    def load_dataset(name, config, streaming):
        calls.append((name, config))
        if name == "missing":
            raise FileNotFoundError("no such dataset")
        return tables

    module = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_huggingface_documents(monkeypatch):
    tables = {
        "train": _Table([{"text": "a"}, {"text": ""}]),
        "dev": _Table([{"text": "b"}]),
        "extra": _Table([{"text": "c"}]),
    }
    calls = []
    _fake_datasets(monkeypatch, tables, calls)
    found = open_documents("hf:owner/name:raw")
    assert calls == [("owner/name", "raw")]
    assert [(d.split, d.text) for d in found] == [("train", "a"), ("validation", "b")]
    assert [d.text for d in of_split("hf:n", "validation")] == ["b"]
    with pytest.raises(ValueError, match="hf:missing: no such dataset"):
        open_documents("hf:missing")
    with pytest.raises(ValueError, match="no column 'body'; it has 'text'"):
        huggingface_source("n", text_key="body")


def test_huggingface_reads_the_first_rows_of_the_splits_that_are_asked_for(
    monkeypatch,
):
    rows = [{"text": text} for text in "abcde"]
    tables = {name: _Table(rows) for name in ("train", "test", "extra", "dev", "val")}
    _fake_datasets(monkeypatch, tables, [])

    def texts(spec):
        return {(d.split, d.text) for d in open_documents(spec)}

    both = {("train", "a"), ("train", "b"), ("test", "a")}
    assert texts("hf:n::train[:40%]+test[:1]") == both
    assert {text for _, text in texts("hf:n::extra[:3]")} == {"a", "b", "c"}
    for split, message in (
        ("other", "split='other' must be one of 'train', 'test'"),
        ("train[2:]", r"split='train\[2:\]' must be one of"),
        ("test[:50%]", "does not say how many rows it has"),
        ("test[:0.5]", "must have whole rows"),
        ("dev+val", "the split 'validation' twice, as 'dev' and 'val'"),
    ):
        with pytest.raises(ValueError, match=message):
            open_documents(f"hf:n::{split}")


def test_huggingface_with_train_only_is_split_by_the_rule(monkeypatch):
    rows = [{"text": text} for text in ("x", "xxx", "xx")]
    _fake_datasets(monkeypatch, {"train": _Table(rows)}, [])
    found = {d.text: d.split for d in open_documents("hf:name")}
    assert found == {"xxx": "train", "xx": "validation", "x": "test"}


def test_huggingface_with_foreign_splits_only(monkeypatch):
    _fake_datasets(monkeypatch, {"extra": _Table([{"text": "c"}])}, [])
    with pytest.raises(ValueError, match="has splits 'extra'"):
        open_documents("hf:name")


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"package datasets: pip install datasets"):
        open_documents("hf:name")
    with pytest.raises(
        ImportError, match=r"tensorflow-datasets: pip install tensorflow-datasets"
    ):
        open_documents("tfds:name")


def test_a_local_folder_is_streamed_by_datasets(tmp_path):
    pytest.importorskip("datasets", reason="needs datasets")
    (tmp_path / "data").mkdir()
    for split, texts in (("train", ["a", None, "b", "c"]), ("validation", ["d"])):
        file = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
        parquet.write_table(pyarrow.table({"text": texts}), file)
    documents = open_documents(f"hf:{tmp_path}::train[:3]+validation")
    found = [(d.split, d.text) for d in documents]
    assert found == [("train", "a"), ("train", "b"), ("validation", "d")]
