"""Values of an ONNX graph under construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xrl_jax.backends.onnx.flat import Op


class ExportError(ValueError):
    """A program that cannot be said in ONNX; the message names the operator."""


@dataclass(frozen=True)
class Value:
    """What an ONNX node reads: a name, and a shape that may lack the repetitions of the operation's
    (axes of size 1, no leading axes), as ONNX broadcasts by itself.
    """

    name: str
    shape: tuple[int, ...]
    array: np.ndarray | None = None  # of a constant, which gets its name when it is written


def without_leading_ones(shape: Sequence[int]) -> tuple[int, ...]:
    first = next((d for d, n in enumerate(shape) if n != 1), len(shape))
    return tuple(shape[first:])


def unsayable(op: Op, why: str = "") -> ExportError:
    detail = f" {why}" if why else ""
    return ExportError(f"ONNX cannot say {op.name!r}{detail} ({op.dtype}{list(op.shape)})")
