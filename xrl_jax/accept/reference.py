"""The results of a program in double precision, and the errors that rounding in the program's own
precision explains.

Every float of the program is evaluated in float64, including casts, constants and closed-over
weights, through the plain lowering of every operator. Each value carries the variance of its
rounding error in the program's own precision (`rounding`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.accept.rounding import (
    Value,
    by_random_signs,
    is_inexact,
    standard_error,
    with_rounding_error,
)
from xrl_jax.accept.rounding_flow import control_flow
from xrl_jax.accept.wide import wide_dtype, wide_results, widened
from xrl_jax.graph import kinds, ops
from xrl_jax.graph.attributes import with_kind
from xrl_jax.graph.bindings import Array, Call, Equation, Input
from xrl_jax.graph.graph import Node, nodes_of
from xrl_jax.graph.operands import flat_operands
from xrl_jax.lower.table import LOWERINGS, lower
from xrl_jax.program.program import Program

_MOST_NODES = 48  # compiled together: twice as many take more than twice the time
# On CPUs `_COMPILE_FAST` halves the compile time and the code is no slower; with `_RUN_ONCE`, for
# code that need not be fast, a third of the time is left.
_COMPILE_FAST: dict[str, Any] = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
_RUN_ONCE: dict[str, Any] = {"xla_backend_optimization_level": 0}
# For each max or min, the operator that shows on the same node whether there was a NaN.
_KEEP_NAN = {
    f"{kind}_{way}": f"{kind}_sum" for kind in ("reduce", "window") for way in ("max", "min")
}


class Reference(NamedTuple):
    """Flat results of a program, on the host.

    Attributes:
      exact: the results; floats in double precision.
      error: for a float result, the standard rounding error of every element; for integers and
        booleans, whether a rounding error could change the element.
      narrow: names of equations that had to run in the program's own precision.
    """

    exact: list[np.ndarray]
    error: list[np.ndarray]
    narrow: tuple[str, ...]


def reference(program: Program, *, errors: bool = True) -> Callable[[Sequence[Any]], Reference]:
    """Return a function of flat arguments that gives the program's results in double precision and
    the errors that its own precision explains. It holds the weights of its last call in double
    precision.

    Args:
      program: as traced; lowerings chosen for its nodes are ignored.
      errors: whether to compute the errors, which takes several times as long; else they are 0.
    """
    narrow: set[str] = set()
    run = _Run(program, narrow.add, errors=errors)
    kept: dict[int, tuple[Any, Any]] = {}

    def wide(i: int, x: Any) -> Any:
        if i in kept and kept[i][0] is x:
            return kept[i][1]
        # To the device at once, so that two copies exist of one array at a time, not of all.
        on_device = jax.device_put(widened(x))
        if program.weights[i]:
            kept[i] = x, on_device
        return on_device

    def call(args: Sequence[Any]) -> Reference:
        with jax.enable_x64(True):
            found = run([Value(wide(i, x)) for i, x in enumerate(args)])
            exact = [on_host(v.exact) for v in found]
            errors = [np.asarray(standard_error(v)) for v in found]
            return Reference(exact, errors, tuple(sorted(narrow)))

    return call


def on_host(x: Any) -> np.ndarray:
    """Return an array on the host; for a PRNG key, its data."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x)


