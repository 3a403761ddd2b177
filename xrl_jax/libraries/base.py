"""The interface of a library of kernels, and of the rows it adds to the table of lowerings.

XLA is the first library: it has a plain lowering for every operator, and further lowerings made of
lax code. Other libraries add kernels of their own. A library is a package `xrl_jax.libraries.NAME`
whose module `library` defines `LIBRARY`, or an entry point of another distribution in the group
`xrl_jax.libraries` (see `registry`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node
from xrl_jax.graph.view import NodeView


class Epilogue(NamedTuple):
    """Operations applied to a result y [..., O] of a kernel before it is written."""

    bias: jax.Array | None = None  # [O] or [1, .., O], added first
    addend: jax.Array | None = None  # of y's shape, added second
    relu: bool = False  # applied last: negative values become 0

    @property
    def arrays(self) -> list[jax.Array]:
        """The operands that are not None."""
        return [x for x in (self.bias, self.addend) if x is not None]

    def __call__(self, y: jax.Array) -> jax.Array:
        """Apply the epilogue to y as lax code."""
        if self.bias is not None:
            y = y + lax.broadcast_in_dim(self.bias.reshape(-1), y.shape, (y.ndim - 1,))
        if self.addend is not None:
            y = y + self.addend
        return jnp.maximum(y, 0) if self.relu else y

    def with_bias(self, *shape: int) -> Epilogue:
        """Return the same epilogue with the bias reshaped to this shape."""
        return self if self.bias is None else self._replace(bias=self.bias.reshape(shape))


NO_EPILOGUE = Epilogue()


def all_of(truths: Iterable[Any]) -> Any:
    """Return whether all of a few truth values hold.

    They are combined one by one because XLA:CPU takes as long to compile one reduction as a hundred
    single operations.
    """
    return functools.reduce(operator.and_, truths)


# The name of a property of `Facts`, or a function of facts. Lowerings with the same condition share
# one function object, so that it is evaluated once.
Condition = str | Callable[[Any], Any]


class Facts:
    """Properties of a node from which the conditions of lowerings are built.

    They are computed in the same way on the host (`xp` is `numpy`) and inside jit (`xp` is
    `jax.numpy`; for one node, vmap for more). Operators that have the attributes a subclass reads
    may share that subclass.
    """

    def __init__(self, xp: Any, view: NodeView, op: str) -> None:
        self.xp, self.view, self.spec = xp, view, ops.OPS[op]

    def number(self, name: str) -> Any:
        """Return an attribute of width one."""
        return self.view.attrs[self.spec.field(name).offset]

    def numbers(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of any width as a tuple."""
        at = self.spec.field(name)
        return tuple(self.view.attrs[at.offset + i] for i in range(at.width))

    def is_float(self, dtype: Any) -> Any:
        """Return whether a dtype code is that of a floating-point type."""
        codes = [ops.DTYPE_CODE[d] for d in ops.FLOAT_DTYPES]
        return (dtype >= min(codes)) & (dtype <= max(codes))

    def is_single(self, dtype: Any) -> Any:
        """Return whether a dtype code is that of float32."""
        return dtype == ops.DTYPE_CODE["float32"]

    def is_weight_type(self, dtype: Any) -> Any:
        """Return whether a product of float32 may read a weight of this dtype code."""
        codes = [ops.DTYPE_CODE[d] for d in ("float32", *ops.WEIGHT_DTYPES)]
        return functools.reduce(operator.or_, (dtype == code for code in codes))

    def holds(self, condition: Condition) -> Any:
        """Return whether a condition holds.

        Raises:
          TypeError: the condition is a name, but not that of a property of these facts.
        """
        if not isinstance(condition, str):
            return condition(self)
        kind = getattr(type(self), condition, None)
        if not isinstance(kind, property | functools.cached_property):
            raise TypeError(
                f"{condition!r} is not a property of {type(self).__name__}: name one, or give a "
                "function of facts"
            )
        return getattr(self, condition)

    @property
    def nonempty(self) -> Any:
        """Whether neither the result nor an argument has a size of 0."""
        xp, view = self.xp, self.view
        return xp.all(view.shape != 0) & xp.all(view.arg_shapes != 0)

    def product(self, *factors: Any) -> Any:
        """Return a product of counts in float32, since large counts overflow 32-bit integers."""
        return functools.reduce(operator.mul, (f.astype(np.float32) for f in factors))


LEVELS = 127  # of int8 on either side of 0
LEAST_SCALE = float(np.finfo(np.float32).tiny)  # factor of the levels of zeros


