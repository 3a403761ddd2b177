"""Sums, bounds and factors of a partition into what they follow.

`epilogue` does so among the nodes of one graph. Here all graphs of a program are one, so what
follows the call of a folded body is seen too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from xrl_jax.backends.dnnl.spec import (
    Binary,
    Clip,
    Dot,
    Instruction,
    Kernel,
    Op,
    Partition,
    Pool,
    Reshape,
    Scale,
    Shape,
)


@dataclass(eq=False)
class _Value:
    """An input (its index) or an operator's result, with the values it is made from."""

    made_by: Op | int
    args: list[_Value]
    shape: Shape


def fused(part: Partition) -> Partition:
    """The same partition with fewer operators; inputs and outputs stay as they are."""
    values = [_Value(i, [], shape) for i, shape in enumerate(part.inputs)]
    for i in part.code:
        values.append(_Value(i.op, [values[a] for a in i.args], i.shape))
    outputs = [values[o] for o in part.outputs]
    uses: dict[_Value, int] = {}
    for used in [*(a for v in values for a in v.args), *outputs]:
        uses[used] = uses.get(used, 0) + 1
    now: dict[_Value, _Value] = {}  # what a value has become
    for v in values:
        v.args = [now.get(a, a) for a in v.args]
        became = _absorbed(v, uses)
        if became is not None:
            now[v] = became
            uses[became] = uses.get(v, 0)
    return _listed(part, [now.get(o, o) for o in outputs])


def _absorbed(v: _Value, uses: dict[_Value, int]) -> _Value | None:
    """The value as part of what it is made from and nothing else uses; None where it cannot be."""
    if isinstance(v.made_by, Scale):
        (pool,) = v.args
        if not isinstance(pool.made_by, Pool) or pool.made_by.kind != "sum" or uses[pool] != 1:
            return None
        scaled = replace(pool.made_by, scale=pool.made_by.scale * v.made_by.by)
        return _Value(scaled, pool.args, v.shape)
    if v.made_by != Binary("add") and not isinstance(v.made_by, Clip):
        return None
    for at in reversed(range(len(v.args))):
        kernel, addend = v.args[at], v.args[1 - at] if len(v.args) == 2 else None
        while isinstance(kernel.made_by, Reshape) and uses.get(kernel) == 1:
            kernel = kernel.args[0]
        op = kernel.made_by
        if not isinstance(op, Kernel) or uses.get(kernel) != 1:
            continue
        clip = op.after.clip
        if isinstance(v.made_by, Clip):
            clip = v.made_by if clip is None else clip.then(v.made_by)
            after, args = replace(op.after, clip=clip), kernel.args
        elif addend is None or clip is not None or _depends(addend, kernel):
            continue
        elif addend.shape == v.shape and not op.after.addend:
            after = replace(op.after, addend=True)
            args = [*kernel.args, _reshaped(addend, kernel.shape)]
        elif _is_bias(addend.shape, v.shape, kernel.shape) and not op.after.bias:
            after = replace(op.after, bias=True)
            flat = kernel.shape[-1:]
            one = (1,) * (len(kernel.shape) - 1) + flat
            number = _reshaped(addend, one if isinstance(op, Dot) else flat)
            x, w, *more = kernel.args
            args = [x, w, number, *more]
        else:
            continue
        made = _Value(replace(op, after=after), args, kernel.shape)
        uses[made] = 1
        return _reshaped(made, v.shape)
    return None


def _is_bias(shape: Shape, of: Shape, kernel: Shape) -> bool:
    """Whether an array of this shape is one number for each feature of a kernel's result, which is
    reshaped to `of`.
    """
    return of == kernel and shape[-1] == of[-1] and math.prod(shape) == of[-1]


def _reshaped(v: _Value, shape: Shape) -> _Value:
    while isinstance(v.made_by, Reshape):
        (v,) = v.args
    return v if v.shape == shape else _Value(Reshape(shape), [v], shape)


def _depends(v: _Value, other: _Value) -> bool:
    """Whether a value is made from another."""
    seen: set[int] = set()
    stack = [v]
    while stack:
        top = stack.pop()
        if top is other:
            return True
        if id(top) not in seen:
            seen.add(id(top))
            stack += top.args
    return False


def _listed(part: Partition, outputs: list[_Value]) -> Partition:
    """The partition of these outputs, operators as soon as their arguments are there."""
    place: dict[_Value, int] = {}
    code: list[Instruction] = []
    stack = [(o, False) for o in reversed(outputs)]
    while stack:
        v, ready = stack.pop()
        if v in place:
            continue
        if isinstance(v.made_by, int):
            place[v] = v.made_by
        elif ready:
            code.append(Instruction(v.made_by, tuple(place[a] for a in v.args), v.shape))
            place[v] = len(part.inputs) + len(code) - 1
        else:
            stack.append((v, True))
            stack += [(a, False) for a in reversed(v.args)]
    return Partition(part.inputs, part.packed, tuple(code), tuple(place[o] for o in outputs))
