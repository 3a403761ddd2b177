"""The bytecode of conditions and attributes: integer vectors computed from what a pattern matched.

A value is a vector of K int32 lanes; a scalar has the same number in all lanes. A program is a
list of instructions over
registers (instruction i writes register i), so it is data in the rule table and one jitted
interpreter runs all rules: a new
rule recompiles nothing.

Expressions: an integer, a bound name, `(vec 1 2 ...)`, `(lane)` (0, 1, 2 ...), properties `(shape
?x) (rank ?x) (dtype ?x)
(op ?x) (attrs d) (attr d FIELD) (lowering d) (weight-only ?x) (is-value ?c NUMBER)`, `(axis-perm d
SIDE)` with SIDE lhs, rhs
or out (where a convolution keeps its batch, feature and spatial dimensions), lane-wise arithmetic
`+ - * // % min max = /= <
<= > >= and or not bit shl`, `(if c a b)`, `(at v i)` (lane i in all lanes), `(gather v idx)`,
`(invert perm)`, reductions over
lanes `(sum v) (prod v) (all v) (any v)`, prefix sums `(cumsum v)`, `(unpack code)` / `(pack v)`
for packed dimension lists, `(layout v)` for the code of a
convolution layout (-1 where there is none), and macros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Nodes
from xrl_jax.rewrite.sexpr import Atom, RuleError, SExpr

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
# Opcodes by name; `load` reads a property of a bound node, `imm` a literal, `put` sets a run of
# lanes (an attribute field).
OPCODES: tuple[str, ...] = (
    "imm", "lane", "load", "field", "is-value", *BINARY, "not", "if", "at", "gather", "invert",
    "sum", "prod", "all", "any", "unpack", "pack", "layout", "axis-perm", "put", "cumsum",
)  # fmt: skip
CODE = {name: i for i, name in enumerate(OPCODES)}
PROPERTIES = ("shape", "rank", "dtype", "op", "attrs", "lowering", "weight-only")
SIDES = ("lhs", "rhs", "out")
_ARITY = {
    **dict.fromkeys(BINARY, 2), "not": 1, "if": 3, "at": 2, "gather": 2, "invert": 1, "sum": 1,
    "prod": 1, "all": 1, "any": 1, "unpack": 1, "pack": 1, "layout": 1, "cumsum": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """One step: `a`, `b`, `c` are registers, or for loads a position in the binding and a
    property."""

    code: int
    a: int = 0
    b: int = 0
    c: int = 0
    imm: int = 0
    fimm: float = 0.0


def check(e: SExpr, tensors: set[str], numbers: set[str], named_ops: Mapping[str, str]) -> None:
    """Refuse an expression with an unknown function, a wrong number of arguments or an unbound
    name.

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


class Bound(NamedTuple):
    """What the loads of a program may read: the node table and, for each binding, its slots in
    it."""

    nodes: Nodes
    slots: jax.Array  # [C, 2P] int32


def _elementwise(
    x: jax.Array, y: jax.Array, z: jax.Array, op: jax.Array, imm: jax.Array
) -> jax.Array:
    """The lane-wise opcodes that cost next to nothing: all are computed and one is chosen."""

    def number(p: jax.Array) -> jax.Array:
        return p.astype(jnp.int32)

    lane = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), x.shape)
    results = {
        "imm": jnp.broadcast_to(imm, x.shape),
        "lane": lane,
        "+": x + y,
        "-": x - y,
        "*": x * y,
        "min": jnp.minimum(x, y),
        "max": jnp.maximum(x, y),
        "=": number(x == y),
        "/=": number(x != y),
        "<": number(x < y),
        "<=": number(x <= y),
        ">": number(x > y),
        ">=": number(x >= y),
        "and": number((x != 0) & (y != 0)),
        "or": number((x != 0) | (y != 0)),
        "bit": (x >> jnp.clip(y, 0, 31)) & 1,
        "shl": x << jnp.clip(y, 0, 30),
        "not": number(x == 0),
        "if": jnp.where(x != 0, y, z),
    }
    chosen = results["imm"]
    for name, value in results.items():
        chosen = jnp.where(op == CODE[name], value, chosen)
    return chosen


def _load(bound: Bound, position: jax.Array, name: jax.Array) -> jax.Array:
    """A property of the nodes bound at a position, [C, K]; shapes are filled up by ones."""
    f, slot = bound.nodes, bound.slots[:, position]

    def wide(v: jax.Array) -> jax.Array:
        return jnp.broadcast_to(v[slot][:, None].astype(jnp.int32), (len(slot), K))

    readers = {
        "shape": lambda: jnp.pad(f.shape[slot], ((0, 0), (0, K - R)), constant_values=1),
        "rank": lambda: wide(f.rank),
        "dtype": lambda: wide(f.dtype),
        "op": lambda: wide(f.op),
        "attrs": lambda: f.attrs[slot],
        "lowering": lambda: wide(f.lowering),
        "weight-only": lambda: wide(f.weight_only),
    }
    return jax.lax.switch(name, [readers[n] for n in PROPERTIES])


