"""Fingerprints of a memory: the parameters and the tokenizer it was made with."""

import hashlib
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from memjax.checks import require_instance, short
from memjax.data.documents.tokenizer import Tokenizer
from memjax.models.base import Model, named_parameters
from memjax_kernels._src.stored_product import Stored, stored_numbers

#: Numbers of each parameter in a fingerprint.
SAMPLED = 4096


class _Found(NamedTuple):
    """A fingerprint, and the arrays that it is of."""

    leaves: list[weakref.ref[Any]]
    fingerprint: str


_known: weakref.WeakKeyDictionary[Model, _Found] = weakref.WeakKeyDictionary()


def fingerprint(model: Model) -> str:
    """The sha256 of names, types, shapes and evenly spaced numbers of all parameters.

    Training changes most numbers, so that a sample is enough: a model of 16 GB is not
    read in full. It is computed once, until a parameter is another array: a
    conversation saves its memory after each turn.
    """
    named = named_parameters(model)
    known = _known.get(model)
    if known is not None and len(known.leaves) == len(named):
        pairs = zip(known.leaves, named, strict=True)
        if all(reference() is leaf for reference, (_, leaf) in pairs):
            return known.fingerprint
    found = hashlib.sha256()
    for path, leaf in named:
        step = max(1, leaf.size // SAMPLED)
        if isinstance(leaf, Stored):
            # As of the same matrix in float32.
            kind = f"float32{leaf.shape}"
            numbers = stored_numbers(leaf, np.arange(0, leaf.size, step))
        else:
            value = np.asarray(leaf)
            kind = f"{value.dtype}{value.shape}"
            numbers = value.reshape(-1)[::step]
        found.update(f"{jax.tree_util.keystr(path)} {kind}".encode())
        # -0 is 0, whatever the form in which a weight is stored.
        found.update((numbers + 0).tobytes())
    leaves = [weakref.ref(leaf) for _, leaf in named]
    _known[model] = _Found(leaves, found.hexdigest())
    return found.hexdigest()


def fingerprints(model: Model, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Entries of a memory's record: what it was made with."""
    if tokenizer is not None:
        require_instance("tokenizer", tokenizer, Tokenizer)
    digest = tokenizer.digest if tokenizer else None
    return {"parameters": fingerprint(model), "tokenizer": digest}


def require_fingerprints(
    record: Mapping[str, Any], model: Model, tokenizer: Tokenizer | None, where: str
) -> None:
    """Raises ValueError on other `fingerprints` of the same memory's record."""
    found = fingerprints(model, tokenizer)
    saved, here = record["parameters"], found["parameters"]
    if saved != here:
        raise ValueError(
            f"{where} is of a model with other parameters: their fingerprints are "
            f"{short(saved[:12])} in the memory and {here[:12]!r} in the model; has it "
            "been trained further since?"
        )
    saved, here = record["tokenizer"], found["tokenizer"]
    if saved and here and saved != here:
        raise ValueError(
            f"{where} is of another tokenizer: the digests are {short(saved[:12])} in "
            f"the memory and {here[:12]!r} in the model"
        )
