"""Documents show the committed result files, and measured numbers in tables only."""

import pytest

from experiments.lab import render
from experiments.lab.results import RESULTS, load, show, table

SOURCE = "speed/hybrids"


@table("study/one", SOURCE)
def one(result):
    yield {"": "model", "PPL": "1.25"}
    yield {"": "n-gram"}
    yield f"measured at {result['commit']}"


@table("study/lost", "study/nowhere")
def lost(result):
    yield {"": "model", "PPL": "1.25"}


TABLES = {"study/one": one, "study/lost": lost}


def block(name, body=""):
    return f"# Results\n\n<!-- table: {name} -->\n{body}<!-- /table -->\n"


def problems(text, folder, name="README.md"):
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    found = [*render.problems([file], TABLES, folder)]
    return [x for x in found if "in no document" not in x]


@pytest.mark.slow  # It imports all studies.
def test_the_repository_is_rendered():
    assert render.main(check=True) == 0


def test_rendered_block_has_cells_notes_and_links_to_its_source():
    text = render.replace(block("study/one"), TABLES, RESULTS.parent / "study")
    assert "|  | PPL |\n|---|--:|\n| model | 1.25 |\n| n-gram |  |\n" in text
    source = load(SOURCE)
    where = f"{source['device']}, {source['date']}, {source['commit']}"
    note = f"measured at {source['commit']}"
    assert f"(../results/speed/hybrids.json): {where}; {note}</sub>" in text


def test_wrong_block_is_named(tmp_path):
    for text, message in (
        (block("study/one", "| old |\n"), "table study/one is stale"),
        (block("study/lost"), "nowhere.json is missing"),
        (block("study/three"), "table study/three: there is no such table"),
        ("<!-- table: study/one -->\n", "a block has no end"),
    ):
        (found,) = problems(text, tmp_path)
        assert message in found


def test_table_in_no_document_or_in_two_is_named(tmp_path):
    tables, files = {"study/one": one}, [tmp_path / "a.md", tmp_path / "b.md"]
    # A study that has not been run yet has none to stand in.
    assert not [*render.problems([], {"study/lost": lost}, tmp_path)]
    assert [*render.problems([], tables, tmp_path)] == [
        "table study/one is in no document"
    ]
    for file in files:
        file.write_text(block("study/one"))
    render.write(files, TABLES)
    found = [*render.problems(files, tables, tmp_path)]
    assert found == [f"{files[1]}: table study/one is in {files[0]} too: link to it"]


def test_measured_numbers_outside_of_tables_are_found(tmp_path):
    for text in ("PPL 17.1", "5 ± 1", "12%", "2x faster", "30 ms", "7 s", "9 MB"):
        (found,) = problems(f"# Results\n\nIt is {text}.\n", tmp_path)[:1]
        assert "README.md:3" in found and "stands in no table" in found
    for text in (
        "16 facts, 8,192 tokens, Table 12, section 4.6.1",
        "Apache-2.0 on Python 3.11 with jax 0.10.2",
        "`--lr 0.5`, [the paper](https://arxiv.org/abs/2405.06067)",
        "```\nstep 0.5 s\n```",
    ):
        assert problems(f"# Results\n\n{text}\n", tmp_path) == []


def test_outside_of_experiments_only_sections_of_results_are_searched(tmp_path):
    text = "# Start\n\n0.5 s\n\n## Results\n\n0.6 s\n\n## More\n\n0.7 s\n"
    assert all("README.md:7" in line for line in problems(text, tmp_path))
    everywhere = problems(text, tmp_path, "experiments/README.md")
    assert {line.split(":")[1] for line in everywhere} == {"3", "7", "11"}


def test_check_exits_with_1_and_writing_mends_it(tmp_path, monkeypatch, capsys):
    file = tmp_path / "README.md"
    file.write_text(block("study/one"))
    monkeypatch.setattr(render, "documents", lambda root: [file])
    monkeypatch.setattr(render, "declared", lambda: ({"study/one": one}, {}))
    monkeypatch.setattr(render, "undeclared", lambda figures: [])
    assert render.main(check=True) == 1
    assert "study/one is stale" in capsys.readouterr().err
    assert render.main() == 0
    assert render.main(check=True) == 0


def test_a_table_wider_than_the_screen_is_cut_between_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    cells = {f"{n} notes, later": f"{n}.00 (0.12 to 0.34)" for n in range(4)}
    show("Answers", iter([{"model": "a name of 20 letters"} | cells, "a note"]))
    printed = capsys.readouterr().out
    assert all(cell in printed for cell in cells.values()) and "a note" in printed
    assert printed.count("a name of 20 letters") == 4
