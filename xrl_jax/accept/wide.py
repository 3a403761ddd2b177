"""Evaluation of equations in double precision: every float is wide (float64 or complex128),
whatever dtype the traced function names.

An equation is bound again with wide operands and with its dtype parameters and inner jaxprs made
wide. Where that is not possible (a bitcast, a custom call, a host callback) it runs unchanged on
narrow operands, its results are widened, and the caller is passed its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from xrl_jax.graph.equations import bind

# Primitives that only evaluate their inner jaxpr, and the parameter that holds it.
_CALLS = {
    **dict.fromkeys(("jit", "pjit", "remat", "remat2", "checkpoint"), "jaxpr"),
    **dict.fromkeys(
        ("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"
    ),
}


def wide_dtype(dtype: Any) -> Any:
    """Return float64 for a float, complex128 for a complex dtype, any other dtype unchanged."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype("float64")
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype("complex128")
    return jnp.dtype(dtype)


def widened(x: Any) -> Any:
    """Return an array in its wide dtype, on the host; PRNG keys are returned unchanged."""
    if not hasattr(x, "dtype") or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return np.asarray(x).astype(wide_dtype(x.dtype))


@dataclass(frozen=True)
class _WideEquation:
    """An equation with other parameters."""

    primitive: Any
    params: dict[str, Any]


def wide_results(
    equation: Any,
    operands: Sequence[Any],
    dtypes: Sequence[Any],
    avals: Sequence[Any],
    tell: Callable[[str], Any],
) -> list[Any]:
    """Return the equation's results on wide operands (traceable, with 64-bit types enabled).

    Args:
      equation: of a jaxpr or of a program.
      dtypes: dtypes of the operands in the traced function.
      avals: abstract values of the results there.
      tell: called with the name of an equation that runs narrow.
    """
    wanted = [(tuple(a.shape), wide_dtype(a.dtype)) for a in avals]
    name = equation.primitive.name
    try:
        params = {k: _wide_param(v, tell) for k, v in equation.params.items()}
        wide = _WideEquation(equation.primitive, params)
        made = jax.eval_shape(lambda *xs: bind(wide, xs), *operands)
        fits = [(tuple(m.shape), m.dtype) for m in made] == wanted
    except Exception:  # whatever a primitive raises for operands it does not accept
        fits = False
    if fits:
        return bind(wide, operands)
    exact = all(wide_dtype(d) == d for d in (*dtypes, *(a.dtype for a in avals)))
    if not exact:
        tell(name)
    narrow = [x if x.dtype == d else x.astype(d) for x, d in zip(operands, dtypes, strict=True)]
    results = bind(equation, narrow)
    return [r if r.dtype == d else r.astype(d) for r, (_, d) in zip(results, wanted, strict=True)]


class _HasCodeError(TypeError):
    """Raised where a parameter is a Python function, which was made for the traced dtypes."""


def _wide_param(value: Any, tell: Callable[[str], Any]) -> Any:
    if isinstance(value, ClosedJaxpr):
        return _wide_jaxpr(value, tell)
    if isinstance(value, Jaxpr):
        return _wide_jaxpr(ClosedJaxpr(value, ()), tell).jaxpr
    if isinstance(value, (tuple, list)):
        parts = [_wide_param(v, tell) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return wide_dtype(value)
    if callable(value):
        raise _HasCodeError(f"{value!r} is code")
    return value


def _wide_jaxpr(closed: Any, tell: Callable[[str], Any]) -> Any:
    """Return the same jaxpr in double precision."""
    structs = [_wide_struct(v.aval) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: _run(closed, args, tell))(*structs)


def _wide_struct(aval: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, wide_dtype(aval.dtype), weak_type=weak)


def _run(closed: Any, args: Sequence[Any], tell: Callable[[str], Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, map(widened, closed.consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def value(atom: Any) -> Any:
        return (
            jnp.asarray(widened(np.asarray(atom.val))) if isinstance(atom, Literal) else env[atom]
        )

    for e in jaxpr.eqns:
        operands = [value(v) for v in e.invars]
        inner = e.params.get(_CALLS.get(e.primitive.name, ""))
        inner = ClosedJaxpr(inner, ()) if isinstance(inner, Jaxpr) else inner
        if isinstance(inner, ClosedJaxpr):
            results = _run(inner, operands, tell)
        else:
            dtypes = [v.aval.dtype for v in e.invars]
            results = wide_results(e, operands, dtypes, [v.aval for v in e.outvars], tell)
        env.update(zip(e.outvars, results, strict=True))
    return [value(v) for v in jaxpr.outvars]
