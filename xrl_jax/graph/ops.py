"""The op table: one entry per operator of a tensor graph.

An entry names the operator's arity, its attribute fields (offsets into the node's fixed-width
integer vector), and the rules that give its output shape and dtype. Every other interpretation
(shape and dtype rules in `shapes`, work in `work`, lax code in `lower.table`) is one dict
keyed by these names, in the style of JAX's autodidax. Adding an operator is one entry here and one
in each dict; the conformance suite then covers it by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jax import lax

MAX_RANK = 6  # R: dimensions a node's shape can hold
MAX_ARGS = 6  # A: arguments a node can hold
MAX_ATTRS = 18  # K: integers in a node's attribute vector

# Index of a dtype is its code on a node. "extended" stands for key types and whatever NumPy cannot
# name (the exact type is then in the bindings), "tuple" for the result of an operator with several
# outputs, "none" for holes.
DTYPES = (
    "none",
    "bool",
    "int2",
    "int4",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint2",
    "uint4",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "extended",
    "tuple",
)
DTYPE_CODE: Mapping[str, int] = MappingProxyType({name: i for i, name in enumerate(DTYPES)})
FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")
# Bytes per element by dtype code; sub-byte integers are stored one to a byte by XLA on CPU.
DTYPE_BYTES = (0, 1, 1, 1, 1, 2, 4, 8, 1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 8, 0)


@dataclass(frozen=True)
class Field:
    """A named run of `width` integers at `offset` of a node's attribute vector."""

    name: str
    offset: int
    width: int = 1


@dataclass(frozen=True)
class OpSpec:
    """What every interpretation needs to know of an operator.

    Attributes:
      name: the name used in rules and text form.
      code: the integer on the node; 0 is the hole.
      arity: least and most number of arguments.
      fields: attribute layout.
      shape: name of the shape rule (`shapes.SHAPE_RULES`); "given" means the shape is set where the
        node is made.
      dtype: "arg0", "arg1", "bool", "attr" (the field named dtype) or "given".
      commutative: whether the first two arguments may be swapped.
    """

    name: str
    code: int
    arity: tuple[int, int]
    fields: tuple[Field, ...] = ()
    shape: str = "elementwise"
    dtype: str = "arg0"
    commutative: bool = False

    def field(self, name: str) -> Field:
        """The field called `name`; KeyError names the operator and its fields."""
        for field in self.fields:
            if field.name == name:
                return field
        known = ", ".join(f.name for f in self.fields) or "none"
        raise KeyError(f"operator {self.name!r} has no attribute {name!r} (it has: {known})")


def _fields(*widths: tuple[str, int] | str) -> tuple[Field, ...]:
    fields, offset = [], 0
    for entry in widths:
        name, width = (entry, 1) if isinstance(entry, str) else entry
        fields.append(Field(name, offset, width))
        offset += width
    if offset > MAX_ATTRS:
        raise ValueError(f"attribute fields need {offset} integers, a node has {MAX_ATTRS}")
    return tuple(fields)


_R = MAX_RANK
_UNARY = (
    "neg exp exp2 expm1 log log1p tanh logistic sqrt rsqrt cbrt sin cos tan asin acos atan sinh "
    "cosh asinh acosh atanh erf erfc erf_inv lgamma digamma abs sign floor ceil not square "
    "population_count clz copy"
).split()
_BINARY = (
    "sub div rem pow atan2 nextafter shift_left shift_right_logical shift_right_arithmetic".split()
)
_COMMUTATIVE = "add mul max min and or xor".split()
_COMPARE = "ne eq ge gt le lt".split()
_REDUCE = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor".split()
_WINDOW = "window_sum window_max window_min".split()
_CUMULATIVE = "cumsum cumprod cummax cummin cumlogsumexp".split()

