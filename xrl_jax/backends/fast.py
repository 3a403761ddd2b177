"""`Fast`: the function that `optimize` returns.

It has the signature and the result structure of the original function. Weight-only work is done
once and kept for as long as the same arrays are passed; the rest is compiled with the program's
options. Under a transformation it is inlined, and its derivative is that of the original, custom
rules included.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import take_current_trace

from xrl_jax.backends.arguments import Arguments, fits, text
from xrl_jax.backends.domain import Bounds, are_finite, inside, outside
from xrl_jax.backends.layouts import is_extended
from xrl_jax.backends.original import Original
from xrl_jax.backends.plain_data import pack_signature
from xrl_jax.backends.prepared import LastWeights, PreparedWeights
from xrl_jax.backends.runnable import Flat, ProgramRunnable, Runnable
from xrl_jax.backends.saving import save
from xrl_jax.program.arguments import flatten_as, unflatten_args
from xrl_jax.program.program import Program
from xrl_jax.runtime.compile_options import keeping_nan
from xrl_jax.runtime.settings import debugging, own_settings
from xrl_jax.runtime.target_platform import target_platform


class Fast:
    """An optimised function.

    Args:
      program: the optimised program.
      fn: the original function; None for a loaded program, whose derivative is then the program's
        own.
      options: XLA compile options by name; inside another jit they have no effect.
      report: any object that describes the optimisation.
      close_over: make the prepared weights compile-time constants; other weights then compile anew.
      domain: the arguments the program was checked on, see `domain.Bounds`; None if it is right for
        all.
      program_text: the program as text, if `program` is a stand-in; None for `str(program)`.
      converted: applied to `(args, kwargs)` before anything else; None for nothing.
      runnable: the functions to run; by default `ProgramRunnable` of the program, `fn` and `more`.
      more: see `ProgramRunnable`.

    Attributes:
      program, report, options, domain: as given.
      baseline: the original function.
    """

    def __init__(
        self,
        program: Program,
        fn: Callable[..., Any] | None,
        *,
        options: Mapping[str, Any] | Sequence[tuple[str, Any]] = (),
        report: Any = None,
        close_over: bool = False,
        domain: Bounds | None = None,
        program_text: str | None = None,
        converted: Callable[[Any], Any] | None = None,
        runnable: Runnable | None = None,
        **more: Any,
    ) -> None:
        self.program = program
        self.baseline = fn
        self.options = dict(options)
        self.report = report
        self.close_over = close_over
        self.domain = domain
        self.runnable = runnable or ProgramRunnable(program, fn, **more)
        self._converted, self._program_text = converted, program_text
        self._arguments = Arguments(program)
        # Waiting for a test on the host would keep a GPU idle, so there the program makes it.
        self._tests_itself = domain is not None and target_platform() == "gpu"
        self._original = Original(fn, program.in_tree)
        self._lock = threading.RLock()
        self._last_weights: LastWeights | None = None
        if fn is not None:
            functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._converted is not None:
            args, kwargs = self._converted((args, kwargs))
        flat = self._fast_path(args, kwargs)
        if flat is not None:
            return jax.tree.unflatten(self.program.out_tree, flat)
        return self._run_debugged(args, kwargs) if debugging() else self._slow_path(args, kwargs)

    def _slow_path(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call with weights that are not those of the last call, or under a trace."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self.program.in_tree:  # static leaves, or passed otherwise than the example's
            leaves, tree = self._arguments.flatten(args, kwargs, self)
        difference = self._arguments.difference(leaves, tree) or self._original.settings_change()
        if difference is not None:
            return self._original.call(difference, args, kwargs)
        weights, inputs = self._arguments.split(leaves)
        if not any(isinstance(x, Tracer) for x in leaves):
            with take_current_trace():  # arrays only: nothing to stage, even inside a trace
                violation = self._domain_violation(inputs)
                run = self._prepared_weights(weights).run
                flat = run(inputs) if violation is None else self._run_outside(violation, leaves)
        elif any(isinstance(w, Tracer) for w in weights):
            flat = self.runnable.with_derivative(self.flat)(*leaves)
        else:
            with take_current_trace():
                values = self._prepared_weights(weights).values
            flat = self._traced(values)(*leaves)
        return jax.tree.unflatten(self.program.out_tree, flat)

    @own_settings()
    def prepare(self, *weights: Any) -> PreparedWeights:
        """Return the results of the weight-only work, to be passed to `call`.

        Args:
          weights: the weight arguments in their order, each a pytree as in a call.

        Raises:
          TypeError: the weights are not those that the program was made for.
        """
        if self._converted is not None:
            weights = self._converted(weights)
        leaves: list[Any] = []
        ours = self._arguments
        places = [p for p, is_weight in enumerate(ours.are_weights) if is_weight]
        if len(weights) != len(places):
            raise TypeError(f"prepare takes {len(places)} weight arguments, got {len(weights)}")
        for place, given in zip(places, weights, strict=True):
            flat, tree = flatten_as(ours.trees[place], (given,), {})
            if tree != ours.trees[place]:
                raise TypeError(
                    f"weight argument {place} has structure {ours.trees[place]} "
                    f"in the program, got {tree}"
                )
            leaves += flat
        avals, _ = ours.split(self.program.in_avals)
        kinds, _ = ours.split(ours.kinds)
        for given, aval, kind in zip(leaves, avals, kinds, strict=True):
            if not fits(given, kind):
                raise TypeError(
                    f"the program was made for a weight {text(aval)}, got {text(given)}"
                )
        return PreparedWeights(self.runnable.hoisted.prepare(leaves), tuple(leaves))

    def call(self, prepared: PreparedWeights, *other_args: Any, **kwargs: Any) -> Any:
        """Call the function on prepared weights.

        Args:
          prepared: from `prepare` of this function.
          other_args: the positional arguments that are not weights, in their order.
          kwargs: keyword arguments as in a call.

        Raises:
          TypeError: the arguments are not those that the program was made for.
        """
        if self._converted is not None:
            other_args, kwargs = self._converted((other_args, kwargs))
        rest = iter(other_args)
        ours = self._arguments
        n_other = ours.are_weights.count(False)
        if len(other_args) != n_other:
            raise TypeError(
                f"call takes {n_other} arguments beside the weights, got {len(other_args)}"
            )
        held = iter(unflatten_args(ours.weight_tree, prepared.weights)[0])
        args = tuple(next(held) if w else next(rest) for w in ours.are_weights)
        if debugging() and self.baseline is not None:
            return self._run_debugged(args, kwargs)
        leaves, tree = flatten_as(self.program.in_tree, args, kwargs)
        difference = ours.difference(leaves, tree) or self._original.settings_change()
        if difference is not None:
            raise TypeError(f"fast.call runs the optimised program only: {difference}")
        _, inputs = ours.split(leaves)
        everything = (*leaves, *prepared.values)
        if any(isinstance(x, Tracer) for x in everything):
            flat = self._traced(prepared.values)(*leaves)
        else:
            with take_current_trace():
                violation = self._domain_violation(inputs)
                if violation is None:
                    flat = self._compiled(self._held(prepared.values, prepared.weights), inputs)
                else:
                    flat = self._run_outside(violation, leaves)
        return jax.tree.unflatten(self.program.out_tree, flat)

    def __copy__(self) -> Fast:
        copied = object.__new__(type(self))
        own = {"_lock": threading.RLock(), "_original": self._original.copy()}
        vars(copied).update(vars(self), **own)
        return copied

    def __deepcopy__(self, memo: Any) -> Fast:
        return copy.copy(self)  # its contents are never changed in place

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an optimised function cannot be pickled, because it holds compiled code: use "
            "fast.save(path) to write it to a file, and xrl_jax.load(path) to read it"
        )

    def flat(self, *leaves: Any) -> list[Any]:
        """Call on flat arguments, as inlined where weights are traced (traceable)."""
        return self._guarded(self.runnable.unprepared)(*leaves)

    def forget(self) -> None:
        """Release the prepared weights of the last call; the next call prepares them again."""
        with self._lock:
            self._last_weights = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this function to a file for `xrl_jax.load`; see `saving` for the limits.

        Raises:
          SaveError: some part of it has no form that is safe to open; the message names the part.
          OSError: the folder is missing, the disk is full.
        """
        save(
            path,
            self.program,
            self.runnable,
            name=str(getattr(self, "__name__", "program")),
            doc=getattr(self, "__doc__", None),
            signature=pack_signature(self),
            options=self.options,
            close_over=self.close_over,
            domain=self.domain,
            report=self.report.as_dict() if hasattr(self.report, "as_dict") else None,
            program_text=self.program_text,
        )

    @property
    def program_text(self) -> str:
        """The optimised program as text."""
        return str(self.program) if self._program_text is None else self._program_text

    @property
    def weight_bytes_added(self) -> int:
        """Bytes of prepared weights that are not weights of the original; constants are copies."""
        if self.close_over:
            return sum(math.prod(a.shape) * a.dtype.itemsize for a in self.runnable.hoisted.avals)
        return self.runnable.hoisted.bytes_added

    @functools.cached_property
    def _compiled(self) -> Callable[..., list[Any]]:
        call = self._tested if self._tests_itself else self.runnable.hoisted.call
        return jax.jit(call, compiler_options=self.options or None)

    def _held(self, values: Sequence[Any], weights: Sequence[Any]) -> Any:
        """Return what `_compiled` takes besides the inputs."""
        return (values, weights) if self._tests_itself else values

    def _prepared_weights(self, weights: Sequence[Any]) -> LastWeights:
        """Return the prepared weights, from the last call if the arrays are the same."""
        kept = self._last_weights
        if kept is not None and all(a is b for a, b in zip(kept.weights, weights, strict=True)):
            return kept
        with self._lock:
            values = self.runnable.hoisted.prepare(weights)
            stable = all(isinstance(w, jax.Array) for w in weights)
            if self.runnable.outside is not None and not are_finite(weights):
                # Rewrites assume that weights are finite.
                run = functools.partial(self._with_weights, tuple(weights))
            elif self.close_over and stable and not self._tests_itself:
                call = self.runnable.hoisted.call
                # JAX may pass closed-over device arrays as arguments; NumPy arrays are constants.
                fixed = tuple(v if is_extended(v) else np.asarray(v) for v in values)
                run = jax.jit(
                    lambda inputs: call(fixed, inputs), compiler_options=self.options or None
                )
            else:
                run = functools.partial(self._compiled, self._held(values, tuple(weights)))
            kept = LastWeights(tuple(weights), values, run)
            if stable:
                self._last_weights = kept
        if any(isinstance(w, np.ndarray) for w in weights):
            self._original.warn_once(
                "NumPy",
                "weights that are NumPy arrays may change in place, so they are prepared in every "
                "call: pass JAX arrays (jax.device_put) to prepare them only once",
                5,
            )
        return kept

    def _with_weights(self, weights: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Run the original."""
        return self._compiled_outside(*self._arguments.merge(weights, inputs))

    def _fast_path(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return the flat result if the weights are those of the last call and nothing is traced,
        else None.

        This is the fast path: networks that take few milliseconds feel every microsecond here.
        """
        kept = self._last_weights
        if kept is None or debugging() or self._original.settings_change():
            return None
        try:
            leaves = self.program.in_tree.flatten_up_to((args, kwargs))
        except (ValueError, TypeError, KeyError):  # another structure
            return None
        weights, inputs = self._arguments.split(leaves)
        if not all(map(operator.is_, kept.weights, weights)):
            return None
        for x, kind in zip(inputs, self._arguments.input_kinds, strict=True):
            if isinstance(x, Tracer) or not fits(x, kind):
                return None
        if self._domain_violation(inputs):
            return None
        with take_current_trace():
            return kept.run(inputs)

    def _traced(self, values: Sequence[Any]) -> Flat:
        """Return the call on prepared weights as a function of all leaves, to be inlined into a
        trace.
        """

        def flat(*leaves: Any) -> list[Any]:
            return self.runnable.hoisted.call(values, self._arguments.split(leaves)[1])

        return self.runnable.with_derivative(self._guarded(flat))

    # --- the domain ---

    @functools.cached_property
    def _input_bounds(self) -> list[float | None]:
        tested = None if self._tests_itself else self.domain
        return [] if tested is None else self._arguments.split(tested)[1]

    def _domain_violation(self, inputs: Sequence[Any]) -> str | None:
        """Return a message about the first input outside of the domain; None if all are inside."""
        at = outside(self._input_bounds, inputs) if self._input_bounds else None
        if at is None:
            return None
        bound = self._input_bounds[at]
        return f"input {at} is not finite, or exceeds the bound {bound:.4g} of the checked inputs"

    def _run_outside(self, violation: str, leaves: Sequence[Any]) -> list[Any]:
        """Run the original on arguments outside of the domain."""
        self._original.warn(violation)
        return self._compiled_outside(*leaves)

    @functools.cached_property
    def _compiled_outside(self) -> Callable[..., list[Any]]:
        """The original, compiled to keep NaN, which XLA otherwise does only in some kernels."""
        assert self.runnable.outside is not None
        return jax.jit(self.runnable.outside, compiler_options=keeping_nan())

    def _tested(self, held: Any, inputs: Sequence[Any]) -> list[Any]:
        """Run the program, or the original outside of the domain (traceable)."""
        values, weights = held
        flat = self._guarded(lambda *_: self.runnable.hoisted.call(values, inputs))
        return flat(*self._arguments.merge(weights, inputs))

    def _guarded(self, flat: Flat) -> Flat:
        """Return a function that runs `flat` inside of the domain and the original outside
        (traceable).
        """
        domain, other = self.domain, self.runnable.outside
        if domain is None or other is None:
            return flat
        return lambda *leaves: jax.lax.cond(inside(domain, leaves), flat, other, *leaves)

    def _run_debugged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original uncompiled, because the user is looking for a fault in it; if there is
        no original, run the program, compiled.
        """
        fn = self.baseline
        if fn is None:
            with jax.disable_jit(False):
                return self._slow_path(args, kwargs)
        args, kwargs = jax.tree.map(
            lambda x: jax.device_put(x) if isinstance(x, np.ndarray) else x, (args, kwargs)
        )
        return fn(*args, **kwargs)
