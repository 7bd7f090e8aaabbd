"""READMEs hold what the result files say, and every measured number in a table."""

import pytest

from experiments.tables import __main__ as program
from experiments.tables import blocks
from experiments.tables.table import Table, load

SOURCE = "hmt/depth"
TABLES = {
    "room/one": lambda: Table(["", "PPL"], [["model", "1.25"]], [SOURCE]),
    "room/lost": lambda: Table(["", "PPL"], [["model", "1.25"]], ["room/nowhere"]),
}


def block(name, body=""):
    return f"# Results\n\n<!-- table: {name} -->\n{body}<!-- /table -->\n"


def problems(text, tmp_path, whole=True):
    return list(blocks.problems(text, TABLES, tmp_path / "README.md", whole))


def test_readmes_of_the_repository_are_right():
    assert program.check(program.readmes(program.ROOT), program.ROOT) == []


def test_every_table_stands_in_a_readme():
    files = program.readmes(program.ROOT)
    text = "".join(file.read_text("utf-8") for file in files)
    shown = {match["name"] for match in blocks._BLOCK.finditer(text)}
    # The main README may have the summary.
    assert set(program.TABLES) - shown <= {"papers"}


def test_a_rendered_block_passes_and_links_to_its_source(tmp_path):
    folder = program.ROOT / "experiments" / "room"
    text = blocks.replace(block("room/one"), TABLES, folder)
    assert "|  | PPL |\n|---|--:|\n| model | 1.25 |\n" in text
    source = load(SOURCE)
    where = f"{source['device']}, {source['date']}, {source['commit']}"
    assert f"(../results/hmt/depth.json): {where}" in text
    found = blocks.problems(text, TABLES, folder / "README.md", True)
    assert list(found) == []


def test_a_stale_block_is_named(tmp_path):
    (found,) = problems(block("room/one", "| old |\n"), tmp_path)
    assert "table room/one is stale" in found


def test_a_missing_result_file_is_named(tmp_path):
    (found,) = problems(block("room/lost"), tmp_path)
    assert "table room/lost" in found and "nowhere.json is missing" in found


def test_an_unknown_table_is_named(tmp_path):
    (found,) = problems(block("room/two"), tmp_path)
    assert found.endswith("table room/two: there is no such table")


def test_a_block_without_an_end_is_named(tmp_path):
    (found,) = problems("<!-- table: room/one -->\n", tmp_path)
    assert "a block has no end" in found


@pytest.mark.parametrize(
    "text",
    ["perplexity 17.1", "5 ± 1", "12%", "2x faster", "takes 30 ms", "7 s", "9 MB"],
)
def test_a_measured_number_outside_is_found(text, tmp_path):
    (found,) = problems(f"# Results\n\nIt is {text}.\n", tmp_path)[:1]
    assert "README.md:3" in found and "stands in no table" in found


@pytest.mark.parametrize(
    "text",
    [
        "16 facts, 8,192 tokens, Table 12, section 4.6.1",
        "Apache-2.0 on Python 3.11 with jax 0.10.2",
        "`--lr 0.5`, [the paper](https://arxiv.org/abs/2405.06067)",
        "```\nstep 0.5 s\n```",
    ],
)
def test_names_settings_and_code_are_not_measured(text, tmp_path):
    assert problems(f"# Results\n\n{text}\n", tmp_path) == []


def test_elsewhere_only_sections_of_results_are_searched(tmp_path):
    text = "# Start\n\n0.5 s\n\n## Results\n\n0.6 s\n\n## More\n\n0.7 s\n"
    found = problems(text, tmp_path, whole=False)
    assert found and all("README.md:7" in line for line in found)


def test_check_exits_with_1_and_writing_mends_it(tmp_path, monkeypatch, capsys):
    file = tmp_path / "README.md"
    file.write_text(block("room/one"))
    monkeypatch.setattr(program, "readmes", lambda root: [file])
    monkeypatch.setattr(program, "TABLES", TABLES)
    assert program.main(check_only=True) == 1
    assert "room/one is stale" in capsys.readouterr().err
    assert program.main(check_only=False) == 0
    assert program.main(check_only=True) == 0
