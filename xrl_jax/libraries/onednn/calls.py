"""Products and convolutions of oneDNN.

They are called in one of two ways. With the library installed (`pip install xrl_jax[onednn]`) a
kernel becomes part of a call that xrl_jax makes itself, on weights in the library's layout. Without
it, kernels go through XLA: the CPU build of jaxlib contains oneDNN, and XLA:CPU compiles custom
calls to its operations, but never emits them by itself in the versions below (its option for that
has no effect there). The configuration of those calls is XLA's internal format, so they are emitted
only under versions that they were tested with, and a file that holds them is loaded only under the
version that saved it.

Source: XLA, service/cpu/onednn_config.proto; oneDNN (github.com/uxlfoundation/oneDNN).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from xrl_jax.graph import ops
from xrl_jax.libraries.base import LEVELS, NO_EPILOGUE, Epilogue
from xrl_jax.libraries.onednn import operand_types, spec, winograd
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.kernels import kernel
from xrl_jax.libraries.onednn.spec import Conv, Dot, Winograd
from xrl_jax.runtime.target_platform import target_platform

_TESTED = ("0.10.2",)  # versions of jaxlib
_PREFIX = "__onednn$"
_STATUS_RETURNING = 2  # the API version of XLA's built-in custom calls


def _spec(epilogue: Epilogue) -> spec.Epilogue:
    """Return the description of an epilogue, without its arrays."""
    clip = spec.RELU if epilogue.relu else None
    return spec.Epilogue(epilogue.bias is not None, epilogue.addend is not None, clip)


@functools.cache
def available() -> bool:
    """Whether the kernels are available: on x86 processors, if the CPU is the default device."""
    return library() is not None or (
        version("jaxlib") in _TESTED
        and platform.machine().lower() in ("x86_64", "amd64")
        and jax.default_backend() == "cpu"
    )


def takes(*arrays: jax.Array) -> bool:
    """Whether the kernels are available, code is made for CPUs, and they support the dtype."""
    on_cpu = target_platform() == "cpu"
    return on_cpu and available() and all(a.dtype == "float32" for a in arrays)


def takes_product(x: jax.Array, w: jax.Array) -> bool:
    """Whether the kernels multiply arrays of these types; w may be a weight in a narrow type."""
    is_narrow = w.dtype in ops.WEIGHT_DTYPES and library() is not None
    return takes(x) and (is_narrow or takes(w))


def convolution(
    x: jax.Array,
    w: jax.Array,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
    epilogue: Epilogue = NO_EPILOGUE,
    right: str = "float32",
) -> jax.Array:
    """Convolve float32 images [N, spatial..., C] with kernels [spatial..., C / groups, O].

    Args:
      stride, dilation: one value for each spatial axis; the dilation is the kernel's.
      padding: (low, high) for each spatial axis, none negative.
      right: type in which they are multiplied: float32, bfloat16, int8, or uint8 for images without
        a negative element and kernels in int8; int16 for kernels of one pixel.
    """
    if right == "int16":
        x = _of_pixels(x, stride, padding)
        stride, padding = (1,) * len(stride), ((0, 0),) * len(padding)
    unsigned, right = right == "uint8", "int8" if right == "uint8" else right
    op = Conv(
        tuple(stride),
        tuple((low, high) for low, high in padding),
        tuple(dilation),
        groups,
        _spec(epilogue),
        right,
        unsigned,
    )
    more = epilogue.with_bias(-1).arrays
    lib = library()
    if right == "int8":
        levels, factors = kernel_levels(w, unsigned=unsigned)
        w, more = levels, (factors, w, *more)
    elif right == "int16":
        levels, factors = operand_types.levels_along(w, range(w.ndim - 1))
        w, more = operand_types.pairs(levels), (factors.reshape(-1), w, *more)
    arrays = (x, w if op.in_integers else w.astype(right), *more)
    if lib is not None or right != "float32":
        return kernel(op, *arrays)
    n = x.ndim
    image = {
        "dims": n,
        "data": {"batch_dim": 0, "feature_dim": n - 1, "spatial_dims": [*range(1, n - 1)]},
    }
    weight = {
        "input_feature_dim": n - 2,
        "output_feature_dim": n - 1,
        "spatial_dims": [*range(n - 2)],
    }
    window = {
        "strides": [*stride],
        "pad_left": [low for low, _ in padding],
        "pad_right": [high for _, high in padding],
        "window_dilations": [*dilation],
    }
    config = {
        "dims": n,
        "input": image,
        "kernel": {"dims": n, "filter": weight},
        "output": image,
        "window": window,
        "feature_groups": groups,
    }
    return _call("convolution", "onednn_conv_config", config, op)(*arrays)


def _of_pixels(
    x: jax.Array, stride: Sequence[int], padding: Sequence[tuple[int, int]]
) -> jax.Array:
    """Return the pixels of an image that a kernel of one pixel is moved to."""
    edges = [(0, 0, 0), *((low, high, 0) for low, high in padding), (0, 0, 0)]
    if any(low or high for low, high, _ in edges):
        x = jax.lax.pad(x, jax.numpy.zeros((), x.dtype), edges)
    steps = (1, *stride, 1)
    return x if max(steps) == 1 else jax.lax.slice(x, (0,) * x.ndim, x.shape, steps)


def kernel_levels(w: Any, *, unsigned: bool) -> tuple[Any, Any]:
    """Return the levels in int8 of a kernel [.., O], and the factors of its features [O], in the
    library of arrays that it is of.

    Args:
      unsigned: whether images are in uint8.
    """
    lib = library()
    most = LEVELS if lib is None or unsigned else lib.most_level
    return operand_types.kernel_levels(w, most)


def winograd_convolution(
    x: jax.Array, w: jax.Array, m: int, padding: Sequence[tuple[int, int]], precision: Any
) -> jax.Array:
    """Compute `winograd.convolved`, as a kernel of the library where it is installed."""
    if library() is None or not takes(x, w):
        return winograd.convolved(x, w, m, padding, precision)
    return kernel(Winograd(m, tuple((low, high) for low, high in padding)), x, w)


def dot_general(
    left: jax.Array, right: jax.Array, dimension_numbers: Any, epilogue: Epilogue = NO_EPILOGUE
) -> jax.Array:
    """Compute `lax.dot_general` of float32 matrices, or of batches with the batch axis first."""
    ((left_over,), (right_over,)), (batch, _) = dimension_numbers
    b = len(batch)
    op = Dot(left_over == b, right_over == b + 1, _spec(epilogue), str(right.dtype))
    arrays = (left, right, *epilogue.with_bias(*(1,) * (b + 1), -1).arrays)
    if library() is not None:
        return kernel(op, *arrays)
    config = {"transpose_a": op.left_transposed, "transpose_b": op.right_transposed}
    return _call("matmul", "onednn_matmul_config", config, op)(*arrays)


def xla_names() -> list[str]:
    """Return the names of XLA's own custom calls."""
    return [f"{_PREFIX}convolution", f"{_PREFIX}matmul"]


