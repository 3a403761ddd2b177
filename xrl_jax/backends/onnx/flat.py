"""A Program as one flat list of operations for exporters.

Calls are inlined, loops are unrolled, and values that depend on weights and constants only are
computed. Constants that are only broadcast stay views of the smaller array (with axes of stride 0),
so that a bias is stored as a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from xrl_jax.graph.bindings import Array, Call, Equation, Input, binding_of, scan_sizes
from xrl_jax.graph.graph import Node, nodes_of, pack_attrs
from xrl_jax.graph.operands import flat_operands
from xrl_jax.lower.table import lower
from xrl_jax.program.arguments import flatten_args
from xrl_jax.program.program import Program

FEW = 8  # constants of up to this many elements are compared by value, larger ones by identity


@dataclass(frozen=True)
class Op:
    """One operation; `args` are indices into the list that contains it.

    Attributes:
      name: an operator of the op table, or the primitive of an equation that is not in the table.
      node: holds the operator's attributes, and the type of the result.
      equation: holds the primitive's parameters; None for operators of the table.
      result: the index of this operation among the equation's results.
      value: the value of a constant, else None.
      index: the operation's own index in the list.
    """

    name: str
    args: tuple[int, ...]
    node: Node
    equation: Equation | None = None
    result: int = 0
    value: np.ndarray | None = None
    index: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.node.shape

    @property
    def dtype(self) -> str:
        return self.node.dtype


@dataclass(frozen=True)
class Flat:
    """The operations in topological order, and the indices of the inputs (arguments that are not
    constants) and of the outputs.
    """

    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def flatten(program: Program, weights: Sequence[Any] | None) -> Flat:
    """Return the flat form of a program.

    Args:
      weights: the arguments that are weights, in their order (pytrees), to become constants; if
        None, they are inputs.

    Raises:
      ValueError: the number, shapes or dtypes of the weights are not the program's.
    """
    flat = _Flattening(program)
    given = iter(() if weights is None else _leaves(program, weights))
    args, inputs = [], []
    for aval, is_weight in zip(program.in_avals, program.weights, strict=True):
        if is_weight and weights is not None:
            args.append(flat.constant(next(given)))
        else:
            node = Node("input", shape=tuple(aval.shape), dtype=aval.dtype.name)
            args.append(flat.append(Op("input", (), node)))
            inputs.append(args[-1])
    outputs = flat.run(0, args)
    return Flat(tuple(flat.ops), tuple(inputs), tuple(outputs))


def _leaves(program: Program, weights: Sequence[Any]) -> list[np.ndarray]:
    """Return the arrays of the weights; raises ValueError where they do not fit the program."""
    leaves = [np.asarray(a) for a in flatten_args(tuple(weights), {})[0]]
    wanted = [a for a, w in zip(program.in_avals, program.weights, strict=True) if w]
    if len(leaves) != len(wanted):
        raise ValueError(f"the program has {len(wanted)} weights, got {len(leaves)}")
    for i, (leaf, aval) in enumerate(zip(leaves, wanted, strict=True)):
        if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
            raise ValueError(
                f"weight {i} of the program is {aval.dtype}{list(aval.shape)}, "
                f"got {leaf.dtype}{list(leaf.shape)}"
            )
    return leaves


def without_repeats(array: np.ndarray) -> np.ndarray:
    """Return the array without its repetitions: axes of stride 0 have size 1."""
    repeated = tuple(slice(0, 1) if s == 0 else slice(None) for s in array.strides)
    return array[repeated] if array.size else array


def uniform_value(op: Op) -> Any:
    """Return the scalar that all elements of a constant equal; None if not constant or uniform."""
    if op.value is None or without_repeats(op.value).size != 1:
        return None
    return without_repeats(op.value).reshape(()).item()


class _Flattening:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = [nodes_of(g)[:2] for g in program.graphs]
        self.ops: list[Op] = []
        self.known: dict[Any, int] = {}
        self.kept: list[np.ndarray] = []  # keeps arrays alive whose ids are keys of `known`
        self.arrays: dict[int, int] = {}  # by binding

    def run(self, index: int, args: Sequence[int]) -> list[int]:
        """Append graph `index` of the program with inputs bound to `args`; returns its outputs."""
        nodes, outputs = self.nodes[index]
        env: list[Any] = []
        for node in nodes:
            match binding_of(node, self.program.bindings):
                case Input(position):
                    env.append(args[position])
                case Array(value):
                    if node.ref not in self.arrays:  # one constant for all runs of a body
                        self.arrays[node.ref] = self.constant(np.asarray(value, node.dtype))
                    env.append(self.arrays[node.ref])
                case Equation() as equation:
                    operands = [env[a] for a in flat_operands(nodes, node)]
                    env.append(self.equation(equation, operands))
                case Call() as call:
                    env.append(self.call(call, [env[a] for a in flat_operands(nodes, node)]))
                case _:
                    env.append(self.native(node, env))
        return [env[o] for o in outputs]

    def native(self, node: Node, env: Sequence[Any]) -> Any:
        if node.op == "pack":
            return None  # `flat_operands` looks through it
        if node.op == "proj":
            return env[node.args[0]][node.scalar_attr("index")]
        if node.op == "const":
            return self.constant(np.broadcast_to(np.asarray(node.value, node.dtype), node.shape))
        if node.op == "iota":
            shape, axis = node.shape, node.scalar_attr("axis")
            line = np.arange(shape[axis], dtype=node.dtype)
            along = [-1 if d == axis else 1 for d in range(len(shape))]
            return self.constant(np.broadcast_to(line.reshape(along), shape))
        return self.add(node, [env[a] for a in node.args])

    def constant(self, value: np.ndarray) -> int:
        small = without_repeats(value)
        if small.size <= FEW:
            key: Any = (str(value.dtype), value.shape, small.shape, small.tobytes())
        else:
            key = id(value)
            self.kept.append(value)
        if key not in self.known:
            node = Node("array", shape=value.shape, dtype=value.dtype.name)
            op = Op("const", (), node, value=value)
            self.known[key] = self.append(op)
        return self.known[key]

    def append(self, op: Op) -> int:
        self.ops.append(replace(op, index=len(self.ops)))
        return len(self.ops) - 1

    def add(self, node: Node, args: Sequence[int]) -> int:
        """Append an operator of the table, unless it simplifies, folds or already exists."""
        op = Op(node.op, tuple(args), node)
        same = self.simplified(op)
        if same is not None:
            return same
        values = [self.ops[a].value for a in args]
        if all(v is not None for v in values):
            return self.constant(folded(op, values))  # type: ignore[arg-type]
        key = (op.name, op.args, node.attrs, op.shape, op.dtype)
        if key not in self.known:
            self.known[key] = self.append(op)
        return self.known[key]

    def simplified(self, op: Op) -> int | None:
        """Return the argument to which the operation is equal; None where there is none."""
        first = self.ops[op.args[0]]
        same_type = (first.shape, first.dtype) == (op.shape, op.dtype)
        if op.name in ("copy", "broadcast", "reshape", "cast", "slice") and same_type:
            rank = len(op.shape)
            if op.name != "slice" or set(op.node.dims("stride", rank)) <= {1}:
                return op.args[0]
        if op.name == "transpose":
            perm = op.node.dims("perm", len(op.shape))
            return op.args[0] if perm == tuple(range(len(perm))) else None
        if op.name == "max":  # softmax computes max(-inf, ...)
            for a, other in (op.args, op.args[::-1]):
                if self.uniform_value(a) == -np.inf and self.ops[other].shape == op.shape:
                    return other
        if op.name == "select":  # a variance tests whether its divisor is positive
            which = self.uniform_value(op.args[0])
            return None if which is None else op.args[1 + int(which)]
        return None

    def uniform_value(self, index: int) -> Any:
        return uniform_value(self.ops[index])

    def equation(self, equation: Equation, operands: Sequence[int]) -> Any:
        values = [self.ops[a].value for a in operands]
        if operands and all(v is not None for v in values):
            primitive = equation.primitive
            arrays = map(jnp.asarray, values)
            results = primitive.bind(*arrays, **primitive.get_bind_params(equation.params))
            results = results if primitive.multiple_results else [results]
            found = [self.constant(np.asarray(r)) for r in results]
        else:
            found = []
            for i, aval in enumerate(equation.avals):
                node = Node("opaque", shape=tuple(aval.shape), dtype=str(aval.dtype))
                op = Op(equation.name, tuple(operands), node, equation, i)
                found.append(self.append(op))
        return found[0] if equation.n_outputs == 1 else found

    def call(self, call: Call, operands: Sequence[int]) -> Any:
        if call.equation is None:
            results: Any = self.run(call.bodies[0] + 1, operands)
        elif call.kind == "scan":
            results = self.unrolled(call.bodies[0] + 1, call.equation, operands)
        elif call.kind == "cond" and self.ops[operands[0]].value is not None:
            branch = int(np.clip(self.uniform_value(operands[0]), 0, len(call.bodies) - 1))
            results = self.run(call.bodies[branch] + 1, operands[1:])
        else:
            return self.equation(call.equation, operands)
        return results[0] if len(results) == 1 else results

    def unrolled(self, body: int, equation: Equation, operands: Sequence[int]) -> list[int]:
        """Append a scan as a sequence of its steps."""
        n_consts, n_carry = scan_sizes(equation.params)
        length = equation.params["length"]
        consts, carry = operands[:n_consts], list(operands[n_consts : n_consts + n_carry])
        rows: list[list[int]] = [[] for _ in equation.avals[n_carry:]]
        steps = range(length)
        for t in reversed(steps) if equation.params["reverse"] else steps:
            xs = [self.row(x, t) for x in operands[n_consts + n_carry :]]
            results = self.run(body, [*consts, *carry, *xs])
            carry = results[:n_carry]
            for column, y in zip(rows, results[n_carry:], strict=True):
                column.append(y)
        if equation.params["reverse"]:
            rows = [column[::-1] for column in rows]
        avals = equation.avals[n_carry:]
        return [*carry, *(self.stacked(c, a) for c, a in zip(rows, avals, strict=True))]

    def row(self, index: int, t: int) -> int:
        """Append x[t]."""
        x = self.ops[index]
        if x.value is not None:
            return self.constant(x.value[t])
        start, limit = [t], [t + 1, *x.shape[1:]]
        part = Node("slice", attrs=pack_attrs("slice", {"start": start, "limit": limit}))
        part = replace(part, shape=(1, *x.shape[1:]), dtype=x.dtype)
        return self.reshaped(self.add(part, [index]), x.shape[1:])

    def stacked(self, parts: Sequence[int], aval: Any) -> int:
        shape = tuple(aval.shape)
        if not parts:
            return self.constant(np.zeros(shape, aval.dtype))
        rows = [self.reshaped(p, (1, *shape[1:])) for p in parts]
        attrs = pack_attrs("concat", {"axis": 0})
        return self.add(Node("concat", attrs=attrs, shape=shape, dtype=aval.dtype.name), rows)

    def reshaped(self, index: int, shape: tuple[int, ...]) -> int:
        attrs = pack_attrs("reshape", {"shape": shape, "rank": len(shape)})
        dtype = self.ops[index].dtype
        return self.add(Node("reshape", attrs=attrs, shape=shape, dtype=dtype), [index])


def folded(op: Op, values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the value of an operation on constants; repeated axes keep stride 0."""
    first, rank = values[0], values[0].ndim
    if op.name == "broadcast":
        dims = op.node.dims("dims", rank)
        shape = [first.shape[dims.index(d)] if d in dims else 1 for d in range(len(op.shape))]
        return np.broadcast_to(_reshaped(first, shape), op.shape)
    if op.name == "reshape":
        return _reshaped(first, op.shape)
    if op.name == "transpose":
        return np.transpose(first, op.node.dims("perm", rank))
    if op.node.spec.shape == "elementwise":
        small = np.broadcast_arrays(*(without_repeats(v) for v in values))
        value = np.asarray(lower(op.node, *map(jnp.asarray, small)))
        return np.broadcast_to(value, op.shape)
    return np.asarray(lower(op.node, *map(jnp.asarray, values)))


def _reshaped(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return `array` reshaped; repeated axes keep stride 0 where only axes of size 1 change."""
    wide = [(n, s) for n, s in zip(array.shape, array.strides, strict=True) if n != 1]
    if [n for n, _ in wide] != [n for n in shape if n != 1]:
        return array.reshape(shape)
    small = iter([1 if s == 0 else n for n, s in wide])
    return np.broadcast_to(
        without_repeats(array).reshape([1 if n == 1 else next(small) for n in shape]), shape
    )
