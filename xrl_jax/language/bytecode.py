"""The bytecode of conditions and attributes: integer vectors computed from the matched nodes.

A value is a vector of K int32 lanes; a scalar has the same value in all lanes. A program is a list
of instructions over registers (instruction i writes register i). Programs are data in the rule
table, run by one jitted `interpreter`, so a new rule recompiles nothing. Conditions are
instructions whose result is checked; they come first.

Expressions: an integer, a bound name, `(vec 1 2 ...)`, `(lane)` (0, 1, 2 ...), properties `(shape
?x) (rank ?x) (dtype ?x) (op ?x) (attrs d) (attr d FIELD) (lowering d) (weight-only ?x) (is-value ?c
NUMBER)`, `(axis-perm d SIDE)` with SIDE lhs, rhs or out (positions of a convolution's batch,
feature and spatial dimensions), lane-wise arithmetic `+ - * // % min max = /= < <= > >= and or not
bit shl`, `(if c a b)`, `(at v i)` (lane i in all lanes), `(gather v idx)`, `(invert perm)`,
reductions over lanes `(sum v) (prod v) (all v) (any v)`, prefix sums `(cumsum v)`, `(unpack code)`
/ `(pack v)` for packed dimension lists, `(layout v)` for the code of a convolution layout (-1 where
there is none), and macros. Dtype names, as in `(= (dtype ?x) float32)`, are replaced by codes
before compilation (`dtype_names`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from xrl_jax.graph import ops
from xrl_jax.language.sexpr import Atom, RuleError, SExpr, integer

K = ops.MAX_ATTRS
R = ops.MAX_RANK
BINARY = (
    "+",
    "-",
    "*",
    "//",
    "%",
    "min",
    "max",
    "=",
    "/=",
    "<",
    "<=",
    ">",
    ">=",
    "and",
    "or",
    "bit",
    "shl",
)
# Opcodes by name; `load` reads features of a bound node, `imm` a literal, `defaults` the default
# attributes of an operator, `put` sets a run of lanes (an attribute field).
OPCODES: tuple[str, ...] = (
    "imm", "lane", *BINARY, "not", "if", "load", "defaults", "at", "gather", "invert", "sum",
    "prod", "all", "any", "unpack", "pack", "layout", "axis-perm", "put", "cumsum",
)  # fmt: skip
CODE = {name: i for i, name in enumerate(OPCODES)}
# The features of a node: first column, number of columns, and fill value of the lanes beyond.
FEATURES = {
    "attrs": (0, K, 0), "shape": (K, R, 1), "rank": (K + R, 1, 0), "dtype": (K + R + 1, 1, 0),
    "op": (K + R + 2, 1, 0), "lowering": (K + R + 3, 1, 0), "weight-only": (K + R + 4, 1, 0),
    "value": (K + R + 5, 1, 0),
}  # fmt: skip
PROPERTIES = tuple(name for name in FEATURES if name != "value")
SIDES = ("lhs", "rhs", "out")
_ARITY = {
    **dict.fromkeys(BINARY, 2), "not": 1, "if": 3, "at": 2, "gather": 2, "invert": 1, "sum": 1,
    "prod": 1, "all": 1, "any": 1, "unpack": 1, "pack": 1, "layout": 1, "cumsum": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """One instruction. `a`, `b`, `c` are registers, or `LITERAL` for `imm`; of a `load` the
    position in the binding, the first feature and the number of features."""

    code: int
    a: int = 0
    b: int = 0
    c: int = 0
    imm: int = 0


LITERAL = -1


def check(e: SExpr, tensors: set[str], numbers: set[str], named_ops: Mapping[str, str]) -> None:
    """Refuse an expression with an unknown function, a wrong number of arguments or an unbound
    name.

    Raises:
      RuleError: the expression is refused; the message names the culprit and its place.
    """
    if isinstance(e, Atom):
        if integer(e.text) is None and e.text not in numbers:
            raise RuleError(f"{e.text!r} is neither a number nor bound", e.place)
        return
    head, args = e.head, e.items[1:]
    if head in PROPERTIES or head in ("attr", "is-value", "axis-perm"):
        wanted = 1 if head in PROPERTIES else 2
        if len(args) != wanted:
            raise RuleError(f"({head} ...) takes {wanted} arguments, got {len(args)}", e.place)
        name = _text(args[0])
        if name not in tensors:
            raise RuleError(f"{name!r} is not bound on the left-hand side", args[0].place)
        if head == "attr":
            op = named_ops.get(name)
            if op is None:
                raise RuleError(f"{name!r} is not the name of a node (see :as)", args[0].place)
            try:
                ops.OPS[op].field(_text(args[1]))
            except KeyError as error:
                raise RuleError(str(error.args[0]), args[1].place) from None
        if head == "axis-perm" and (_text(args[1]) not in SIDES or named_ops.get(name) != "conv"):
            raise RuleError("(axis-perm d SIDE) takes a convolution and lhs, rhs or out", e.place)
        return
    if head == "vec":
        if len(args) > K or any(integer(_text(a)) is None for a in args):
            raise RuleError(f"(vec ...) takes up to {K} integers", e.place)
        return
    if head == "lane":
        return
    if head not in _ARITY:
        raise RuleError(f"there is no function {head!r}", e.place)
    variadic = head in ("and", "or", "+", "*") and len(args) >= 2
    if len(args) != _ARITY[head] and not variadic:
        raise RuleError(f"({head} ...) takes {_ARITY[head]} arguments, got {len(args)}", e.place)
    for a in args:
        check(a, tensors, numbers, named_ops)


def _text(e: SExpr) -> str:
    if not isinstance(e, Atom):
        raise RuleError("expected a name", e.place)
    return e.text


class Assembler:
    """Compiles expressions of one rule into instructions, sharing equal ones.

    Args:
      positions: position of each tensor name in the binding.
      named_ops: for each node name, its operator.
    """

    def __init__(self, positions: Mapping[str, int], named_ops: Mapping[str, str]):
        self.positions = positions
        self.named_ops = named_ops
        self.numbers: dict[str, int] = {}
        self.code: list[Instruction] = []
        self.checked: set[int] = set()
        self._seen: dict[Instruction, int] = {}

    def emit(self, name: str, *operands: int, imm: int = 0) -> int:
        """Append an instruction (or reuse an equal one) and return its register."""
        a, b, c = (*operands, 0, 0, 0)[:3]
        instruction = Instruction(CODE[name], a, b, c, imm)
        if instruction not in self._seen:
            self._seen[instruction] = len(self.code)
            self.code.append(instruction)
        return self._seen[instruction]

    def load(self, position: int, name: str) -> int:
        """Load a property of a bound node."""
        offset, width, fill = FEATURES[name]
        return self.emit("load", position, offset, width, imm=fill)

    def field(self, position: int, offset: int, width: int) -> int:
        """Load an attribute field of a bound node."""
        return self.emit("load", position, FEATURES["attrs"][0] + offset, width)

    def put(self, base: int, field: ops.Field, value: int) -> int:
        """Set an attribute field of the vector `base` from the first lanes of `value`."""
        return self.emit("put", base, value, field.width, imm=field.offset)

    def check(self, e: SExpr) -> None:
        """Add the condition that the expression holds in all lanes."""
        if not isinstance(e, Atom) and e.head == "and":
            for part in e.items[1:]:
                self.check(part)
        else:
            self.checked.add(self.compile(e))

    def compile(self, e: SExpr) -> int:
        """Compile an expression and return the register that holds it."""
        if isinstance(e, Atom):
            number = integer(e.text)
            return self.numbers[e.text] if number is None else self.emit("imm", imm=number)
        head, args = e.head, e.items[1:]
        if head in PROPERTIES:
            return self.load(self.positions[_text(args[0])], head)
        if head == "attr":
            name = _text(args[0])
            field = ops.OPS[self.named_ops[name]].field(_text(args[1]))
            return self.field(self.positions[name], field.offset, field.width)
        if head == "is-value":
            bits = int(np.array(_text(args[1]), np.float32).view(np.int32))
            value = self.load(self.positions[_text(args[0])], "value")
            return self.emit("=", value, self.emit("imm", imm=bits))
        if head == "axis-perm":
            name = _text(args[0])
            offset = ops.OPS["conv"].field(f"{_text(args[1])}_layout").offset
            code = self.field(self.positions[name], offset, 1)
            return self.emit("axis-perm", code)
        if head == "vec":
            return self.vector([int(_text(a)) for a in args])
        if head == "lane":
            return self.emit("lane")
        registers = [self.compile(a) for a in args]
        while len(registers) > _ARITY[head]:
            registers[:2] = [self.emit(head, *registers[:2])]
        return self.emit(head, *registers)

    def vector(self, values: Sequence[int]) -> int:
        """Emit a literal vector padded with zeros, by a few instructions per run of equal lanes."""
        row = [*values, *[0] * (K - len(values))]
        total = self.emit("imm", imm=row[-1])
        for i in range(K - 1, 0, -1):
            if row[i - 1] != row[i]:
                before = self.emit("<", self.emit("lane"), self.emit("imm", imm=i))
                total = self.emit("if", before, self.emit("imm", imm=row[i - 1]), total)
        return total

    def program(self, results: Sequence[int]) -> Program:
        """Return the instructions that the conditions and the registers `results` need.

        Conditions come first, those that need the fewest instructions before others, because most
        bindings fail one of them. Literals are folded into the instructions that read them.
        """
        short = [self._with_literal(i) for i in self.code]
        needs: list[set[int]] = []
        for i, instruction in enumerate(short):
            needs.append({i}.union(*(needs[r] for r in _reads(instruction))))
        checks = sorted(self.checked, key=lambda i: (len(needs[i]), i))
        order: list[int] = []
        for i in (*checks, *results):
            order += sorted(needs[i] - set(order))
        place = {old: new for new, old in enumerate(order)}
        moved = [_with_operands(short[i], lambda r: place.get(r, r)) for i in order]
        return Program(moved, [i in self.checked for i in order], [place[r] for r in results])

    def _with_literal(self, instruction: Instruction) -> Instruction:
        literals = {r: i.imm for r, i in enumerate(self.code) if i.code == CODE["imm"]}
        values = [literals[r] for r in _reads(instruction) if r in literals]
        if not values or instruction.code == CODE["put"]:
            return instruction
        folded = _with_operands(
            instruction, lambda r: LITERAL if literals.get(r) == values[0] else r
        )
        return replace(folded, imm=values[0])


def _n_operands(instruction: Instruction) -> int:
    name = OPCODES[instruction.code]
    return {"put": 2, "axis-perm": 1}.get(name, _ARITY.get(name, 0))


def _reads(instruction: Instruction) -> list[int]:
    """Return the registers that an instruction reads."""
    operands = (instruction.a, instruction.b, instruction.c)[: _n_operands(instruction)]
    return [r for r in operands if r != LITERAL]


def _with_operands(instruction: Instruction, change: Callable[[int], int]) -> Instruction:
    names = ("a", "b", "c")[: _n_operands(instruction)]
    return replace(
        instruction,
        **{n: change(r) for n in names if (r := getattr(instruction, n)) != LITERAL},
    )


class Program(NamedTuple):
    """The instructions of one rule, which of them are conditions, and the registers of results."""

    code: list[Instruction]
    checked: list[bool]
    results: list[int]
