"""Loops and branches on values that carry their rounding errors (`rounding`). The operators in a
body pass errors on, and the values that a loop carries bring theirs into the next iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xrl_jax.accept.rounding import Value, is_inexact, standard_error
from xrl_jax.graph.bindings import scan_sizes

Body = Callable[[Sequence[Value]], Sequence[Value]]


def control_flow(
    kind: str, params: Mapping[str, Any], bodies: Sequence[Body], xs: Sequence[Value]
) -> list[Value]:
    """Return the results of a "scan", "while" or "cond" (traceable, with 64-bit types enabled).

    Args:
      params: of the equation.
      bodies: in the order of `Call.bodies`.
      xs: operands of the equation.
    """
    if kind == "scan":
        return _scan(params, bodies[0], xs)
    if kind == "while":
        return _while(params, bodies[0], bodies[1], xs)
    return _cond(bodies, xs)


def _scan(params: Mapping[str, Any], body: Body, xs: Sequence[Value]) -> list[Value]:
    n, carried = scan_sizes(params)
    consts, first, rows = xs[:n], xs[n : n + carried], xs[n + carried :]

    def step(carry: list[Value], row: list[Value]) -> tuple[list[Value], list[Value]]:
        results = _with_errors(body([*consts, *carry, *row]))
        return results[:carried], results[carried:]

    last, made = jax.lax.scan(
        step, _with_errors(first), list(rows), length=params["length"], reverse=params["reverse"]
    )
    return [*last, *made]


def _while(params: Mapping[str, Any], test: Body, body: Body, xs: Sequence[Value]) -> list[Value]:
    n, m = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def condition(carry: Sequence[Value]) -> Value:
        (found,) = test([*xs[:n], *carry])
        return found

    def step(state: tuple[list[Value], Any]) -> tuple[list[Value], Any]:
        carry, doubt = state
        doubt |= jnp.any(standard_error(condition(carry)))
        return _with_errors(body([*xs[n:m], *carry])), doubt

    start = _with_errors(xs[m:]), jnp.zeros((), bool)
    last, doubt = jax.lax.while_loop(lambda state: condition(state[0]).exact, step, start)
    return _unsure(last, doubt | jnp.any(standard_error(condition(last))))


def _cond(branches: Sequence[Body], xs: Sequence[Value]) -> list[Value]:
    which, *operands = xs

    def taken(branch: Body) -> Callable[[list[Value]], list[Value]]:
        return lambda operands: _with_errors(branch(operands))

    results = jax.lax.switch(which.exact, list(map(taken, branches)), operands)
    return _unsure(results, jnp.any(standard_error(which)))


def _with_errors(values: Sequence[Value]) -> list[Value]:
    """Return the values with an error each, so that a loop carries the same types throughout."""
    found = []
    for v in values:
        dtype = jnp.float64 if is_inexact(v.exact) else bool
        error = jnp.zeros(v.exact.shape, dtype) if v.error is None else v.error
        found.append(Value(v.exact, jnp.broadcast_to(error, v.exact.shape).astype(dtype)))
    return found


def _unsure(values: Sequence[Value], doubt: Any) -> list[Value]:
    """Return the values as uncertain where `doubt` is set: a rounding error may have decided which
    code computed them.
    """
    return [
        Value(v.exact, jnp.where(doubt, jnp.inf, v.error))
        if is_inexact(v.exact)
        else Value(v.exact, v.error | doubt)
        for v in values
    ]
