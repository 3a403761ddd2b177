"""The original function, which runs the calls that the optimised program is not made for."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax

from xrl_jax.backends.arguments import of_leaves
from xrl_jax.program.arguments import flatten_args, static_scalars
from xrl_jax.runtime.settings import semantic_settings


class Original:
    """The original function, and the warnings given about running it.

    Args:
      fn: the function; None if there is none (a loaded program).
      in_tree: the structure of the arguments that it was optimised for.
    """

    def __init__(self, fn: Callable[..., Any] | None, in_tree: Any) -> None:
        self._fn, self._in_tree = fn, in_tree
        self._settings = None if fn is None else semantic_settings()
        self._lock = threading.Lock()
        self._compiled: dict[Any, Callable[..., Any]] = {}  # by the structure of the arguments
        self._warned: set[str] = set()  # subjects of the warnings given

    def copy(self) -> Original:
        """Return a copy, with the same compiled functions and the same warnings already given."""
        copied = object.__new__(Original)
        own = {"_compiled": dict(self._compiled), "_warned": set(self._warned)}
        vars(copied).update(vars(self), **own, _lock=threading.Lock())
        return copied

    def settings_change(self) -> str | None:
        """Return how JAX's settings that change the function's results differ from those it was
        traced under.

        None if they do not differ, or if there is no function (a loaded program).
        """
        if self._settings is None or (now := semantic_settings()) == self._settings:
            return None
        return "it was made under jax_enable_x64={}, jax_default_matmul_precision={}, ".format(
            *self._settings
        ) + "now they are {} and {}".format(*now)

    def call(self, difference: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on arguments other than the example's.

        Raises:
          TypeError: there is no function.
        """
        fn = self._fn
        if fn is None:
            raise TypeError(f"a loaded program runs on the arguments it was made for: {difference}")
        self.warn(difference)
        if static_scalars(self._in_tree):  # it cannot be compiled once for all scalars
            return fn(*args, **kwargs)
        leaves, tree = flatten_args(args, kwargs)
        with self._lock:
            if tree not in self._compiled:
                self._compiled[tree] = jax.jit(of_leaves(fn, tree))
        return self._compiled[tree](*leaves)

    def warn(self, difference: str) -> None:
        """Warn, once, that the original runs, and why."""
        text = f"the optimised function runs the original here: {difference}"
        self.warn_once("original", text, 6)

    def warn_once(self, about: str, text: str, stacklevel: int) -> None:
        """Warn, unless there was a warning about the same thing before."""
        with self._lock:
            first = about not in self._warned
            self._warned.add(about)
        if first:
            warnings.warn(text, stacklevel=stacklevel)
