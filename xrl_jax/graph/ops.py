"""The op table: one entry per operator of a tensor graph.

An entry has the operator's arity and the dtypes it accepts, its attribute fields (offsets into the
node's fixed-width integer vector) with their kinds, and the names of its shape and dtype rules.
Every other interpretation (shape and dtype rules in `shapes`, work in `work`, lax code in
`lower.table`) is one dict keyed by operator name, in the style of JAX's autodidax. Adding an
operator takes one entry here and one in each dict; the conformance suite then covers it
automatically.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jax import lax

from xrl_jax.graph import kinds as k
from xrl_jax.graph.kinds import DTYPES, MAX_RANK, TAKES, Field, Kind

MAX_ARGS = 6  # A: arguments a node can hold
MAX_ATTRS = 18  # K: integers in a node's attribute vector

DTYPE_CODE: Mapping[str, int] = MappingProxyType({name: i for i, name in enumerate(DTYPES)})
FLOAT_DTYPES = tuple(d for d in DTYPES if d in TAKES["float"])
NARROW_DTYPES = ("bfloat16", "float16")  # floats that float32 holds exactly
# Types in which a product of float32 may read a weight; float32 holds all their values.
WEIGHT_DTYPES = ("int8", *NARROW_DTYPES)
# Bytes per element by dtype code; sub-byte integers are stored one to a byte by XLA on CPU.
DTYPE_BYTES = (0, 1, 1, 1, 1, 2, 4, 8, 1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 8, 0)


@dataclass(frozen=True)
class OpSpec:
    """The properties of an operator that all interpretations share.

    Attributes:
      name: the name used in rules and text form.
      code: the integer on the node; 0 is the hole.
      arity: minimum and maximum number of arguments.
      fields: layout of the attributes, with the kind of each (`kinds`).
      shape: name of the shape rule (`shapes.SHAPE_RULES`); "given" means the shape is set when the
        node is created.
      dtype: "arg0", "arg1", "bool", "attr" (the field named dtype) or "given".
      takes: for each argument, the name in `TAKES` of the dtypes it may have; the last name also
        holds for all further arguments.
      gives: name in `TAKES` of the dtypes of the result where the arguments do not determine it.
      one_dtype: positions of the arguments that must have the same dtype.
      full: positions of the arguments that must have the result's shape where the shape rule is
        "elementwise"; others may be scalars.
      commutative: whether the first two arguments may be swapped.
    """

    name: str
    code: int
    arity: tuple[int, int]
    fields: tuple[Field, ...] = ()
    shape: str = "elementwise"
    dtype: str = "arg0"
    takes: tuple[str, ...] = ("any",)
    gives: str = "any"
    one_dtype: tuple[int, ...] = tuple(range(MAX_ARGS))
    full: tuple[int, ...] = ()
    commutative: bool = False

    def field(self, name: str) -> Field:
        """Return the field called `name`; KeyError names the operator and its fields."""
        for field in self.fields:
            if field.name == name:
                return field
        known = ", ".join(f.name for f in self.fields) or "none"
        raise KeyError(f"operator {self.name!r} has no attribute {name!r} (it has: {known})")

    def of_kind(self, *kinds: Kind) -> tuple[Field, ...]:
        """Return the fields of these kinds."""
        return tuple(f for f in self.fields if f.kind in kinds)

    def dtypes_of(self, arg: int) -> frozenset[str]:
        """Return the dtypes that an argument may have."""
        return TAKES[self.takes[min(arg, len(self.takes) - 1)]]

    def takes_dtypes(self, dtypes: Sequence[str]) -> bool:
        """Whether the operator accepts arguments of these dtypes."""
        same = {d for i, d in enumerate(dtypes) if i in self.one_dtype}
        return len(same) <= 1 and all(d in self.dtypes_of(i) for i, d in enumerate(dtypes))


def fields(**named: Kind | tuple[Kind, int]) -> tuple[Field, ...]:
    """Lay out fields one after the other; each is a kind, or (kind, width) if wider than one."""
    made, offset = [], 0
    for name, entry in named.items():
        kind, width = (entry, 1) if isinstance(entry, Kind) else entry
        made.append(Field(name, kind, offset, width))
        offset += width
    if offset > MAX_ATTRS:
        raise ValueError(f"attribute fields need {offset} integers, a node has {MAX_ATTRS}")
    return tuple(made)


Entry = tuple[str, tuple[int, int], Mapping[str, Any]]


def _all(takes: str, names: str, arity: int, **kwargs: Any) -> list[Entry]:
    """Return the entries of operators that differ in their names only."""
    return [(name, (arity, arity), dict(takes=(takes,), **kwargs)) for name in names.split()]


_R = MAX_RANK
_GIVEN = dict(shape="given", dtype="given", one_dtype=())
_HOLDER = dict(fields=fields(pinned=k.FLAG, n_args=k.NATURAL), **_GIVEN)
_REDUCE = dict(fields=fields(axes=k.AXES), shape="reduce")
_ARG_REDUCE = dict(
    fields=fields(axes=k.ONE_AXIS, dtype=k.DTYPE), shape="reduce", dtype="attr", gives="integer"
)
_CUMULATIVE = dict(fields=fields(axis=k.AXIS, reverse=k.FLAG), shape="arg0")
_WINDOW = dict(
    fields=fields(
        window=(k.STEPS, 4), stride=(k.STEPS, 4), low=(k.PADDING, 4), high=(k.PADDING, 4)
    ),
    shape="window",
)

# An operator's index is its code, which is part of the saved format: new ones go to the end.
ENTRIES: tuple[Entry, ...] = (
    ("hole", (0, 0), _GIVEN),
    # Sources. `ref` indexes the bindings (an input's position, a constant array); a const without
    # ref is the scalar `value`. A loop-carried input of a body (`carried` > 0) is the body's result
    # `carried` - 1 of the preceding call.
    ("input", (0, 0), dict(fields=fields(carried=k.INTEGER), **_GIVEN)),
    ("weight", (0, 0), _GIVEN),
    ("array", (0, 0), _GIVEN),
    ("const", (0, 0), _GIVEN),
    ("iota", (0, 0), dict(fields=fields(axis=k.AXIS), gives="number", **_GIVEN)),
    # `opaque` is an equation of the traced function that the table cannot express, kept in the
    # bindings at `ref`. `call` runs folded bodies. Either is `pinned` if it has effects. `pack`
    # chains arguments beyond MAX_ARGS; `proj` selects one of several results.
    ("opaque", (0, MAX_ARGS), _HOLDER),
    ("call", (0, MAX_ARGS), _HOLDER),
    ("pack", (1, MAX_ARGS), _GIVEN),
    ("proj", (1, 1), dict(fields=fields(index=k.NATURAL), **_GIVEN)),
    *_all("number", "neg", 1),
    *_all("inexact", "exp exp2 expm1 log log1p tanh logistic sqrt rsqrt", 1),
    *_all("float", "cbrt", 1),
    *_all("inexact", "sin cos tan asin acos atan sinh cosh asinh acosh atanh", 1),
    *_all("float", "erf erfc erf_inv lgamma digamma", 1),
    *_all("signed", "abs", 1),
    *_all("number", "sign", 1),
    *_all("float", "floor ceil", 1),
    *_all("logical", "not", 1),
    *_all("number", "square", 1),
    *_all("integer", "population_count clz", 1),
    *_all("any", "copy", 1),
    *_all("float", "is_finite", 1, dtype="bool"),
    *_all("float", "round", 1, fields=fields(method=k.FLAG)),
    *_all("number", "integer_pow", 1, fields=fields(exponent=k.INTEGER)),
    *_all("any", "cast", 1, fields=fields(dtype=k.DTYPE), dtype="attr"),
    *_all("number", "sub div", 2),
    *_all("real", "rem", 2),
    ("pow", (2, 2), dict(takes=("inexact", "number"), one_dtype=())),  # integer exponents, too
    *_all("inexact", "atan2", 2),
    *_all("float", "nextafter", 2),
    *_all("integer", "shift_left shift_right_logical shift_right_arithmetic", 2),
    *_all("number", "add mul", 2, commutative=True),
    *_all("ordered", "max min", 2, commutative=True),
    *_all("logical", "and or xor", 2, commutative=True),
    *_all("any", "ne eq", 2, dtype="bool", commutative=True),
    *_all("ordered", "ge gt le lt", 2, dtype="bool"),
    ("select", (3, 3), dict(dtype="arg1", takes=("bool", "any"), one_dtype=(1, 2), full=(1, 2))),
    *_all("ordered", "clamp", 3, dtype="arg1", full=(1,)),
    *_all("any", "transpose", 1, fields=fields(perm=(k.PERMUTATION, _R)), shape="transpose"),
    *_all("any", "reshape", 1, fields=fields(shape=(k.SIZES, _R), rank=k.RANK), shape="reshape"),
    (
        "broadcast",
        (1, 1),
        dict(
            fields=fields(shape=(k.SIZES, _R), rank=k.RANK, dims=(k.RESULT_AXES, _R)),
            shape="broadcast",
        ),
    ),
    ("concat", (1, MAX_ARGS), dict(fields=fields(axis=k.AXIS), shape="concat")),
    (
        "slice",
        (1, 1),
        dict(
            fields=fields(start=(k.STARTS, _R), limit=(k.LIMITS, _R), stride=(k.STEPS, _R)),
            shape="slice",
        ),
    ),
    (
        "pad",
        (2, 2),
        dict(
            fields=fields(low=(k.PADDING, _R), high=(k.PADDING, _R), interior=(k.GAPS, _R)),
            shape="pad",
        ),
    ),
    *_all("any", "rev", 1, fields=fields(axes=k.AXES), shape="arg0"),
    *_all("number", "reduce_sum", 1, **_REDUCE),
    *_all("ordered", "reduce_max reduce_min", 1, **_REDUCE),
    *_all("number", "reduce_prod", 1, **_REDUCE),
    *_all("logical", "reduce_and reduce_or reduce_xor", 1, **_REDUCE),
    *_all("ordered", "argmax argmin", 1, **_ARG_REDUCE),
    *_all("number", "cumsum cumprod", 1, **_CUMULATIVE),
    *_all("real", "cummax cummin", 1, **_CUMULATIVE),
    *_all("inexact", "cumlogsumexp", 1, **_CUMULATIVE),
    *_all("number", "window_sum", 1, **_WINDOW),
    *_all("ordered", "window_max window_min", 1, **_WINDOW),
    # `softmax` over a mask of axes: exp(x - max) / sum; it is an operator so that it has lowerings.
    *_all("float", "softmax", 1, fields=fields(axes=k.AXES), shape="arg0"),
    # Layouts of conv are indices into `LAYOUTS`.
    (
        "dot",
        (2, 2),
        dict(
            fields=fields(
                lhs_contract=k.LHS_DIMS,
                rhs_contract=k.RHS_DIMS,
                lhs_batch=k.LHS_DIMS,
                rhs_batch=k.RHS_DIMS,
                precision=k.PRECISION,
                dtype=k.DTYPE,
            ),
            shape="dot",
            dtype="attr",
            gives="number",
            one_dtype=(),
        ),
    ),
    (
        "conv",
        (2, 2),
        dict(
            fields=fields(
                stride=(k.SPATIAL_STEPS, 2),
                low=(k.SPATIAL_PADDING, 2),
                high=(k.SPATIAL_PADDING, 2),
                lhs_dilation=(k.SPATIAL_STEPS, 2),
                rhs_dilation=(k.SPATIAL_STEPS, 2),
                groups=k.COUNT,
                batch_groups=k.COUNT,
                lhs_layout=k.DATA_LAYOUT,
                rhs_layout=k.KERNEL_LAYOUT,
                out_layout=k.DATA_LAYOUT,
                precision=k.PRECISION,
                dtype=k.DTYPE,
            ),
            shape="conv",
            dtype="attr",
            gives="number",
        ),
    ),
)


def table(entries: Sequence[Entry]) -> Mapping[str, OpSpec]:
    """Return the operators by name; the code of each is its index in `entries`."""
    specs = {n: OpSpec(n, code, arity, **more) for code, (n, arity, more) in enumerate(entries)}
    return MappingProxyType(specs)


OPS = table(ENTRIES)
OP_NAMES: tuple[str, ...] = tuple(OPS)
N_OPS = len(OP_NAMES)
HOLE = OPS["hole"].code
SOURCES = ("input", "weight", "array", "const", "iota")


def _permutations(n: int) -> list[tuple[int, ...]]:
    if n == 0:
        return [()]
    return [(*p[:i], n - 1, *p[i:]) for p in _permutations(n - 1) for i in range(n)]


# Convolution layouts: positions of (batch or output feature, feature, spatial...) for one and two
# spatial dimensions, in the convention of `jax.lax.ConvDimensionNumbers`. Unused trailing entries
# are -1.
LAYOUTS: tuple[tuple[int, int, int, int], ...] = tuple(
    sorted((*p, -1) for p in _permutations(3))  # type: ignore[arg-type]
) + tuple(sorted(_permutations(4)))  # type: ignore[arg-type]
LAYOUT_CODE: Mapping[tuple[int, ...], int] = MappingProxyType(
    {tuple(d for d in p if d >= 0): i for i, p in enumerate(LAYOUTS)}
)

_DIM_BASE = 8


def pack_dims(dims: tuple[int, ...]) -> int:
    """Pack a list of dimension numbers into one integer, base 8, first entry lowest; inverse of
    `unpack_dims`.
    """
    code = 0
    for i, d in enumerate(dims):
        if not 0 <= d < MAX_RANK:
            raise ValueError(f"dimension {d} is outside 0..{MAX_RANK - 1}")
        code += (d + 1) * _DIM_BASE**i
    return code


def unpack_dims(code: int) -> tuple[int, ...]:
    """Return the dimension numbers packed by `pack_dims`."""
    dims = []
    while code:
        dims.append(code % _DIM_BASE - 1)
        code //= _DIM_BASE
    return tuple(dims)


def mask_of(axes: tuple[int, ...]) -> int:
    """Return the bit mask of a set of axes."""
    return sum(1 << a for a in set(axes))


def axes_of(mask: int) -> tuple[int, ...]:
    """Return the axes of a bit mask, ascending."""
    return tuple(a for a in range(MAX_RANK) if mask >> a & 1)


# The `precision` attribute: 0 for none, then the nine pairs of `lax.Precision` (left argument,
# right argument), then the named algorithms. The order is part of the saved format: new names go to
# the end.
_PRECISIONS = (lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)
_ALGORITHMS = (
    "DEFAULT ANY_F8_ANY_F8_F32 ANY_F8_ANY_F8_F32_FAST_ACCUM ANY_F8_ANY_F8_ANY "
    "ANY_F8_ANY_F8_ANY_FAST_ACCUM F16_F16_F16 F16_F16_F32 BF16_BF16_BF16 BF16_BF16_F32 "
    "BF16_BF16_F32_X3 BF16_BF16_F32_X6 BF16_BF16_F32_X9 TF32_TF32_F32 TF32_TF32_F32_X3 F32_F32_F32 "
    "F64_F64_F64"
).split()


def encode_precision(precision: Any) -> int | None:
    """Return the `precision` attribute for the precision of a `dot_general` or convolution; None if
    no code represents it.
    """
    if precision is None:
        return 0
    if isinstance(precision, lax.DotAlgorithmPreset):
        name = precision.name
        return 10 + _ALGORITHMS.index(name) if name in _ALGORITHMS else None
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    if len(pair) != 2 or any(p not in _PRECISIONS for p in pair):
        return None
    return 1 + 3 * _PRECISIONS.index(pair[0]) + _PRECISIONS.index(pair[1])


def decode_precision(code: int) -> Any:
    """Return the parameter that `encode_precision` maps to `code`."""
    if code == 0:
        return None
    if code < 10:
        return _PRECISIONS[(code - 1) // 3], _PRECISIONS[(code - 1) % 3]
    return lax.DotAlgorithmPreset[_ALGORITHMS[code - 10]]
