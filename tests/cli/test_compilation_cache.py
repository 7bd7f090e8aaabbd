"""The folder of compiled programs."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from memjax.cli.compilation_cache import enable_compilation_cache

NAMES = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {name: jax.config.values[name] for name in NAMES}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def folder() -> str | None:
    return jax.config.values["jax_compilation_cache_dir"]


def test_default_is_the_users_cache_folder(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", None)
    enable_compilation_cache()
    assert folder() == str(tmp_path / "memjax" / "compiled")


def test_given_folder_precedes_that_of_the_environment(
    tmp_path: Path,
) -> None:
    jax.config.update("jax_compilation_cache_dir", "of the environment")
    enable_compilation_cache()
    assert folder() == "of the environment"
    enable_compilation_cache(str(tmp_path / "given"))
    assert folder() == str(tmp_path / "given")


def test_off_disables_the_cache() -> None:
    enable_compilation_cache("off")
    assert not jax.config.values["jax_enable_compilation_cache"]
