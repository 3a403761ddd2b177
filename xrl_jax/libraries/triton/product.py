"""A matrix product that may become part of a larger kernel.

It computes what `lax.dot_general` computes. As an equation of its own kind it can be told apart
from the products that XLA is to compute; what no kernel takes in is such a product again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir

MOST_ELEMENTS = 1 << 31  # of an array that a kernel reads: positions are 32-bit integers
_FLOATS = ("float32", "float16", "bfloat16")
_PRESETS = (  # products in Triton as XLA computes them
    "DEFAULT TF32_TF32_F32 TF32_TF32_F32_X3 F32_F32_F32 F16_F16_F32 BF16_BF16_F32 "
    "BF16_BF16_F32_X3 BF16_BF16_F32_X6 BF16_BF16_F32_X9"
).split()

product_p = Primitive("triton_product")


def product(lhs: jax.Array, rhs: jax.Array, **how: Any) -> jax.Array:
    """Return `lax.dot_general(lhs, rhs, **how)`, marked."""
    return product_p.bind(lhs, rhs, **how)


def _plain(*operands: Any, **how: Any) -> jax.Array:
    return lax.dot_general(*operands, **how)


def _aval(lhs: Any, rhs: Any, **how: Any) -> ShapedArray:
    avals = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (lhs, rhs))
    out = jax.eval_shape(partial(_plain, **how), *avals)
    return ShapedArray(out.shape, out.dtype)


def _jvp(primals: Any, tangents: Any, **how: Any) -> Any:
    return jax.jvp(
        partial(_plain, **how), tuple(primals), tuple(map(ad.instantiate_zeros, tangents))
    )


def _batched(operands: Any, axes: Any, **how: Any) -> Any:
    return jax.vmap(partial(_plain, **how), axes)(*operands), 0


product_p.def_impl(_plain)
product_p.def_abstract_eval(_aval)
mlir.register_lowering(product_p, mlir.lower_fun(_plain, multiple_results=False))
ad.primitive_jvps[product_p] = _jvp
batching.primitive_batchers[product_p] = _batched


@dataclass(frozen=True)
class Part:
    """The axes of one operand of a product, by what they are in a kernel.

    Attributes:
      batch, free, summed: indices of axes, in the order in which they count.
    """

    batch: tuple[int, ...]
    free: tuple[int, ...]
    summed: tuple[int, ...]


def parts(product: Any) -> tuple[Part, Part]:
    """Return the axes of both operands of a product."""
    summed, batch = product.params["dimension_numbers"]

    def part(side: int) -> Part:
        rank = len(product.invars[side].aval.shape)
        taken = (*summed[side], *batch[side])
        free = tuple(d for d in range(rank) if d not in taken)
        return Part(tuple(batch[side]), free, tuple(summed[side]))

    return part(0), part(1)


def is_possible(product: Any) -> bool:
    """Return whether a kernel can compute a marked product as XLA would."""
    if product.primitive is not product_p or any(isinstance(v, Literal) for v in product.invars):
        return False
    dtypes = {str(v.aval.dtype) for v in product.invars}
    out, precision = product.outvars[0].aval, product.params["precision"]
    known = precision is None or isinstance(precision, tuple) or precision.name in _PRESETS
    return len(dtypes) == 1 and dtypes <= set(_FLOATS) and str(out.dtype) in _FLOATS and known


def multiplied_in(product: Any) -> str:
    """Return the type in which the hardware multiplies the operands of a product."""
    precision, dtype = str(product.params["precision"]), str(product.invars[0].aval.dtype)
    exact = "HIGHEST" in precision or "F32_F32_F32" in precision
    return "tf32" if dtype == "float32" and not exact else dtype
