"""Options of a model's mechanisms, such as --model.mechanisms.0.window 64."""

import dataclasses
import typing

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
    return StructConstructorSpec(
        instantiate=kind,
        fields=tuple(
            StructFieldSpec(f.name, hints[f.name], getattr(info.default, f.name))
            for f in dataclasses.fields(kind)
            if f.init
        ),
    )
