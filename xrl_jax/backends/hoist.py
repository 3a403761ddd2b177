"""Hoisting of weight-only work out of the call.

A function of weights and inputs is split in two: `prepare(weights)`, run once, and `call(prepared,
inputs)`. Equations that depend on weights and constants only go to `prepare`; the values that the
call then needs are the frontier. Four rules say what stays in the call although it could go:

- equations with effects;
- broadcasts and casts to a wider type at the frontier, which only make values bigger, and
  reshapes, which cost nothing; but not casts of weights from bfloat16 or float16, since most are
  for products in float32, and XLA:CPU would make them before each;
- cheap elementwise work on literals (masks, iotas), which XLA folds or fuses;
- with `max_bytes`, the equations that enlarge values the most, until the bound holds.

Weight-only work inside a scan is first taken out of the loop: on constants of the loop once, on its
scanned weights for all steps together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from xrl_jax.graph.bindings import scan_sizes
from xrl_jax.graph.equations import JITS, bind, is_plain, read, run, variables
from xrl_jax.libraries.registry import partitioned
from xrl_jax.program.host import struct

_SMALL = 1024  # bytes up to which constants stay in the code: XLA simplifies with them
_FREE = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
_CHEAP = frozenset(
    (
        "iota broadcast_in_dim reshape squeeze convert_element_type transpose add sub mul div max "
        "min neg abs eq ne lt le gt ge and or not xor select_n rem floor sign concatenate pad slice"
    ).split()
)


@dataclass(frozen=True)
class Hoisted:
    """A function of flat arguments in two parts.

    Attributes:
      prepare: `prepare(weights) -> tuple of arrays`, given the weights in the order of the mask.
      call: `call(prepared, inputs) -> list of flat results`, given the other arguments in their
        order (traceable).
      avals: shape and dtype of the values that `prepare` returns.
      bytes_added: bytes of the values that `prepare` returns and that are not weights or constants
        themselves.
      n_hoisted: number of equations that `prepare` runs.
    """

    prepare: Callable[[Sequence[Any]], tuple[Any, ...]]
    call: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    bytes_added: int
    n_hoisted: int


def split(
    fn: Callable[..., Any],
    flat_avals: Sequence[Any],
    weights_mask: Sequence[bool],
    *,
    max_bytes: int | None = None,
) -> Hoisted:
    """Split `fn` of flat arguments (returning flat results) into preparation and call.

    Args:
      fn: traceable, `fn(*flat)`, returns a list or tuple of arrays.
      flat_avals: shape and dtype of every argument.
      weights_mask: for every argument, whether it is a weight.
      max_bytes: bound for `bytes_added`; None for no bound.

    Raises:
      ValueError: the mask does not have one entry for each argument.
    """
    if len(flat_avals) != len(weights_mask):
        raise ValueError(
            f"there are {len(flat_avals)} arguments, but weights_mask has {len(weights_mask)} items"
        )
    closed = jax.make_jaxpr(fn)(*flat_avals)
    closed = _prepared_for_split(closed, weights_mask, flat_avals)
    jaxpr = closed.jaxpr
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    small = {v: c for v, c in consts.items() if _nbytes(v.aval) <= _SMALL}
    weights = [v for v, is_weight in zip(jaxpr.invars, weights_mask, strict=True) if is_weight]
    inputs = [v for v, is_weight in zip(jaxpr.invars, weights_mask, strict=True) if not is_weight]
    large = {v: c for v, c in consts.items() if v not in small}
    plan = _plan(jaxpr, [*weights, *large], small, max_bytes)
    passed = {*weights, *large}
    computed = [v for v in plan.frontier if v not in passed]

    def compute(values: Sequence[Any], large_values: Sequence[Any]) -> list[Any]:
        env = dict(zip([*weights, *large], [*values, *large_values], strict=True)) | small
        run(plan.before, env)
        return [env[v] for v in computed]

    jitted = jax.jit(compute)

    def prepare(values: Sequence[Any]) -> tuple[Any, ...]:
        env = dict(zip(weights, values, strict=True)) | large
        if computed:
            env.update(zip(computed, jitted(list(values), list(large.values())), strict=True))
        return tuple(env[v] for v in plan.frontier)

    def call(prepared: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        env = dict(zip(inputs, values, strict=True)) | small
        env.update(zip(plan.frontier, prepared, strict=True))
        run(plan.after, env)
        return [read(env, v) for v in jaxpr.outvars]

    return Hoisted(
        prepare,
        call,
        tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in plan.frontier),
        sum(_nbytes(v.aval) for v in computed),
        len(plan.before),
    )


# --- which equations go where ---


@dataclass(frozen=True)
class _Plan:
    before: list[Any]  # equations of the preparation
    after: list[Any]  # equations of the call
    frontier: list[Any]  # variables the call takes from the preparation


def _plan(jaxpr: Any, known: Sequence[Any], small: Iterable[Any], max_bytes: int | None) -> _Plan:
    """Divide the equations of a jaxpr; the preparation has the values of `known`."""
    live = _live(jaxpr.eqns, jaxpr.outvars)
    producer = {v: e for e in live for v in e.outvars}
    free: set[Any] = set(small)  # cheap and of literals only: computed in both parts as needed
    ready: set[Any] = set(known)  # depends on weights only
    for e in live:
        operands = variables(e.invars)
        if e.effects or not all(v in free or v in ready for v in operands):
            continue
        cheap = e.primitive.name in _CHEAP and all(v in free for v in operands)
        (free if cheap else ready).update(e.outvars)
    stay: set[int] = set()  # equations that could go to the preparation but stay in the call

    def frontier() -> list[Any]:
        users = [e for e in live if not _goes(e) or id(e) in stay]
        used = [v for e in users for v in variables(e.invars)]
        seen = dict.fromkeys(v for v in [*used, *variables(jaxpr.outvars)] if v in ready)
        return [v for v in seen if v not in producer or id(producer[v]) not in stay]

    def _goes(e: Any) -> bool:
        return all(v in ready for v in e.outvars) and not e.effects and bool(e.outvars)

    def growth(v: Any) -> int:
        """Return how many bytes larger a value is than the operands it is computed from."""
        return _nbytes(v.aval) - sum(_nbytes(a.aval) for a in set(variables(producer[v].invars)))

    def is_widened(v: Any) -> bool:
        """Return whether a value is another one in a wider type: a broadcast one, or no float."""
        if producer[v].primitive.name != "convert_element_type" or growth(v) <= 0:
            return False
        (operand,) = producer[v].invars
        by = producer.get(operand)
        is_broadcast = by is not None and by.primitive.name == "broadcast_in_dim"
        return is_broadcast or not jnp.issubdtype(operand.aval.dtype, jnp.inexact)

    while True:
        edge = frontier()
        made = [v for v in edge if v in producer]
        back = [v for v in made if producer[v].primitive.name in _FREE or is_widened(v)]
        total = sum(_nbytes(v.aval) for v in made)
        if not back and max_bytes is not None and total > max_bytes:
            back = [max(made, key=growth)]
        if not back:
            break
        stay.update(id(producer[v]) for v in back)
    after = [e for e in live if not _goes(e) or id(e) in stay]
    # Equations that stay may be needed in both parts: by the call, and by the preparation.
    before_all = [e for e in live if _goes(e) or all(v in free for v in e.outvars)]
    before = _live([e for e in before_all if not e.effects], edge)
    return _Plan(before, _live(after, jaxpr.outvars), edge)


def _live(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return the equations that the outputs or effects depend on, in order."""
    needed = set(variables(outputs))
    kept = []
    for e in reversed(equations):
        if e.effects or any(v in needed for v in e.outvars):
            kept.append(e)
            needed.update(variables(e.invars))
    return kept[::-1]


