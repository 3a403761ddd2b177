"""Attribute fields: what their integers mean, and how they are read and written.

Masks and packed dimensions are lists of axes, layouts are letters (`NCHW`, `OIHW`), precisions and
dtypes are names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count
from types import MappingProxyType

from xrl_jax.graph import ops
from xrl_jax.graph.graph import pack_attrs

# Arguments that must have one dtype, by op. `pow` is missing: its exponent may be an integer.
_PAIRS = (
    "sub div rem atan2 nextafter shift_left shift_right_logical shift_right_arithmetic add mul max "
    "min and or xor ne eq ge gt le lt pad"
)
SAME_DTYPE: Mapping[str, tuple[int, ...]] = MappingProxyType(
    dict.fromkeys(_PAIRS.split(), (0, 1))
    | {"select": (1, 2), "clamp": (0, 1, 2), "concat": tuple(range(ops.MAX_ARGS))}
)


@cache
def _layouts(letters: str) -> dict[int, str]:
    """`letters` are those of the first two dimensions: NC for data, OI for kernels."""
    names = {}
    for code, places in enumerate(ops.LAYOUTS):
        used = [p for p in places if p >= 0]
        text = letters + ("HW" if len(used) == 4 else "W")
        names[code] = "".join(text[used.index(i)] for i in range(len(used)))
    return names


@cache
def precisions() -> dict[int, str]:
    """Text of every code of the `precision` attribute; a pair of equals is written once."""
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
PACKED = ("lhs_contract", "rhs_contract", "lhs_batch", "rhs_batch")  # fields of `ops.pack_dims`


def names_of(field: str) -> dict[int, str] | None:
    """The names of the values of an enumerated field, by code; None for other fields."""
    match field:
        case "dtype":
            return _DTYPES
        case "precision":
            return precisions()
        case "lhs_layout" | "out_layout":
            return _layouts("NC")
        case "rhs_layout":
            return _layouts("OI")
        case _:
            return None


def dims_of(code: int) -> tuple[int, ...] | None:
    """Dimensions of a packed code; None where `ops.pack_dims` does not make it."""
    if code < 0:
        return None
    dims = ops.unpack_dims(code)
    return dims if all(0 <= d < ops.MAX_RANK for d in dims) else None


def used_width(op: str, field: ops.Field, rank: int, arg_rank: int) -> int:
    """How many entries of a wide field matter, by the node's rank and its first argument's."""
    if op == "conv":
        wanted = arg_rank - 2
    else:
        wanted = rank if field.name == "shape" else arg_rank
    return min(max(wanted, 0), field.width)


def encode(field: str, value: int) -> str:
    names = names_of(field)
    if names is not None:
        return names.get(value, str(value))
    dims: tuple[int, ...] | None = None
    if field == "axes" and 0 <= value < 1 << ops.MAX_RANK:
        dims = ops.axes_of(value)
    elif field in PACKED:
        dims = dims_of(value)
    return str(value) if dims is None else f"[{', '.join(map(str, dims))}]"


def decode(field: str, text: str) -> int:
    """The integer that `encode` wrote; ValueError says what is wrong."""
    if text.startswith("["):
        dims = tuple(int(d) for d in text[1:-1].split(",") if d.strip())
        if field in PACKED:
            return ops.pack_dims(dims)
        if (
            field == "axes"
            and len(set(dims)) == len(dims)
            and all(0 <= d < ops.MAX_RANK for d in dims)
        ):
            return ops.mask_of(dims)
        raise ValueError(f"{field} does not take {text}")
    codes = {name: code for code, name in (names_of(field) or {}).items()}
    if text in codes:
        return codes[text]
    try:
        return int(text)
    except ValueError:
        takes = f"one of {', '.join(codes)}, or an integer" if codes else "an integer"
        raise ValueError(f"{field} takes {takes}, not {text!r}") from None


def defaults(op: str, shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """Attributes that need not be written on a node of this type."""
    named: dict[str, int | Sequence[int]] = {}
    for field in ops.OPS[op].fields:
        if field.name == "dtype":
            named["dtype"] = ops.DTYPE_CODE[dtype]
        elif field.name == "shape" and len(shape) <= ops.MAX_RANK:
            named |= {"shape": tuple(shape), "rank": len(shape)}
    return pack_attrs(op, named)
