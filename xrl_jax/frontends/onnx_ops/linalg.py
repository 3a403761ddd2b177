"""Matrix products of ONNX, and operators built on them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import Array, Node, Translation, Value, align, device, like
from xrl_jax.frontends.onnx_ops.elementwise import unary


def matmul_arrays(a: Array, b: Array, out: np.dtype | None = None) -> Array:
    """Multiply as numpy.matmul does: one plain dot_general unless b has batches."""
    if b.ndim <= 2:
        numbers = (((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ()))
        return lax.dot_general(a, b, numbers, preferred_element_type=out)
    return jnp.matmul(a, b, preferred_element_type=out)


def matmul(node: Node, a: Value, b: Value) -> Array:
    return matmul_arrays(device(a), device(b))


def gemm(node: Node, a: Value, b: Value, c: Value | None = None) -> Array:
    """Return alpha * A' B' + beta * C, where ' is an optional transposition."""
    a, b = device(a), device(b)
    left = 0 if node.get("transA", 0) else 1
    right = 1 if node.get("transB", 0) else 0
    result = lax.dot_general(a, b, (((left,), (right,)), ((), ())))
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    if alpha != 1:
        result = result * like(result, alpha)
    if c is None or beta == 0:
        return result
    _, c = align(result, c)
    return jnp.add(result, c if beta == 1 else c * like(c, beta))


def einsum(node: Node, *operands: Value) -> Array:
    equation = node.attributes["equation"].replace(" ", "")
    return jnp.einsum(equation, *(device(x) for x in operands))


TRANSLATIONS: dict[str, Translation] = {
    "Det": unary(jnp.linalg.det),
    "Einsum": einsum,
    "Gemm": gemm,
    "MatMul": matmul,
}
