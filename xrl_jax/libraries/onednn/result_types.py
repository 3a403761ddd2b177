"""Types for results that only products in a narrower type read, to save the conversions."""

from __future__ import annotations

from xrl_jax.libraries.onednn.spec import (
    Concat,
    Conv,
    Instruction,
    Partition,
    Pool,
    Reshape,
    Transpose,
)

_ROUNDED = "bfloat16"  # rounding to integers takes a factor, which is not known beforehand


def result_types(partition: Partition) -> dict[int, str]:
    """Return types narrower than float32, by value, for results of convolutions in that type.

    Such a result is rounded once, where it is computed, instead of by each of its readers. It may
    pass through operators that only pick elements on its way.
    """
    n = len(partition.inputs)
    users: dict[int, set[int]] = {}
    for v, i in enumerate(partition.code, n):
        for a in i.args:
            users.setdefault(a, set()).add(v)

    def is_narrow(v: int, narrow: set[int]) -> bool:
        """Whether a value can be in the narrow type if these are: as it is computed and read."""
        i = partition.code[v - n]
        if not _multiplies(i) and not (_picks(i) and narrow.issuperset(i.args)):
            return False
        return all(
            u in narrow if _picks(user) else _multiplies(user) and v not in user.args[1:]
            for u, user in ((u, partition.code[u - n]) for u in users[v])
        )

    found = {v for v in users if v >= n} - set(partition.outputs)
    while found != (kept := {v for v in found if is_narrow(v, found)}):
        found = kept
    return {v: _ROUNDED for v in found if _multiplies(partition.code[v - n])}


def _multiplies(i: Instruction) -> bool:
    return isinstance(i.op, Conv) and i.op.right == _ROUNDED


def _picks(i: Instruction) -> bool:
    """Whether an operator's results are elements of its operands, whatever their type."""
    return isinstance(i.op, Reshape | Transpose | Concat) or (
        isinstance(i.op, Pool) and i.op.kind == "max"
    )
