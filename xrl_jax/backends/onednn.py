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
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
from jax import export, lax
from jax.custom_batching import custom_vmap

_TESTED = ("0.10.2",)  # versions of jaxlib
_PREFIX = "__onednn$"
_POST_OPS = {"bias": "BIAS", "addend": "BINARY_ADD"}
_STATUS_RETURNING = 2  # how XLA calls what it has built in


class Epilogue(NamedTuple):
    """What is computed with a result y [..., O] before it is written."""

    bias: jax.Array | None = None  # [O] or [1, .., O], added first
    addend: jax.Array | None = None  # of y's shape, added then
    relu: bool = False  # negative values become 0 in the end

    def __call__(self, y: jax.Array) -> jax.Array:
        """The same as lax code."""
        if self.bias is not None:
            y = y + lax.broadcast_in_dim(self.bias.reshape(-1), y.shape, (y.ndim - 1,))
        if self.addend is not None:
            y = y + self.addend
        return lax.max(y, lax.full_like(y, 0)) if self.relu else y

    def with_bias(self, *shape: int) -> Epilogue:
        """The same with the bias in this shape."""
        return self if self.bias is None else self._replace(bias=self.bias.reshape(shape))


NOTHING = Epilogue()


@functools.cache
def available() -> bool:
    """Whether the kernels are there: on x86 processors, where they are the default device."""
    return (
        version("jaxlib") in _TESTED
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
    epilogue: Epilogue = NOTHING,
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
    plain = functools.partial(
        lax.conv_general_dilated,
        window_strides=stride,
        padding=padding,
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
    epilogue = epilogue.with_bias(-1)
    return _call("convolution", "onednn_conv_config", config, plain, epilogue)(x, w)


def dot_general(
    left: jax.Array, right: jax.Array, dimension_numbers: Any, epilogue: Epilogue = NOTHING
) -> jax.Array:
    """`lax.dot_general` of two float32 matrices, or of two rows of them with the batch first."""
    ((left_over,), (right_over,)), (batch, _) = dimension_numbers
    b = len(batch)
    config = {"transpose_a": left_over == b, "transpose_b": right_over == b + 1}
    plain = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers)
    epilogue = epilogue.with_bias(*(1,) * (b + 1), -1)
    return _call("matmul", "onednn_matmul_config", config, plain, epilogue)(left, right)


def exported(fn: Callable[..., Any], *avals: Any) -> export.Exported:
    """`jax.export` of a function that may hold these kernels, which JAX makes no promise about."""
    names = [f"{_PREFIX}convolution", f"{_PREFIX}matmul"]
    allowed = [export.DisabledSafetyCheck.custom_call(n) for n in names]
    return export.export(jax.jit(fn), disabled_checks=allowed)(*avals)


def is_in(artefact: export.Exported) -> bool:
    """Whether the artefact calls one of these kernels."""
    return _PREFIX.encode() in artefact.mlir_module_serialized


def _call(
    name: str,
    field: str,
    config: dict[str, Any],
    plain: Callable[..., jax.Array],
    epilogue: Epilogue,
) -> Callable[..., jax.Array]:
    """The named operation on two arrays; under differentiation and vmap `plain`, which computes the
    same, and the epilogue.
    """
    # XLA cannot write these calls to JAX's persistent cache; they are compiled again, no more.
    warnings.filterwarnings("ignore", r"Error writing persistent .* std::bad_alloc", UserWarning)
    arrays = {"bias": epilogue.bias, "addend": epilogue.addend}
    after = {k: v for k, v in arrays.items() if v is not None}
    post_ops = [_POST_OPS[k] for k in after] + ["RELU"] * epilogue.relu
    config = {field: config | {"fusions": {"ops": post_ops}}}

    def as_lax(a: jax.Array, b: jax.Array, *more: jax.Array) -> jax.Array:
        return epilogue._replace(**dict(zip(after, more, strict=True)))(plain(a, b))

    @custom_vmap
    def kernel(*arrays: jax.Array) -> jax.Array:
        call = jax.ffi.ffi_call(
            f"{_PREFIX}{name}",
            jax.eval_shape(as_lax, *arrays),
            custom_call_api_version=_STATUS_RETURNING,
            legacy_backend_config=json.dumps(config),
        )
        return call(*arrays)

    @kernel.def_vmap
    def batched(size: int, has_axis: Sequence[bool], *arrays: jax.Array) -> Any:
        return jax.vmap(as_lax, [0 if has else None for has in has_axis])(*arrays), True

    smooth = jax.custom_jvp(kernel)
    smooth.defjvp(lambda primals, tangents: jax.jvp(as_lax, tuple(primals), tuple(tangents)))
    return lambda a, b: smooth(a, b, *after.values())
