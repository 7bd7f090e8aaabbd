"""The cache of compiled programs on the disk."""

from pathlib import Path

import jax

from memjax.data.documents.tokens import default_cache_dir


def enable_compilation_cache(where: str | None = None) -> None:
    """Saves compiled programs on the disk, for the next command.

    Args:
        where: a folder, or "off". None is that of JAX_COMPILATION_CACHE_DIR, or else
            `compiled` in the user's cache folder.
    """
    if where == "off":
        jax.config.update("jax_enable_compilation_cache", False)
    elif where is not None:
        folder = Path(where).expanduser().resolve()
        jax.config.update("jax_compilation_cache_dir", str(folder))
    elif not jax.config.values["jax_compilation_cache_dir"]:
        folder = default_cache_dir() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))
