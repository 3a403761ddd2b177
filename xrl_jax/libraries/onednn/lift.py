"""Splits a partition: weight-only work goes into a partition that runs once, before the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from xrl_jax.libraries.onednn.spec import Partition, Repeat, Reshape, Slice, Transpose

_FREE = (Repeat, Reshape, Slice, Transpose)  # operators that do no work


class Lifted(NamedTuple):
    """A partition split in two.

    Attributes:
      part: its inputs are the original ones that `taken` lists, then the results of `before`.
      before: its inputs are the original ones that `needs` lists; None where it has no work.
    """

    part: Partition
    taken: tuple[int, ...]
    before: Partition | None
    needs: tuple[int, ...]


def lifted(part: Partition, known: Sequence[bool]) -> Lifted:
    """Split off operators that depend on weights only, such as sums and concatenations.

    Args:
      known: for each input, whether it depends on weights only.
    """
    n = len(part.inputs)
    fixed, worked = list(known), [False] * n
    for i in part.code:
        fixed.append(all(fixed[a] for a in i.args))
        works = not isinstance(i.op, _FREE) or any(worked[a] for a in i.args)
        worked.append(fixed[-1] and works)
    used = {a for v, i in enumerate(part.code, n) if not fixed[v] for a in i.args}
    used.update(part.outputs)
    made = tuple(v for v in range(n, len(fixed)) if worked[v] and v in used)
    if not made:
        return Lifted(part, tuple(range(n)), None, ())
    before, needs = subpartition(part, made)
    rest, taken = subpartition(part, part.outputs, made)
    return Lifted(rest, taken, before, needs)


def subpartition(
    part: Partition,
    outputs: tuple[int, ...],
    given: tuple[int, ...] = (),
    *,
    keep_inputs: bool = False,
) -> tuple[Partition, tuple[int, ...]]:
    """Return the partition that computes `outputs` from inputs and from `given` values, and the
    inputs that it takes: those that it needs, or all with `keep_inputs`.
    """
    n = len(part.inputs)
    needed, stack = set(given), list(outputs)
    while stack:
        v = stack.pop()
        if v not in needed:
            needed.add(v)
            stack += part.code[v - n].args if v >= n else ()
    taken = tuple(v for v in range(n) if keep_inputs or v in needed)
    made = [v for v in range(n, n + len(part.code)) if v in needed and v not in given]
    place = {v: at for at, v in enumerate((*taken, *given, *made))}
    code = tuple(
        replace(part.code[v - n], args=tuple(place[a] for a in part.code[v - n].args)) for v in made
    )
    shapes = tuple(part.shape(v) for v in (*taken, *given))
    packed = tuple(part.is_packed(v) for v in (*taken, *given))
    return Partition(shapes, packed, code, tuple(place[o] for o in outputs)), taken
