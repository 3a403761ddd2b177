"""The operators between two products, evaluated on a tile of scores inside a kernel.

A tile has rows and columns [M, N]; what is the same for all rows or columns has a size of 1 there,
or is a scalar. Axes that only move (transposes, reshapes, broadcasts) are nothing on a tile.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from xrl_jax.libraries.triton.error_function import erf, erfc

MOVES = ("reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim")
# Reductions, and what they start from.
START = {"reduce_max": -math.inf, "reduce_min": math.inf, "reduce_sum": 0.0}
# Elementwise operators that Pallas lowers to Triton, and two that it does not.
_ARITHMETIC = (
    "add sub mul div neg abs sign max min square integer_pow sqrt rsqrt exp exp2 log log1p expm1 "
    "tanh logistic sin cos floor ceil erf erfc"
).split()
_LOGIC = (
    "eq ne lt le gt ge and or not is_finite select_n convert_element_type copy stop_gradient"
).split()
_OWN = {"erf": erf, "erfc": erfc}
REDUCTIONS = tuple(START)
DTYPES = ("float32", "float16", "bfloat16", "bool", "int32", "int8")


def is_possible(equation: Any) -> bool:
    """Return whether an equation of a jaxpr can be evaluated on tiles."""
    (out,) = equation.outvars if len(equation.outvars) == 1 else (None,)
    if out is None or equation.effects or str(out.aval.dtype) not in DTYPES:
        return False
    if equation.primitive.name == "select_n" and len(equation.invars) != 3:
        return False  # a choice among more than two
    name, floats = equation.primitive.name, jnp.issubdtype(out.aval.dtype, jnp.floating)
    if name in START or name in _ARITHMETIC:
        return floats
    return name in MOVES or name in _LOGIC


def evaluate(equation: Any, operands: list[jax.Array]) -> jax.Array:
    """Return the value of an equation on a tile, but for a reduction."""
    name, params = equation.primitive.name, equation.params
    dtype = equation.outvars[0].aval.dtype
    if name in MOVES or name in ("copy", "stop_gradient"):
        return operands[0]
    if name == "convert_element_type":
        return operands[0].astype(dtype)
    if name in _ARITHMETIC:
        operands = [_wide(x) for x in operands]
    operands = list(jnp.broadcast_arrays(*operands))
    if name in ("max", "min"):
        return combined(name, *operands).astype(dtype)
    if name in _OWN:
        return _OWN[name](*operands).astype(dtype)
    if name == "is_finite":
        return jnp.abs(_wide(operands[0])) < jnp.inf
    out = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
    return out.astype(dtype)


def reduced(name: str, x: jax.Array, columns: jax.Array | None) -> jax.Array:
    """Return the reduction of every row of a tile, [M, 1], in float32.

    Args:
      columns: [1, N] bool, the columns that exist; None if all do.
    """
    x = _wide(x)
    if columns is not None:
        x = jnp.where(columns, x, jnp.float32(START[name]))
    if name == "reduce_sum":
        return jnp.sum(x, axis=1, keepdims=True)
    most = (jnp.max if name == "reduce_max" else jnp.min)(x, axis=1, keepdims=True)
    has_nan = jnp.max(jnp.where(x != x, 1.0, 0.0), axis=1, keepdims=True) > 0
    return jnp.where(has_nan, jnp.float32(jnp.nan), most)


def combined(name: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the sum, maximum or minimum of two arrays; Triton's own extrema ignore NaN."""
    if name == "reduce_sum":
        return x + y
    better = x > y if name in ("max", "reduce_max") else x < y
    return jnp.where(better | (x != x), x, y)


def _wide(x: jax.Array) -> jax.Array:
    """Return floats in float32, in which Triton has all functions."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
