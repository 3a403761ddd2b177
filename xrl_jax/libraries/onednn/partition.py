"""Partitioning of a jaxpr: equations that the library can compute are merged into a few calls.

A library call has to wake the library's threads and make its descriptors, which costs some 50
microseconds where a convolution of a small network takes 100; and its results have to be row-major.
So kernels are merged with those they feed, and with the operators in between that the library can
do: pooling, concatenation, sums. Within a partition values keep the layouts that the library
prefers.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from xrl_jax.graph import equations
from xrl_jax.graph.equations import read, variables
from xrl_jax.libraries.onednn import kernels
from xrl_jax.libraries.onednn.attend import with_attention
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.fuse import fused
from xrl_jax.libraries.onednn.lift import Lifted, lifted
from xrl_jax.libraries.onednn.loops import looped
from xrl_jax.libraries.onednn.members import (
    Member,
    as_member,
    as_widened,
    is_broadcast,
    result_shape,
)
from xrl_jax.libraries.onednn.spec import (
    Binary,
    Instruction,
    Map,
    Op,
    Partition,
    Reduce,
    Repeat,
    Reshape,
    Scale,
    Slice,
    Transpose,
    Widen,
)

# Equations whose results may be read where their operands are (`_take_views`).
_VIEWS = ("slice", "reshape", "squeeze", "expand_dims", "convert_element_type")
# Operators that are left to XLA, which does them as well, where no library operator uses them.
_LIGHT = (Reshape, Repeat, Transpose, Slice, Scale, Binary, Map, Reduce)


def partitioned(closed: Any, known: Sequence[bool]) -> Any:
    """Return the closed jaxpr with its kernels merged into partitions.

    Args:
      known: for each argument, whether it is a weight; values that depend on weights only stay
        outside of partitions, to be hoisted.
    """
    if library() is None or not any(e.primitive is kernels.kernel_p for e in closed.jaxpr.eqns):
        return closed
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    stages = _stages(closed.jaxpr, known)

    def run(*args: Any) -> list[Any]:
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(closed.jaxpr.invars, args, strict=True))
        for stage in stages:
            equations.run(stage.before, env)
            _run(stage, env)
        return [read(env, v) for v in closed.jaxpr.outvars]

    return jax.make_jaxpr(run)(*avals)


@dataclass
class _Stage:
    """Equations for XLA, followed by the members of one partition."""

    before: list[Any]
    members: list[Member]
    outputs: list[Any]
    fixed: set[Any]  # variables that depend on weights only
    producer: dict[Any, Any]  # the equation that computes a variable


def _stages(jaxpr: Any, known: Sequence[bool]) -> list[_Stage]:
    """Assign each equation to the first stage in which all its operands are available."""
    producer = {v: e for e in jaxpr.eqns for v in e.outvars}
    fixed = set(jaxpr.constvars) | {v for v, k in zip(jaxpr.invars, known, strict=True) if k}
    level: dict[Any, int] = {}  # of a variable: its partition, or the last one it depends on
    inside: dict[Any, Member] = {}  # by result

    for e in jaxpr.eqns:
        operands = variables(e.invars)
        if not e.effects and all(v in fixed for v in operands):
            fixed.update(e.outvars)
            continue
        at = max((level.get(v, 0) for v in operands), default=0)
        member = as_member(e, producer)
        if member is not None:
            own = max(level.get(v, 0) + (v not in inside) for v in member.taken)
            feeds = any(v in inside and level[v] == own for v in member.taken)
            if feeds or e.primitive is kernels.kernel_p:
                at, inside[member.result] = own, member
        level.update(dict.fromkeys(e.outvars, at))

    _peel(inside)
    _take_views(jaxpr, fixed, producer, inside, level)
    users: dict[Any, list[Any]] = {}
    returned = set(variables(jaxpr.outvars))
    for e in reversed(jaxpr.eqns):
        v = e.outvars[0] if e.outvars else None
        if v not in inside and is_broadcast(e) and v not in users and v not in returned:
            continue  # members take its operand instead
        for o in inside[v].taken if v in inside else variables(e.invars):
            users.setdefault(o, []).append(e)
    stages = [
        _Stage([], [], [], fixed, producer) for _ in range(max(level.values(), default=0) + 2)
    ]
    for e in jaxpr.eqns:
        v = e.outvars[0] if e.outvars else None
        if v in inside:
            stages[level[v] - 1].members.append(inside[v])
        elif not is_broadcast(e) or v in users or v in returned:
            stages[max((level.get(o, 0) for o in variables(e.invars)), default=0)].before.append(e)
    for stage in stages:
        own = {id(m.equation) for m in stage.members}
        stage.outputs = [
            m.result
            for m in stage.members
            if m.result in returned or any(id(e) not in own for e in users.get(m.result, ()))
        ]
    return stages


def _peel(inside: dict[Any, Member]) -> None:
    """Leave to XLA the operators at the end of a partition that cost XLA nothing.

    These are changes of shape, and elementwise operators other than sums. A reduction and the light
    operators that use it stay: XLA would recompute the reduced values at each use, with
    multiply-add where it reduced rounded products; `x - max(x)` is then above zero, and a softmax
    of large values is NaN.
    """
    reduced: set[Any] = set()
    for v, (_, op, operands) in inside.items():
        follows = isinstance(op, _LIGHT) and any(o.variable in reduced for o in operands)
        if isinstance(op, Reduce) or follows:
            reduced.add(v)
    needed: set[Any] = set()  # by later members
    for v, (_, op, operands) in reversed(list(inside.items())):
        ends = isinstance(op, _LIGHT) and op != Binary("add")
        if ends and v not in needed and v not in reduced:
            del inside[v]
        else:
            needed.update(o.variable for o in operands)


def _take_views(
    jaxpr: Any,
    fixed: Container[Any],
    producer: dict[Any, Any],
    inside: dict[Any, Member],
    level: dict[Any, int],
) -> None:
    """Let partitions take slices and conversions that only their members read: the library reads
    them in the memory of the whole array, XLA would copy them for the call.
    """
    readers: dict[Any, list[Any]] = {v: [None] for v in variables(jaxpr.outvars)}
    for e in jaxpr.eqns:
        for v in variables(e.invars):
            readers.setdefault(v, []).append(e.outvars[0] if e.outvars else None)
    found: dict[Any, tuple[Member, int]] = {}  # with the partition that reads it
    for e in reversed(jaxpr.eqns):
        v = e.outvars[0] if e.outvars else None
        if v in inside or v in fixed or v not in readers or e.primitive.name not in _VIEWS:
            continue
        member = as_widened(e, producer, readers) or as_member(e, producer)
        if member is None or not isinstance(member.op, Reshape | Slice | Widen):
            continue
        own = {level[r] if r in inside else found[r][1] if r in found else -1 for r in readers[v]}
        if len(own) == 1 and own != {-1}:
            found[v] = member, own.pop()
    for v, (member, at) in reversed(found.items()):
        if isinstance(member.op, Slice | Widen) or member.taken[0] in inside:
            inside[v], level[v] = member, at


def _run(stage: _Stage, env: dict[Any, Any]) -> None:
    """Add the stage's outputs to `env`, computed by one library call.

    Where the library cannot compute them in one call, each member runs on its own.
    """
    if not stage.members:
        return
    (part, taken, before, needs), inputs = _partition(stage)
    part = with_attention(looped(part))
    if not kernels.is_possible(part):
        for m in stage.members:
            _run_alone(m.equation, stage.producer, env)
        return

    def array(i: int, dtype: str = "float32") -> jax.Array:
        return env[inputs[i]].astype(dtype).reshape(_shape(inputs[i]))

    operands = [
        kernels.pack(part, at, env[inputs[i]])
        if part.packed[at]
        else array(i, part.narrow.get(at, "float32"))
        for at, i in enumerate(taken)
    ]
    operands += [] if before is None else before(*map(array, needs))
    for v, y in zip(stage.outputs, kernels.run(part, *operands), strict=True):
        env[v] = y.astype(v.aval.dtype)


def _run_alone(e: Any, producer: dict[Any, Any], env: dict[Any, Any]) -> None:
    """Run an equation, after the broadcasts that it reads and that a partition leaves out."""
    for v in variables(e.invars):
        if v not in env:
            _run_alone(producer[v], producer, env)
    equations.run([e], env)


def _partition(stage: _Stage) -> tuple[Lifted, list[Any]]:
    """Return the stage's partition, with weight-only work split off, and the input variables.

    The input variables are those of the partition before it is split; see `Lifted`.
    """
    inputs: list[Any] = []
    packed: list[bool] = []
    place: dict[Any, int] = {}  # index i of a variable's input, or -1 - i for instruction i
    code: list[Instruction] = []

    def take(v: Any, *, is_weight: bool) -> int:
        at = place.get(v)
        if at is None or (is_weight and at >= 0):
            at = len(inputs)
            inputs.append(v)
            packed.append(is_weight)
            if not is_weight:
                place[v] = at
        return at

    def append(op: Op, args: list[int], shape: tuple[int, ...]) -> int:
        code.append(Instruction(op, tuple(args), shape))
        return -len(code)

    for m in stage.members:
        args = []
        for n, (v, shape) in enumerate(m.operands):
            at = take(v, is_weight=n == 1 and kernels.packs(m.op, v.aval.shape))
            args.append(at if shape == _shape(v) else append(Reshape(shape), [at], shape))
        shape = m.result.aval.shape
        place[m.result] = append(m.op, args, result_shape(m.op, m.operands, shape))
        if result_shape(m.op, m.operands, shape) != shape:
            place[m.result] = append(Reshape(shape), [place[m.result]], shape)

    def number(at: int) -> int:
        return at if at >= 0 else len(inputs) - 1 - at

    numbered = tuple(replace(i, args=tuple(number(a) for a in i.args)) for i in code)
    shapes = tuple(_shape(v) for v in inputs)
    outputs = tuple(number(place[v]) for v in stage.outputs)
    known = [v in stage.fixed for v in inputs]
    whole = fused(Partition(shapes, tuple(packed), numbered, outputs), known)
    return lifted(whole, known), inputs


def _shape(v: Any) -> tuple[int, ...]:
    """Return the shape of an input; for the library every array has an axis."""
    return v.aval.shape or (1,)
