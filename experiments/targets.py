"""Targets of experiments: functions with their arguments, from a name, file or module."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import models
from xrl_jax.frontends.onnx import OnnxError, load_onnx

# Options of the models' constructors that are flags of the experiments.
SHAPE_FLAGS = (
    "layers",
    "tokens",
    "past",
    "frames",
    "steps",
    "image_size",
    "width",
    "batch",
    "scan",
)

# The flag for each argument of `load_onnx` that specifies what an ONNX file leaves open.
ONNX_FLAGS = {"input_shapes": "input_shape", "dimensions": "dim", "constants": "constant"}


class ConfigError(ValueError):
    """Flags are invalid; the message names the flag."""


@dataclass(frozen=True)
class Target:
    """A function to optimise, with example arguments; `weights` are the positions of weights."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    weights: tuple[int, ...]


def from_model(name: str, *, seed: int = 0, **shape: int | float | tuple[int, ...]) -> Target:
    """Build a network of `experiments.models` with the options in `shape`.

    Raises:
      ConfigError: there is no such network or option, or its value does not fit.
    """
    require_network(name)
    options = inspect.signature(models.MODELS[name]).parameters
    for option in shape:
        if option not in options:
            known = ", ".join(f"--{n}" for n in SHAPE_FLAGS if n in options)
            raise ConfigError(f"--model={name} has no option --{option} (it has: {known})")
    given = {o: _converted(name, o, options[o].default, value) for o, value in shape.items()}
    try:
        model = models.get(name, seed=seed, **given)
    except ValueError as error:
        raise ConfigError(f"--model={name}: {error}") from error
    # Moved to the device once, because host arrays would be copied in every call.
    args = jax.tree.map(jnp.asarray, (model.weights, *model.inputs))
    return Target(name, model.fn, args, (0,))


def _converted(name: str, option: str, default: Any, value: Any) -> Any:
    """Convert an option's value to the type of its default (one number becomes a tuple if that is
    a tuple); raise ConfigError if it does not fit.
    """
    kind = type(default)
    if kind is tuple:
        return value if isinstance(value, tuple) else (value,)
    if isinstance(value, tuple):
        raise ConfigError(f"--{option}: --model={name} takes one number, not {value}")
    if kind(value) != value:
        raise ConfigError(f"--{option}={value}: --model={name} takes a whole number")
    return kind(value)


def require_network(name: str) -> None:
    """Raise ConfigError, for the flag --model, if there is no such network."""
    if name not in models.MODELS:
        hint, known = _nearest(name, models.MODELS), ", ".join(models.MODELS)
        raise ConfigError(f"--model={name}: there is no such network{hint} (known: {known})")


def require_known(flag: str, names: Sequence[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first name that is not known, or if there are no names."""
    listed = list(known)
    for name in names:
        if name not in listed:
            raise ConfigError(f"--{flag}: there is no {name} (known: {', '.join(listed)})")
    if not names:
        raise ConfigError(f"--{flag} is empty: name at least one")


def from_onnx_file(
    path: str,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    dimensions: Mapping[str, int] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Target:
    """Load an ONNX model as a function of its inputs only, with the weights inside.

    Args:
      path: the file.
      input_shapes, dimensions, constants: what the file leaves open; see `xrl_jax.from_onnx`.

    Raises:
      ConfigError: there is no such file, or its inputs have to be specified by flags.
      OnnxError: the file cannot be read.
    """
    if not Path(path).is_file():
        raise ConfigError(f"--onnx={path}: there is no such file")
    try:
        loaded = load_onnx(
            path, input_shapes=input_shapes, dimensions=dimensions, constants=constants
        )
    except OnnxError as error:
        flags = [f"--{flag}" for name, flag in ONNX_FLAGS.items() if f"{name}={{" in str(error)]
        if not flags:
            raise
        raise ConfigError(f"{error}; here, use the flags {', '.join(flags)}") from error
    weights = jax.tree.map(jnp.asarray, loaded.weights)

    def fn(*inputs: Any) -> Any:
        return loaded.fn(weights, *inputs)

    name = fn.__name__ = Path(path).stem
    return Target(name, fn, loaded.inputs, ())


def from_attribute(spec: str) -> Target:
    """Return the target in `package.module:attribute`: a tuple (fn, args) or (fn, args, weights),
    or a function that returns one.

    Raises:
      ConfigError: there is no such module or attribute, or it gives something else.
    """
    module_name, _, attribute = spec.partition(":")
    if not (module_name and attribute):
        raise ConfigError(f"--fn={spec} must be package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one that it imports does not
        raise ConfigError(
            f"--fn={spec}: there is no module {error.name!r} here; run the command in the folder "
            "that holds it, or install its package"
        ) from error
    if not hasattr(module, attribute):
        hint = _nearest(attribute, (n for n in vars(module) if not n.startswith("_")))
        raise ConfigError(f"--fn={spec}: module {module_name!r} has no {attribute!r}{hint}")
    example = getattr(module, attribute)
    if callable(example):
        if not _takes_nothing(example):
            raise ConfigError(
                f"--fn={spec}: {attribute} takes arguments; name a function without arguments "
                "that returns (fn, args) or (fn, args, weights)"
            )
        example = example()
    match example:
        case (fn, (tuple() | list()) as args) if callable(fn):
            return Target(attribute, fn, tuple(args), ())
        case (fn, (tuple() | list()) as args, int(position)) if callable(fn):
            return Target(attribute, fn, tuple(args), (position,))
        case (fn, (tuple() | list()) as args, (tuple() | list()) as weights) if callable(fn):
            return Target(attribute, fn, tuple(args), tuple(weights))
    raise ConfigError(
        f"--fn={spec} must give (fn, args) or (fn, args, weights): a function, a tuple of its "
        "arguments, and the positions of the weights among them"
    )


def _takes_nothing(fn: Callable[..., Any]) -> bool:
    try:
        inspect.signature(fn).bind()
    except TypeError:
        return False
    return True


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
