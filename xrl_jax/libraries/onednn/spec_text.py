"""Partitions as plain text, for files and other processes, and the names that XLA knows them by."""

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


@functools.lru_cache(maxsize=16)  # each weight that is packed for a partition comes with its text
def partition(text: str) -> Partition:
    """What `text_of` wrote.

    Raises:
      ValueError: it is something else.
    """
    try:
        inputs, packed, code, outputs = map(_read, json.loads(text))
        return Partition(inputs, tuple(map(bool, packed)), code, outputs)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"no partition: {error}") from error


@functools.lru_cache(maxsize=16)
def text_of(part: Partition) -> str:
    """Plain text, read by `partition`."""
    return json.dumps(_plain(part))


def name_of(part: Partition, surroundings: str) -> str:
    """Under which XLA knows it; the same where the surroundings are: the library, the processor,
    how weights are packed.
    """
    digest = hashlib.sha256(f"{surroundings}\n{text_of(part)}".encode())
    return f"xrl_jax.onednn.{digest.hexdigest()[:24]}"


def _plain(x: Any) -> Any:
    if dataclasses.is_dataclass(x):
        name = [type(x).__name__] if type(x).__name__ in _OPS else []
        return [*name, *(_plain(getattr(x, f.name)) for f in dataclasses.fields(x))]
    return [_plain(v) for v in x] if isinstance(x, tuple) else x


def _read(x: Any) -> Any:
    """The tuples and dataclasses that `_plain` made lists of; these begin with their names."""
    if not isinstance(x, list):
        return x
    if x and isinstance(x[0], str):
        return _OPS[x[0]](*map(_read, x[1:]))
    return tuple(map(_read, x))
