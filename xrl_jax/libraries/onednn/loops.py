"""Groups the elementwise functions and reductions of a partition into loops over rows.

A loop computes values between two kernels that have the same number of rows and columns, or one
element for each row. They are grouped by level, as partitions are: a value's level counts, on the
path to it, the changes between loops and other operators, or between loops over different rows. So
no loop needs a value that another operator computes from the loop's own results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from xrl_jax.libraries.onednn.spec import (
    Binary,
    Clip,
    Instruction,
    Loop,
    Map,
    Op,
    Partition,
    Reduce,
    Repeat,
    Reshape,
    Scale,
    Shape,
)

_MOST_COLUMNS = 1 << 16  # a row is kept on the stack


@dataclass(eq=False)
class _Group:
    """The values of one loop, as indices."""

    rows: int
    columns: int
    members: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Place:
    """The place of a value: its level, its group if any, and whether it has one element per row."""

    level: int
    group: _Group | None = None
    is_row: bool = False


def needs_loop(op: Op) -> bool:
    """Whether the operator has to be in a loop, because the library has no such kernel."""
    return isinstance(op, Map | Reduce | Repeat)


def is_possible(op: Op, shapes: Sequence[Shape], shape: Shape) -> bool:
    """Whether a function or reduction of arrays of these shapes can be part of a loop."""
    whole = shapes[0] if isinstance(op, Reduce) else shape
    return bool(shape) and all(shapes) and 0 < whole[-1] <= _MOST_COLUMNS and math.prod(whole) > 0


def looped(part: Partition) -> Partition:
    """Return the same partition with its elementwise functions and reductions in loops."""
    if not any(needs_loop(i.op) for i in part.code):
        return part
    n = len(part.inputs)
    places = [_Place(0) for _ in part.inputs]
    for i in part.code:
        place = _placed(part, i, places)
        places.append(place)
        if place.group is not None:
            place.group.members.append(len(places) - 1)
    merged = {id(p.group): p.group for p in places if p.group is not None}
    groups = [g for g in merged.values() if any(needs_loop(part.code[v - n].op) for v in g.members)]
    inside = {v: g for g in groups for v in g.members}
    users: dict[int, set[int]] = {}
    for at, i in enumerate(part.code):
        for a in i.args:
            users.setdefault(a, set()).add(n + at)
    outer = set(part.outputs)
    for v, g in inside.items():
        if any(inside.get(u) is not g for u in users.get(v, ())):
            outer.add(v)
    for v in sorted(inside, reverse=True):
        i = part.code[v - n]
        if v in outer and isinstance(i.op, Reshape):
            # Reshape after the loop, because other reshapes may be of the same value.
            del inside[v]
            outer.add(i.args[0])
    return _with_loops(part, inside, outer)


def _placed(part: Partition, i: Instruction, places: list[_Place]) -> _Place:
    args = [places[a] for a in i.args]
    outside = _Place(max((p.level + (p.group is not None) for p in args), default=0))
    whole = part.shape(i.args[0]) if isinstance(i.op, Reduce) else i.shape
    in_loops = isinstance(i.op, Map | Reduce | Repeat | Binary | Clip | Scale | Reshape)
    if not in_loops or not whole or not math.prod(whole):
        return outside
    # Join the groups of the arguments of the highest level, if these have the same rows.
    level = max((p.level + (p.group is None) for p in args), default=0)
    joined = [
        a for a in dict.fromkeys(i.args) if places[a].group is not None and places[a].level == level
    ]
    group = _fitting(part, i, [places[a] for a in joined], joined)
    if joined and group is None:
        level, joined = level + 1, []
    if group is None:
        if isinstance(i.op, Reshape):
            return outside
        group = _Group(math.prod(whole) // whole[-1], whole[-1])
    for a in joined:
        _merge(places, places[a].group, group)
    if isinstance(i.op, Reduce):
        return _Place(level, group, True)
    return _Place(level, group, bool(joined) and math.prod(i.shape) != group.rows * group.columns)


def _fitting(
    part: Partition, i: Instruction, args: list[_Place], numbers: list[int]
) -> _Group | None:
    """Return the group of the arguments that can take the value; None if there is none."""
    if not args:
        return None
    group = args[0].group
    assert group is not None
    for p in args:
        assert p.group is not None
        if (p.group.rows, p.group.columns) != (group.rows, group.columns):
            return None
    size, shape = math.prod(i.shape), i.shape
    whole = size == group.rows * group.columns
    rows = size == group.rows
    if isinstance(i.op, Reduce):
        fits = not args[0].is_row and part.shape(numbers[0])[-1] == group.columns
        return group if fits else None
    if isinstance(i.op, Reshape):
        (p,) = args
        fits = rows if p.is_row else whole and shape[-1:] == (group.columns,)
        return group if fits else None
    for a, p in zip(numbers, args, strict=True):
        own = part.shape(a)
        if p.is_row and own != shape:
            fits = whole and shape[-1] == group.columns and own == (*shape[:-1], 1)
        elif p.is_row:
            fits = rows
        else:
            fits = whole and own == shape and shape[-1] == group.columns
        if not fits:
            return None
    return group


def _merge(places: list[_Place], old: _Group | None, new: _Group) -> None:
    if old is None or old is new:
        return
    new.members += old.members
    for v in old.members:
        places[v] = replace(places[v], group=new)


def _with_loops(part: Partition, inside: dict[int, _Group], outer: set[int]) -> Partition:
    """Return the partition with a loop for each value of a group that is needed outside of it.

    Operators come as soon as their arguments are computed; equal ones are merged.
    """
    n = len(part.inputs)
    number: dict[int, int] = {v: v for v in range(n)}  # index of each value in the new partition
    code: dict[Instruction, int] = {}
    stack = [(o, False) for o in reversed(part.outputs)]
    while stack:
        v, ready = stack.pop()
        if v in number:
            continue
        made = _loop(part, inside[v], v, outer) if v in inside else part.code[v - n]
        if ready:
            made = replace(made, args=tuple(number[a] for a in made.args))
            number[v] = code.setdefault(made, n + len(code))
        else:
            stack.append((v, True))
            stack += [(a, False) for a in reversed(made.args)]
    return Partition(part.inputs, part.packed, tuple(code), tuple(number[o] for o in part.outputs))


def _loop(part: Partition, group: _Group, result: int, outer: set[int]) -> Instruction:
    """Return the instruction that computes a value of a group: a loop on values that are outside of
    the group or needed there; or the operator itself, if it is the only one and needs no loop.
    """
    n = len(part.inputs)
    own = set(group.members)
    needed: set[int] = set()
    stack = [result]
    while stack:
        v = stack.pop()
        if v not in needed:
            needed.add(v)
            stack += [a for a in part.code[v - n].args if a in own and a not in outer]
    if not any(needs_loop(part.code[v - n].op) for v in needed) and len(needed) == 1:
        return part.code[result - n]
    order = sorted(needed)
    taken = list(dict.fromkeys(a for v in order for a in part.code[v - n].args if a not in needed))
    number = {a: k for k, a in enumerate([*taken, *order])}
    code = tuple(
        replace(part.code[v - n], args=tuple(number[a] for a in part.code[v - n].args))
        for v in order
    )
    loop = Loop(group.rows, group.columns, tuple(part.shape(a) for a in taken), code)
    return Instruction(loop, tuple(taken), part.shape(result))
