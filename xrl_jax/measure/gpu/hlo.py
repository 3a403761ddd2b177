"""A reader of XLA's text of a compiled module: its instructions, by name."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_BACKEND = re.compile(r"backend_config=(\{.*\})")
_BYTES = {"pred": 1, "token": 0, "c64": 8, "c128": 16}


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's type, with XLA's name of the element type ("f32") and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        digits = re.search(r"\d+", self.dtype)
        each = _BYTES.get(self.dtype, max(int(digits.group()) // 8, 1) if digits else 0)
        return self.size * each


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a module.

    Attributes:
      shapes: the arrays of its result; one unless the result is a tuple.
      operands: names of its operands.
      rest: the text after them: attributes, metadata and the back end's settings.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    rest: str

    def attribute(self, name: str) -> str:
        """Return an attribute's text up to the next comma or brace; "" where it has none."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]*)", self.rest)
        return "" if found is None else found.group(1)

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return an attribute that lists numbers, as in "lhs_batch_dims={0,1}"."""
        return tuple(map(int, re.findall(r"\d+", self.attribute(name))))

    @functools.cached_property
    def settings(self) -> Mapping[str, Any]:
        """The back end's settings; empty where there are none or they cannot be read."""
        found = _BACKEND.search(self.rest)
        if found is None:
            return {}
        try:
            return json.JSONDecoder().raw_decode(found.group(1))[0]
        except ValueError:
            return {}


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled module.

    Attributes:
      computations: instructions of each computation, by its name.
      by_name: every instruction; XLA gives no name twice.
    """

    computations: Mapping[str, Sequence[Instruction]]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {i.name: i for each in self.computations.values() for i in each}

    def called(self, instruction: Instruction) -> Sequence[Instruction]:
        """Return the instructions of the computation that a fusion calls; () for other ones."""
        return self.computations.get(instruction.attribute("calls").lstrip("%"), ())

    def shape_of(self, name: str) -> Shape:
        """Return the first array of an instruction's result."""
        return self.by_name[name].shapes[0]


def read_module(text: str) -> Module:
    """Return the module that XLA printed as `text` (`Compiled.as_text`)."""
    return Module({name: tuple(lines) for name, lines in _computations(text)})


def _computations(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    name, found = "", []
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None:
            name, found = header.group(2), []
        elif line.startswith("}") and name:
            yield name, found
            name = ""
        elif name and (instruction := _instruction(line)) is not None:
            found.append(instruction)


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    name, result, opcode, operands, rest = match.groups()
    shapes = tuple(
        Shape(dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, dims in _SHAPE.findall(result)
    )
    return Instruction(name, opcode, shapes, tuple(re.findall(r"%([\w.\-]+)", operands)), rest)