_ENTRIES: tuple[tuple[str, tuple[int, int], dict[str, Any]], ...] = (
    ("hole", (0, 0), dict(shape="given", dtype="given")),
    # Sources. `ref` indexes the bindings (an input's position, a constant array); a const without
    # ref is its `value`. An input of a body that is the body's own result `again` - 1, one call
    # before, says so.
    ("input", (0, 0), dict(fields=_fields("again"), shape="given", dtype="given")),
    ("weight", (0, 0), dict(shape="given", dtype="given")),
    ("array", (0, 0), dict(shape="given", dtype="given")),
    ("const", (0, 0), dict(shape="given", dtype="given")),
    ("iota", (0, 0), dict(fields=_fields("axis"), shape="given", dtype="given")),
    # What the table cannot say: an equation of the traced function, kept in the bindings at `ref`.
    # `pinned` equations have effects. `call` runs a folded body. `pack` chains arguments beyond
    # MAX_ARGS; `proj` takes one of several results.
    (
        "opaque",
        (0, MAX_ARGS),
        dict(fields=_fields("pinned", "n_args"), shape="given", dtype="given"),
    ),
    ("call", (0, MAX_ARGS), dict(fields=_fields("pinned", "n_args"), shape="given", dtype="given")),
    ("pack", (1, MAX_ARGS), dict(shape="given", dtype="given")),
    ("proj", (1, 1), dict(fields=_fields("index"), shape="given", dtype="given")),
    *((name, (1, 1), {}) for name in _UNARY),
    ("is_finite", (1, 1), dict(dtype="bool")),
    ("round", (1, 1), dict(fields=_fields("method"))),
    ("integer_pow", (1, 1), dict(fields=_fields("exponent"))),
    ("cast", (1, 1), dict(fields=_fields("dtype"), dtype="attr")),
    *((name, (2, 2), {}) for name in _BINARY),
    *((name, (2, 2), dict(commutative=True)) for name in _COMMUTATIVE),
    *((name, (2, 2), dict(dtype="bool", commutative=name in ("eq", "ne"))) for name in _COMPARE),
    ("select", (3, 3), dict(dtype="arg1")),
    ("clamp", (3, 3), dict(dtype="arg1")),
    # Movement. A mask has bit i set for dimension i.
    ("transpose", (1, 1), dict(fields=_fields(("perm", _R)), shape="transpose")),
    ("reshape", (1, 1), dict(fields=_fields(("shape", _R), "rank"), shape="reshape")),
    (
        "broadcast",
        (1, 1),
        dict(fields=_fields(("shape", _R), "rank", ("dims", _R)), shape="broadcast"),
    ),
    ("concat", (1, MAX_ARGS), dict(fields=_fields("axis"), shape="concat")),
    (
        "slice",
        (1, 1),
        dict(fields=_fields(("start", _R), ("limit", _R), ("stride", _R)), shape="slice"),
    ),
    (
        "pad",
        (2, 2),
        dict(fields=_fields(("low", _R), ("high", _R), ("interior", _R)), shape="pad"),
    ),
    ("rev", (1, 1), dict(fields=_fields("axes"), shape="arg0")),
    # Reductions.
    *(
        (
            name,
            (1, 1),
            dict(
                fields=_fields("axes"),
                shape="reduce",
            ),
        )
        for name in _REDUCE
    ),
    ("argmax", (1, 1), dict(fields=_fields("axes", "dtype"), shape="reduce", dtype="attr")),
    ("argmin", (1, 1), dict(fields=_fields("axes", "dtype"), shape="reduce", dtype="attr")),
    *(
        (name, (1, 1), dict(fields=_fields("axis", "reverse"), shape="arg0"))
        for name in _CUMULATIVE
    ),
    *(
        (
            name,
            (1, 1),
            dict(
                fields=_fields(("window", 4), ("stride", 4), ("low", 4), ("high", 4)),
                shape="window",
            ),
        )
        for name in _WINDOW
    ),
    # `softmax` over a mask of axes: exp(x - max) / sum; it exists so that its form can be chosen.
    (
        "softmax",
        (1, 1),
        dict(fields=_fields("axes"), shape="arg0"),
    ),
    # Contractions. Dimension lists of dot are packed (`pack_dims`), layouts of conv are indices
    # into `LAYOUTS`.
    (
        "dot",
        (2, 2),
        dict(
            fields=_fields(
                "lhs_contract", "rhs_contract", "lhs_batch", "rhs_batch", "precision", "dtype"
            ),
            shape="dot",
            dtype="attr",
        ),
    ),
    (
        "conv",
        (2, 2),
        dict(
            fields=_fields(
                ("stride", 2),
                ("low", 2),
                ("high", 2),
                ("lhs_dilation", 2),
                ("rhs_dilation", 2),
                "groups",
                "batch_groups",
                "lhs_layout",
                "rhs_layout",
                "out_layout",
                "precision",
                "dtype",
            ),
            shape="conv",
            dtype="attr",
        ),
    ),
)

OPS: Mapping[str, OpSpec] = MappingProxyType(
    {
        name: OpSpec(name=name, code=code, arity=arity, **kwargs)
        for code, (name, arity, kwargs) in enumerate(_ENTRIES)
    }
)
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
    """A list of dimension numbers as one integer, base 8, first entry lowest; inverse of
    `unpack_dims`.
    """
    code = 0
    for i, d in enumerate(dims):
        if not 0 <= d < MAX_RANK:
            raise ValueError(f"dimension {d} is outside 0..{MAX_RANK - 1}")
        code += (d + 1) * _DIM_BASE**i
    return code


def unpack_dims(code: int) -> tuple[int, ...]:
    """The dimension numbers packed by `pack_dims`."""
    dims = []
    while code:
        dims.append(code % _DIM_BASE - 1)
        code //= _DIM_BASE
    return tuple(dims)


def mask_of(axes: tuple[int, ...]) -> int:
    """Bit mask of a set of axes."""
    return sum(1 << a for a in set(axes))


def axes_of(mask: int) -> tuple[int, ...]:
    """Axes of a bit mask, ascending."""
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
    """The `precision` attribute for the parameter of a `dot_general` or convolution; None where it
    cannot be said.
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
    """The parameter that `encode_precision` made `code` of."""
    if code == 0:
        return None
    if code < 10:
        return _PRECISIONS[(code - 1) // 3], _PRECISIONS[(code - 1) % 3]
    return lax.DotAlgorithmPreset[_ALGORITHMS[code - 10]]
