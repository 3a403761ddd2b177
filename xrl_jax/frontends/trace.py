"""Traces JAX functions to jaxprs; the error of a failure says why, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from xrl_jax.program.arguments import flatten_args, unflatten_args, wrap_static

_MOST_NUMBERS = 8  # beyond this, all are static without a trial of each


class TraceError(ValueError):
    """Raised for a function that JAX cannot trace; the message names it and says what to do."""


def trace_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any, list[Any], Any]:
    """Trace a call to a jaxpr.

    Numbers that the function must know while it is traced (a length, a static argument of its
    `jax.jit`) are static, i.e. part of the structure of the arguments.

    Returns:
      The closed jaxpr, the structure of the result, the leaves and the structure of the arguments.

    Raises:
      TraceError: the function cannot be traced, even with static numbers.
    """

    def traced(static: Collection[int]) -> tuple[Any, Any, list[Any], Any]:
        leaves, tree = flatten_args(*wrap_static(static, args, kwargs))
        return (*trace(fn, leaves, tree), leaves, tree)

    try:
        return traced(())
    except TraceError as error:
        leaves = jax.tree.leaves((args, kwargs))
        numbers = (bool, int, float, complex, np.generic)
        static = {i for i, x in enumerate(leaves) if isinstance(x, numbers)}
        if not static:
            raise
        try:
            found = traced(static)
        except TraceError:
            raise error from error.__cause__
    for number in sorted(static) if 1 < len(static) <= _MOST_NUMBERS else ():
        with suppress(TraceError):
            found = traced(static - {number})
            static.remove(number)
    return found


def trace(fn: Callable[..., Any], leaves: Sequence[Any], in_tree: Any) -> tuple[Any, Any]:
    """Return the closed jaxpr of `fn` over flat leaves, and the structure of its result."""
    out_trees: list[Any] = []

    def flat(*flat_args: Any) -> list[Any]:
        args, kwargs = unflatten_args(in_tree, flat_args)
        out, tree = jax.tree.flatten(fn(*args, **kwargs))
        out_trees.append(tree)
        return out

    try:
        with jax.disable_jit(False):  # with jit disabled, loops need concrete values
            closed = jax.make_jaxpr(flat)(*leaves)
    except (
        Exception
    ) as error:  # any exception of the user's function is a reason why it cannot be traced
        name = getattr(fn, "__name__", None) or repr(fn)
        lines = [line for line in str(error).splitlines() if line.strip()][:3]
        reason = "\n  ".join(
            [type(error).__name__ + ": " + (lines[0] if lines else ""), *lines[1:]]
        )
        raise TraceError(f"cannot trace {name!r}:\n  {reason}\n{_advice(error)}") from error
    return closed, out_trees[-1]


def _advice(error: Exception) -> str:
    concrete = (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.NonConcreteBooleanIndexError,
    )
    if isinstance(error, concrete):
        return (
            "It needs the value of an argument while it is traced. Close over that value "
            "(functools.partial, a lambda) to make it static, or use lax.cond, jnp.where and so on."
        )
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return "It keeps traced values between calls. Return them instead of storing them."
    return (
        "Call it with these arguments under jax.jit, and fix the error that is raised there first."
    )
