"""The bytecode of conditions and attributes: integer vectors computed from what a pattern matched.

A value is a vector of K int32 lanes; a scalar has the same number in all lanes. A program is a list of instructions over
registers (instruction i writes register i), so it is data in the rule table and one jitted interpreter runs all rules: a new
rule recompiles nothing.

Expressions: an integer, a bound name, `(vec 1 2 ...)`, `(lane)` (0, 1, 2 ...), properties `(shape ?x) (rank ?x) (dtype ?x)
(op ?x) (attrs d) (attr d FIELD) (lowering d) (weight-only ?x) (is-value ?c NUMBER)`, `(axis-perm d SIDE)` with SIDE lhs, rhs
or out (where a convolution keeps its batch, feature and spatial dimensions), lane-wise arithmetic `+ - * // % min max = /= <
<= > >= and or not bit shl`, `(if c a b)`, `(at v i)` (lane i in all lanes), `(gather v idx)`, `(invert perm)`, reductions over
lanes `(sum v) (prod v) (all v) (any v)`, prefix sums `(cumsum v)`, `(unpack code)` / `(pack v)` for packed dimension lists, `(layout v)` for the code of a
convolution layout (-1 where there is none), and macros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.rewrite.sexpr import Atom, RuleError, SExpr

K = ops.MAX_ATTRS
R = ops.MAX_RANK
BINARY = ("+", "-", "*", "//", "%", "min", "max", "=", "/=", "<", "<=", ">", ">=", "and", "or", "bit", "shl")
# Opcodes by name; `load` reads a property of a bound node, `imm` a literal, `put` sets a run of lanes (an attribute field).
OPCODES: tuple[str, ...] = (
    "imm", "lane", "load", "field", "is-value", *BINARY, "not", "if", "at", "gather", "invert",
    "sum", "prod", "all", "any", "unpack", "pack", "layout", "axis-perm", "put", "cumsum",
)  # fmt: skip
CODE = {name: i for i, name in enumerate(OPCODES)}
PROPERTIES = ("shape", "rank", "dtype", "op", "attrs", "lowering", "weight-only")
SIDES = ("lhs", "rhs", "out")
_ARITY = {
    **dict.fromkeys(BINARY, 2), "not": 1, "if": 3, "at": 2, "gather": 2, "invert": 1, "sum": 1, "prod": 1,
    "all": 1, "any": 1, "unpack": 1, "pack": 1, "layout": 1, "cumsum": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """One step: `a`, `b`, `c` are registers, or for loads a position in the binding and a property."""

    code: int
    a: int = 0
    b: int = 0
    c: int = 0
    imm: int = 0
    fimm: float = 0.0


def check(e: SExpr, tensors: set[str], numbers: set[str], named_ops: Mapping[str, str]) -> None:
    """Refuse an expression with an unknown function, a wrong number of arguments or an unbound name.

    Raises:
      RuleError: naming the culprit with its place.
    """
    if isinstance(e, Atom):
        if _integer(e.text) is None and e.text not in numbers:
            raise RuleError(f"{e.text!r} is not a number and not bound", e.place)
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
                raise RuleError(f"{name!r} names no operator (give it with :as)", args[0].place)
            try:
                ops.OPS[op].field(_text(args[1]))
            except KeyError as error:
                raise RuleError(str(error.args[0]), args[1].place) from None
        if head == "axis-perm" and (_text(args[1]) not in SIDES or named_ops.get(name) != "conv"):
            raise RuleError("(axis-perm d SIDE) takes a convolution and lhs, rhs or out", e.place)
        return
    if head == "vec":
        if len(args) > K or any(_integer(_text(a)) is None for a in args):
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


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


class Assembler:
    """Compiles expressions of one rule into instructions, sharing equal ones.

    Args:
      positions: where each tensor name is in the binding.
      fields: for each node name, its operator.
    """

    def __init__(self, positions: Mapping[str, int], named_ops: Mapping[str, str]):
        self.positions = positions
        self.named_ops = named_ops
        self.numbers: dict[str, int] = {}
        self.code: list[Instruction] = []
        self._seen: dict[Instruction, int] = {}

    def emit(self, name: str, *registers: int, imm: int = 0, fimm: float = 0.0) -> int:
        """Append an instruction (or reuse an equal one); its register."""
        a, b, c = (*registers, 0, 0, 0)[:3]
        instruction = Instruction(CODE[name], a, b, c, imm, fimm)
        if instruction not in self._seen:
            self._seen[instruction] = len(self.code)
            self.code.append(instruction)
        return self._seen[instruction]

    def field(self, position: int, offset: int, width: int) -> int:
        """Load an attribute field of a bound node."""
        return self.emit("field", position, offset, width)

    def put(self, base: int, field: ops.Field, value: int) -> int:
        """The vector `base` with an attribute field set from the first lanes of `value`."""
        return self.emit("put", base, value, field.width, imm=field.offset)

    def compile(self, e: SExpr) -> int:
        """The register that holds the expression."""
        if isinstance(e, Atom):
            number = _integer(e.text)
            return self.numbers[e.text] if number is None else self.emit("imm", imm=number)
        head, args = e.head, e.items[1:]
        if head in PROPERTIES:
            return self.emit("load", self.positions[_text(args[0])], PROPERTIES.index(head))
        if head == "attr":
            name = _text(args[0])
            field = ops.OPS[self.named_ops[name]].field(_text(args[1]))
            return self.field(self.positions[name], field.offset, field.width)
        if head == "is-value":
            return self.emit("is-value", self.positions[_text(args[0])], fimm=float(_text(args[1])))
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
        """A literal vector, zero beyond its end; a few instructions for each run of equal lanes."""
        row = [*values, *[0] * (K - len(values))]
        total = self.emit("imm", imm=row[-1])
        for i in range(K - 1, 0, -1):
            if row[i - 1] != row[i]:
                before = self.emit("<", self.emit("lane"), self.emit("imm", imm=i))
                total = self.emit("if", before, self.emit("imm", imm=row[i - 1]), total)
        return total


def _alternatives(
    regs: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, imm: jax.Array, fimm: jax.Array,
    properties: jax.Array, attrs: jax.Array, values: jax.Array,
) -> list[Any]:  # fmt: skip
    """The result of every opcode for one instruction, in the order of OPCODES."""
    lane = jnp.arange(K, dtype=jnp.int32)
    x, y, z = regs[a], regs[b], regs[c]
    truth = lambda p: jnp.broadcast_to(p, (K,)).astype(jnp.int32)  # noqa: E731
    node = jnp.clip(a, 0, attrs.shape[0] - 1)
    row = attrs[node]
    narrow = row[jnp.clip(lane + b, 0, K - 1)]
    field = jnp.where(c == 1, narrow[0], jnp.where(lane < c, narrow, 0))
    safe = jnp.where(y == 0, 1, y)
    table = jnp.asarray(np.pad(np.array(ops.LAYOUTS, np.int32), ((0, 0), (0, K - 4)), constant_values=0))
    powers = jnp.asarray(np.array([8**i for i in range(R)] + [0] * (K - R), np.int32))
    head = lane < R
    packable = head & (jnp.cumsum((x < 0) & head) == 0)
    perm = jnp.where(head, x, lane)
    binary = {
        "+": x + y, "-": x - y, "*": x * y, "//": x // safe, "%": x % safe,
        "min": jnp.minimum(x, y), "max": jnp.maximum(x, y), "=": truth(x == y), "/=": truth(x != y),
        "<": truth(x < y), "<=": truth(x <= y), ">": truth(x > y), ">=": truth(x >= y),
        "and": truth((x != 0) & (y != 0)), "or": truth((x != 0) | (y != 0)),
        "bit": (x >> jnp.clip(y, 0, 31)) & 1, "shl": x << jnp.clip(y, 0, 30),
    }  # fmt: skip
    results = {
        "imm": truth(imm),
        "lane": lane,
        "load": properties[node, jnp.clip(b, 0, len(PROPERTIES) - 1)],
        "field": field,
        "is-value": truth(values[node] == fimm),
        **binary,
        "not": truth(x == 0),
        "if": jnp.where(x != 0, y, z),
        "at": truth(x[jnp.clip(y[0], 0, K - 1)]),
        "gather": x[jnp.clip(y, 0, K - 1)],
        "invert": jnp.argmax(perm[None, :] == lane[:, None], axis=1).astype(jnp.int32),
        "sum": truth(jnp.sum(x)),
        "prod": truth(jnp.prod(x)),
        "all": truth(jnp.all(x != 0)),
        "any": truth(jnp.any(x != 0)),
        "unpack": jnp.where(head, (x // jnp.maximum(powers, 1)) % 8 - 1, -1),
        "pack": truth(jnp.sum(jnp.where(packable, (x + 1) * powers, 0))),
        "layout": truth(_layout_code(x, table)),
        "axis-perm": table[jnp.clip(x[0], 0, len(ops.LAYOUTS) - 1)],
        "cumsum": jnp.cumsum(x),
        "put": jnp.where((lane >= imm) & (lane < imm + c), y[jnp.clip(lane - imm, 0, K - 1)], x),
    }
    return [results[name] for name in OPCODES]


def _layout_code(x: jax.Array, table: jax.Array) -> jax.Array:
    hit = jnp.all(table[:, :4] == x[None, :4], axis=1)
    return jnp.where(jnp.any(hit), jnp.argmax(hit), -1)


def run(
    code: jax.Array, length: jax.Array, fimm: jax.Array, properties: jax.Array, attrs: jax.Array, values: jax.Array
) -> jax.Array:  # fmt: skip
    """Run one program on one binding (vmap for many).

    Args:
      code: [I, 5] int32, columns opcode, a, b, c, imm.
      length: how many instructions to run, the same for all programs of a batch or the largest of them.
      fimm: [I] float32.
      properties: [P, len(PROPERTIES), K] int32 of the bound nodes.
      attrs: [P, K] int32.
      values: [P] float32.

    Returns:
      Registers [I, K] int32.
    """

    def step(i: jax.Array, regs: jax.Array) -> jax.Array:
        op, a, b, c, imm = code[i]
        results = jnp.stack(_alternatives(regs, a, b, c, imm, fimm[i], properties, attrs, values))
        return regs.at[i].set(results[op])

    return jax.lax.fori_loop(0, length, step, jnp.zeros((code.shape[0], K), jnp.int32))


def properties_of(
    op: jax.Array, attrs: jax.Array, lowering: jax.Array, shape: jax.Array, rank: jax.Array,
    dtype: jax.Array, weight_only: jax.Array,
) -> jax.Array:  # fmt: skip
    """The property table [P, len(PROPERTIES), K] of P nodes; shapes are filled up by ones."""
    wide = lambda v: jnp.broadcast_to(v[:, None], (len(v), K)).astype(jnp.int32)  # noqa: E731
    shape = jnp.pad(shape, ((0, 0), (0, K - R)), constant_values=1)
    parts = [shape, wide(rank), wide(dtype), wide(op), attrs, wide(lowering), wide(weight_only)]
    return jnp.stack(parts, axis=1)
