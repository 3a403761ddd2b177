"""Kinds of attributes and dtype classes of arguments, which the op table refers to by name.

A kind says what the integers of an attribute mean, their fill value and their range. Text form,
checks, normal form, defaults and random attributes follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

MAX_RANK = 6  # R: dimensions a node's shape can hold

# The index of a dtype is its code on a node. "extended" stands for key types and any other dtype
# that NumPy cannot name (the exact type is then in the bindings), "tuple" for the result of an
# operator with several outputs, "none" for holes.
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
_FLOATS = tuple(d for d in DTYPES if "float" in d)
_SIGNED = tuple(d for d in DTYPES if d.startswith("int"))
_INTEGERS = (*_SIGNED, *(d for d in DTYPES if d.startswith("uint")))
_COMPLEX = ("complex64", "complex128")

# The dtypes that an argument may have, by the name that the op table uses. As in lax, but without
# dtypes that would change the dtype rule (the absolute value of a complex number is real).
TAKES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        name: frozenset(dtypes)
        for name, dtypes in {
            "any": DTYPES,
            "number": (*_INTEGERS, *_FLOATS, *_COMPLEX),
            "real": (*_INTEGERS, *_FLOATS),
            "ordered": (*_INTEGERS, *_FLOATS, "bool"),
            "signed": (*_SIGNED, *_FLOATS),
            "inexact": (*_FLOATS, *_COMPLEX),
            "float": _FLOATS,
            "logical": (*_INTEGERS, "bool"),
            "integer": _INTEGERS,
            "bool": ("bool",),
        }.items()
    }
)


@dataclass(frozen=True)
class Kind:
    """The meaning of an attribute's integers.

    Attributes:
      name: what one integer is, in words.
      fill: the value of an integer that is not given; None stands for its own position.
      least, most: range of each integer; None where the shape rules, or the kind itself, decide.
      span: what the entries of a wide attribute belong to: "arg" and "node", the dimensions of the
        first argument or of the node itself; "spatial", all but two of the first argument's.
      arg: the argument whose axes the integers are, if they are axes of an argument.
    """

    name: str
    fill: int | None = 0
    least: int | None = None
    most: int | None = None
    span: str = "arg"
    arg: int = 0


INTEGER = Kind("integer")
NATURAL = Kind("natural number", least=0)
COUNT = Kind("count", fill=1, least=1)
FLAG = Kind("flag", least=0, most=1)
# Axes of the first argument, or of the node itself if it has no arguments: a single axis, a mask
# (bit i set for dimension i) or a permutation. The `*_DIMS` are lists, packed into one integer
# (`ops.pack_dims`), of the contracted or batched axes of an argument.
AXIS = Kind("axis")
AXES = Kind("mask of axes")
ONE_AXIS = Kind("mask of one axis")
PERMUTATION = Kind("permutation", fill=None)
LHS_DIMS = Kind("packed axes", arg=0)
RHS_DIMS = replace(LHS_DIMS, arg=1)
RESULT_AXES = Kind("axes of the result", fill=-1)  # one for each axis of the argument
# The node's own shape.
SIZES = Kind("sizes", fill=1, least=0, span="node")
RANK = Kind("rank", least=0, most=MAX_RANK)
# One integer for each axis.
STARTS = Kind("first elements", least=0)
LIMITS = Kind("ends", fill=1, least=0)
STEPS = Kind("steps", fill=1, least=1)
GAPS = Kind("gaps between neighbours", least=0)
PADDING = Kind("padding")  # negative padding removes elements
SPATIAL_STEPS = replace(STEPS, span="spatial")
SPATIAL_PADDING = replace(PADDING, span="spatial")
# Codes that have names: see `attributes.names_of`.
DTYPE = Kind("dtype")
PRECISION = Kind("precision")
DATA_LAYOUT = Kind("layout of data")
KERNEL_LAYOUT = Kind("layout of kernels")


@dataclass(frozen=True)
class Field:
    """A named run of `width` integers at `offset` of a node's attribute vector."""

    name: str
    kind: Kind
    offset: int
    width: int = 1

    @property
    def attr_slice(self) -> slice:
        """The slice of the attribute vector that the field occupies."""
        return slice(self.offset, self.offset + self.width)

    @property
    def fill(self) -> tuple[int, ...]:
        """The values of the field where none are given."""
        fill = self.kind.fill
        return tuple(range(self.width)) if fill is None else (fill,) * self.width
