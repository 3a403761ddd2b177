"""A matrix product that may become part of a larger kernel.

It computes what `lax.dot_general` computes. As an equation of its own kind it can be told apart
from the products that XLA is to compute; what no kernel takes in is such a product again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

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
