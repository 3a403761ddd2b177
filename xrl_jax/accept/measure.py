"""Timing of one program or function, for users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from xrl_jax.accept.samples import concrete
from xrl_jax.backends.fast import Fast
from xrl_jax.backends.hoist import split
from xrl_jax.measure import comparison
from xrl_jax.measure.timing import Timing
from xrl_jax.program.arguments import flatten_as
from xrl_jax.program.program import Program, evaluate
from xrl_jax.runtime.settings import own_settings


def measure(
    program_or_fn: Program | Fast | Callable[..., Any], *args: Any, seconds: float = 1.0
) -> Timing:
    """Time a program, an optimised function or any JAX function in this process.

    Of a program or an optimised function only the call is timed, under its compile options; work on
    weights is done before. Any other function is jitted, and all of its work is timed.

    Args:
      args: arrays, or `jax.ShapeDtypeStruct`s for random ones; may be omitted for a program.
      seconds: time to spend on timing, after compiling.

    Raises:
      TypeError: `program_or_fn` is no program or function, or the arguments have another structure
        or type than it was made for.

    >>> timing = xrl_jax.measure(jnp.tanh, jnp.ones(3), seconds=0.1)
    >>> timing.low <= timing.seconds <= timing.high
    True
    """
    options = program_or_fn.options if isinstance(program_or_fn, Fast) else {}
    program = program_or_fn.program if isinstance(program_or_fn, Fast) else program_or_fn
    if not callable(program):
        raise TypeError(f"measure takes one program or function, got {type(program).__name__}")
    if not isinstance(program, Program):
        return comparison.measure(program, *args, seconds=seconds)
    with own_settings():
        return _of_program(program, args, options, seconds)


def _of_program(
    program: Program, args: tuple[Any, ...], options: dict[str, Any], seconds: float
) -> Timing:
    leaves = list(program.in_avals)
    if args:
        leaves, tree = flatten_as(program.in_tree, args, {})
        if tree != program.in_tree:
            raise TypeError(
                f"the program was made for arguments of structure {program.in_tree}, got {tree}"
            )
    leaves = concrete(program, leaves)
    for i, (leaf, aval) in enumerate(zip(leaves, program.in_avals, strict=True)):
        if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
            raise TypeError(
                f"flat argument {i} is {leaf.dtype}{list(leaf.shape)}, the program was made for "
                f"{aval.dtype}{list(aval.shape)}"
            )
    hoisted = split(lambda *flat: evaluate(program, 0, flat), program.in_avals, program.weights)
    weights = [x for x, w in zip(leaves, program.weights, strict=True) if w]
    inputs = [x for x, w in zip(leaves, program.weights, strict=True) if not w]
    call = jax.jit(hoisted.call, compiler_options=options or None)
    return comparison.measure(call, hoisted.prepare(weights), inputs, seconds=seconds)
