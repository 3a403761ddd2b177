"""ONNX models as JAX functions: `load_onnx` returns the function, `from_onnx` the Program.

The whole model is read and checked first, so that damaged or unsupported parts are reported before
any other work. Supports opsets from 7 to the newest of the installed onnx package.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.frontends.onnx_file import parse_graph, read_model, walk
from xrl_jax.frontends.onnx_inputs import check_names, constant_input, input_dtype, input_structs
from xrl_jax.frontends.onnx_ops import TRANSLATIONS
from xrl_jax.frontends.onnx_ops.base import (
    Graph,
    OnnxError,
    UnknownValueError,
    UnsupportedOnnxError,
    Value,
    device,
    operator_key,
)
from xrl_jax.frontends.onnx_ops.evaluate import run_graph
from xrl_jax.frontends.onnx_ops.wide import Watch
from xrl_jax.frontends.onnx_weights import split_weights
from xrl_jax.runtime.settings import types_mixed

if TYPE_CHECKING:
    import onnx

    from xrl_jax.program.program import Program

__all__ = ["OnnxError", "OnnxFunction", "UnsupportedOnnxError", "from_onnx", "load_onnx"]

OLDEST_OPSET = 7
TENSOR_TYPES = frozenset(
    "FLOAT FLOAT16 BFLOAT16 DOUBLE INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL "
    "COMPLEX64 COMPLEX128".split()
)


@dataclass(frozen=True)
class OnnxFunction:
    """An ONNX model as a JAX function.

    `fn(weights, *inputs)` returns the output, or a tuple of them when the model has several.
    64-bit values are narrowed to 32 bits, as everywhere in JAX, unless x64 is enabled. Load the
    model under the same setting as it will be used with.
    """

    fn: Callable[..., Any]
    weights: dict[str, np.ndarray] = field(repr=False)
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    opset: int


def load_onnx(
    path: str | os.PathLike[str] | onnx.ModelProto,
    *,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    dimensions: Mapping[str, int] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> OnnxFunction:
    """Read an ONNX file, or a ModelProto in memory.

    input_shapes: the shapes of inputs for which the model leaves dimensions open.
    dimensions: sizes of open dimensions, by their names in the model, for all inputs.
    constants: values of inputs to be treated as known, such as those that decide shapes.

    Raises OnnxError when the model is damaged, and UnsupportedOnnxError, which lists all nodes and
    types without a translation, when there are any. Warns, without x64, when the results may
    depend on 64-bit integers or doubles; see `xrl_jax.frontends.onnx_ops.wide`.
    """
    model = expand_functions(read_model(path))
    opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}
    check_opset(model, opsets)
    check_supported(model, opsets)
    graph = parse_graph(model.graph, opsets)
    shapes, known = dict(input_shapes or {}), dict(constants or {})
    check_names(graph.inputs, shapes, known)
    protos = {value.name: value for value in model.graph.input}
    names = tuple(n for n in graph.inputs if n not in graph.initialisers and n not in known)
    inputs = input_structs([protos[name] for name in names], shapes, dict(dimensions or {}))
    weights, rest = split_weights(model, graph)
    for name, value in known.items():
        weights.pop(name, None)  # the model may have a default value for it
        rest[name] = constant_input(protos[name], value)

    program = Graph(graph.name, graph.nodes, (), graph.outputs, {})

    @types_mixed()
    def run(watch: Watch | None, weights: Mapping[str, Value], *arrays: Value) -> Any:
        if len(arrays) != len(names):
            raise TypeError(f"the model has {len(names)} inputs {names}, not {len(arrays)}")
        given = {**weights, **dict(zip(names, arrays, strict=True))}
        scope = {**rest, **{name: device(value) for name, value in given.items()}}
        outputs = [device(value) for value in run_graph(program, scope, watch=watch)]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def fn(weights: Mapping[str, Value], *arrays: Value) -> Any:
        return run(None, weights, *arrays)

    watch = Watch()
    for name in names:
        watch.record_input(name, input_dtype(protos[name]))
    for name, weight in weights.items():
        watch.record_input(name, weight.dtype)
    try:  # report here the problems that only tracing finds
        jax.eval_shape(functools.partial(run, watch), weights, *inputs)
    except UnknownValueError as error:
        error.name_inputs(names)
        raise
    watch.warn()
    return OnnxFunction(fn, weights, inputs, names, graph.outputs, opsets.get("", 0))


def from_onnx(
    path: str | os.PathLike[str] | onnx.ModelProto,
    *,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    dimensions: Mapping[str, int] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Program:
    """Read an ONNX model as a Program whose arguments are the model's inputs, in its order.

    The arguments are those of `load_onnx`. The Program contains the weights, on the default device;
    `load_onnx` returns them separately, for a function that is to be called with other weights.

    >>> xrl_jax.to_onnx(xrl_jax.from_jax(jnp.tanh, jnp.ones(3)), "tanh.onnx")
    >>> xrl_jax.from_onnx("tanh.onnx")(jnp.zeros(3)).tolist()
    [0.0, 0.0, 0.0]
    """
    loaded = load_onnx(path, input_shapes=input_shapes, dimensions=dimensions, constants=constants)
    weights = jax.tree.map(jnp.asarray, loaded.weights)

    def fn(*inputs: Value) -> Any:
        return loaded.fn(weights, *inputs)

    fn.__name__ = Path(path).stem if isinstance(path, (str, os.PathLike)) else "onnx_model"
    return from_jax(fn, *loaded.inputs)


def expand_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Inline the model's functions, and standard operators that have a body but no translation."""
    from onnx import inliner

    if model.functions:
        model = inliner.inline_local_functions(model, convert_version=True)
    tried: set[tuple[str, str]] = set()
    while True:
        wanted = {
            (node.domain, node.op_type)
            for node in walk(model.graph)
            if not translated(node) and has_body(node)
        } - tried
        if not wanted:
            return model
        tried |= wanted
        for key in sorted(wanted):
            model = expand_standard(model, key)


