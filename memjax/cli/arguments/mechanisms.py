"""Options of a model's mechanisms, such as --model.mechanisms.0.window 64."""

import dataclasses
import typing

import docstring_parser
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from memjax.mechanisms import MechanismConfig

REGISTRY = ConstructorRegistry()


@REGISTRY.struct_rule
def _fields_of_the_default(info: StructTypeInfo) -> StructConstructorSpec | None:
    """A field of type `MechanismConfig` has the options of its default's class.

    Without this rule tyro cannot build a Protocol and offers no option.
    """
    if info.type is not MechanismConfig:
        return None
    kind = type(info.default)
    hints = typing.get_type_hints(kind)
    said = _attributes(kind)
    return StructConstructorSpec(
        instantiate=kind,
        fields=tuple(
            StructFieldSpec(
                f.name, hints[f.name], getattr(info.default, f.name), said.get(f.name)
            )
            for f in dataclasses.fields(kind)
            if f.init
        ),
    )


def _attributes(kind: type) -> dict[str, str]:
    """Descriptions of attributes, from the docstrings of a class and its bases."""
    return {
        attribute.arg_name: " ".join((attribute.description or "").split())
        for base in reversed(kind.__mro__)
        for attribute in docstring_parser.parse(base.__doc__ or "").params
    }
