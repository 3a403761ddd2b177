"""The way out: a program as a plain, traceable JAX function.

Each node becomes lax code through its chosen lowering, in the order of `nodes_of`. Equations the
op table cannot say are bound again as they were; folded bodies are inlined, or put into the
control flow they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.backends.epilogue import chains
from xrl_jax.graph.equations import bind
from xrl_jax.graph.graph import GraphError, Node, nodes_of
from xrl_jax.graph.operands import flat_operands
from xrl_jax.graph.program import (
    CONTROL_FLOW,
    Array,
    Call,
    Equation,
    Input,
    Program,
    flatten_as,
)
from xrl_jax.lowerings.table import lower
from xrl_jax.runtime.settings import own_settings

YNN = "xla_cpu_experimental_ynn_fusion_type"  # the compile option of what goes to YNNPACK


def keeping_nan() -> dict[str, str]:
    """Compile options with which XLA keeps NaN on the default device: YNNPACK's kernels on the CPU
    make it a number where a bound and a sum are one kernel.
    """
    return {YNN: ""} if jax.default_backend() == "cpu" else {}


@own_settings()
def evaluate(program: Program, index: int, args: Sequence[Any]) -> list[Any]:
    """The results of graph `index` of `program.graphs` on flat arguments (traceable).

    Args:
      program: nodes refer to its bindings.
      index: 0 for the main graph, i + 1 for body i.
      args: one array for each flat argument of the graph.
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
            values.append(_value(program, node, nodes, values, args))
    results = [values[o] for o in outputs]
    for i in program.weak_outputs if index == 0 else ():
        results[i] = weakened(results[i])
    return results


def weakened(x: Any) -> Any:
    """The array with a weak type; graphs do not know of these."""
    if getattr(x, "weak_type", False):
        return x
    return lax.convert_element_type_p.bind(
        x, new_dtype=jnp.dtype(x.dtype), weak_type=True, sharding=None
    )


def to_jax(program: Program) -> Callable[..., Any]:
    """The program as a function with the arguments and the result structure of the traced one.

    Raises (when called):
      TypeError: the arguments have another structure than those the program was made for.
    """

    @own_settings()
    def run(*args: Any, **kwargs: Any) -> Any:
        flat, tree = flatten_as(program.in_tree, args, kwargs)
        if tree != program.in_tree:
            raise TypeError(
                f"the program was made for arguments of structure {program.in_tree}, got {tree}"
            )
        leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in flat]  # numbers
        return jax.tree.unflatten(program.out_tree, evaluate(program, 0, leaves))

    return run


def _value(
    program: Program, node: Node, nodes: Sequence[Node], values: Sequence[Any], args: Sequence[Any]
) -> Any:
    """One node's value; a tuple for `pack` and where an equation has other than one result."""
    match program.bindings[node.ref] if node.ref >= 0 else None:
        case Input(position):
            return args[position]
        case Array(value):
            return value
        case Equation() as equation:
            return _bound(equation, _operands(node, nodes, values))
        case Call() as call:
            return _call(program, call, _operands(node, nodes, values))
        case _:
            return lower(node, *(values[a] for a in node.args))


def _operands(node: Node, nodes: Sequence[Node], values: Sequence[Any]) -> list[Any]:
    """Operands of an equation: packs opened, the chain that orders effects cut off."""
    return [values[i] for i in flat_operands(nodes, node)]


def _bound(equation: Equation, operands: Sequence[Any]) -> Any:
    """The equation's results: the array itself where there is one, else a tuple."""
    results = bind(equation, operands)
    return results[0] if len(results) == 1 else tuple(results)


def _call(program: Program, call: Call, operands: Sequence[Any]) -> Any:
    """A run of folded bodies, inlined or inside the control flow of the call's equation."""
    if call.equation is None:
        results = evaluate(program, call.bodies[0] + 1, operands)
        return results[0] if len(results) == 1 else tuple(results)
    if call.kind not in CONTROL_FLOW:
        raise GraphError(f"a call of kind {call.kind!r} has an equation (known: scan, while, cond)")
    traced = [_trace_body(program, b) for b in call.bodies]
    params = dict(call.equation.params)
    if call.kind == "cond":
        params["branches"] = tuple(traced)
    else:
        params.update(zip(CONTROL_FLOW[call.kind], traced, strict=True))
    return _bound(replace(call.equation, params=params), operands)


def _trace_body(program: Program, body: int) -> Any:
    """The closed jaxpr of a body, for the parameters of control flow."""
    avals = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in program.bodies[body].in_avals
    ]
    return jax.make_jaxpr(lambda *args: evaluate(program, body + 1, args))(*avals)
