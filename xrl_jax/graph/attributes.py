"""Attribute fields by their kinds: text form, defaults, normal form and range checks.

In text, masks and packed dimensions are lists of axes, layouts are letters (`NCHW`, `OIHW`),
precisions and dtypes are names.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count

from xrl_jax.graph import kinds, ops
from xrl_jax.graph.graph import Node, pack_attrs
from xrl_jax.graph.kinds import Field, Kind


@cache
def _layouts(letters: str) -> dict[int, str]:
    """Return layout names by code; `letters` is NC for data, OI for kernels."""
    names = {}
    for code, places in enumerate(ops.LAYOUTS):
        used = [p for p in places if p >= 0]
        text = letters + ("HW" if len(used) == 4 else "W")
        names[code] = "".join(text[used.index(i)] for i in range(len(used)))
    return names


@cache
def precisions() -> dict[int, str]:
    """Return the text of every `precision` code; a pair of equal precisions is written once."""
    names = {0: "none"}
    for code in count(1):
        try:
            precision = ops.decode_precision(code)
        except IndexError:
            return names
        if isinstance(precision, tuple):
            left, right = (p.name for p in precision)
            names[code] = left if left == right else f"{left}|{right}"
        else:
            names[code] = f"algorithm:{precision.name}"
    raise AssertionError("unreachable: counting does not end")


_DTYPES = {code: name for name, code in ops.DTYPE_CODE.items() if code}
_MASKS = (kinds.AXES, kinds.ONE_AXIS)
_PACKED = (kinds.LHS_DIMS, kinds.RHS_DIMS)


def names_of(kind: Kind) -> dict[int, str] | None:
    """Return the names of an enumerated kind's values by code; None for other kinds."""
    if kind == kinds.DTYPE:
        return _DTYPES
    if kind == kinds.PRECISION:
        return precisions()
    if kind == kinds.DATA_LAYOUT:
        return _layouts("NC")
    return _layouts("OI") if kind == kinds.KERNEL_LAYOUT else None


def dims_of(code: int) -> tuple[int, ...] | None:
    """Return the dimensions of a packed code; None for codes `ops.pack_dims` never returns."""
    if code < 0:
        return None
    dims = ops.unpack_dims(code)
    return dims if all(0 <= d < ops.MAX_RANK for d in dims) else None


def used_width(field: Field, rank: int, arg_rank: int) -> int:
    """Return how many entries of a wide field matter, by the ranks of node and first argument."""
    wanted = {"arg": arg_rank, "node": rank, "spatial": arg_rank - 2}[field.kind.span]
    return min(max(wanted, 0), field.width)


def encode(field: Field, value: int) -> str:
    names = names_of(field.kind)
    if names is not None:
        return names.get(value, str(value))
    dims: tuple[int, ...] | None = None
    if field.kind in _MASKS and 0 <= value < 1 << ops.MAX_RANK:
        dims = ops.axes_of(value)
    elif field.kind in _PACKED:
        dims = dims_of(value)
    return str(value) if dims is None else f"[{', '.join(map(str, dims))}]"


def decode(field: Field, text: str) -> int:
    """Return the integer that `encode` wrote as `text`; raise ValueError for other text."""
    if text.startswith("["):
        dims = tuple(int(d) for d in text[1:-1].split(",") if d.strip())
        if field.kind in _PACKED:
            return ops.pack_dims(dims)
        if (
            field.kind in _MASKS
            and len(set(dims)) == len(dims)
            and all(0 <= d < ops.MAX_RANK for d in dims)
        ):
            return ops.mask_of(dims)
        raise ValueError(f"{field.name} does not take {text}")
    codes = {name: code for code, name in (names_of(field.kind) or {}).items()}
    if text in codes:
        return codes[text]
    try:
        return int(text)
    except ValueError:
        takes = f"one of {', '.join(codes)}, or an integer" if codes else "an integer"
        raise ValueError(f"{field.name} takes {takes}, not {text!r}") from None


