"""The builder of ONNX graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xrl_jax.backends.onnx.flat import Flat, without_repeats
from xrl_jax.backends.onnx.match import consumers_of
from xrl_jax.backends.onnx.patterns import recognise
from xrl_jax.backends.onnx.values import ExportError, Value, without_leading_ones

if TYPE_CHECKING:
    import onnx


class Writer:
    """An ONNX graph under construction, to which the functions of `table` append nodes.

    They read operands by `exact` where an operator needs the whole shape, else by `loose`.
    """

    def __init__(self, flat: Flat) -> None:
        try:
            import onnx
        except ImportError as error:
            raise ImportError("ONNX models need the onnx package: pip install onnx") from error
        self.onnx = onnx
        self.flat = flat
        self.patterns = recognise(flat)
        self.consumers = consumers_of(flat)
        self.nodes: list[onnx.NodeProto] = []
        self.initialisers: dict[Any, onnx.TensorProto] = {}
        self.kept: list[np.ndarray] = []
        self.values: dict[int, Value] = {}
        self.expanded: dict[int, Value] = {}
        self.transposes: dict[str, tuple[Value, tuple[int, ...]]] = {}  # by Transpose output

    def loose(self, index: int) -> Value:
        """Return an operation's value, possibly without its repetitions."""
        op = self.flat.ops[index]
        if op.value is None:
            return self.values[index]
        small = without_repeats(op.value)
        return self.constant(small.reshape(without_leading_ones(small.shape)))

    def exact(self, index: int) -> Value:
        """Return an operation's value in its whole shape."""
        op = self.flat.ops[index]
        if op.value is not None:
            return Value("", op.shape, op.value)
        value = self.values[index]
        if value.shape == op.shape:
            return value
        if index not in self.expanded:
            self.expanded[index] = self.node("Expand", value, self.ints(op.shape), shape=op.shape)
        return self.expanded[index]

    def constant(self, array: Any, dtype: str | None = None) -> Value:
        array = np.asarray(array, dtype)
        return Value("", array.shape, array)

    def ints(self, numbers: Sequence[int]) -> Value:
        return self.constant(numbers, "int64")

    def node(self, op_type: str, *args: Value | None, shape: Sequence[int], **attrs: Any) -> Value:
        """Append a node with one output; None stands for an omitted input."""
        names = ["" if a is None else self.named(a) for a in args]
        output = f"{op_type.lower()}_{len(self.nodes)}"
        proto = self.onnx.helper.make_node(op_type, names, [output], name=output, **attrs)
        self.nodes.append(proto)
        return Value(output, tuple(shape))

    def named(self, value: Value) -> str:
        """Return the name of a value; a constant becomes an initialiser, shared by equal ones."""
        if value.array is None:
            return value.name
        array = value.array
        if array.size <= 16:
            key: Any = (str(array.dtype), array.shape, array.tobytes())
        else:
            address = array.__array_interface__["data"][0]
            key = (str(array.dtype), array.shape, array.strides, address)
        if key not in self.initialisers:
            self.kept.append(array)  # so that its address is not reused
            whole = np.array(array, order="C")
            label = f"constant_{len(self.initialisers)}"
            self.initialisers[key] = self.onnx.numpy_helper.from_array(whole, label)
        return self.initialisers[key].name

    def apply(self, op_type: str, *args: Value, **attrs: Any) -> Value:
        """Append an elementwise node; ONNX broadcasts the arguments."""
        return self.node(
            op_type, *args, shape=np.broadcast_shapes(*(a.shape for a in args)), **attrs
        )

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        if value.shape == tuple(shape):
            return value
        if value.array is not None:
            return self.constant(value.array.reshape(shape))
        options = {"allowzero": 1} if 0 in shape else {}  # otherwise 0 means an unchanged size
        return self.node("Reshape", value, self.ints(shape), shape=shape, **options)

    def transpose(self, value: Value, perm: Sequence[int]) -> Value:
        """Transpose a value; a transpose of a transpose becomes one."""
        if value.array is not None:
            return self.constant(np.transpose(value.array, perm))
        if value.name in self.transposes:
            value, first = self.transposes[value.name]
            perm = [first[p] for p in perm]
        if list(perm) == list(range(len(perm))):
            return value
        shape = [value.shape[p] for p in perm]
        transposed = self.node("Transpose", value, shape=shape, perm=list(perm))
        self.transposes[transposed.name] = (value, tuple(perm))
        return transposed

    def cast(self, value: Value, dtype: str) -> Value:
        if value.array is not None:
            return self.constant(value.array, dtype)
        return self.node("Cast", value, shape=value.shape, to=self.element(dtype))

    def element(self, dtype: str) -> int:
        """Return the ONNX code of an element type."""
        try:
            return self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        except (KeyError, TypeError, ValueError) as error:
            raise ExportError(f"ONNX has no element type {dtype!r}") from error

    def info(self, label: str, index: int) -> onnx.ValueInfoProto:
        op = self.flat.ops[index]
        return self.onnx.helper.make_tensor_value_info(label, self.element(op.dtype), op.shape)

    def used_initialisers(self) -> list[onnx.TensorProto]:
        read = {name for node in self.nodes for name in node.input}
        return [t for t in self.initialisers.values() if t.name in read]
