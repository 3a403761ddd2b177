"""The error function and its complement in float32, of operators that Triton has.

Sources: the rational function of `erf` is that of Eigen and XLA, `erfc` is S. Moshier's (Cephes).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from xrl_jax.libraries.cephes import ERFC_FAR, ERFC_NEAR

_LIMIT = 3.832506856900711  # beyond it erf rounds to 1
_ERF_ABOVE = (
    0.00022905065861350646,
    0.0034082910107109506,
    0.050955695062380861,
    0.18520832239976145,
    1.128379143519084,
)
_ERF_BELOW = (
    -1.1791602954361697e-7,
    0.000023547966471313185,
    0.0010179625278914885,
    0.014070470171167667,
    0.11098505178285362,
    0.49746925110067538,
    1.0,
)


def erf(x: jax.Array) -> jax.Array:
    """Return the error function of float32; within 3.2e-7 of the exact value."""
    far = jnp.abs(x) > _LIMIT
    y = jnp.where(far, 0.0, x)
    near = y * _polynomial(y * y, _ERF_ABOVE) / _polynomial(y * y, _ERF_BELOW)
    return jnp.where(far, jnp.where(x > 0, 1.0, -1.0), near)


def erfc(x: jax.Array) -> jax.Array:
    """Return 1 - erf(x) of float32; relative error at most 4e-6, as XLA's."""
    size = jnp.abs(x)
    inverse = 1.0 / size
    z = inverse * inverse
    factor = jnp.where(size < 2.0, _polynomial(z, ERFC_NEAR), _polynomial(z, ERFC_FAR))
    tail = jnp.exp(-x * x) * inverse * factor
    return jnp.where(size > 1.0, jnp.where(x < 0.0, 2.0 - tail, tail), 1.0 - erf(x))


def _polynomial(x: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    """Return a polynomial, the coefficient of the highest power first."""
    total = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + jnp.float32(coefficient)
    return total
