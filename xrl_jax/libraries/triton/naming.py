"""Names of kernels, which say what they multiply: compilers and profilers show them."""

from __future__ import annotations

import re
from typing import NamedTuple

_PRODUCT = re.compile(r"product_(\d+)x(\d+)x(\d+)_(\d+)x(\d+)_([a-z]+\d+)")
_PATTERN = re.compile(r"attention_(\d+)x(\d+)x(\d+)x(\d+)x(\d+)_(\d+)_([a-z]+\d+)")


class Sizes(NamedTuple):
    """The sizes of an attention.

    Attributes:
      batch: attentions, each of the sizes below.
      rows, columns: of the scores.
      summed: features of a query and of a key.
      features: of a value.
    """

    batch: int
    rows: int
    columns: int
    summed: int
    features: int


class Work(NamedTuple):
    """What a kernel multiplies.

    Attributes:
      times: how often it computes the scores.
      dtype: in which the hardware multiplies.
    """

    sizes: Sizes
    times: int
    dtype: str


def name_of(work: Work) -> str:
    """Return the name of a kernel."""
    return f"attention_{'x'.join(map(str, work.sizes))}_{work.times}_{work.dtype}"


def work_in(text: str) -> Work | None:
    """Return the work in the first kernel's name in a text; None if there is none."""
    found = _PATTERN.search(text)
    if found is None:
        return None
    *sizes, times, dtype = found.groups()
    return Work(Sizes(*map(int, sizes)), int(times), dtype)


class ProductWork(NamedTuple):
    """What the kernel of a product with its epilogue multiplies.

    Attributes:
      rows, columns, summed: sizes of the product.
      tile_rows, tile_columns: of the tile that a program computes.
      dtype: in which the hardware multiplies.
    """

    rows: int
    columns: int
    summed: int
    tile_rows: int
    tile_columns: int
    dtype: str


def product_name(work: ProductWork) -> str:
    """Return the name of the kernel of a product."""
    sizes = f"{work.rows}x{work.columns}x{work.summed}"
    return f"product_{sizes}_{work.tile_rows}x{work.tile_columns}_{work.dtype}"


def product_work_in(text: str) -> ProductWork | None:
    """Return the work in the first such name in a text; None if there is none."""
    found = _PRODUCT.search(text)
    if found is None:
        return None
    *sizes, dtype = found.groups()
    rows, columns, summed, tile_rows, tile_columns = map(int, sizes)
    return ProductWork(rows, columns, summed, tile_rows, tile_columns, dtype)
