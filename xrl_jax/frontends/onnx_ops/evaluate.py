"""Evaluates a parsed ONNX graph: nodes of known values fold on the host, others trace to lax."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from xrl_jax.frontends.onnx_file import free_names
from xrl_jax.frontends.onnx_ops import TRANSLATIONS
from xrl_jax.frontends.onnx_ops.base import (
    Graph,
    Node,
    OnnxError,
    UnknownValueError,
    Value,
    is_host,
)
from xrl_jax.frontends.onnx_ops.shape import HOST_LIMIT
from xrl_jax.frontends.onnx_ops.wide import Watch

# Operators with which exporters compute shapes, axes, indices and masks. All others are translated
# even if their inputs are known: the reference implementation is not exact for all old opsets.
FOLDING = frozenset(
    "Abs Add And ArgMax ArgMin Ceil Clip Compress Concat CumSum Div Equal Exp Flatten Floor Gather "
    "GatherElements GatherND Greater GreaterOrEqual Less LessOrEqual Log Max Min Mod Mul Neg "
    "NonZero Not OneHot Or Pow Reciprocal Relu ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "Reshape Round ScatterElements ScatterND Sign Slice Split Sqrt Squeeze Sub Sum TopK Transpose "
    "Trilu Unique Unsqueeze Where Xor".split()
)


def run_graph(
    graph: Graph, scope: Mapping[str, Value], *inputs: Value, watch: Watch | None = None
) -> list[Value]:
    """Return the graph's outputs; `scope` holds the values of enclosing graphs.

    `watch` records each node that is translated.
    """
    values = dict(scope)
    values.update(graph.initialisers)
    values.update(zip(graph.inputs, inputs, strict=False))
    for node in graph.nodes:
        try:
            results = run_node(node, values, watch)
        except UnknownValueError as error:
            error.needs = origins(graph, node, error.needs, values)
            raise
        values.update(
            (name, value)
            for name, value in zip(node.outputs, results, strict=False)
            if name and value is not None
        )
    return [values[name] for name in graph.outputs]


def origins(
    graph: Graph, failed: Node, needs: frozenset[str], values: Mapping[str, Value]
) -> frozenset[str]:
    """Return the names of the values from outside the graph that decide those in `needs`.

    The inputs of a subgraph are assumed to depend on everything that its node reads.
    """
    inner = needs - values.keys()
    wanted = set(needs & values.keys())
    wanted |= {name for name in failed.inputs if inner and name and not is_host(values[name])}
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outputs):
            wanted -= set(node.outputs)
            read = free_names(node.proto)
            wanted |= {name for name in read if name in values and not is_host(values[name])}
    return frozenset(wanted)


def run_node(
    node: Node, values: Mapping[str, Value], watch: Watch | None
) -> Sequence[Value | None]:
    inputs = [values[name] if name else None for name in node.inputs]
    try:
        if folds(node, inputs):
            return fold(node, inputs)
        made = TRANSLATIONS[node.key](bind_subgraphs(node, values, watch), *inputs)
    except UnknownValueError as error:
        names = zip(node.inputs, inputs, strict=True)
        name = next((name for name, value in names if value is error.value), "")
        error.needs |= {name} - {""}
        raise
    except OnnxError as error:
        if str(error).startswith(("node ", "model ")):
            raise
        raise OnnxError(f"{node}: {error}") from error
    except (TypeError, ValueError, IndexError, KeyError, ZeroDivisionError) as error:
        shapes = ", ".join("-" if x is None else f"{x.dtype}{list(x.shape)}" for x in inputs)
        raise OnnxError(f"{node}, given {shapes}: {error}") from error
    results = made if isinstance(made, tuple | list) else (made,)
    if watch is not None:
        watch.record_node(node, inputs, results)
    return results


def bind_subgraphs(node: Node, values: Mapping[str, Value], watch: Watch | None) -> Node:
    """Replace subgraph attributes by functions of the inputs of the subgraph."""
    if not any(isinstance(value, Graph) for value in node.attributes.values()):
        return node
    bound = {
        name: functools.partial(run_graph, value, values, watch=watch)
        if isinstance(value, Graph)
        else value
        for name, value in node.attributes.items()
    }
    return dataclasses.replace(node, attributes=bound)


def folds(node: Node, inputs: Sequence[Value | None]) -> bool:
    """Return whether a node is folded: its operator may be, and its inputs are known and small."""
    if node.key not in FOLDING:
        return False
    known = [x for x in inputs if x is not None]
    return all(is_host(x) for x in known) and sum(x.size for x in known) <= HOST_LIMIT


def fold(node: Node, inputs: Sequence[Value | None]) -> list[np.ndarray]:
    """Compute a node with the onnx package's reference implementation."""
    from onnx import ValueInfoProto, helper
    from onnx.reference import ReferenceEvaluator

    given = {
        name: np.asarray(x) for name, x in zip(node.inputs, inputs, strict=True) if x is not None
    }
    wanted = [name for name in node.outputs if name]
    graph = helper.make_graph(
        [node.proto],
        "fold",
        [ValueInfoProto(name=name) for name in given],
        [ValueInfoProto(name=name) for name in wanted],
    )
    opsets = [helper.make_opsetid(node.domain, node.opset)]
    model = helper.make_model(graph, opset_imports=opsets)
    with np.errstate(all="ignore"):
        computed = dict(zip(wanted, ReferenceEvaluator(model).run(None, given), strict=True))
    return [np.asarray(computed[name]) if name else np.zeros(0) for name in node.outputs]