def _nbytes(aval: Any) -> int:
    """Return the size of a value; dtypes that NumPy lacks (keys) count eight bytes an element."""
    return math.prod(getattr(aval, "shape", ())) * getattr(
        getattr(aval, "dtype", None), "itemsize", 8
    )


# --- inlining of jits, hoisting out of loops ---


def _prepared_for_split(closed: Any, known: Sequence[bool], avals: Sequence[Any]) -> Any:
    """Return the jaxpr with jits inlined, weight-only work taken out of scans, and library kernels
    grouped into calls.
    """
    plain = jax.make_jaxpr(lambda *args: _evaluate(closed, args, known)[0])(*avals)
    return partitioned(plain, known)


def _evaluate(
    closed: Any, args: Sequence[Any], known: Sequence[bool]
) -> tuple[list[Any], list[bool]]:
    """Return the results of a closed jaxpr, and which of them depend on known arguments and
    constants only.
    """
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    ready = set(jaxpr.constvars)
    env.update(zip(jaxpr.invars, args, strict=True))
    ready.update(v for v, k in zip(jaxpr.invars, known, strict=True) if k)
    for e in jaxpr.eqns:
        operands = [read(env, v) for v in e.invars]
        flags = [isinstance(v, Literal) or v in ready for v in e.invars]
        inner = e.params.get("jaxpr") if e.primitive.name in JITS else None
        if inner is not None and is_plain(e.params):
            results, done = _evaluate(inner, operands, flags)
        elif e.primitive.name == "scan" and any(flags) and not all(flags):
            results, done = _scan(e, operands, flags), [False] * len(e.outvars)
        else:
            results, done = bind(e, operands), [all(flags) and not e.effects] * len(e.outvars)
        env.update(zip(e.outvars, results, strict=True))
        ready.update(v for v, d in zip(e.outvars, done, strict=True) if d)
    flags = [isinstance(v, Literal) or v in ready for v in jaxpr.outvars]
    return [read(env, v) for v in jaxpr.outvars], flags


