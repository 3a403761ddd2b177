"""Flags for what an ONNX file leaves open: shapes, sizes and constant inputs."""

from __future__ import annotations

import re
from typing import Any

from absl import flags

from experiments.targets import ConfigError


def define_onnx_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Define the flags that `open_inputs` reads."""
    for name, meaning in (
        ("input_shape", "Shape of an ONNX input with open dimensions, as NAME:1,3,224,224."),
        ("dim", "Size of a named open dimension of ONNX inputs, as NAME:1."),
        ("constant", "Value of an ONNX input that is always the same, as NAME:16000 or NAME:1,2."),
    ):
        meaning += " May be given several times."
        flags.DEFINE_multi_string(name, [], meaning, flag_values=values)


def open_inputs(values: flags.FlagValues) -> dict[str, tuple[tuple[str, Any], ...]]:
    """Return the arguments `input_shapes`, `dimensions` and `constants` of `xrl_jax.from_onnx`, as
    pairs.

    Raises:
      ConfigError: a flag is malformed; the message says how it is written.
    """
    given = values.flag_values_dict()
    return {
        "input_shapes": tuple(map(_input_shape, given["input_shape"])),
        "dimensions": tuple(map(_dimension, given["dim"])),
        "constants": tuple(map(_constant, given["constant"])),
    }


def _input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    match = re.fullmatch(r"(.+):(\d+(?:,\d+)*|)", text)
    if match is None:
        raise ConfigError(f"--input_shape={text} must be a name and its sizes: NAME:1,3,224,224")
    return match[1], tuple(int(size) for size in match[2].split(",") if size)


def _dimension(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.+):(\d+)", text)
    if match is None:
        raise ConfigError(f"--dim={text} must be a name and its size: NAME:1")
    return match[1], int(match[2])


def _constant(text: str) -> tuple[str, int | float | tuple[int | float, ...]]:
    name, _, listed = text.rpartition(":")
    try:
        numbers = tuple(
            int(word) if re.fullmatch(r"[+-]?\d+", word) else float(word)
            for word in listed.split(",")
        )
    except ValueError:
        numbers = ()
    if not (name and numbers):
        raise ConfigError(f"--constant={text} must be a name and numbers: NAME:16000 or NAME:1,2")
    return name, numbers if "," in listed else numbers[0]
