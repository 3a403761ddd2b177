"""Partitions as plain text, for files and other processes, and their names in XLA."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import typing
from collections.abc import Callable
from typing import Any

from xrl_jax.libraries.onednn.spec import Epilogue, Instruction, Op, Partition

_OPS: dict[str, Callable[..., Any]] = {
    c.__name__: c for c in (*typing.get_args(Op), Epilogue, Instruction)
}


@functools.lru_cache(maxsize=16)  # the target of each packed weight carries the text
def partition(text: str) -> Partition:
    """Parse a text that `text_of` wrote.

    Raises:
      ValueError: it is not the text of a partition.
    """
    try:
        inputs, packed, code, outputs = map(_read, json.loads(text))
        return Partition(inputs, tuple(map(bool, packed)), code, outputs)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"not the text of a partition: {error}") from error


@functools.lru_cache(maxsize=16)
def text_of(part: Partition) -> str:
    """Return the partition as plain text, which `partition` parses."""
    return json.dumps(_plain(part))


def name_of(part: Partition, surroundings: str) -> str:
    """Return the name of a partition in XLA.

    It depends on the surroundings too: the library, the processor, how weights are packed.
    """
    digest = hashlib.sha256(f"{surroundings}\n{text_of(part)}".encode())
    return f"xrl_jax.onednn.{digest.hexdigest()[:24]}"


def _plain(x: Any) -> Any:
    if dataclasses.is_dataclass(x):
        name = [type(x).__name__] if type(x).__name__ in _OPS else []
        return [*name, *(_plain(getattr(x, f.name)) for f in dataclasses.fields(x))]
    return [_plain(v) for v in x] if isinstance(x, tuple) else x


def _read(x: Any) -> Any:
    """Rebuild what `_plain` wrote as lists: tuples, and dataclasses, which begin with a name."""
    if not isinstance(x, list):
        return x
    if x and isinstance(x[0], str):
        return _OPS[x[0]](*map(_read, x[1:]))
    return tuple(map(_read, x))
