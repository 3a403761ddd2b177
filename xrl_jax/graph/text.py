"""Text form of graphs and programs: one line per node, and the parser that reads it back.

    graph {
      %1: float32[2,3] = input() ref=@0
      %2: float32[] = const() value=0.5
      %3: float32[2] = reduce_sum(%1) {axes=[1]}
      %4: float32[2] = mul(%3, %2) lowering=1
      return %4
    }

Nodes are numbered from 1 in topological order; the numbers are their slots in the graph that is
read back. An attribute that has its default is left out; so are `dtype`, and the `shape` and `rank`
of a reshape or broadcast, where they agree with the node's type. A value that has no readable form
(a layout code out of range) is written as an integer. `#` starts a comment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from xrl_jax.graph import attributes, ops
from xrl_jax.graph.bindings import Array, Binding, Call, Equation, Input
from xrl_jax.graph.graph import (
    GraphError,
    Node,
    TensorGraph,
    build,
    infer,
    nodes_of,
)


class GraphTextError(GraphError):
    """Invalid text of a graph. `line` and `column` count from 1; the message shows the place."""

    def __init__(self, line: int, column: int, message: str, source: str = "") -> None:
        caret = f"\n{source}\n{' ' * (column - 1)}^" if source else ""
        super().__init__(f"line {line}, column {column}: {message}{caret}")
        self.line, self.column, self.message = line, column, message


# Scalar values: the shortest decimal that gives the same float32, otherwise its bits.


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def _format_value(value: float) -> str:
    text = str(np.float32(value))
    return text if _bits(float(text)) == _bits(value) else f"0x{_bits(value):08x}"


def _parse_value(text: str) -> float:
    if text.startswith("0x"):
        return float(np.uint32(int(text, 16)).view(np.float32))
    return float(np.float32(float(text)))


# Writing.


def format_type(shape: Sequence[int], dtype: str) -> str:
    """Format a type as in `float32[2,3]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def format_node(node: Node, name: str, args: Sequence[str], arg_rank: int = 0) -> str:
    """Format the line of one node.

    Args:
      name: name of the node itself, e.g. `%4`.
      args: the names of its arguments.
      arg_rank: rank of the first argument, which decides how much of a wide attribute matters.
    """
    defaults = attributes.defaults(node.op, node.shape, node.dtype)
    attrs = []
    for field in node.spec.fields:
        values, usual = node.attrs[field.attr_slice], defaults[field.attr_slice]
        if values == usual:
            continue
        if field.width == 1:
            attrs.append(f"{field.name}={attributes.encode(field, values[0])}")
            continue
        used = attributes.used_width(field, len(node.shape), arg_rank)
        last = max((i + 1 for i in range(field.width) if values[i] != field.fill[i]), default=0)
        row = values[: max(used, last)]
        attrs.append(f"{field.name}=({', '.join(map(str, row))}{',' * (len(row) == 1)})")
    line = f"{name}: {format_type(node.shape, node.dtype)} = {node.op}({', '.join(args)})"
    if attrs:
        line += f" {{{', '.join(attrs)}}}"
    if node.lowering:
        line += f" lowering={node.lowering}"
    if _bits(node.value) or (node.op == "const" and node.ref < 0):
        line += f" value={_format_value(node.value)}"
    return line + (f" ref=@{node.ref}" if node.ref >= 0 else "")


def _describe(binding: Binding) -> str:
    match binding:
        case Input(position):
            return f"argument {position}"
        case Array(value):
            return f"array {value.dtype}[{','.join(map(str, value.shape))}]"
        case Equation():
            return f"equation {binding.name}"
        case Call(kind, bodies, _):
            return f"{kind} of {', '.join(f'body{b}' for b in bodies)}"


def format_graph(
    graph: TensorGraph, bindings: Sequence[Binding] | None = None, *, name: str = ""
) -> str:
    """Format the live nodes of a graph, one line each, by level (longest path) and then by slot.

    Args:
      bindings: if given, comments describe the bindings that nodes refer to.
      name: name of the graph, for programs.
    """
    nodes, outputs, slots = nodes_of(graph)
    # By level and slot, not by the stored depth, which rewrites raise and parsing recomputes.
    level: list[int] = []
    for node in nodes:
        level.append(1 + max((level[a] for a in node.args), default=0))
    order = sorted(range(len(nodes)), key=lambda i: (level[i], slots[i]))
    number = {i: f"%{n + 1}" for n, i in enumerate(order)}
    lines = [f"graph {name} {{" if name else "graph {"]
    for i in order:
        node = nodes[i]
        arg_rank = len(nodes[node.args[0]].shape) if node.args else 0
        line = format_node(node, number[i], [number[a] for a in node.args], arg_rank)
        if bindings is not None and 0 <= node.ref < len(bindings):
            line += f"  # {_describe(bindings[node.ref])}"
        lines.append("  " + line)
    results = ", ".join(number[o] for o in outputs)
    return "\n".join([*lines, f"  return {results}".rstrip(), "}"])


# Reading.


class _Line:
    """A line of text with a cursor."""

    def __init__(self, number: int, text: str) -> None:
        self.number, self.text, self.at = number, text, 0
        self.code = text.split("#", 1)[0].rstrip()
        self.accept("")

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        column = (self.at if at is None else at) + 1
        raise GraphTextError(self.number, column, message, self.text)

    def accept(self, pattern: str) -> str | None:
        """Consume and return the text that matches here, or None; skip blanks after it."""
        found = re.compile(pattern).match(self.code, self.at)
        if found is None:
            return None
        self.at = found.end()
        while self.at < len(self.code) and self.code[self.at] in " \t":
            self.at += 1
        return found.group()

    def expect(self, pattern: str, what: str) -> str:
        found = self.accept(pattern)
        if found is None:
            rest = self.code[self.at :]
            self.fail(
                f"expected {what}, found {rest.split(' ')[0]!r}" if rest else f"expected {what}"
            )
        return found

    def items(self, close: str, what: str, item: Callable[[], None]) -> None:
        """Parse items separated by commas up to `close`."""
        while self.accept(close) is None:
            item()
            if self.accept(",") is None:
                self.expect(close, f"',' or {what}")
                return

    def end(self) -> None:
        if self.at < len(self.code):
            self.fail(f"unexpected {self.code[self.at :]!r}")


def _parse_type(line: _Line) -> tuple[tuple[int, ...], str]:
    at = line.at
    dtype = line.expect(r"\w+", "a dtype")
    if dtype not in ops.DTYPE_CODE:
        line.fail(f"unknown dtype {dtype!r}", at)
    line.expect(r"\[", "'['")
    shape: list[int] = []
    line.items(r"\]", "']'", lambda: shape.append(int(line.expect(r"\d+", "a size"))))
    return tuple(shape), dtype


def _parse_attrs(line: _Line, op: str, defaults: tuple[int, ...]) -> tuple[int, ...]:
    attrs = list(defaults)
    seen: set[str] = set()

    def item() -> None:
        at = line.at
        name = line.expect(r"\w+", "the name of an attribute")
        try:
            field = ops.OPS[op].field(name)
        except KeyError as error:
            line.fail(str(error.args[0]), at)
        if name in seen:
            line.fail(f"attribute {name!r} is given twice", at)
        seen.add(name)
        line.expect("=", "'='")
        at = line.at
        if field.width == 1:
            text = line.expect(r"\[[\d, ]*\]|[-\w|:.]+", "a value")
            row = [text]
        else:
            text = line.expect(r"\([-\d, ]*\)", f"a tuple of at most {field.width} integers")
            row = [v for v in text[1:-1].split(",") if v.strip()]
        if len(row) > field.width:
            line.fail(f"{op}.{name} takes at most {field.width} values, got {len(row)}", at)
        try:
            values = [attributes.decode(field, v.strip()) for v in row]
            attrs[field.attr_slice] = [*values, *field.fill[len(row) :]]
        except ValueError as error:
            line.fail(str(error), at)

    line.items(r"\}", "'}'", item)
    return tuple(attrs)


def _check_type(line: _Line, node: Node, nodes: Sequence[Node], type_at: int, op_at: int) -> None:
    spec = node.spec
    least, most = spec.arity
    if not least <= len(node.args) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        line.fail(f"{node.op} takes {wanted} arguments, got {len(node.args)}", op_at)
    if spec.shape == "given":
        return
    if spec.dtype == "attr" and not 0 < node.attrs[spec.field("dtype").offset] < len(ops.DTYPES):
        line.fail(f"{node.op} has an unknown dtype code", op_at)
    found = infer(node.op, node.attrs, [nodes[a] for a in node.args])
    if found is None:
        types = ", ".join(format_type(nodes[a].shape, nodes[a].dtype) for a in node.args)
        line.fail(f"{node.op} with these attributes does not accept {types}", op_at)
    if found != (node.shape, node.dtype):
        line.fail(f"the type must be {format_type(*found)} by the shape rule of {node.op}", type_at)


def _parse_node(line: _Line, nodes: list[Node], numbers: dict[str, int]) -> None:
    def argument() -> None:
        at = line.at
        found = line.expect(r"%\d+", "an argument such as %1")
        if found not in numbers:
            line.fail(f"{found} is not defined above", at)
        args.append(numbers[found])

    at = line.at
    name = line.expect(r"%\d+", "a node such as %1, or return")
    if name in numbers:
        line.fail(f"{name} is defined twice", at)
    line.expect(":", "':'")
    type_at = line.at
    shape, dtype = _parse_type(line)
    line.expect("=", "'='")
    op_at = line.at
    op = line.expect(r"\w+", "an operator")
    if op not in ops.OPS or op == "hole":
        line.fail(f"unknown operator {op!r}", op_at)
    line.expect(r"\(", "'('")
    args: list[int] = []
    line.items(r"\)", "')'", argument)
    attrs = attributes.defaults(op, shape, dtype)
    if line.accept(r"\{") is not None:
        attrs = _parse_attrs(line, op, attrs)
    lowering, value, ref = 0, 0.0, -1
    if line.accept("lowering=") is not None:
        lowering = int(line.expect(r"\d+", "the number of a lowering"))
    if line.accept("value=") is not None:
        number = r"0x[0-9a-f]{8}|[-+]?(\d+\.?\d*([eE][-+]?\d+)?|inf|nan)"
        value = _parse_value(line.expect(number, "a number"))
    if line.accept("ref=@") is not None:
        ref = int(line.expect(r"\d+", "the number of a binding"))
    line.end()
    node = Node(op, tuple(args), attrs, lowering, shape, dtype, value, ref)
    _check_type(line, node, nodes, type_at, op_at)
    numbers[name] = len(nodes)
    nodes.append(node)


def parse_blocks(text: str) -> list[tuple[str, TensorGraph, int]]:
    """Parse every `graph ... { ... }` in the text to its name, graph and first line.

    If the nodes of a graph are numbered in order, node %i gets slot i.

    Raises:
      GraphTextError: with the line and column of a syntax error, unknown name or type mismatch.
    """
    lines = [_Line(n, t) for n, t in enumerate(text.splitlines() or [""], 1)]
    code = iter([line for line in lines if line.code.strip()])
    blocks = []
    for head in code:
        head.accept(r"\s*")
        head.expect(r"graph\b", "'graph'")
        name = head.accept(r"\w+") or ""
        head.expect(r"\{", "'{'")
        head.end()
        nodes: list[Node] = []
        numbers: dict[str, int] = {}
        outputs: list[int] | None = None
        for line in code:
            line.accept(r"\s*")
            if line.accept(r"\}") is not None:
                line.end()
                if outputs is None:
                    line.fail("the graph has no 'return'", 0)
                break
            if outputs is not None:
                line.fail("expected '}' after 'return'")
            if line.accept(r"return\b") is not None:
                outputs = _parse_outputs(line, numbers)
            else:
                _parse_node(line, nodes, numbers)
        else:
            lines[-1].fail("the graph is not closed: expected '}'", len(lines[-1].code))
        blocks.append((name, build(nodes, outputs or []), head.number))
    return blocks


def _parse_outputs(line: _Line, numbers: dict[str, int]) -> list[int]:
    outputs: list[int] = []
    while line.at < len(line.code):
        if outputs:
            line.expect(",", "','")
        at = line.at
        found = line.expect(r"%\d+", "an output such as %1")
        if found not in numbers:
            line.fail(f"{found} is not defined above", at)
        outputs.append(numbers[found])
    return outputs