def _shifted(x: jax.Array, by: jax.Array) -> jax.Array:
    """Lane i of the result is lane i + by."""
    return jnp.take(x, jnp.clip(jnp.arange(K) + by, 0, K - 1), axis=1)


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, jnp.clip(index, 0, K - 1), axis=1)


def _layout_code(x: jax.Array, table: jax.Array) -> jax.Array:
    hit = jnp.all(table[None, :, :4] == x[:, None, :4], axis=2)
    return jnp.where(jnp.any(hit, axis=1), jnp.argmax(hit, axis=1), -1)


def _execute(regs: jax.Array, instruction: jax.Array, fimm: jax.Array, bound: Bound) -> jax.Array:
    """The result [C, K] of one instruction for all bindings. The opcode is not batched, so that
    only its branch runs."""
    op, a, b, c, imm = instruction
    x, y, z = regs[a], regs[b], regs[c]
    lane = jnp.arange(K, dtype=jnp.int32)
    head = lane < R
    layouts = np.pad(np.array(ops.LAYOUTS, np.int32), ((0, 0), (0, K - 4)))
    powers = np.array([8**i for i in range(R)] + [0] * (K - R), np.int32)

    def full(v: jax.Array) -> jax.Array:
        return jnp.broadcast_to(v[:, None].astype(jnp.int32), x.shape)

    def division() -> jax.Array:
        safe = jnp.where(y == 0, 1, y)
        return jnp.where(op == CODE["//"], x // safe, x % safe)

    def is_value() -> jax.Array:
        # Only a scalar constant has a value that conditions may rely on.
        f, slot = bound.nodes, bound.slots[:, a]
        known = (f.op[slot] == ops.OPS["const"].code) & (f.ref[slot] < 0)
        return full(known & (f.value[slot] == fimm))

    def field() -> jax.Array:
        narrow = _shifted(bound.nodes.attrs[bound.slots[:, a]], b)
        return jnp.where(c == 1, narrow[:, :1], jnp.where(lane < c, narrow, 0))

    def reduction() -> jax.Array:
        truth = x != 0
        every = jnp.stack([jnp.sum(x, 1), jnp.prod(x, 1), jnp.all(truth, 1), jnp.any(truth, 1)])
        return full(every[op - CODE["sum"]])

    def invert() -> jax.Array:
        perm = jnp.where(head, x, lane)
        return jnp.argmax(perm[:, None, :] == lane[:, None], axis=2).astype(jnp.int32)

    def pack() -> jax.Array:
        before_end = head & (jnp.cumsum((x < 0) & head, axis=1) == 0)
        return full(jnp.sum(jnp.where(before_end, (x + 1) * powers, 0), axis=1))

    def put() -> jax.Array:
        return jnp.where((lane >= imm) & (lane < imm + c), _shifted(y, -imm), x)

    special = {
        ("//", "%"): division,
        ("load",): lambda: _load(bound, a, b),
        ("field",): field,
        ("is-value",): is_value,
        ("at",): lambda: full(_gather(x, y[:, :1])[:, 0]),
        ("gather",): lambda: _gather(x, y),
        ("invert",): invert,
        ("sum", "prod", "all", "any"): reduction,
        ("unpack",): lambda: jnp.where(head, (x // np.maximum(powers, 1)) % 8 - 1, -1),
        ("pack",): pack,
        ("layout",): lambda: full(_layout_code(x, jnp.asarray(layouts))),
        ("axis-perm",): lambda: jnp.asarray(layouts)[jnp.clip(x[:, 0], 0, len(layouts) - 1)],
        ("put",): put,
        ("cumsum",): lambda: jnp.cumsum(x, axis=1),
    }
    branch = np.zeros(len(OPCODES), np.int32)
    for i, names in enumerate(special):
        branch[[CODE[n] for n in names]] = i + 1

    def elementwise() -> jax.Array:
        return _elementwise(x, y, z, op, imm)

    return jax.lax.switch(jnp.asarray(branch)[op], [elementwise, *special.values()])


def run(
    code: jax.Array,
    fimm: jax.Array,
    length: jax.Array,
    guard: jax.Array,
    bound: Bound,
    present: jax.Array,
    registers: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Run one program on many bindings at once, an instruction at a time.

    The guard comes first in a program: where it holds for no binding, the rest is not run.

    Args:
      code: [I, 5] int32, columns opcode, a, b, c, imm.
      fimm: [I] float32.
      length: how many instructions there are.
      guard: the register that says whether the conditions hold.
      present: [C] bool, bindings that matter.
      registers: [I, C, K] int32, a buffer to write to; what is in it does not matter (clearing it
        takes longer than most programs).

    Returns:
      Registers [I, C, K] int32, and [C] bool, where the guard holds.
    """

    def going(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        i, _, holds = carry
        return (i < length) & jnp.any(holds)

    def step(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        i, regs, holds = carry
        result = _execute(regs, code[i], fimm[i], bound)
        holds &= (i != guard) | jnp.all(result != 0, axis=1)
        return i + 1, regs.at[i].set(result), holds

    _, registers, holds = jax.lax.while_loop(going, step, (jnp.int32(0), registers, present))
    return registers, holds