def defaults(op: str, shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """Return the default attributes of a node of this type, which its text form leaves out."""
    spec, named = ops.OPS[op], {}
    for field in spec.of_kind(kinds.DTYPE):
        named[field.name] = ops.DTYPE_CODE[dtype]
    if len(shape) <= ops.MAX_RANK:
        for field in spec.of_kind(kinds.SIZES):
            named[field.name] = tuple(shape)
        for field in spec.of_kind(kinds.RANK):
            named[field.name] = len(shape)
    return pack_attrs(op, named)


def normal(node: Node, arg_rank: int) -> tuple[int, ...]:
    """Return a node's attributes with the entries that do not matter set to their fill values.

    Integers beyond the operator's fields are set to zero.

    Args:
      arg_rank: rank of the first argument.
    """
    out = [0] * ops.MAX_ATTRS
    for field in node.spec.fields:
        used = used_width(field, len(node.shape), arg_rank) if field.width > 1 else 1
        out[field.attr_slice] = [*node.attrs[field.attr_slice][:used], *field.fill[used:]]
    return tuple(out)


def with_kind(node: Node, kind: Kind, value: int) -> tuple[int, ...]:
    """Return a node's attributes with every field of one kind set to `value`."""
    attrs = list(node.attrs)
    for field in node.spec.of_kind(kind):
        attrs[field.attr_slice] = [value] * field.width
    return tuple(attrs)


def error(node: Node, arg_ranks: Sequence[int]) -> str | None:
    """Describe the first attribute of a node that is out of range; None if all are valid.

    Args:
      arg_ranks: ranks of the node's arguments.
    """
    spec = node.spec
    arg_rank = arg_ranks[0] if arg_ranks else 0
    for field in spec.fields:
        values = node.attrs[field.attr_slice]
        wrong = _named_error(field, values[0]) or _axis_error(field, values[0], node, arg_ranks)
        if wrong or (wrong := _range_error(field, values)):
            return f"attribute {field.name}={wrong}"
        if field.width > 1:
            used = used_width(field, len(node.shape), arg_rank)
            if values[used:] != field.fill[used:]:
                beyond = f"must have {field.fill[used:]} from entry {used} on"
                return f"attribute {field.name}={values} {beyond}"
    for kind, side in zip(_PACKED, ("lhs", "rhs"), strict=True):
        listed = [d for f in spec.of_kind(kind) for d in dims_of(node.attrs[f.offset]) or ()]
        if twice := sorted({d for d in listed if listed.count(d) > 1}):
            return f"{side} axes {twice} are both contracted and batched"
    end = max((f.attr_slice.stop for f in spec.fields), default=0)
    if any(node.attrs[end:]):
        return f"attribute integers from entry {end} on are not zero"
    return None


def _named_error(field: Field, value: int) -> str | None:
    names = names_of(field.kind)
    return None if names is None or value in names else f"{value} is out of range"


def _axis_error(field: Field, value: int, node: Node, arg_ranks: Sequence[int]) -> str | None:
    rank = arg_ranks[0] if arg_ranks else len(node.shape)
    if field.kind in _MASKS and not 0 <= value < 1 << rank:
        return f"{value} is not a mask of {rank} axes"
    if field.kind == kinds.AXIS and not 0 <= value < rank:
        return f"{value} is outside 0..{rank - 1}"
    if field.kind in _PACKED:
        rank, dims = arg_ranks[field.kind.arg], dims_of(value)
        if dims is None or len(set(dims)) < len(dims) or any(d >= rank for d in dims):
            return f"{value} is not a list of distinct axes below {rank}"
    return None


def _range_error(field: Field, values: Sequence[int]) -> str | None:
    least, most = field.kind.least, field.kind.most
    for v in values:
        if (least is not None and v < least) or (most is not None and v > most):
            limits = f"at least {least}" if most is None else f"{least} to {most}"
            return f"{v} is out of range: {limits}"
    return None
