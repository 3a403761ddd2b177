"""Exports programs as ONNX models, in the form in which exporters of other frameworks write them.

Calls are inlined, loops are unrolled, values that depend on constants only are computed, and
patterns that exporters keep as one operator (softmax, layer norm, batch norm, ...) become one.
Indices are assumed to be in range, as ONNX requires.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xrl_jax.backends.onnx.flat import flatten
from xrl_jax.backends.onnx.table import write_operation, write_pattern
from xrl_jax.backends.onnx.values import Value
from xrl_jax.backends.onnx.writer import Writer
from xrl_jax.program.program import Program
from xrl_jax.runtime.files import atomic_write

if TYPE_CHECKING:
    import onnx

OPSET = 21
IR_VERSION = 10  # the version released with opset 21
_LARGEST = 1 << 30  # bytes of constants in the file itself; protobuf is limited to 2 GiB


def to_onnx(
    program: Program,
    path: str | os.PathLike[str],
    *,
    weights: Sequence[Any] | None = None,
    name: str = "network",
) -> None:
    """Write a program as an ONNX model with inputs input_0, ... and outputs output_0, ...

    The lowerings that a search chose are not exported, because ONNX operators have none. Constants
    of more than 1 GiB are written to a second file, `path` with ".data" appended.

    Args:
      path: the file, which is written completely or not at all, unless there is a second one.
      weights: the arguments that are weights, in their order (pytrees of arrays); they become
        constants of the model. If None, they are inputs of the model like all others.
      name: the name of the graph.

    Raises:
      ExportError: the program has an operation, named in the message, that ONNX cannot express.
      ValueError: the number, shapes or dtypes of the weights are not the program's.
      ImportError: the onnx package is missing.

    >>> program = xrl_jax.from_jax(lambda w, x: x @ w, jnp.eye(2), jnp.ones(2), weights=0)
    >>> xrl_jax.to_onnx(program, "product.onnx", weights=[2.0 * jnp.eye(2)])
    >>> xrl_jax.from_onnx("product.onnx")(jnp.ones(2)).tolist()
    [2.0, 2.0]
    """
    made = model_proto(program, name=name, weights=weights)
    path = Path(path)
    nbytes = sum(t.ByteSize() for t in made.graph.initializer)
    if nbytes > _LARGEST:
        import onnx

        onnx.save(made, path, save_as_external_data=True, location=f"{path.name}.data")
        return
    with atomic_write(path) as file:
        file.write(made.SerializeToString())


def model_proto(
    program: Program, *, name: str = "network", weights: Sequence[Any] | None = None
) -> onnx.ModelProto:
    """Return the model that `to_onnx` writes."""
    flat = flatten(program, weights)
    return _model(Writer(flat), name)


def _model(w: Writer, name: str) -> onnx.ModelProto:
    flat, helper = w.flat, w.onnx.helper
    inputs = [f"input_{k}" for k in range(len(flat.inputs))]
    for index, label in zip(flat.inputs, inputs, strict=True):
        w.values[index] = Value(label, flat.ops[index].shape)
    for index in _needed(w):
        write = write_operation if w.patterns.get(index) is None else write_pattern
        w.values[index] = write(w, flat.ops[index])
    outputs = _named_outputs(w, inputs)
    _drop_dead(w, outputs)
    graph = helper.make_graph(
        w.nodes,
        name,
        [w.info(label, i) for label, i in zip(inputs, flat.inputs, strict=True)],
        [w.info(label, i) for label, i in zip(outputs, flat.outputs, strict=True)],
        w.used_initialisers(),
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="xrl_jax",
    )


def _needed(w: Writer) -> list[int]:
    """Return the operations to write, in order, without those inside a pattern."""
    wanted = set(w.flat.outputs)
    for i in range(len(w.flat.ops) - 1, -1, -1):
        if i in wanted:
            pattern = w.patterns.get(i)
            wanted.update(w.flat.ops[i].args if pattern is None else pattern.args)
    known = {i for i in wanted if w.flat.ops[i].value is not None}
    return sorted(wanted - known - set(w.flat.inputs))


def _named_outputs(w: Writer, inputs: Sequence[str]) -> list[str]:
    """Rename the outputs; constants, inputs and repeated outputs get an Identity node first."""
    names: dict[str, str] = {}
    for k, index in enumerate(w.flat.outputs):
        value = w.exact(index)
        if value.array is not None or value.name in inputs or value.name in names:
            value = w.node("Identity", value, shape=value.shape)
        names[value.name] = f"output_{k}"
    for node in w.nodes:
        node.input[:] = [names.get(n, n) for n in node.input]
        node.output[:] = [names.get(n, n) for n in node.output]
    return list(names.values())


def _drop_dead(w: Writer, outputs: Sequence[str]) -> None:
    """Drop nodes without users, such as transposes that were merged with others."""
    read, alive = set(outputs), []
    for node in reversed(w.nodes):
        if read.intersection(node.output):
            read.update(node.input)
            alive.append(node)
    w.nodes = alive[::-1]
