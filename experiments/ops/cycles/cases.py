"""The table of all cases: a new one is a line in the file of its kind."""

from experiments.ops.cycles import (
    cases_attention,
    cases_heads,
    cases_memories,
    cases_models,
    cases_ops,
)
from experiments.ops.cycles.case import Case

MODULES = (cases_ops, cases_heads, cases_attention, cases_memories, cases_models)
CASES: dict[str, Case] = {
    name: case for module in MODULES for name, case in module.table().items()
}


def module_of(name: str) -> str:
    """The name of the module that has a case in its table."""
    return next(module.__name__ for module in MODULES if name in module.table())
