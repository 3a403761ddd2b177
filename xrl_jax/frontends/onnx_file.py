"""Reads and checks ONNX models: protobuf, external data, names, order of nodes.

Every error message names the faulty file, tensor, node or value.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xrl_jax.frontends.onnx_ops.base import Graph, Node, OnnxError

if TYPE_CHECKING:
    import onnx


def read_model(source: str | os.PathLike[str] | onnx.ModelProto) -> onnx.ModelProto:
    """Read a model; returns it with all external data loaded into its tensors.

    External data is read only from the model's own folder. Raises OnnxError when the file is
    missing, truncated or not an ONNX model.
    """
    import onnx
    from google.protobuf.message import DecodeError

    model, folder = onnx.ModelProto(), None
    if isinstance(source, onnx.ModelProto):
        model = source
    else:
        path = Path(source)
        folder = path.parent
        try:
            model.ParseFromString(path.read_bytes())
        except OSError as error:
            raise OnnxError(f"model {path}: cannot be read: {error.strerror}") from error
        except DecodeError as error:
            raise OnnxError(f"model {path}: is truncated or not an ONNX file") from error
    if not model.HasField("graph") or not model.opset_import:
        raise OnnxError("model has no graph or no opset_import: truncated or not an ONNX file")
    for node in model.graph.node:
        for text in (node.op_type, node.domain, node.name, *node.input, *node.output):
            if not isinstance(text, str):
                raise OnnxError(f"model has the name {text!r}, which is not UTF-8: damaged file")
    external = [t for t in tensors(model.graph) if t.data_location == onnx.TensorProto.EXTERNAL]
    for tensor in external:
        if folder is None:
            raise OnnxError(
                f"model in memory keeps tensor '{tensor.name}' in an external file: "
                "give the path of the model instead, or load the data into it first"
            )
        read_external(tensor, folder)
    return model


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs among a node's attributes."""
    for attribute in node.attribute:
        yield from attribute.graphs
        if attribute.HasField("g"):
            yield attribute.g


