"""oneDNN's reference kernels for bfloat16, which run on any processor, for a process of their own.

`python -m tests.libraries.onednn.reference_bfloat16 NAME` prints the largest error of the network
of that name in `NETWORKS`, relative to its largest element. The library refuses bfloat16 where a
function of its own says that the processor has no instructions for it; here that function is
overwritten, so that it always agrees.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tests.libraries.onednn.calls import hoisted, in_lax, pool
from xrl_jax.libraries.base import Epilogue
from xrl_jax.libraries.onednn import calls
from xrl_jax.libraries.onednn.c_api import Library, library

_REFUSES = "_ZN4dnnl4impl3cpu8platform21has_data_type_supportE16dnnl_data_type_t"
_RETURN_TRUE = b"\xb8\x01\x00\x00\x00\xc3"  # mov eax, 1; ret


def admit() -> None:
    """Let the library compute in bfloat16, and xrl_jax use its reference kernels."""
    lib = library()
    assert lib is not None
    at = lib.address(_REFUSES)
    start = at - at % mmap.PAGESIZE
    everything = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(start), 2 * mmap.PAGESIZE, everything) == 0
    ctypes.memmove(at, _RETURN_TRUE, len(_RETURN_TRUE))
    implementation = Library.implementation
    Library.implementation = lambda self, prim: f"admitted {implementation(self, prim)}"


def convolution(x: jax.Array, w: jax.Array, *more: jax.Array) -> jax.Array:
    edge = w.shape[0] // 2
    return calls.convolution(
        x,
        w,
        stride=(1, 1),
        padding=((edge, edge),) * 2,
        dilation=(1, 1),
        groups=1,
        epilogue=Epilogue(relu=True, addend=more[0] if more else None),
        right="bfloat16",
    )


def chain(w: jax.Array, k: jax.Array, x: jax.Array) -> jax.Array:
    """Two convolutions side by side, joined, pooled, and read by another."""
    narrow = convolution(x, w)
    joined = jnp.concatenate([convolution(narrow, w), convolution(narrow, k)], axis=3)
    return convolution(pool(joined), jnp.concatenate([w, w], axis=2))


def residual(w: jax.Array, k: jax.Array, x: jax.Array) -> jax.Array:
    """A sum that is read by a convolution and by the next sum."""
    y = convolution(convolution(x, w), k, x)
    return convolution(convolution(y, w), k, y)


def channels_first(w: jax.Array, k: jax.Array, x: jax.Array) -> jax.Array:
    """As a network whose images have their features before their axes is traced."""
    y = jnp.moveaxis(convolution(x, w), 3, 1)
    y = jnp.concatenate([y, y], axis=1)
    return convolution(jnp.moveaxis(y, 1, 3), jnp.concatenate([k, k], axis=2))


def special_values(w: jax.Array, k: jax.Array, x: jax.Array) -> jax.Array:
    """NaN and infinity, as zeros and ones of the result."""
    x = x.at[0, 1, 1, 3].set(jnp.nan).at[0, 6, 6, 3].set(jnp.inf)
    y = chain(w, k, x)
    return jnp.where(jnp.isnan(y), 0.0, 1.0) + jnp.isinf(y)


NETWORKS: dict[str, Callable[..., jax.Array]] = {
    fn.__name__: fn for fn in (chain, residual, channels_first, special_values)
}


def main(name: str) -> None:
    rng = np.random.default_rng(0)
    shapes = (1, 1, 32, 32), (3, 3, 32, 32), (1, 9, 9, 32)
    w, k, x = (jnp.asarray(rng.standard_normal(s) / 6, jnp.float32) for s in shapes)
    fn = NETWORKS[name]
    admit()
    parts = hoisted(fn, w, k, x, weights=2)
    (y,) = jax.jit(parts.call)(parts.prepare([w, k]), [x])
    (expected,) = in_lax(fn, w, k, x)
    print(float(jnp.abs(y - expected).max() / jnp.abs(expected).max()))


if __name__ == "__main__":
    main(*sys.argv[1:])
