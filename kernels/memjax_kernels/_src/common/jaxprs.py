"""Evaluation of a traced function with some primitives replaced.

Pallas lacks some of jax's primitives. A function that kernels share with plain jax is
traced, and its missing primitives are replaced when it runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

#: (parameters of the primitive, operands) -> its result.
Replacement = Callable[[dict[str, Any], Sequence[Any]], Any]


#: Calls that are inlined, and the parameter with their function.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def evaluate(
    closed: Any, arguments: Sequence[Any], replaced: Mapping[str, Replacement]
) -> list[Any]:
    """The results of a traced function.

    Args:
        closed: what `jax.make_jaxpr` gives.
        arguments: its flat arguments.
        replaced: by the name of a primitive of one result, what runs instead.

    Raises:
        ValueError: on a primitive with a function inside that is no plain call: a loop,
            a branch.
    """
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))

    def value_of(atom):
        return atom.val if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        operands = [value_of(atom) for atom in equation.invars]
        name = equation.primitive.name
        if name in _CALLS and name not in replaced:
            inner = equation.params[_CALLS[name]]
            results = evaluate(inner, operands, replaced)
        else:
            results = _bind(equation, operands, replaced)
        values |= dict(zip(equation.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _bind(equation, operands, replaced):
    primitive = equation.primitive
    if primitive.name in replaced:
        return [replaced[primitive.name](equation.params, operands)]
    if any(True for _ in jaxprs_in_params(equation.params)):
        raise ValueError(
            f"a function for kernels must have no {primitive.name}: of primitives that "
            f"call a function only {sorted(_CALLS)} are inlined"
        )
    results = primitive.bind(*operands, **equation.params)
    return results if primitive.multiple_results else [results]
