"""A program: a main graph, folded bodies, the host objects that nodes refer to, and evaluation.

The graphs are arrays and are rewritten inside jit. The bindings never change while a program is
optimised, so a rewritten program is the old one with other graphs (`with_graphs`).

For evaluation, each node becomes lax code through its chosen lowering, in the order of `nodes_of`.
Equations that the op table cannot express are bound again unchanged; folded bodies are inlined, or
traced into the control flow that they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.graph.bindings import (
    CONTROL_FLOW,
    Array,
    Binding,
    Call,
    Equation,
    Input,
    binding_of,
    digest,
)
from xrl_jax.graph.equations import bind
from xrl_jax.graph.graph import GraphError, Node, TensorGraph, nodes_of
from xrl_jax.graph.operands import flat_operands
from xrl_jax.graph.text import format_graph
from xrl_jax.lower.chains import chains
from xrl_jax.lower.table import lower
from xrl_jax.program.arguments import flatten_as
from xrl_jax.runtime.settings import own_settings


@dataclass(frozen=True)
class Body:
    """A graph that runs `count` times per run of the program.

    `count` is an estimate for while loops and branches.
    """

    graph: TensorGraph
    in_avals: tuple[Any, ...]
    n_outputs: int
    count: float
    name: str = "body"


@dataclass(frozen=True, eq=False)  # arrays are not comparable; `jax.jit` asks for a hash
class Program:
    """A program as returned by `from_jax` and rewritten by searches; equality is identity.

    Attributes:
      graph: the main graph; nodes `input` and `weight` refer to `Input(position)` among the flat
        arguments.
      bodies: folded bodies, callees before callers.
      bindings: indexed by the `ref` of the nodes of all graphs.
      in_avals: shape and dtype of every flat argument.
      weights: for every flat argument, whether it stays the same between calls.
      in_tree: structure of `(args, kwargs)` as returned by `flatten_args`.
      out_tree: structure of the result.
      n_outputs: number of flat results.
      fn: the traced function, for derivatives and for calls with other shapes; None if there is
        none (a loaded program).
      weak_outputs: positions of the flat results with a weak type (e.g. `2 * 3.0`; such a result
        takes on the dtype of the value it is combined with).
    """

    graph: TensorGraph
    bodies: tuple[Body, ...]
    bindings: tuple[Binding, ...]
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    weights: tuple[bool, ...]
    in_tree: Any
    out_tree: Any
    n_outputs: int
    fn: Callable[..., Any] | None = None
    weak_outputs: tuple[int, ...] = ()

    @property
    def graphs(self) -> tuple[TensorGraph, ...]:
        """The main graph, then the bodies' graphs."""
        return (self.graph, *(b.graph for b in self.bodies))

    @property
    def counts(self) -> tuple[float, ...]:
        """How often each of `graphs` runs."""
        return (1.0, *(b.count for b in self.bodies))

    def with_graphs(self, graphs: Sequence[TensorGraph]) -> Program:
        """Return the same program with rewritten graphs, in the order of `graphs`."""
        bodies = tuple(replace(b, graph=g) for b, g in zip(self.bodies, graphs[1:], strict=True))
        return replace(self, graph=graphs[0], bodies=bodies)

    def digests(self) -> np.ndarray:
        """Return each binding's content as [D, 2] uint32, for the identity hash; D is positive."""
        rows = [digest(b) for b in self.bindings] or [np.zeros(2, np.uint32)]
        return np.stack(rows)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program unchanged, node by node through its lowerings (traceable)."""
        return to_jax(self)(*args, **kwargs)

    def __str__(self) -> str:
        """Return the main graph, then the bodies, with comments that explain the references."""
        blocks = [format_graph(self.graph, self.bindings, name="main")]
        for i, body in enumerate(self.bodies):
            text = format_graph(body.graph, self.bindings, name=f"body{i}")
            blocks.append(f"# {body.name}, {body.count:g} times\n{text}")
        return "\n\n".join(blocks)


# Returns the value of an operator, given its graph (as for `evaluate`), slot, node and operands.
Compute = Callable[[int, int, Node, Sequence[Any]], Any]


def _lowered(graph: int, slot: int, node: Node, operands: Sequence[Any]) -> Any:
    return lower(node, *operands)


@own_settings()
def evaluate(
    program: Program, index: int, args: Sequence[Any], *, compute: Compute = _lowered
) -> list[Any]:
    """Return the results of graph `index` of `program.graphs` on flat arguments (traceable).

    Args:
      program: its bindings are those that the nodes refer to.
      index: 0 for the main graph, i + 1 for body i.
      args: one array for each flat argument of the graph.
      compute: computes the operators, by their lowerings by default. It is not asked for operators
        whose lowering computes an epilogue as well; plain lowerings never do.
    """
    graph = program.graphs[index]
    nodes, outputs, slots = nodes_of(graph)
    chained, inner = chains(nodes, outputs, np.asarray(graph.nodes.weight_only)[slots].tolist())
    values: list[Any] = []
    for i, node in enumerate(nodes):
        if i in inner:
            values.append(None)
        elif chain := chained.get(i):
            anchor = nodes[chain.anchor]
            operands = (values[a] for a in anchor.args)
            values.append(lower(anchor, *operands, epilogue=chain.epilogue(values)))
        else:
            match binding_of(node, program.bindings):
                case Input(position):
                    value = args[position]
                case Array(value):
                    pass
                case Equation() as equation:
                    value = _bound(equation, _operands(node, nodes, values))
                case Call() as call:
                    value = _call(program, call, _operands(node, nodes, values), compute)
                case _:
                    value = compute(index, slots[i], node, [values[a] for a in node.args])
            values.append(value)
    results = [values[o] for o in outputs]
    for i in program.weak_outputs if index == 0 else ():
        results[i] = weakened(results[i])
    return results


def plain(program: Program) -> Program:
    """Return the program with the plain lowering of every operator."""

    def of(graph: TensorGraph) -> TensorGraph:
        lowering = jnp.zeros_like(graph.nodes.lowering)
        return graph._replace(nodes=graph.nodes._replace(lowering=lowering))

    return program.with_graphs([of(g) for g in program.graphs])


def weakened(x: Any) -> Any:
    """Return the array with a weak type, which graphs do not represent."""
    if getattr(x, "weak_type", False):
        return x
    return lax.convert_element_type_p.bind(
        x, new_dtype=jnp.dtype(x.dtype), weak_type=True, sharding=None
    )


def to_jax(program: Program) -> Callable[..., Any]:
    """Return the program as a function with the signature of the traced one.

    Raises (when called):
      TypeError: the arguments do not have the structure that the program was traced with.

    >>> program = xrl_jax.from_jax(jnp.tanh, jnp.ones(3))
    >>> fn = xrl_jax.to_jax(program)
    >>> jax.jit(fn)(jnp.zeros(3)).tolist()
    [0.0, 0.0, 0.0]
    """

    @own_settings()
    def run(*args: Any, **kwargs: Any) -> Any:
        flat, tree = flatten_as(program.in_tree, args, kwargs)
        if tree != program.in_tree:
            raise TypeError(
                f"the program was made for arguments of structure {program.in_tree}, got {tree}"
            )
        leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in flat]  # Python scalars
        return jax.tree.unflatten(program.out_tree, evaluate(program, 0, leaves))

    return run


def _operands(node: Node, nodes: Sequence[Node], values: Sequence[Any]) -> list[Any]:
    """Return the operands of an equation.

    Packs are flattened, and the link that orders effects is left out.
    """
    return [values[i] for i in flat_operands(nodes, node)]


def _bound(equation: Equation, operands: Sequence[Any]) -> Any:
    """Return the equation's results: the array itself if there is one, else a tuple."""
    results = bind(equation, operands)
    return results[0] if len(results) == 1 else tuple(results)


def _call(program: Program, call: Call, operands: Sequence[Any], compute: Compute) -> Any:
    """Run folded bodies, inlined or inside the control flow of the call's equation."""
    if call.equation is None:
        results = evaluate(program, call.bodies[0] + 1, operands, compute=compute)
        return results[0] if len(results) == 1 else tuple(results)
    if call.kind not in CONTROL_FLOW:
        raise GraphError(
            f"unknown kind {call.kind!r} of a call with an equation (known: scan, while, cond)"
        )
    traced = [_trace_body(program, b, compute) for b in call.bodies]
    params = dict(call.equation.params)
    if call.kind == "cond":
        params["branches"] = tuple(traced)
    else:
        params.update(zip(CONTROL_FLOW[call.kind], traced, strict=True))
    return _bound(replace(call.equation, params=params), operands)


def _trace_body(program: Program, body: int, compute: Compute) -> Any:
    """Return the closed jaxpr of a body, for the parameters of control flow."""
    avals = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in program.bodies[body].in_avals
    ]
    return jax.make_jaxpr(lambda *args: evaluate(program, body + 1, args, compute=compute))(*avals)
