"""`nnx.tabulate` for modules that take and return memories."""

import functools
from typing import Any

import jax
from flax import nnx
from flax.nnx import summary

from memjax.checks import require_instance


def tabulate(module: nnx.Module, *args: Any, **options: Any) -> str:
    """A table of a module's parameters, inputs and outputs, as `nnx.tabulate` makes it.

    That one raises a TypeError on NamedTuples inside tuples (flax 0.12.8), as the
    arguments `(state, x)` of every call with a memory are. Here they are printed.

    Args:
        module: a model, a `Memory`, or any module with one inside.
        args: of its call, say `state, tokens`.
        options: of `nnx.tabulate`, or further arguments of the call.

    Raises:
        ValueError: if `module` is no module.
    """
    require_instance("module", module, nnx.Module)
    to_printable = summary._maybe_pytree_to_dict
    # A private function of flax, replaced for this call alone: there is no hook for it.
    summary._maybe_pytree_to_dict = _printable
    try:
        return nnx.tabulate(module, *args, **options)
    finally:
        summary._maybe_pytree_to_dict = to_printable


def _printable(tree: Any) -> Any:
    """A leaf as it is, any other tree as its leaves by their paths."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    if len(named) == 1 and not named[0][0]:
        return tree
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): leaf for path, leaf in named}
