"""Samplers of random operators whose arguments have the shape of the result or are scalars."""

from __future__ import annotations

from typing import Any

from xrl_jax.graph import ops
from xrl_jax.language.rule import Pattern, Var
from xrl_jax.verify.samplers.base import Drawing, Drawn, Rejected, Want, argument_dtypes
from xrl_jax.verify.samplers.kinds import attributes


def like_first(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Drawn:
    """Draw an operator whose result has the shape of its first argument (`rev`, `softmax`)."""
    dtypes = argument_dtypes(m, ops.OPS[p.op], len(p.args), dtype)
    args = [m.make(a, want if i == 0 else None, dtypes[i]) for i, a in enumerate(p.args)]
    return args, attributes(m, p.op, len(m.shape_of(args[0])), dtype)


def elementwise(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Drawn:
    """Draw an elementwise operator on arguments of equal shape, some of them scalars."""
    spec = ops.OPS[p.op]
    inner = argument_dtypes(m, spec, len(p.args), dtype)
    order = sorted(range(len(p.args)), key=lambda i: (not m.known(p.args[i]), i))
    got: dict[int, int] = {}
    full: Want = want
    for k, i in enumerate(order):
        arg = p.args[i]
        last = k == len(order) - 1
        fresh = isinstance(arg, Var) and arg.name not in m.bound
        value = m.is_value(arg)
        scalar = (
            len(p.args) > 1
            and i not in spec.full
            and fresh
            and (value or m.chance(0.2))
            and (not last or full is not None)
        )
        if m.rank_of(arg) == 0:
            scalar = True
        if isinstance(arg, Var) and not fresh and m.shape_of(m.bound[arg.name]) == ():
            scalar = True
        aim: Want = () if scalar and (full is None or len(full) or value) else full
        if fresh and not scalar and aim is None and not last and m.chance(0.8):
            aim = m.shape()
        got[i] = m.make(arg, aim, inner[i])
        shape = m.shape_of(got[i])
        if shape != () and not scalar:
            full = shape
    args = [got[i] for i in range(len(p.args))]
    shapes = [m.shape_of(a) for a in args]
    if any(shapes[i] != max(shapes, key=len) for i in spec.full):
        raise Rejected
    return args, attributes(m, p.op, len(max(shapes, key=len)), dtype)
