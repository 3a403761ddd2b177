"""Baselines that a result has to beat: the original function, compiled as a user would otherwise
run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xrl_jax.program.arguments import unflatten_args
from xrl_jax.program.program import Program, evaluate

AS_ARGUMENTS = "jit, weights as arguments"
CLOSED_OVER = "jit, weights closed over"


def flat_original(program: Program) -> Callable[..., list[Any]]:
    """Return the traced function on flat leaves (traceable); the program itself where there is no
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
    """Return a function without arguments that calls `fn`, jitted, on `args`."""
    run = jax.jit(fn, compiler_options=dict(options) or None)
    on_device = _on_device(args)
    return lambda: run(*on_device)


def _on_device(args: Sequence[Any]) -> list[Any]:
    return [jax.device_put(a) if isinstance(a, np.ndarray) else a for a in args]


class Original:
    """The original with weights and closed-over arrays as arguments; compiled when it is first
    called.

    Args:
      leaves: flat arguments.
      options: XLA compile options.
    """

    def __init__(
        self, program: Program, leaves: Sequence[Any], options: Sequence[tuple[str, str]] = ()
    ) -> None:
        closed = jax.make_jaxpr(flat_original(program))(*leaves)

        def with_consts(consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
            return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*args)

        self.closes_over = bool(closed.consts)
        self._consts = list(closed.consts)
        self._run = jax.jit(with_consts, compiler_options=dict(options) or None)
        self._leaves = _on_device(leaves)

    def __call__(self) -> list[Any]:
        return self.on(self._leaves)

    def on(self, leaves: Sequence[Any]) -> list[Any]:
        """Call it on other arguments of the same shapes."""
        return self._run(self._consts, list(leaves))


def baselines(
    program: Program,
    leaves: Sequence[Any],
    options: Sequence[tuple[str, str]] = (),
    *,
    first: Original | None = None,
) -> dict[str, Callable[[], Any]]:
    """Return, by name, the original with weights as arguments and with weights closed over
    (constants of the compiled code).

    Arrays the function closes over are weights too: they become arguments in the first baseline.
    Where there are no weights at all, only the first is returned, since both are the same.

    Args:
      leaves: flat arguments.
      options: XLA compile options of both.
      first: the first baseline, if it exists with these options already.
    """
    original = flat_original(program)
    suffix = " + options" if options else ""
    first = first or Original(program, leaves, options)
    # JAX may lift closed-over arrays to arguments of its own; NumPy arrays stay constants.
    weights = program.weights
    fixed = [np.asarray(x) if w and _plain(x) else x for x, w in zip(leaves, weights, strict=True)]
    inputs = [x for x, w in zip(leaves, weights, strict=True) if not w]

    def closing(*given: Any) -> list[Any]:
        rest = iter(given)
        return original(*(f if w else next(rest) for f, w in zip(fixed, weights, strict=True)))

    found: dict[str, Callable[[], Any]] = {AS_ARGUMENTS + suffix: first}
    if any(weights) or first.closes_over:
        found[CLOSED_OVER + suffix] = compiled(closing, inputs, options)
    return found


def _plain(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)
