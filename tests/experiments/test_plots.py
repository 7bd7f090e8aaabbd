"""Every committed plot is drawn from its result file by one command."""

from experiments import plots
from experiments.lab.results import RESULTS
from experiments.tables.table import load


def test_every_plot_is_in_the_command_and_has_a_result_file():
    drawn = {path.relative_to(RESULTS) for path in RESULTS.rglob("*.png")}
    assert {str(path.with_suffix("")) for path in drawn} == {*plots.PLOTS}
    for name in plots.PLOTS:
        assert load(plots.SOURCES.get(name, name))["device"]


def test_a_plot_is_drawn_from_its_file(tmp_path):
    plots.draw(only=("ops/kernels",), folder=tmp_path)
    assert (tmp_path / "ops/kernels.png").read_bytes().startswith(b"\x89PNG")