class Rounding(NamedTuple):
    """How a lowering rounds its operands to a narrower type.

    Attributes:
      dtype: the type.
      left: returns the first operand rounded, in float32, given the node.
      right: the same for the second, a weight, in NumPy.
    """

    dtype: str
    left: Callable[[Node, jax.Array], jax.Array]
    right: Callable[[Node, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Lowering:
    """A row of the table: one implementation of an operator, as lax code or as a kernel.

    Attributes:
      name: "plain" for the first row of an operator; otherwise a name for its method.
      fn: `fn(node, *arrays) -> array`, traceable, differentiable and vmappable.
      when: conditions on the operator's `Facts` (see `Library.facts`). `fn` is right if all hold.
      absorbs: the condition under which `fn` also takes an `epilogue`; None: never.
      error: relative error that `fn` may add beyond that of summing in another order, by dtype; no
        entry for none. It is relative to the largest sum of absolute products in a tile.
      bounded: `fn` is right only for finite values of ordinary size (see `backends.domain`).
      instead: the lowering to use where a bounded one is not right; "plain" by default.
      algorithm: "direct" or "tiles"; timings of whole programs correct their costs separately.
      source: the reason to expect that it may be fast.
      platforms: JAX platforms that it exists on; () for all.
      without_library: if its library is missing, `fn` is lax code and still worth trying.
      rounds: how `fn` rounds its operands, if it does; such a row is chosen only under a tolerance.
      alone: it becomes a call without other kernels, even if its library's kernels share calls.
    """

    name: str
    fn: Callable[..., Any]
    when: tuple[Condition, ...] = ()
    absorbs: Condition | None = None
    error: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    bounded: bool = False
    instead: str = "plain"
    algorithm: str = "direct"
    source: str = ""
    platforms: tuple[str, ...] = ()
    without_library: bool = False
    rounds: Rounding | None = None
    alone: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.when, tuple):
            raise TypeError(f"lowering {self.name!r}: `when` must be a tuple of conditions")


@dataclass(frozen=True)
class CallCosts:
    """The cost model's facts about a library that merges several kernels into one call.

    Attributes:
      can_join: maps nodes [...] (with `op`, `lowering`, `attrs`, `rank`) to whether a call can
        contain them between its kernels, each as one library operation.
      fused: those of these operators that are fused into a loop with their neighbours.
      enter: seconds to enter a call.
      leave: seconds that XLA's next call takes longer after it.
      joined, in_loop: the cost of an operator between kernels, and of one of `fused`, in passes
        over its arguments.
    """

    can_join: Callable[[Any], Any]
    fused: frozenset[str]
    enter: float
    leave: float
    joined: float
    in_loop: float


NO_CALLS = CallCosts(lambda _: False, frozenset(), 0.0, 0.0, 1.0, 1.0)


class CustomCall(NamedTuple):
    """A function that XLA calls by name; every process that runs the code must register it."""

    library: str
    data: tuple[Any, ...]  # plain values, from which the library restores the call


class Calls(Protocol):
    """The interface for making, exporting and loading library calls with several operators."""

    costs: CallCosts

    def partitioned(self, closed: Any, known: Sequence[bool]) -> Any:
        """Return the closed jaxpr with its kernels merged into calls.

        Args:
          known: for each argument, whether it is a weight; values that depend on weights only stay
            outside of calls, to be hoisted.
        """
        ...

    def pair(
        self, node: Node, lowered: Callable[..., jax.Array], *arrays: jax.Array
    ) -> jax.Array | None:
        """Return the result of a kernel and of another one on its result that does as much work in
        the same call, for timing; None where copies of a kernel share a call.

        Args:
          node: of the kernel.
          lowered: `lowered(*arrays)` computes it.
        """
        return None

    def exporting(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for exports into files that also store the custom calls."""
        ...

    def custom_calls_in(self, module: bytes) -> list[CustomCall]:
        """Return the custom calls in a serialised module."""
        ...

    def register_calls(self, custom_calls: Sequence[CustomCall]) -> None:
        """Register the calls with XLA under the names that they have in the exported module.

        Raises:
          RuntimeError: the library is missing, or this version computes differently; says which.
        """
        ...

    def only_time(self) -> None:
        """Skip the handling of special values from now on: this process only times calls."""
        ...


class Library(Protocol):
    """A library of kernels. Subclasses inherit defaults for everything but the name."""

    name: str
    install: str = ""  # the command that installs it
    platforms: tuple[str, ...] = ()  # JAX platforms that it has kernels for; () for all

    def available(self) -> bool:
        """Return whether its lowerings are worth trying on this machine."""
        return True

    def version(self) -> str:
        """Return the facts that timings and saved files depend on (version, instruction set,
        version of generated kernels); "" if the library is missing.
        """
        return ""

    def lowerings(self) -> Mapping[str, tuple[Lowering, ...]]:
        """Return rows by operator. Saved programs refer to their order: add new rows at the end."""
        return {}

    def facts(self) -> Mapping[str, type[Facts]]:
        """Return, by operator, the subclass of `Facts` that the conditions of its rows use."""
        return {}

    def preferred(self, node: Node, args: Sequence[Node]) -> Sequence[str]:
        """Return its lowerings for a node in a network that uses this library throughout, best
        first, whether or not they are applicable.
        """
        return ()

    def is_fast(self, row: Lowering, node: Node, args: Sequence[Node]) -> bool:
        """Whether this machine has instructions for the type to which a lowering of this library,
        which is right for the node, rounds its operands.
        """
        return False

    def priors(self, platform: str) -> Mapping[tuple[str, int], str]:
        """Return the usual times of its lowerings relative to the plain one, as "name 0.5 other
        0.9", by operator and kind of node (`cost.view.lowering_kind_of`).

        They decide which lowerings are timed first.
        """
        return {}

    def absorbing(self, platform: str) -> frozenset[str]:
        """Return the operators into whose kernels, on a JAX platform, this library itself merges
        the additions and the ReLU that follow, whatever the lowering.
        """
        return frozenset()

    def calls(self) -> Calls | None:
        """Return how kernels share calls; None if they do not, or the library is missing."""
        return None

    def custom_call_names(self) -> list[str]:
        """Return the names of all custom calls made so far, which `jax.export` has to allow."""
        return []

    def bound_to_jaxlib(self, module: bytes) -> bool:
        """Return whether a serialised module runs only under the version of jaxlib that made it."""
        return False
