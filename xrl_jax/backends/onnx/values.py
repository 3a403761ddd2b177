"""Values of an ONNX graph under construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xrl_jax.backends.onnx.flat import Op


class ExportError(ValueError):
    """The program cannot be expressed in ONNX; the message names the operator."""


@dataclass(frozen=True)
class Value:
    """An input of an ONNX node: a name and a shape.

    The shape may be smaller than the operation's where the value repeats (axes of size 1 or missing
    leading axes), because ONNX operators broadcast.
    """

    name: str
    shape: tuple[int, ...]
    array: np.ndarray | None = None  # for a constant, which is named when it is written


def without_leading_ones(shape: Sequence[int]) -> tuple[int, ...]:
    first = next((d for d, n in enumerate(shape) if n != 1), len(shape))
    return tuple(shape[first:])


def export_error(op: Op, why: str = "") -> ExportError:
    detail = f" {why}" if why else ""
    return ExportError(f"ONNX cannot express {op.name!r}{detail} ({op.dtype}{list(op.shape)})")
