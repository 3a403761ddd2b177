"""The bytecode of conditions and attributes: integer vectors computed from what a pattern matched.

A value is a vector of K int32 lanes; a scalar has the same number in all lanes. A program is a
list of instructions over registers (instruction i writes register i), so it is data in the rule
table and one jitted interpreter runs all rules: a new rule recompiles nothing. Conditions are
instructions whose result is checked; they come first.

Expressions: an integer, a bound name, `(vec 1 2 ...)`, `(lane)` (0, 1, 2 ...), properties `(shape
?x) (rank ?x) (dtype ?x) (op ?x) (attrs d) (attr d FIELD) (lowering d) (weight-only ?x) (is-value ?c
NUMBER)`, `(axis-perm d SIDE)` with SIDE lhs, rhs or out (where a convolution keeps its batch,
feature and spatial dimensions), lane-wise arithmetic `+ - * // % min max = /= < <= > >= and or not
bit shl`, `(if c a b)`, `(at v i)` (lane i in all lanes), `(gather v idx)`, `(invert perm)`,
reductions over lanes `(sum v) (prod v) (all v) (any v)`, prefix sums `(cumsum v)`, `(unpack code)`
/ `(pack v)` for packed dimension lists, `(layout v)` for the code of a convolution layout (-1 where
there is none), and macros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Nodes, pack_attrs
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
# Opcodes by name; `load` reads features of a bound node, `imm` a literal, `defaults` the attributes
# of an operator where none is given, `put` sets a run of lanes (an attribute field).
OPCODES: tuple[str, ...] = (
    "imm", "lane", *BINARY, "not", "if", "load", "defaults", "at", "gather", "invert", "sum",
    "prod", "all", "any", "unpack", "pack", "layout", "axis-perm", "put", "cumsum",
)  # fmt: skip
CODE = {name: i for i, name in enumerate(OPCODES)}
# The features of a node: first column, how many, and what is beyond the last.
FEATURES = {
    "attrs": (0, K, 0), "shape": (K, R, 1), "rank": (K + R, 1, 0), "dtype": (K + R + 1, 1, 0),
    "op": (K + R + 2, 1, 0), "lowering": (K + R + 3, 1, 0), "weight-only": (K + R + 4, 1, 0),
    "value": (K + R + 5, 1, 0),
}  # fmt: skip
PROPERTIES = tuple(name for name in FEATURES if name != "value")
T = TypeVar("T")
_NO_VALUE = 0x7FC00001  # bits of a number that no literal equals
SIDES = ("lhs", "rhs", "out")
_ARITY = {
    **dict.fromkeys(BINARY, 2), "not": 1, "if": 3, "at": 2, "gather": 2, "invert": 1, "sum": 1,
    "prod": 1, "all": 1, "any": 1, "unpack": 1, "pack": 1, "layout": 1, "cumsum": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """One step: `a`, `b`, `c` are registers, where `LITERAL` stands for `imm`; of a load the
    position in the binding, the first feature and how many."""

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
        self.checked: set[int] = set()
        self._seen: dict[Instruction, int] = {}

    def emit(self, name: str, *operands: int, imm: int = 0) -> int:
        """Append an instruction (or reuse an equal one); its register."""
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
        """The vector `base` with an attribute field set from the first lanes of `value`."""
        return self.emit("put", base, value, field.width, imm=field.offset)

    def check(self, e: SExpr) -> None:
        """Demand that the expression holds in all lanes."""
        if not isinstance(e, Atom) and e.head == "and":
            for part in e.items[1:]:
                self.check(part)
        else:
            self.checked.add(self.compile(e))

    def compile(self, e: SExpr) -> int:
        """The register that holds the expression."""
        if isinstance(e, Atom):
            number = _integer(e.text)
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
        """A literal vector, zero beyond its end; a few instructions for each run of equal lanes."""
        row = [*values, *[0] * (K - len(values))]
        total = self.emit("imm", imm=row[-1])
        for i in range(K - 1, 0, -1):
            if row[i - 1] != row[i]:
                before = self.emit("<", self.emit("lane"), self.emit("imm", imm=i))
                total = self.emit("if", before, self.emit("imm", imm=row[i - 1]), total)
        return total

    def program(self, results: Sequence[int]) -> Program:
        """The instructions that the checks and the registers `results` need, the checks' first, and
        of these the shortest first: most bindings fail at one of them. A literal becomes part of
        the instruction that reads it."""
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
    """The registers that an instruction reads."""
    operands = (instruction.a, instruction.b, instruction.c)[: _n_operands(instruction)]
    return [r for r in operands if r != LITERAL]


def _with_operands(instruction: Instruction, change: Callable[[int], int]) -> Instruction:
    names = ("a", "b", "c")[: _n_operands(instruction)]
    return replace(
        instruction,
        **{n: change(r) for n in names if (r := getattr(instruction, n)) != LITERAL},
    )


class Program(NamedTuple):
    """The instructions of one rule, which of them are conditions, and the registers asked for."""

    code: list[Instruction]
    checked: list[bool]
    results: list[int]


def features(nodes: Nodes) -> jax.Array:
    """What programs may read of nodes [N]: their features [N, F] int32, see `FEATURES`."""
    # Only a scalar constant has a value that conditions may rely on.
    known = (nodes.op == ops.OPS["const"].code) & (nodes.ref < 0)
    value = jnp.where(nodes.value == 0, 0.0, nodes.value)  # zero has two signs
    bits = jnp.where(known, jax.lax.bitcast_convert_type(value, jnp.int32), _NO_VALUE)
    columns = (
        nodes.rank,
        nodes.dtype,
        nodes.op,
        nodes.lowering,
        nodes.weight_only.astype(jnp.int32),
        bits,
    )
    return jnp.concatenate([nodes.attrs, nodes.shape, *(c[:, None] for c in columns)], axis=1)


def _elementwise(x: jax.Array, y: jax.Array, op: jax.Array, imm: jax.Array) -> jax.Array:
    """The lane-wise opcodes that cost next to nothing: all are computed and one is chosen."""

    def number(p: jax.Array) -> jax.Array:
        return p.astype(jnp.int32)

    results = {
        "lane": jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), x.shape),
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
    }
    chosen = jnp.broadcast_to(imm, x.shape)
    for name, value in results.items():
        chosen = jnp.where(op == CODE[name], value, chosen)
    return chosen


def _shifted(x: jax.Array, by: jax.Array) -> jax.Array:
    """Lane i of the result is lane i + by [C, 1]."""
    return _gather(x, jnp.arange(K) + by)


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, jnp.clip(index, 0, x.shape[1] - 1), axis=1)


def _layout_code(x: jax.Array, table: jax.Array) -> jax.Array:
    hit = jnp.all(table[None, :, :4] == x[:, None, :4], axis=2)
    return jnp.where(jnp.any(hit, axis=1), jnp.argmax(hit, axis=1), -1)


def _execute(
    registers: jax.Array, instruction: jax.Array, features: jax.Array, bound: jax.Array
) -> jax.Array:
    """The result [C, K] of an instruction [C, 6] for each binding. Of the costly opcodes only those
    at hand are computed."""
    op, a, b, c, imm, _ = jnp.moveaxis(instruction, 1, 0)[..., None]
    lane = jnp.arange(K, dtype=jnp.int32)
    head = lane < R
    layouts = jnp.asarray(np.pad(np.array(ops.LAYOUTS, np.int32), ((0, 0), (0, K - 4))))
    defaults = jnp.asarray([pack_attrs(name, {}) for name in ops.OPS], jnp.int32)
    powers = np.array([8**i for i in range(R)] + [0] * (K - R), np.int32)

    def operand(r: jax.Array) -> jax.Array:
        value = registers[jnp.maximum(r[:, 0], 0), jnp.arange(len(r))]
        return jnp.where(r == LITERAL, imm, value)

    x, y = operand(a), operand(b)

    def full(v: jax.Array) -> jax.Array:
        return jnp.broadcast_to(v[:, None].astype(jnp.int32), x.shape)

    def division() -> jax.Array:
        safe = jnp.where(y == 0, 1, y)
        return jnp.where(op == CODE["//"], x // safe, x % safe)

    def load() -> jax.Array:
        slot = jnp.take_along_axis(bound, a, axis=1)
        column = jnp.minimum(b + jnp.where(c == 1, 0, lane), features.shape[1] - 1)
        return jnp.where((c == 1) | (lane < c), features[slot, column], imm)

    def reduction() -> jax.Array:
        truth = x != 0
        every = [jnp.sum(x, 1), jnp.prod(x, 1), jnp.all(truth, 1), jnp.any(truth, 1)]
        return full(jnp.select([op[:, 0] == CODE["sum"] + i for i in range(4)], every))

    def invert() -> jax.Array:
        perm = jnp.where(head, x, lane)
        return jnp.argmax(perm[:, None, :] == lane[:, None], axis=2).astype(jnp.int32)

    def pack() -> jax.Array:
        before_end = head & (jnp.cumsum((x < 0) & head, axis=1) == 0)
        return full(jnp.sum(jnp.where(before_end, (x + 1) * powers, 0), axis=1))

    def put() -> jax.Array:
        return jnp.where((lane >= imm) & (lane < imm + c), _shifted(y, -imm), x)

    costly = {
        ("load",): load,
        ("if",): lambda: jnp.where(x != 0, y, operand(c)),
        ("//", "%"): division,
        ("defaults",): lambda: defaults[imm[:, 0]],
        ("at",): lambda: full(_gather(x, y[:, :1])[:, 0]),
        ("gather",): lambda: _gather(x, y),
        ("invert",): invert,
        ("sum", "prod", "all", "any"): reduction,
        ("unpack",): lambda: jnp.where(head, (x // np.maximum(powers, 1)) % 8 - 1, -1),
        ("pack",): pack,
        ("layout",): lambda: full(_layout_code(x, layouts)),
        ("axis-perm",): lambda: layouts[jnp.clip(x[:, 0], 0, len(layouts) - 1)],
        ("put",): put,
        ("cumsum",): lambda: jnp.cumsum(x, axis=1),
    }
    family = np.full(len(OPCODES), -1, np.int32)
    for i, names in enumerate(costly):
        family[[CODE[n] for n in names]] = i
    kind = jnp.asarray(family)[op]
    branches = [
        lambda old, i=i, compute=compute: jnp.where(kind == i, compute(), old)
        for i, compute in enumerate(costly.values())
    ]
    return at_hand(kind[:, 0], branches, _elementwise(x, y, op, imm))


def at_hand(kind: jax.Array, branches: Sequence[Callable[[T], T]], start: T) -> T:
    """`start` after each of up to 32 branches whose index is in `kind` [C] (-1 for none), in
    order.

    A loop over those at hand takes XLA:CPU less time than asking for each whether it is.
    """
    bits = jnp.where(kind >= 0, jnp.uint32(1) << kind.astype(jnp.uint32), jnp.uint32(0))
    wanted = jax.lax.reduce(bits, jnp.uint32(0), jax.lax.bitwise_or, (0,))

    def one(carry: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        wanted, value = carry
        lowest = jax.lax.population_count((wanted & -wanted) - 1).astype(jnp.int32)
        return wanted & (wanted - 1), jax.lax.switch(lowest, branches, value)

    return jax.lax.while_loop(lambda c: c[0] != 0, one, (wanted, start))[1]


def run(
    code: jax.Array,
    length: jax.Array,
    program: jax.Array,
    features: jax.Array,
    bound: jax.Array,
    present: jax.Array,
    registers: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Run a program on each of many bindings, all at the same instruction.

    Args:
      code: [E, I, 6] int32, columns opcode, a, b, c, imm, and whether the result is checked.
      length: [E], how many instructions there are.
      program: [C] int32, which of the E programs to run.
      features: [N, F] int32.
      bound: [C, 2P] int32, slots.
      present: [C] bool, bindings that matter.
      registers: [I, C, K] int32, a buffer to write to; what is in it does not matter (clearing it
        takes longer than most programs).

    Returns:
      Registers [I, C, K] int32, and [C] bool, where the conditions hold. Of bindings whose
      conditions do not hold the registers mean nothing.
    """
    idle = jnp.zeros(code.shape[2], jnp.int32)
    n_steps = length[program]
    # Copied before the loop, so that each step reads its instructions in a row.
    mine = jax.lax.optimization_barrier(jnp.swapaxes(code[program], 0, 1))

    def going(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        i, _, holds = carry
        return jnp.any(holds & (i < n_steps))

    def step(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        i, registers, holds = carry
        instruction = jnp.where(holds[:, None], mine[i], idle)
        result = _execute(registers, instruction, features, bound)
        holds &= (instruction[:, 5] == 0) | jnp.all(result != 0, axis=1)
        return i + 1, registers.at[i].set(result), holds

    return jax.lax.while_loop(going, step, (jnp.int32(0), registers, present))[1:]
