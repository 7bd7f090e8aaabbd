"""The text of a compiled program: computations and their lines.

%fused_computation (param_0: f32[8,64]) -> f32[8,64] {
  %param_0 = f32[8,64]{1,0:T(8,128)} parameter(0)
  ROOT %add = f32[8,64]{1,0:T(8,128)S(1)} add(%param_0, %param_0)
}
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_BLOCK = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_LINE = re.compile(r"\s*(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.*)")
# The type comes first, and has letters before brackets, not before "(".
_OPCODE = re.compile(r"(?:^| )(?P<opcode>[a-z][\w\-]*)\(")
#: Attributes that name the computations of an operation.
CALLS = "calls|branch_computations|true_computation|false_computation|to_apply"


class Line(NamedTuple):
    """An operation of a computation.

    Attributes:
        name: with its number.
        opcode: of HLO.
        type: of its result, with the layout.
        operands: the names of its operands, in order.
        root: whether its result is the computation's.
        text: the line as it stands.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    root: bool
    text: str

    def called(self, attribute: str) -> list[str]:
        """The computations of an attribute."""
        names = []
        for found in re.findall(
            rf"(?:{attribute})=(\{{[^}}]*\}}|%?[\w.\-]+)", self.text
        ):
            names += re.findall(r"%?([\w.\-]+)", found)
        return names


#: The lines of each computation, both by name.
Blocks = Mapping[str, Mapping[str, Line]]


def read_blocks(text: str) -> tuple[Blocks, str | None]:
    """The lines of each computation, and the name of the entry."""
    blocks: dict[str, list[str]] = {}
    entry = name = None
    for line in text.splitlines():
        head = _BLOCK.match(line)
        if head:
            name = head["name"]
            blocks[name] = []
            entry = name if head["entry"] else entry
        elif line.rstrip() == "}":
            name = None
        elif name is not None and _LINE.match(line):
            blocks[name].append(line)
        elif name is not None and blocks[name]:
            blocks[name][-1] += line
    parsed = {
        name: {line.name: line for line in _parsed(lines)}
        for name, lines in blocks.items()
    }
    return parsed, entry


def _parsed(lines: list[str]) -> Iterator[Line]:
    for line in lines:
        head = _LINE.match(line)
        opcode = head and _OPCODE.search(head["rest"])
        if head and opcode:
            given = re.split(r"\)(?:,|$)", head["rest"][opcode.end() :], maxsplit=1)[0]
            yield Line(
                name=head["name"],
                opcode=opcode["opcode"],
                type=head["rest"][: opcode.start()],
                operands=tuple(re.findall(r"%([\w.\-]+)", given)),
                root=head["root"] is not None,
                text=line,
            )