def expand_standard(model: onnx.ModelProto, key: tuple[str, str]) -> onnx.ModelProto:
    """Replace all nodes of a standard operator by its function body.

    The inliner does not set attributes whose default is only in the operator's definition, so this
    sets them first. It fails on some bodies with absent optional inputs; those nodes stay, and
    `check_supported` reports them.
    """
    import onnx
    from onnx import defs, inliner

    filled = onnx.ModelProto()
    filled.CopyFrom(model)
    version = next((o.version for o in model.opset_import if o.domain == key[0]), None)
    if version is None:
        return model
    schema = defs.get_schema(key[1], version, key[0])
    for node in walk(filled.graph):
        if (node.domain, node.op_type) == key:
            present = {attribute.name for attribute in node.attribute}
            node.attribute.extend(
                attribute.default_value
                for name, attribute in schema.attributes.items()
                if name not in present and attribute.default_value.name
            )
    try:
        return inliner.inline_selected_functions(
            filled, [key], exclude=False, inline_schema_functions=True
        )
    except RuntimeError:
        return model


def translated(node: onnx.NodeProto) -> bool:
    key = operator_key(node.domain, node.op_type)
    return key in TRANSLATIONS or key == "Constant"


def has_body(node: onnx.NodeProto) -> bool:
    from onnx import defs

    if not defs.has(node.op_type, node.domain):
        return False
    schema: Any = defs.get_schema(node.op_type, node.domain)
    return schema.has_function or schema.has_context_dependent_function


def check_opset(model: onnx.ModelProto, opsets: Mapping[str, int]) -> None:
    from onnx import defs

    version, newest = opsets.get("", OLDEST_OPSET), defs.onnx_opset_version()
    if version > newest:
        raise UnsupportedOnnxError(
            f"model uses opset {version}; the installed onnx package knows up to {newest}: "
            "install a newer one",
            (f"opset {version}",),
        )
    changed = sorted(
        {node.op_type for node in walk(model.graph) if changed_since(node, version)}
        if version < OLDEST_OPSET
        else ()
    )
    if changed:
        raise UnsupportedOnnxError(
            f"model uses opset {version}, older than {OLDEST_OPSET}, where {', '.join(changed)} "
            "changed: convert it first with onnx.version_converter.convert_version",
            (f"opset {version}",),
        )


def changed_since(node: onnx.NodeProto, version: int) -> bool:
    """Return whether an operator changed between opset `version` and the oldest supported one."""
    from onnx import defs

    if node.domain not in ("", "ai.onnx") or not defs.has(node.op_type):
        return False
    try:
        old = defs.get_schema(node.op_type, version)
    except defs.SchemaError:
        return True
    return old.since_version != defs.get_schema(node.op_type, OLDEST_OPSET).since_version


def check_supported(model: onnx.ModelProto, opsets: Mapping[str, int]) -> None:
    """Raise one UnsupportedOnnxError that lists all operators and types without a translation."""
    from onnx import TensorProto

    problems: dict[str, str] = {}

    def check_type(elem_type: int, label: str) -> None:
        known = elem_type in TensorProto.DataType.values()
        name = TensorProto.DataType.Name(elem_type) if known else f"number {elem_type}"
        if name not in TENSOR_TYPES:
            problems.setdefault(f"{label}: type {name}", name)

    for value in (*model.graph.input, *model.graph.output):
        kind = value.type.WhichOneof("value")
        if kind == "tensor_type":
            if value.type.tensor_type.elem_type:  # 0: an output without a declared type
                check_type(value.type.tensor_type.elem_type, f"value '{value.name}'")
        elif kind is not None:
            problems[f"value '{value.name}': {kind}"] = kind
    for tensor in model.graph.initializer:
        check_type(tensor.data_type, f"initialiser '{tensor.name}'")
    for tensor in model.graph.sparse_initializer:
        problems[f"initialiser '{tensor.values.name}': sparse tensor"] = "sparse tensor"
    for node in walk(model.graph):
        domain = "" if node.domain == "ai.onnx" else node.domain
        label = (
            f"node '{node.name or ', '.join(node.output)}' "
            f"({domain or 'ai.onnx'}.{node.op_type}, opset {opsets.get(domain, 'not imported')})"
        )
        if not translated(node):
            problems[label] = node.op_type
        for attribute in node.attribute:
            if attribute.HasField("t"):
                check_type(attribute.t.data_type, f"{label}: attribute '{attribute.name}'")
            elif attribute.name in ("to", "dtype", "output_dtype") and attribute.i:
                check_type(attribute.i, f"{label}: attribute '{attribute.name}'")
            elif node.op_type == "Constant" and attribute.name in UNREADABLE_CONSTANTS:
                problems[f"{label}: {attribute.name}"] = f"Constant {attribute.name}"
    if problems:
        listing = "; ".join(problems)
        raise UnsupportedOnnxError(f"not supported: {listing}", tuple(problems.values()))


UNREADABLE_CONSTANTS = ("sparse_value", "value_string", "value_strings")
