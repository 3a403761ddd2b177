"""Products and convolutions of oneDNN, a library that the CPU build of jaxlib carries and XLA calls
by name.

XLA:CPU compiles a custom call to one of its oneDNN operations wherever it meets one, but never
makes one by itself in the versions below (its option for that has no effect there). What the calls
are told is XLA's internal format, so they are made under versions that they were tested with, and a
file that holds them is loaded under the version that it was saved by.

Source: XLA, service/cpu/onednn_config.proto; oneDNN (github.com/uxlfoundation/oneDNN).
"""

from __future__ import annotations

import functools
import json
import platform
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib
from jax import export, lax
from jax.custom_batching import custom_vmap

_TESTED = ("0.10.2",)  # versions of jaxlib
_TARGETS = ("__onednn$convolution", "__onednn$matmul")
_STATUS_RETURNING = 2  # how XLA calls what it has built in

_POST_OPS = {"bias": "BIAS", "addend": "BINARY_ADD"}


@functools.cache
def available() -> bool:
    """Whether the kernels are there: on x86 processors, where they are the default device."""
    return (
        jaxlib.__version__ in _TESTED
        and platform.machine().lower() in ("x86_64", "amd64")
        and jax.default_backend() == "cpu"
    )


def takes(*arrays: jax.Array) -> bool:
    """Whether the kernels are there and know the arrays' dtype."""
    return available() and all(a.dtype == "float32" for a in arrays)


def convolution(
    x: jax.Array,
    w: jax.Array,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
    bias: jax.Array | None = None,
    addend: jax.Array | None = None,
    relu: bool = False,
) -> jax.Array:
    """A convolution of float32 images [N, spatial..., C] with kernels [spatial..., C / groups, O],
    and what follows it; see `with_epilogue`.

    Args:
      stride, dilation: one number for each spatial axis; the kernel's dilation.
      padding: (low, high) for each spatial axis, none negative.
    """
    n = x.ndim
    spec = lax.ConvDimensionNumbers(
        (0, n - 1, *range(1, n - 1)), (n - 1, n - 2, *range(n - 2)), (0, n - 1, *range(1, n - 1))
    )

    after = {} if bias is None else {"bias": bias}
    after |= {} if addend is None else {"addend": addend}

    def plain(x: jax.Array, w: jax.Array, *more: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(
            x,
            w,
            stride,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=spec,
            feature_group_count=groups,
        )
        return with_epilogue(y, relu=relu, **dict(zip(after, more, strict=True)))

    image = {
        "dims": n,
        "data": {"batch_dim": 0, "feature_dim": n - 1, "spatial_dims": [*range(1, n - 1)]},
    }
    kernel = {
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
        "kernel": {"dims": n, "filter": kernel},
        "output": image,
        "window": window,
        "feature_groups": groups,
        "fusions": {"ops": [_POST_OPS[k] for k in after] + ["RELU"] * relu},
    }
    call = _call("__onednn$convolution", {"onednn_conv_config": config}, plain)
    return call(x, w, *after.values())


def with_epilogue(
    y: jax.Array,
    *,
    bias: jax.Array | None = None,
    addend: jax.Array | None = None,
    relu: bool = False,
) -> jax.Array:
    """A bias [O] added to y [..., O], then an array of y's shape; then negative values made 0."""
    if bias is not None:
        y = y + lax.broadcast_in_dim(bias, y.shape, (y.ndim - 1,))
    if addend is not None:
        y = y + addend
    return lax.max(y, lax.full_like(y, 0)) if relu else y


def dot_general(
    left: jax.Array,
    right: jax.Array,
    dimension_numbers: Any,
    *,
    bias: jax.Array | None = None,
    addend: jax.Array | None = None,
    relu: bool = False,
) -> jax.Array:
    """`lax.dot_general` of two float32 matrices, or of two rows of them with the batch first, and
    what follows it; see `with_epilogue`.
    """
    ((left_over,), (right_over,)), (batch, _) = dimension_numbers
    b = len(batch)
    after = {} if bias is None else {"bias": bias.reshape(*(1,) * (b + 1), -1)}
    after |= {} if addend is None else {"addend": addend}

    def plain(left: jax.Array, right: jax.Array, *more: jax.Array) -> jax.Array:
        y = lax.dot_general(left, right, dimension_numbers)
        named = dict(zip(after, more, strict=True))
        if bias is not None:
            named["bias"] = named["bias"].reshape(-1)
        return with_epilogue(y, relu=relu, **named)

    config = {
        "transpose_a": left_over == b,
        "transpose_b": right_over == b + 1,
        "fusions": {"ops": [_POST_OPS[k] for k in after] + ["RELU"] * relu},
    }
    call = _call("__onednn$matmul", {"onednn_matmul_config": config}, plain)
    return call(left, right, *after.values())


def exported(fn: Callable[..., Any], *avals: Any) -> export.Exported:
    """`jax.export` of a function that may hold these kernels, which JAX makes no promise about."""
    allowed = [export.DisabledSafetyCheck.custom_call(t) for t in _TARGETS]
    return export.export(jax.jit(fn), disabled_checks=allowed)(*avals)


def is_in(artefact: export.Exported) -> bool:
    """Whether the artefact calls one of these kernels."""
    return any(t.encode() in artefact.mlir_module_serialized for t in _TARGETS)


def _call(
    target: str, config: dict[str, Any], plain: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """The named operation; under differentiation and vmap, `plain`, which computes the same."""
    # XLA cannot write these calls to JAX's persistent cache; they are compiled again, no more.
    warnings.filterwarnings("ignore", r"Error writing persistent .* std::bad_alloc", UserWarning)

    @custom_vmap
    def kernel(*arrays: jax.Array) -> jax.Array:
        call = jax.ffi.ffi_call(
            target,
            jax.eval_shape(plain, *arrays),
            custom_call_api_version=_STATUS_RETURNING,
            legacy_backend_config=json.dumps(config),
        )
        return call(*arrays)

    @kernel.def_vmap
    def batched(size: int, has_axis: Sequence[bool], *arrays: jax.Array) -> Any:
        return jax.vmap(plain, [0 if has else None for has in has_axis])(*arrays), True

    smooth = jax.custom_jvp(kernel)
    smooth.defjvp(lambda primals, tangents: jax.jvp(plain, tuple(primals), tuple(tangents)))
    return smooth
