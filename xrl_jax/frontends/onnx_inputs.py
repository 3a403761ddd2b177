"""The inputs of an ONNX model: shapes with their open dimensions filled in, and known values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xrl_jax.frontends.onnx_ops.base import OnnxError, canonical

if TYPE_CHECKING:
    import onnx

# A size, the name of an open dimension, or None for an open dimension without a name.
Dim = int | str | None


def declared_shape(value: onnx.ValueInfoProto) -> tuple[Dim, ...] | None:
    """Return the shape that the model declares; None where it declares none, not even a rank."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    # Negative sizes are open dimensions, too: some exporters write -1.
    return tuple(
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or None
        for dim in tensor.shape.dim
    )


def format_shape(shape: tuple[Dim, ...] | None) -> str:
    if shape is None:
        return "no shape"
    return f"shape [{', '.join('?' if dim is None else str(dim) for dim in shape)}]"


def check_names(
    inputs: Sequence[str], input_shapes: Mapping[str, Any], constants: Mapping[str, Any]
) -> None:
    """Raise OnnxError if a shape or constant is given for a name that is no input of the model."""
    for name in (*input_shapes, *constants):
        if name not in inputs:
            raise OnnxError(
                f"'{name}' is not an input of the model; its inputs are {tuple(inputs)}"
            )


def input_structs(
    values: Sequence[onnx.ValueInfoProto],
    input_shapes: Mapping[str, tuple[int, ...]],
    dimensions: Mapping[str, int],
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shape and dtype of each input, with open dimensions filled in.

    Raises OnnxError when a shape does not fit, or (once for all inputs) when sizes stay open.
    """
    shapes = [declared_shape(value) for value in values]
    named = {dim: None for shape in shapes for dim in shape or () if isinstance(dim, str)}
    for name in dimensions:
        if name not in named:
            known = ", ".join(f"'{dim}'" for dim in named) or "none"
            raise OnnxError(f"no input of the model has a dimension '{name}' (known: {known})")
    filled = [
        filled_shape(value.name, shape, input_shapes.get(value.name), dimensions)
        for value, shape in zip(values, shapes, strict=True)
    ]
    missing = {
        value.name: shape
        for value, shape, full in zip(values, shapes, filled, strict=True)
        if full is None
    }
    if missing:
        raise OnnxError(missing_sizes(missing, dimensions))
    return tuple(
        jax.ShapeDtypeStruct(full, canonical(input_dtype(value)))
        for value, full in zip(values, filled, strict=True)
        if full is not None
    )


def filled_shape(
    name: str,
    shape: tuple[Dim, ...] | None,
    given: tuple[int, ...] | None,
    dimensions: Mapping[str, int],
) -> tuple[int, ...] | None:
    """Return the sizes of one input; None where some of them stay open."""
    sizes: list[int | None] = [
        dimensions.get(dim) if isinstance(dim, str) else dim for dim in shape or ()
    ]
    if given is None:
        full = tuple(int(size) for size in sizes if size is not None)
        return full if shape is not None and len(full) == len(sizes) else None
    if shape is not None and (
        len(given) != len(shape)
        or any(size not in (None, new) for size, new in zip(sizes, given, strict=True))
    ):
        raise OnnxError(
            f"input '{name}' has {format_shape(shape)}, which {tuple(given)} does not fit"
        )
    return tuple(int(size) for size in given)


def missing_sizes(
    missing: Mapping[str, tuple[Dim, ...] | None], dimensions: Mapping[str, int]
) -> str:
    """Return the error message for inputs with open sizes, with the two ways to specify them."""
    listing = ", ".join(
        f"input '{name}' has {format_shape(shape)}" for name, shape in missing.items()
    )
    open_names = {
        dim: None
        for shape in missing.values()
        for dim in shape or ()
        if isinstance(dim, str) and dim not in dimensions
    }
    ways = ["input_shapes={" + ", ".join(f"'{name}': (...)" for name in missing) + "}"]
    if open_names:
        ways.insert(0, "dimensions={" + ", ".join(f"'{name}': ..." for name in open_names) + "}")
    return f"{listing}: specify the open sizes with {' or with '.join(ways)}"


def input_dtype(value: onnx.ValueInfoProto) -> np.dtype:
    from onnx import helper

    kind = value.type.tensor_type.elem_type
    if not kind:
        raise OnnxError(f"input '{value.name}' has no element type")
    return np.dtype(helper.tensor_dtype_to_np_dtype(kind))


def constant_input(value: onnx.ValueInfoProto, given: Any) -> np.ndarray:
    """Return a known value of an input, in the type and shape that the model declares.

    Raises OnnxError when it does not fit.
    """
    array, shape = np.asarray(given), declared_shape(value)
    dtype = input_dtype(value)
    cast = array.astype(dtype)
    if dtype.kind in "iub" and not np.array_equal(cast, array):
        raise OnnxError(f"input '{value.name}' has type {dtype}, which {given} does not fit")
    if shape is None:
        return cast
    if array.size == 1 and all(dim == 1 or not isinstance(dim, int) for dim in shape):
        return cast.reshape((1,) * len(shape))  # a scalar is accepted for one element of any rank
    if len(shape) != array.ndim or any(
        isinstance(dim, int) and dim != size for dim, size in zip(shape, array.shape, strict=True)
    ):
        raise OnnxError(
            f"input '{value.name}' has {format_shape(shape)}, which a constant of shape "
            f"{list(array.shape)} does not fit"
        )
    return cast
