"""Samplers of random elementwise operators."""

from __future__ import annotations

from typing import Any

from xrl_jax.graph import ops
from xrl_jax.language.rule import Pattern, Var
from xrl_jax.verify.samplers.base import Drawing, Made, Rejected, Want


def elementwise(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
    inner = [dtype] * len(p.args)
    if ops.OPS[p.op].dtype == "bool":
        inner = [
            ("float32" if p.op == "is_finite" else str(m.rng.choice(("float32", "int32"))))
        ] * len(p.args)
        if dtype != "bool":
            raise Rejected
    if p.op == "select":
        inner[0] = "bool"
    if p.op == "cast":
        inner = [str(m.rng.choice(("float32", "bfloat16", "float16", "int32", "float64", "int8")))]
    attrs: dict[str, Any] = {"dtype": ops.DTYPE_CODE[dtype]} if p.op == "cast" else {}
    if p.op == "integer_pow":
        attrs["exponent"] = int(m.rng.choice((-2, -1, 0, 1, 2, 3)))
    order = sorted(range(len(p.args)), key=lambda i: (not m.known(p.args[i]), i))
    got: dict[int, int] = {}
    full: Want = want
    for k, i in enumerate(order):
        arg = p.args[i]
        last = k == len(order) - 1
        fresh = isinstance(arg, Var) and arg.name not in m.bound
        value = isinstance(arg, Var) and arg.name in m.hints.value
        scalar = (
            len(p.args) > 1
            and fresh
            and (value or m.chance(0.2))
            and (not last or full is not None)
        )
        if isinstance(arg, Var) and m.hints.rank.get(arg.name) == 0:
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
    return [got[i] for i in range(len(p.args))], attrs