class _Run:
    """Evaluation of a program or, with `inside`, of the body of a loop or branch, which is traced.

    A graph is compiled in pieces, between its calls of folded bodies, and each body once for the
    shapes it is called with. First all pieces are traced, while threads compile those traced.
    """

    def __init__(
        self,
        program: Program,
        tell: Callable[[str], Any],
        *,
        inside: bool = False,
        errors: bool = True,
    ) -> None:
        self.program = program
        self.errors = errors
        self.tell = tell
        self.inside = inside
        self.pieces: dict[int, _Pieces] = {}  # by the index of the graph
        self.compiled: dict[Any, _Compiled] = {}
        self.threads: Executor | None = None  # while pieces are traced

    def __call__(self, args: Sequence[Value]) -> list[Value]:
        """Return the results of the program."""
        self.threads = threads = ThreadPoolExecutor(os.cpu_count())
        try:
            self.graph(0, jax.tree.map(_struct, args))
            self.threads = None
            return self.graph(0, args)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def run_piece(self, key: tuple[int, int], run: Callable[[Any], Any], inputs: Any) -> Any:
        """Return the results of a piece for the values `inputs`; where these are only shapes,
        shapes. `key` is (graph, node) of the first node of the piece.
        """
        if self.inside:
            return run(inputs)
        leaves, tree = jax.tree.flatten(inputs)
        known = (*key, tree, *((x.shape, x.dtype) for x in leaves))
        if self.threads is None:
            return self.compiled[known].code.result()(inputs)
        if known not in self.compiled:
            traced = jax.jit(run).trace(inputs)
            options = _COMPILE_FAST | (_RUN_ONCE if key[0] == 0 else {})
            code = self.threads.submit(traced.lower().compile, options)
            self.compiled[known] = _Compiled(code, jax.tree.map(_struct, traced.out_info))
        return self.compiled[known].result_shapes

    def graph(self, index: int, args: Sequence[Value]) -> list[Value]:
        """Return the results of a graph of the program."""
        if index not in self.pieces:
            self.pieces[index] = _split_into_pieces(self.program, index)
        nodes, outputs, pieces = self.pieces[index]
        values: dict[int, Any] = {}  # a list where a node has several results
        for i, node in enumerate(nodes):
            match self.program.bindings[node.ref] if node.ref >= 0 else None:
                case Input(position):
                    values[i] = args[position]
                case Array(value):
                    values[i] = Value(jnp.asarray(widened(value)))
        for piece in pieces:
            first = piece.members[0]
            call = self.inlined_body(nodes[first])
            if call is not None:
                operands = [values[a] for a in flat_operands(nodes, nodes[first])]
                results = self.graph(call + 1, operands)
                values[first] = results[0] if len(results) == 1 else results
            else:
                run = functools.partial(self.piece, nodes, piece)
                values |= self.run_piece((index, first), run, {a: values[a] for a in piece.inputs})
            for a in piece.freed:
                values.pop(a, None)
        return [values[o] for o in outputs]

    def inlined_body(self, node: Node) -> int | None:
        """Return the index of the body that a node calls inline; None for any other node."""
        match self.program.bindings[node.ref] if node.op == "call" else None:
            case Call("inline", (body,)):
                return body
        return None

    def piece(
        self, nodes: Sequence[Node], piece: _Piece, inputs: Mapping[int, Any]
    ) -> dict[int, Any]:
        """Return the values of a piece that others use."""
        values = dict(inputs)
        for i in piece.members:
            node = nodes[i]
            if node.op in ("opaque", "call"):
                held = flat_operands(nodes, node)
                operands = [values[a] for a in held]
                results = self.bound(node, operands, [_dtype_of(nodes[a]) for a in held])
                values[i] = results[0] if len(results) == 1 else results
            elif node.op == "proj":
                values[i] = values[node.args[0]][node.attr("index")]
            elif node.op != "pack":
                dtypes = [nodes[a].dtype for a in node.args]
                values[i] = self.native(node, dtypes, [values[a] for a in node.args])
        return {i: values[i] for i in piece.outputs}

    def native(self, node: Node, dtypes: Sequence[str], xs: Sequence[Value]) -> Value:
        """Evaluate an operator of the table on operands with these dtypes in the program."""
        wide = _wide_node(node)
        y = lower(wide, *(x.exact for x in xs))
        if node.op in _KEEP_NAN and is_inexact(y):
            # XLA:CPU drops NaN in some of these operators.
            lost = lower(replace(wide, op=_KEEP_NAN[node.op]), jnp.isnan(xs[0].exact) * 1.0)
            y = jnp.where(lost > 0, jnp.nan, y)
        elif node.op in ("max", "min") and is_inexact(y):
            # And in these where a sum follows.
            lost = jnp.isnan(xs[0].exact) | jnp.isnan(xs[1].exact)
            y = jnp.where(lost, jnp.nan, y)
        return with_rounding_error(node, wide, y, dtypes, xs) if self.errors else Value(y)

    def bound(self, node: Node, xs: Sequence[Value], dtypes: Sequence[Any]) -> list[Value]:
        """Evaluate an equation that the operator table cannot express, or control flow."""
        bound = self.program.bindings[node.ref]
        if isinstance(bound, Call):
            assert bound.equation is not None
            inside = _Run(self.program, self.tell, inside=True, errors=self.errors)
            bodies = [functools.partial(inside.graph, b + 1) for b in bound.bodies]
            return control_flow(bound.kind, bound.equation.params, bodies, xs)
        assert isinstance(bound, Equation)
        equation, avals = bound, bound.avals

        def run(*exact: Any) -> list[Any]:
            own = [x.dtype if d is None else d for x, d in zip(exact, dtypes, strict=True)]
            return wide_results(equation, exact, own, avals, self.tell)

        if not self.errors:
            return [Value(y) for y in run(*(x.exact for x in xs))]
        return by_random_signs(run, avals, xs)