def is_in(module: bytes) -> bool:
    """Whether a serialised module calls one of XLA's kernels."""
    return _PREFIX.encode() in module


def _call(
    name: str, field: str, config: dict[str, Any], op: Conv | Dot
) -> Callable[..., jax.Array]:
    """Return a function that calls the named operation of XLA.

    Its derivatives and vmap are those of `op`, which computes the same. Clipping follows the call,
    because inside it would turn NaN into a number.
    """
    clip = op.after.clip
    op = dataclasses.replace(op, after=dataclasses.replace(op.after, clip=None))
    # XLA cannot write these calls to JAX's persistent cache; they are compiled again, nothing else.
    warnings.filterwarnings("ignore", r"Error writing persistent .* std::bad_alloc", UserWarning)
    after = op.after
    post_ops = ["BIAS"] * after.bias + ["BINARY_ADD"] * after.addend
    config = {field: config | {"fusions": {"ops": post_ops}}}

    @custom_vmap
    def kernel(*arrays: jax.Array) -> jax.Array:
        call = jax.ffi.ffi_call(
            f"{_PREFIX}{name}",
            jax.eval_shape(op, *arrays),
            custom_call_api_version=_STATUS_RETURNING,
            legacy_backend_config=json.dumps(config),
        )
        return call(*arrays)

    @kernel.def_vmap
    def batched(size: int, has_axis: Sequence[bool], *arrays: jax.Array) -> Any:
        return jax.vmap(op, [0 if has else None for has in has_axis])(*arrays), True

    smooth = jax.custom_jvp(kernel)
    smooth.defjvp(lambda primals, tangents: jax.jvp(op, tuple(primals), tuple(tangents)))
    return smooth if clip is None else lambda *arrays: clip(smooth(*arrays))
