"""Finds a model by its name: a folder, a GGUF file, or one of the Hugging Face hub.

A hub id is "owner/name", or "owner/name/file.gguf" for one file of a repository, either
with "@revision". Only the files that a model is read from are downloaded, never those
that are refused (pickles, code).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from memjax.buckets.bucket import Bucket, as_path
from memjax.buckets.local_copies import cached_files
from memjax.config_io import AnyPath
from memjax.data.documents.tokens import default_cache_dir
from memjax.models.checkpoints.gguf.parts import part_names
from memjax.models.checkpoints.hf.safetensors_folder import (
    CARD,
    CHAT_TEMPLATES,
    CONFIG,
    INDEX,
    LICENSES,
    SINGLE,
    TEXT_FILES,
    read_index,
)

HUB_ID = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+)(/(?P<file>[\w./-]+\.gguf))?(@(?P<revision>[\w./-]+))?"
)
#: Files of a LoRA of PEFT, which `peft` reads.
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
DESCRIPTION = (
    *(CONFIG, ADAPTER_CONFIG, INDEX, CARD, *LICENSES),
    *(*TEXT_FILES, f"{CHAT_TEMPLATES}/*.jinja"),
)


class Location(NamedTuple):
    """Location of a model's files.

    Attributes:
        path: a folder or a GGUF file on this computer.
        origin: the path, or "owner/name@commit" of the hub.
        repository: of the hub; None of a model that was here.
        commit: of the repository.
    """

    path: Path
    origin: str
    repository: str | None = None
    commit: str | None = None


def locate(name: AnyPath | str) -> Location:
    """The folder or file of a name; for a hub id without the weights.

    What exists under that path goes first. A repository that was downloaded before
    is found without a network.

    Raises:
        ValueError: saying where it was looked for, if there is nothing of that name.
    """
    path = as_path(name)
    if not isinstance(path, Path):
        return Location(_copied(path), str(path))
    if path.exists():
        return Location(path, str(path))
    parts = HUB_ID.fullmatch(str(name))
    if not parts or str(name).startswith((".", "~")):
        raise ValueError(
            f"{name} is neither a folder nor a GGUF file; a model of the Hugging Face "
            "hub is named owner/name"
        )
    repository, revision = parts["repository"], parts["revision"]
    wanted = part_names(parts["file"]) if parts["file"] else DESCRIPTION
    snapshot = _download(repository, revision, wanted, path)
    # Snapshots are in folders named by their commits.
    commit = snapshot.name
    origin = f"{repository}/{parts['file']}" if parts["file"] else repository
    if parts["file"]:
        file = snapshot / parts["file"]
        for name in wanted:
            if not (snapshot / name).is_file():
                raise ValueError(f"{repository} has no file {name} at {commit}")
        return Location(file, f"{origin}@{commit}", repository, commit)
    if not ((snapshot / CONFIG).is_file() or is_adapter(snapshot)):
        raise ValueError(
            f"{repository} has no {CONFIG} at {commit}; of a repository of GGUF files "
            "name one, as in owner/name/file.gguf"
        )
    return Location(snapshot, f"{origin}@{commit}", repository, commit)


def is_adapter(folder: Path) -> bool:
    """Whether a folder has a LoRA of PEFT; as in transformers, it is loaded first."""
    return (folder / ADAPTER_CONFIG).is_file()


def _copied(url: AnyPath) -> Path:
    """A copy of a folder or a file of a bucket, in the cache."""
    if entries := Bucket(url).entries():
        return cached_files(url, entries, default_cache_dir())
    if not url.is_file():
        raise ValueError(f"{url} is neither a folder nor a GGUF file")
    names = part_names(url.name)
    return cached_files(url.parent, names, default_cache_dir()) / url.name


def fetch_weights(found: Location, *, adapter: bool = False) -> None:
    """Downloads the weights of a model that `locate` found on the hub.

    Args:
        found: the model.
        adapter: those of its LoRA of PEFT instead.

    Raises:
        ValueError: as `locate`, or if the index names files that it may not.
    """
    if found.repository is None or found.path.is_file():
        return
    index = found.path / INDEX
    # The index first: a repository may hold the same weights in other forms too.
    files = sorted(set(read_index(index).values())) if index.exists() else [SINGLE]
    if adapter:
        files = [ADAPTER]
    _download(found.repository, found.commit, files, found.path)
    # Without a network a snapshot is given as it is, whatever it lacks.
    missing = [file for file in files if not (found.path / file).is_file()]
    if missing:
        raise ValueError(
            f"{found.origin} has no file {missing[0]} (pickled weights are not read), "
            f"or it was not downloaded and there is no network: {found.path}"
        )


def _download(
    repository: str, revision: str | None, files: Sequence[str], path: Path
) -> Path:
    """The snapshot's folder with these files of it, those that exist."""
    library = _library()
    try:
        folder = library.snapshot_download(
            repository, revision=revision, allow_patterns=list(files)
        )
    # Also for no network, no repository, no revision, no permission and a bad name.
    except (OSError, ValueError, library.errors.HfHubHTTPError) as error:
        places = library.constants
        wanted = repository if revision is None else f"{repository}@{revision}"
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{wanted} was not found: no such path ({path.absolute()}), not in the "
            f"cache {places.HF_HUB_CACHE}, and not to be had from "
            f"{places.ENDPOINT}: {reason[0][:200]}"
        ) from error
    return Path(folder)


def _library() -> Any:
    """The optional package huggingface_hub; ValueError without it."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            "models of the Hugging Face hub need the optional package huggingface_hub: "
            "pip install huggingface_hub"
        ) from error
    return huggingface_hub