def _scan(e: Any, operands: Sequence[Any], known: Sequence[bool]) -> list[Any]:
    """Run a scan after taking out of its body the work on known constants and known scanned arrays
    only.
    """
    n_consts, n_carry = scan_sizes(e.params)
    n_before_xs = n_consts + n_carry
    known = [k and not n_consts <= i < n_before_xs for i, k in enumerate(known)]
    avals = [v.aval for v in e.params["jaxpr"].jaxpr.invars]
    body = _prepared_for_split(e.params["jaxpr"], known, [struct(a) for a in avals])
    jaxpr = body.jaxpr
    constants = dict(zip(jaxpr.constvars, body.consts, strict=True))
    fixed = [v for v, k in zip(jaxpr.invars[:n_consts], known, strict=False) if k]
    scanned = [v for v, k in zip(jaxpr.invars[n_before_xs:], known[n_before_xs:], strict=True) if k]
    plan = _plan(jaxpr, [*fixed, *scanned], constants, None)
    stepwise = set(scanned)  # values that differ from step to step
    for equation in plan.before:
        if any(v in stepwise for v in variables(equation.invars)):
            stepwise.update(equation.outvars)
    once = [v for v in plan.frontier if v not in stepwise]
    each = [v for v in plan.frontier if v in stepwise]
    values = dict(zip(jaxpr.invars, operands, strict=True))

    def before(targets: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        env = {v: values[v] for v in fixed} | constants | dict(zip(scanned, xs, strict=True))
        run(_live(plan.before, targets), env)
        return [env[v] for v in targets]

    new_consts = before(once, [values[v] for v in scanned]) if once else []
    new_xs = jax.vmap(lambda *xs: before(each, xs))(*(values[v] for v in scanned)) if each else []
    left_consts = [v for v in jaxpr.invars[:n_consts] if v not in set(fixed)]
    carry = list(jaxpr.invars[n_consts:n_before_xs])
    left_xs = [v for v in jaxpr.invars[n_before_xs:] if v not in set(scanned)]
    outside = constants | dict(zip(once, new_consts, strict=True))
    outside |= {v: values[v] for v in left_consts}

    def step(carried: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        env = outside | dict(zip([*carry, *each, *left_xs], [*carried, *xs], strict=True))
        run(plan.after, env)
        results = [read(env, v) for v in jaxpr.outvars]
        return results[:n_carry], results[n_carry:]

    last, rows = jax.lax.scan(
        step,
        [values[v] for v in carry],
        [*new_xs, *(values[v] for v in left_xs)],
        **{k: e.params[k] for k in ("length", "reverse", "unroll")},
    )
    return [*last, *rows]
