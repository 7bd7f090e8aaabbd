"""Compiled methods of modules.

Without it an eager call compiles every loop and branch inside anew, each time.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax
import numpy as np
from flax import nnx

Method = TypeVar("Method", bound=Callable[..., Any])

# True while a compiled method is traced: what it calls becomes part of its program.
_inside = contextvars.ContextVar("inside a compiled method", default=False)


@overload
def compiled(method: Method, /) -> Method: ...
@overload
def compiled(*, check: Callable[..., None]) -> Callable[[Method], Method]: ...
def compiled(method: Any = None, /, *, check: Callable[..., None] | None = None) -> Any:
    """A method that is compiled once for each shape of its arguments.

    The module's parameters are arguments of the program; its other attributes and all
    arguments that are no arrays are constants of it, and must be hashable. The method
    must not change the module. Within `jax.jit`, `jax.grad` or `nnx.jit` its operations
    become part of the caller's program.

    Args:
        method: of a flax module.
        check: called first, with the same arguments: what looks at values, which are
            not known inside a program.

    Example:
        @compiled(check=check_tokens)
        def features(self, state, tokens): ...
    """
    if method is None:
        return functools.partial(_compiled, check)
    return _compiled(check, method)


def _compiled(check, method):

    @functools.wraps(method)
    def call(self: nnx.Module, *args: Any, **options: Any) -> Any:
        if check is not None:
            check(self, *args, **options)
        if _inside.get():
            return method(self, *args, **options)
        leaves, tree = jax.tree.flatten((args, options))
        dynamic = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        arrays = [x for x, is_array in zip(leaves, dynamic, strict=True) if is_array]
        # An array's place keeps its type, which no other constant is.
        constants = tuple(
            jax.Array if is_array else x
            for x, is_array in zip(leaves, dynamic, strict=True)
        )
        graph, variables = nnx.split(self)
        return _run(method, graph, tree, constants, variables, arrays)

    return call


# Inlined in a caller's program, so that this one looks as without the decorator.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _run(method, graph, tree, constants, variables, arrays):
    arrays = iter(arrays)
    leaves = [next(arrays) if x is jax.Array else x for x in constants]
    args, options = jax.tree.unflatten(tree, leaves)
    token = _inside.set(True)
    try:
        return method(nnx.merge(graph, variables), *args, **options)
    finally:
        _inside.reset(token)
