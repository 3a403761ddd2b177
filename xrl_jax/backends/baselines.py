"""The original function in the forms a user would otherwise run, compiled: what a result has to
beat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xrl_jax.backends.xla import evaluate
from xrl_jax.graph.program import Program, unflatten_args

AS_ARGUMENTS = "jit, weights as arguments"
CLOSED_OVER = "jit, weights closed over"


def flat_original(program: Program) -> Callable[..., list[Any]]:
    """The traced function on flat leaves (traceable); the program itself where there is no
    function.
    """
    fn = program.fn
    if fn is None:
        return lambda *leaves: evaluate(program, 0, leaves)

    def run(*leaves: Any) -> list[Any]:
        args, kwargs = unflatten_args(program.in_tree, leaves)
        return jax.tree.leaves(fn(*args, **kwargs))

    return run


def compiled(
    fn: Callable[..., Any], args: Sequence[Any], options: Sequence[tuple[str, str]] = ()
) -> Callable[[], Any]:
    """`fn` compiled for `args`, as a call of no arguments."""
    run = jax.jit(fn, compiler_options=dict(options) or None)
    on_device = [jax.device_put(a) if isinstance(a, np.ndarray) else a for a in args]
    return lambda: run(*on_device)


def baselines(
    program: Program, leaves: Sequence[Any], options: Sequence[tuple[str, str]] = ()
) -> dict[str, Callable[[], Any]]:
    """The original with weights as arguments and with weights closed over (constants of the
    compiled code).

    Arrays the function closes over are weights too: they become arguments in the first form. Where
    there are no weights at all, both forms are one.

    Args:
      leaves: flat arguments.
      options: XLA compile options of both.
    """
    original = flat_original(program)
    closed = jax.make_jaxpr(original)(*leaves)
    suffix = " + options" if options else ""

    def with_consts(consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*args)

    # JAX may lift closed-over arrays to arguments of its own; NumPy arrays stay constants.
    weights = program.weights
    fixed = [np.asarray(x) if w and _plain(x) else x for x, w in zip(leaves, weights, strict=True)]
    inputs = [x for x, w in zip(leaves, weights, strict=True) if not w]

    def closing(*given: Any) -> list[Any]:
        rest = iter(given)
        return original(*(f if w else next(rest) for f, w in zip(fixed, weights, strict=True)))

    found = {
        AS_ARGUMENTS + suffix: compiled(with_consts, [list(closed.consts), list(leaves)], options)
    }
    if any(weights) or closed.consts:
        found[CLOSED_OVER + suffix] = compiled(closing, inputs, options)
    return found


def _plain(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)