class _Compiled(NamedTuple):
    """A piece that is being compiled, and the shapes of the values that it gives."""

    code: Future[Any]
    result_shapes: Any


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


class _Piece(NamedTuple):
    """Nodes that are evaluated together, or one call of a body.

    Attributes:
      members: indices of the nodes.
      inputs, outputs: values from other pieces, and values for them.
      freed: values that have no users after this piece.
    """

    members: list[int]
    inputs: list[int]
    outputs: list[int]
    freed: list[int]


_Pieces = tuple[list[Node], tuple[int, ...], list[_Piece]]


def _split_into_pieces(program: Program, index: int) -> _Pieces:
    """Return the nodes of a graph, its outputs, and its pieces."""
    nodes, outputs, _ = nodes_of(program.graphs[index])
    groups: list[list[int]] = [[]]
    uses: list[list[int]] = []
    for i, node in enumerate(nodes):
        bound = program.bindings[node.ref] if node.ref >= 0 else None
        is_bound = isinstance(bound, Equation | Call)
        args = flat_operands(nodes, node) if is_bound else list(node.args)
        uses.append([] if node.op == "pack" else args)
        if isinstance(bound, Call) and bound.equation is None:
            groups += [[i], []]
        elif is_bound or node.ref < 0:
            if len(groups[-1]) >= _MOST_NODES:
                groups.append([])
            groups[-1].append(i)
    groups = [g for g in groups if g]
    last: dict[int, int] = {a: n for n, g in enumerate(groups) for i in g for a in uses[i]}
    last |= dict.fromkeys(outputs, len(groups))
    pieces = []
    for n, members in enumerate(groups):
        own = set(members)
        inputs = list(dict.fromkeys(a for i in members for a in uses[i] if a not in own))
        results = [i for i in members if last.get(i, -1) > n]
        pieces.append(_Piece(members, inputs, results, [a for a in inputs if last[a] == n]))
    return nodes, outputs, pieces


def _wide_node(node: Node) -> Node:
    if node.spec.shape != "given" and len(LOWERINGS[node.op]) > 1:
        node = replace(node, lowering=0)
    wide = wide_dtype(jnp.dtype(node.dtype)).name if node.dtype not in _UNTYPED else node.dtype
    node = replace(node, dtype=wide)
    node = replace(node, attrs=with_kind(node, kinds.PRECISION, 0))
    for f in node.spec.of_kind(kinds.DTYPE):
        named = wide_dtype(jnp.dtype(ops.DTYPES[node.attrs[f.offset]])).name
        node = replace(node, attrs=with_kind(node, kinds.DTYPE, ops.DTYPE_CODE[named]))
    return node


_UNTYPED = ("none", "extended", "tuple")


def _dtype_of(node: Node) -> Any:
    """Return the dtype of a node in the program; None where it is that of the value itself."""
    return None if node.dtype in _UNTYPED else jnp.dtype(node.dtype)