def walk(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes of a graph and its subgraphs."""
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from walk(inner)


def tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield all tensors of a graph and its subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for inner in subgraphs(node):
            yield from tensors(inner)


def read_external(tensor: onnx.TensorProto, folder: Path) -> None:
    """Load a tensor's external data into it.

    Raises OnnxError unless the file is in the model's folder.
    """
    import onnx

    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    label = f"tensor '{tensor.name}': external data '{location}'"
    root = folder.resolve()
    target = (root / location).resolve()
    if not location or os.path.isabs(location) or not target.is_relative_to(root):
        raise OnnxError(f"{label} is outside the model's folder, which is not allowed")
    if not target.is_file():
        raise OnnxError(f"{label} is missing from the model's folder")
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries["length"]) if "length" in entries else None
    except ValueError as error:
        raise OnnxError(f"{label} has an offset or length that is not a number") from error
    available = target.stat().st_size - offset
    wanted = available if length is None else length
    if offset < 0 or wanted < 0 or wanted > available:
        raise OnnxError(
            f"{label} is too short: it needs {wanted} bytes and has {max(available, 0)}"
        )
    with target.open("rb") as file:
        file.seek(offset)
        tensor.raw_data = file.read(wanted)
    tensor.ClearField("external_data")
    tensor.data_location = onnx.TensorProto.DEFAULT


def to_numpy(tensor: onnx.TensorProto, label: str) -> np.ndarray:
    """Return a tensor's values; raises OnnxError when there are too few or too many."""
    from onnx import TensorProto, helper, numpy_helper

    try:
        count = math.prod(tensor.dims)
        if tensor.HasField("raw_data") and tensor.data_type != TensorProto.STRING:
            width = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize
            if len(tensor.raw_data) != width * count:
                raise OnnxError(
                    f"{label} of shape {list(tensor.dims)} needs {width * count} bytes "
                    f"and has {len(tensor.raw_data)}"
                )
        return numpy_helper.to_array(tensor)
    except OnnxError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise OnnxError(f"{label} cannot be read: {error}") from error


def parse_graph(
    proto: onnx.GraphProto, opsets: dict[str, int], outer: frozenset[str] = frozenset()
) -> Graph:
    """Turn a graph into nodes in topological order, with constants as initialisers.

    `outer` holds the names that enclosing graphs define. Raises OnnxError on duplicate names,
    undefined names, and cycles.
    """
    initialisers = {}
    for tensor in proto.initializer:
        if tensor.name in initialisers:
            raise OnnxError(f"model has two initialisers named '{tensor.name}'")
        initialisers[tensor.name] = to_numpy(tensor, f"initialiser '{tensor.name}'")
    inputs = tuple(value.name for value in proto.input)
    made = Counter(inputs) + Counter(name for node in proto.node for name in node.output if name)
    made += Counter(name for name in initialisers if name not in inputs)
    for name, count in made.items():
        if count > 1:
            raise OnnxError(f"model makes the value '{name}' {count} times (duplicate name)")

    known = frozenset(made) | outer
    nodes = []
    for node in proto.node:
        for name in free_names(node):
            if name not in known:
                raise OnnxError(
                    f"node '{node.name or node.op_type}' ({node.op_type}) reads '{name}', which is "
                    "neither an input, nor an initialiser, nor made by any node"
                )
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            initialisers[node.output[0]] = constant_value(node)
        else:
            nodes.append(parse_node(node, opsets, known))
    for value in proto.output:
        if value.name not in known:
            raise OnnxError(f"output '{value.name}' is not made by any node of the model")
    ready = set(inputs) | set(initialisers) | outer
    return Graph(
        proto.name,
        tuple(in_order(nodes, ready)),
        inputs,
        tuple(value.name for value in proto.output),
        initialisers,
    )


def free_names(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node and its subgraphs read from the graph that contains it."""
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        own = {value.name for value in graph.input} | {t.name for t in graph.initializer}
        own |= {name for inner in graph.node for name in inner.output}
        for inner in graph.node:
            yield from (name for name in free_names(inner) if name not in own)
        yield from (value.name for value in graph.output if value.name not in own)


def in_order(nodes: list[Node], ready: set[str]) -> Iterator[Node]:
    """Yield nodes in topological order; keeps the order of a model that is sorted already."""
    reads = {id(node): set(free_names(node.proto)) - ready for node in nodes}
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in reads[id(node)]:
            readers.setdefault(name, []).append(node)
    queue = [node for node in nodes if not reads[id(node)]]
    done = 0
    while done < len(queue):
        node = queue[done]
        done += 1
        yield node
        for name in node.outputs:
            for reader in readers.get(name, ()):
                reads[id(reader)].discard(name)
                if not reads[id(reader)]:
                    queue.append(reader)
    stuck = [node for node in nodes if reads[id(node)]]
    if stuck:
        names = ", ".join(f"'{node.name or node.op}'" for node in stuck[:5])
        raise OnnxError(f"model has a cycle through the nodes {names}")


def constant_value(node: onnx.NodeProto) -> np.ndarray:
    from onnx import helper

    for attribute in node.attribute:
        if attribute.name == "value":
            return to_numpy(attribute.t, f"constant '{node.output[0]}'")
        dtype = {"value_float": np.float32, "value_int": np.int64}.get(attribute.name.rstrip("s"))
        if dtype is not None:
            return np.asarray(helper.get_attribute_value(attribute), dtype)
    raise OnnxError(f"constant '{node.output[0]}' has no numeric value")


def parse_node(node: onnx.NodeProto, opsets: dict[str, int], known: frozenset[str]) -> Node:
    from onnx import AttributeProto, helper

    domain = "" if node.domain == "ai.onnx" else node.domain
    attributes: dict[str, Any] = {}
    for attribute in node.attribute:
        label = f"attribute '{attribute.name}' of node '{node.name or node.op_type}'"
        if attribute.type == AttributeProto.GRAPH:
            attributes[attribute.name] = parse_graph(attribute.g, opsets, known)
        elif attribute.type == AttributeProto.TENSOR:
            attributes[attribute.name] = to_numpy(attribute.t, label)
        else:
            value = helper.get_attribute_value(attribute)
            if isinstance(value, bytes):
                value = value.decode()
            elif isinstance(value, list):
                value = tuple(v.decode() if isinstance(v, bytes) else v for v in value)
            attributes[attribute.name] = value
    return Node(
        op=node.op_type,
        domain=domain,
        name=node.name,
        opset=opsets.get(domain, 0),
        inputs=tuple(node.input),
        outputs=tuple(node.output),
        attributes=attributes,
        proto=node,
    )
