"""Rematerialisation: residuals saved for the backward pass, or computed again."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

#: The name of a layer's input, by which a memory around the model can offload it.
LAYER_INPUT = "layer_input"
# Saves the inputs of the layers, in the host's memory, and nothing else.
offload_layers = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[LAYER_INPUT],
    offload_src="device",
    offload_dst="pinned_host",
)


def remat(activations: str, function: Callable) -> Callable:
    """The function, with rematerialisation as `activations` says.

    Args:
        activations: "keep" all, "offload" the layers' inputs to the host's memory, or
            "recompute" everything from the function's arguments.
        function: of arrays.
    """
    match activations:
        case "keep":
            return function
        case "offload":
            return jax.checkpoint(function, policy=offload_layers)
        case _:
            return jax.checkpoint(function)


def cond_with_remat(
    activations: str,
    needed: Bool[Array, ""],
    function: Callable,
    otherwise: Callable,
    *args: Any,
) -> Any:
    """function(*args) where `needed`, else otherwise(*args).

    As `jax.lax.cond`, but the backward pass runs the branch again. That of `lax.cond`
    saves the residuals of both branches, zeros for the one that did not run. Both
    functions take all arrays they use as arguments.

    With "keep" the backward pass holds a copy of the floats among the arguments, the
    parameters too, and there are derivatives of every mode and order. Otherwise it
    holds none, and there is no forward mode (`jax.jvp`, `jacfwd`, `linearize`).
    """
    leaves, tree = jax.tree.flatten(args)
    kinds = [_kind(leaf) for leaf in leaves]

    def select(kind):
        return [x for x, of in zip(leaves, kinds, strict=True) if of == kind]

    floats, fixed = select("float"), select("fixed")

    def branches(fixed):
        """Both functions of the floats alone: the only arguments with gradients."""

        def of_floats(branch):
            def call(*floats):
                sources = {"float": iter(floats), "fixed": iter(fixed)}
                merged = [
                    leaf if kind == "constant" else next(sources[kind])
                    for leaf, kind in zip(leaves, kinds, strict=True)
                ]
                return branch(*jax.tree.unflatten(tree, merged))

            return call

        return of_floats(function), of_floats(otherwise)

    if activations == "keep":
        return jax.lax.cond(needed, *map(jax.checkpoint, branches(fixed)), *floats)

    # The predicate and integers have no gradients; they are apart from the floats.
    @jax.custom_vjp
    def cond(needed, fixed, floats):
        return jax.lax.cond(needed, *branches(fixed), *floats)

    def forward(needed, fixed, floats):
        return cond(needed, fixed, floats), (needed, fixed, floats)

    def backward(saved, cotangent):
        needed, fixed, floats = saved

        # The branch that ran is run again, and its gradient taken there: nothing else
        # is kept.
        def branch_vjp(branch):
            return lambda *floats: jax.vjp(branch, *floats)[1](cotangent)

        gradients = jax.lax.cond(needed, *map(branch_vjp, branches(fixed)), *floats)
        return None, None, list(gradients)

    cond.defvjp(forward, backward)
    return cond(needed, fixed, floats)


def _kind(leaf):
    """Python numbers in a module, as LoRA's scale, are constants of the program."""
    if not hasattr(leaf, "dtype"):
        return "constant"
    return "float" if jnp.issubdtype(leaf.dtype, jnp.inexact) else "fixed"
