"""The README's example runs as printed, and its commands name what exists."""

import pathlib
import re

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["y"].shape == (2, 256)
    assert scope["drawn"].shape == (2, 20)


def test_files_named_in_the_readme_exist():
    root = pathlib.Path(__file__).parents[1]
    names = re.findall(r"`((?:memjax|experiments|kernels|tests)/[\w/.]+)`", README)
    assert len(names) > 5
    assert all((root / name).exists() for name in names)
