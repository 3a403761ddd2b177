"""Types for results that only products in a narrower type read, to save the conversions."""

from __future__ import annotations

from xrl_jax.libraries.onednn.spec import Conv, Partition, Reshape

_ROUNDED = "bfloat16"  # rounding to integers takes a factor, which is not known beforehand


def result_types(partition: Partition) -> dict[int, str]:
    """Return types narrower than float32, by value, for results of convolutions in that type.

    Such a result is rounded once, where it is computed, instead of by each of its readers.
    """
    n = len(partition.inputs)
    users: dict[int, set[int]] = {}
    for v, i in enumerate(partition.code, n):
        for a in i.args:
            users.setdefault(a, set()).add(v)
    rounded: set[int] = set()  # values that are read in the narrow type only

    def is_read_narrow(value: int, user: int) -> bool:
        i = partition.code[user - n]
        if isinstance(i.op, Reshape):
            return user in rounded
        is_image = i.args[0] == value and value not in i.args[1:]
        return isinstance(i.op, Conv) and i.op.right == _ROUNDED and is_image

    for v in reversed(range(n, n + len(partition.code))):
        own = users.get(v, set())
        if own and v not in partition.outputs and all(is_read_narrow(v, u) for u in own):
            rounded.add(v)
    ops = {v: i.op for v, i in enumerate(partition.code, n) if v in rounded}
    return {v: _ROUNDED for v, op in ops.items() if isinstance(op, Conv) and op.right == _ROUNDED}
