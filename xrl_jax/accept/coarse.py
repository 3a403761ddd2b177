"""A program in mixed precision: the error that a user accepts who runs it in a narrow type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.accept.accuracy import relative_error
from xrl_jax.accept.reference import Reference
from xrl_jax.graph.graph import Node
from xrl_jax.lower.table import lower
from xrl_jax.program.program import Program, evaluate, plain

# Types by the name that `optimize(tolerance=...)` takes.
COARSE = {"bf16": "bfloat16", "f16": "float16"}


def rounded(x: jax.Array, dtype: str) -> jax.Array:
    """Return the numbers rounded to a narrow type, in their own; XLA would drop two casts."""
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def coarse_results(program: Program, kind: str) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """Return a function of flat arguments that runs the program with the operands of its products
    and convolutions rounded to a type of `COARSE`, as mixed precision does; sums are in float32.
    """

    def compute(_: int, __: int, node: Node, operands: Sequence[Any]) -> Any:
        if node.op in ("dot", "conv") and node.dtype == "float32":
            operands = [rounded(x, COARSE[kind]) if x.dtype == jnp.float32 else x for x in operands]
        return lower(node, *operands)

    of = plain(program)
    run = jax.jit(lambda flat: evaluate(of, 0, flat, compute=compute))
    return lambda flat: [np.asarray(x) for x in run(list(flat))]


def coarse_error(results: Sequence[np.ndarray], reference: Reference) -> float:
    """Return the largest error of a float result, relative to the largest element of its array."""
    pairs = zip(results, reference.exact, strict=True)
    return max((relative_error(x, y) for x, y in pairs if _is_float(x)), default=0.0)


def _is_float(x: np.ndarray) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
