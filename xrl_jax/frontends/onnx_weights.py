"""Splits an ONNX model's stored arrays into weights and arrays that must be known while tracing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from xrl_jax.frontends.onnx_ops.base import Graph

if TYPE_CHECKING:
    import onnx

# Values of Constant nodes with up to this many elements stay in the graph, where rules can see
# them; of stored initialisers, only those with one element do.
FEW_ELEMENTS = 8
# Larger float arrays are weights: they are neither shapes nor operands from which one is computed.
SHAPE_ELEMENTS = 64
# Positions of the inputs that decide shapes, by operator.
SHAPE_DECIDING = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Upsample": (1,),
}
# Operators whose results are known while tracing, whatever their inputs.
KNOWN_RESULTS = ("Shape", "Size")


def split_weights(
    model: onnx.ModelProto, graph: Graph
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Split initialisers into weights (float arrays, an argument of `fn`) and known constants."""
    stored = {tensor.name for tensor in model.graph.initializer}
    deciding = shape_deciding(graph)
    weights, rest = {}, {}
    for name, array in graph.initialisers.items():
        few = 1 if name in stored else FEW_ELEMENTS
        numeric = array.dtype.kind in "fc" or array.dtype.name == "bfloat16"
        decides = name in deciding and array.size <= SHAPE_ELEMENTS
        is_weight = numeric and array.size > few and not decides
        (weights if is_weight else rest)[name] = array
    return weights, rest


def shape_deciding(graph: Graph, outputs: Iterable[str] = ()) -> set[str]:
    """Return the names of `outputs`, of values that decide shapes, and of all they depend on."""
    wanted = set(outputs)
    for node in reversed(graph.nodes):
        decides = not wanted.isdisjoint(node.outputs)
        for body in node.attributes.values():
            if isinstance(body, Graph):
                wanted |= shape_deciding(body, body.outputs if decides else ())
        if decides and node.key not in KNOWN_RESULTS:
            wanted.update(node.inputs)
        wanted.update(
            node.inputs[place]
            for place in SHAPE_DECIDING.get(node.key, ())
            if place < len(node.inputs)
        )
    return wanted
