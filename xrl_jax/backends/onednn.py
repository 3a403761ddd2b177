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

Kernel = Callable[[jax.Array, jax.Array], jax.Array]


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
) -> jax.Array:
    """A convolution of float32 images [N, spatial..., C] with kernels [spatial..., C / groups, O].

    Args:
      stride, dilation: one number for each spatial axis; the kernel's dilation.
      padding: (low, high) for each spatial axis, none negative.
    """
    n = x.ndim
    spec = lax.ConvDimensionNumbers(
        (0, n - 1, *range(1, n - 1)), (n - 1, n - 2, *range(n - 2)), (0, n - 1, *range(1, n - 1))
    )

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            w,
            stride,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=spec,
            feature_group_count=groups,
        )

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
    }
    return _call("__onednn$convolution", {"onednn_conv_config": config}, plain)(x, w)


def dot_general(left: jax.Array, right: jax.Array, dimension_numbers: Any) -> jax.Array:
    """`lax.dot_general` of two float32 matrices, or of two rows of them with the batch first."""
    ((left_over,), (right_over,)), (batch, _) = dimension_numbers
    b = len(batch)
    config = {"transpose_a": left_over == b, "transpose_b": right_over == b + 1}
    plain = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers)
    return _call("__onednn$matmul", {"onednn_matmul_config": config}, plain)(left, right)


def exported(fn: Callable[..., Any], *avals: Any) -> export.Exported:
    """`jax.export` of a function that may hold these kernels, which JAX makes no promise about."""
    allowed = [export.DisabledSafetyCheck.custom_call(t) for t in _TARGETS]
    return export.export(jax.jit(fn), disabled_checks=allowed)(*avals)


def is_in(artefact: export.Exported) -> bool:
    """Whether the artefact calls one of these kernels."""
    return any(t.encode() in artefact.mlir_module_serialized for t in _TARGETS)


def _call(target: str, config: dict[str, Any], plain: Kernel) -> Kernel:
    """The named operation; under differentiation and vmap, `plain`, which computes the same."""
    # XLA cannot write these calls to JAX's persistent cache; they are compiled again, no more.
    warnings.filterwarnings("ignore", r"Error writing persistent .* std::bad_alloc", UserWarning)

    @custom_vmap
    def kernel(a: jax.Array, b: jax.Array) -> jax.Array:
        call = jax.ffi.ffi_call(
            target,
            jax.eval_shape(plain, a, b),
            custom_call_api_version=_STATUS_RETURNING,
            legacy_backend_config=json.dumps(config),
        )
        return call(a, b)

    @kernel.def_vmap
    def batched(size: int, axes: Sequence[bool], a: jax.Array, b: jax.Array) -> Any:
        in_axes = tuple(0 if batched else None for batched in axes)
        return jax.vmap(plain, in_axes)(a, b), True

    smooth = jax.custom_jvp(kernel)
    smooth.defjvp(lambda primals, tangents: jax.jvp(plain, tuple(primals), tuple(tangents)))
    return smooth
