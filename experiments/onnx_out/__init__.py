"""A JAX function as an ONNX model, such as an exporter of another framework would write it.

Weights become initialisers, calls and loops are written out, what depends on weights alone is
computed, and what exporters keep whole (softmax, layer norm, batch norm, ...) is one operator.
Indices are taken to be in range, as ONNX demands of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from experiments.onnx_out.flat import flatten
from experiments.onnx_out.values import OnnxOutError
from experiments.onnx_out.writer import Writer
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.program import Program

if TYPE_CHECKING:
    import onnx

__all__ = ["OnnxOutError", "export", "to_onnx"]


def export(
    fn: Callable[..., Any], weights: Any, *inputs: Any, name: str = "network"
) -> onnx.ModelProto:
    """`fn(weights, *inputs)` as an ONNX model of the inputs, for inputs of these shapes."""
    program = from_jax(fn, weights, *inputs, weights=(0,), fold=False)
    return to_onnx(program, name=name, constants=(weights,))


def to_onnx(program: Program, *, name: str, constants: Sequence[Any] = ()) -> onnx.ModelProto:
    """The program as an ONNX model with inputs input_0, ... and outputs output_0, ...

    Args:
      program: its inputs are the flat arguments that are no weights.
      name: of the graph.
      constants: the arguments that are weights, in their order (pytrees of arrays).

    Raises:
      OnnxOutError: an operator that ONNX lacks, by name.
      ImportError: there is no onnx package.
      ValueError: the constants are not those the program was made for.
    """
    flat = flatten(program, constants)
    return Writer(flat).model(name)
