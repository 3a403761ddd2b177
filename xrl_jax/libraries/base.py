"""What a library of kernels is, and the rows it adds to the table of lowerings.

XLA is the first library: it has a plain lowering for every operator and further ones of lax code.
Others add kernels of their own. A library is a package `xrl_jax.libraries.NAME` with a `LIBRARY`,
or an entry point of the group `xrl_jax.libraries` of another distribution (see `registry`).
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
    """What is computed with a result y [..., O] before it is written."""

    bias: jax.Array | None = None  # [O] or [1, .., O], added first
    addend: jax.Array | None = None  # of y's shape, added then
    relu: bool = False  # negative values become 0 in the end

    @property
    def arrays(self) -> list[jax.Array]:
        """Those that are there."""
        return [x for x in (self.bias, self.addend) if x is not None]

    def __call__(self, y: jax.Array) -> jax.Array:
        """The same as lax code."""
        if self.bias is not None:
            y = y + lax.broadcast_in_dim(self.bias.reshape(-1), y.shape, (y.ndim - 1,))
        if self.addend is not None:
            y = y + self.addend
        return jnp.maximum(y, 0) if self.relu else y

    def with_bias(self, *shape: int) -> Epilogue:
        """The same with the bias in this shape."""
        return self if self.bias is None else self._replace(bias=self.bias.reshape(shape))


NOTHING = Epilogue()


def every(truths: Iterable[Any]) -> Any:
    """Whether all of a few hold: XLA:CPU compiles one reduction for as long as a hundred single
    operations.
    """
    return functools.reduce(operator.and_, truths)


# A fact by its name, or a function of facts. Lowerings that share one have the same function, so
# that it is asked once.
Condition = str | Callable[[Any], Any]


class Facts:
    """What conditions may ask of a node: on the host (`xp` is `numpy`) and inside jit (`xp` is
    `jax.numpy`; one node, vmap for more) alike. A kind of facts may serve several operators whose
    attributes it asks for are the same.
    """

    def __init__(self, xp: Any, view: NodeView, op: str) -> None:
        self.xp, self.view, self.spec = xp, view, ops.OPS[op]

    def number(self, name: str) -> Any:
        """An attribute of width one."""
        return self.view.attrs[self.spec.field(name).offset]

    def numbers(self, name: str) -> tuple[Any, ...]:
        """An attribute of any width."""
        at = self.spec.field(name)
        return tuple(self.view.attrs[at.offset + i] for i in range(at.width))

    def is_float(self, dtype: Any) -> Any:
        """Whether a dtype code is of one of the floating types."""
        codes = [ops.DTYPE_CODE[d] for d in ops.FLOAT_DTYPES]
        return (dtype >= min(codes)) & (dtype <= max(codes))

    def is_single(self, dtype: Any) -> Any:
        """Whether a dtype code is that of float32."""
        return dtype == ops.DTYPE_CODE["float32"]

    def holds(self, condition: Condition) -> Any:
        """Whether a condition holds.

        Raises:
          TypeError: its name is that of no property of these facts.
        """
        if not isinstance(condition, str):
            return condition(self)
        kind = getattr(type(self), condition, None)
        if not isinstance(kind, property | functools.cached_property):
            raise TypeError(
                f"{condition!r} is no property of {type(self).__name__}: name one, or give a "
                "function of facts"
            )
        return getattr(self, condition)

    @property
    def nonempty(self) -> Any:
        """Whether neither the result nor an argument has a size of 0."""
        xp, view = self.xp, self.view
        return xp.all(view.shape != 0) & xp.all(view.arg_shapes != 0)

    def product(self, *factors: Any) -> Any:
        """Of counts, in float32: that of a whole network's sizes overflows 32-bit integers."""
        return functools.reduce(operator.mul, (f.astype(np.float32) for f in factors))


@dataclass(frozen=True)
class Lowering:
    """A row of the table: one way for an operator to become lax code or a kernel.

    Attributes:
      name: "plain" for the first; otherwise what it does.
      fn: `fn(node, *arrays) -> array`, traceable, differentiable and vmappable.
      when: conditions on `Facts` of the operator's kind (`Library.facts`); where all hold, `fn` is
        right.
      absorbs: where it holds, `fn` takes an `epilogue`, too; None: never.
      error: relative error that it may add, by dtype, where that is more than another order of the
        same sums; absent for none. Relative to the largest sum of absolute products in a tile.
      bounded: right on finite numbers of ordinary size only (see `backends.domain`).
      instead: the lowering to use where a bounded one is not right; "plain" by default.
      algorithm: "direct", or "tiles": whole programs correct the two apart.
      source: what says that it may be worth a trial.
      platforms: of JAX, where it exists; () for all.
      without_library: it is lax code where its library is missing, and worth a trial there.
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

    def __post_init__(self) -> None:
        if not isinstance(self.when, tuple):
            raise TypeError(f"lowering {self.name!r}: `when` is a tuple of conditions")


@dataclass(frozen=True)
class CallCosts:
    """What the cost model has to know of a library whose kernels share calls.

    Attributes:
      joins: operators that a call takes in between its kernels, one operation of the library each.
      elements: those of them that are in one loop with what is around.
      can_join: of nodes [...] (`op`, `lowering`, `attrs`, `rank`): whether a call takes them in.
      enter, leave: seconds to enter a call, and more before the next call of XLA's.
      joined, in_loop: passes over its arguments that one of `joins`, one of `elements` takes.
    """

    joins: frozenset[str]
    elements: frozenset[str]
    can_join: Callable[[Any], Any]
    enter: float
    leave: float
    joined: float
    in_loop: float


NO_CALLS = CallCosts(frozenset(), frozenset(), lambda _: False, 0.0, 0.0, 1.0, 1.0)


class CustomCall(NamedTuple):
    """What XLA calls by name: to be made known in every process that runs the compiled code."""

    library: str
    data: tuple[Any, ...]  # plain values, which the library reads back


class Calls(Protocol):
    """Calls of several operators: how they are made, exported and loaded."""

    costs: CallCosts

    def partitioned(self, closed: Any, known: Sequence[bool]) -> Any:
        """The closed jaxpr with its kernels put together in calls.

        Args:
          known: for each argument, whether it is a weight; what is computed from weights alone
            stays outside, to be hoisted.
        """
        ...

    def exporting(self) -> contextlib.AbstractContextManager[Any]:
        """What is exported in this context goes into files that carry the custom calls."""
        ...

    def custom_calls_in(self, module: bytes) -> list[CustomCall]:
        """What a serialised module calls."""
        ...

    def make_known(self, calls: Sequence[CustomCall]) -> None:
        """Make XLA know the calls under the names they had where `custom_calls_in` found them.

        Raises:
          RuntimeError: the library is not here, or computes otherwise; says which.
        """
        ...

    def only_time(self) -> None:
        """From now on this process times calls: special values need no care."""
        ...


class Library(Protocol):
    """A library of kernels; subclass this for the defaults."""

    name: str
    install: str = ""  # what to type where it is missing
    platforms: tuple[str, ...] = ()  # of JAX, that it has kernels for; () for all

    def available(self) -> bool:
        """Whether its lowerings are worth a trial here."""
        return True

    def version(self) -> str:
        """What timings and saved files depend on (version, instruction set, our kernels); "" where
        none of that is here.
        """
        return ""

    def lowerings(self) -> Mapping[str, tuple[Lowering, ...]]:
        """Rows by operator. Their order is part of saved programs: new ones go to the end."""
        return {}

    def facts(self) -> Mapping[str, type[Facts]]:
        """The kind of facts that conditions of an operator's rows are asked of."""
        return {}

    def preferred(self, node: Node, args: Sequence[Node]) -> Sequence[str]:
        """Its lowerings for a node where the whole network goes to this library, best first,
        whether or not they apply.
        """
        return ()

    def priors(self, platform: str) -> Mapping[tuple[str, int], str]:
        """What its lowerings usually take in multiples of the plain one, by operator and kind of
        node (`cost.view.lowering_kind_of`): "name 0.5 other 0.9". They say what to time first.
        """
        return {}

    def calls(self) -> Calls | None:
        """How kernels share calls; None where each is a call of XLA's, or nothing is here."""
        return None

    def custom_call_names(self) -> list[str]:
        """Names of all custom calls it has made so far, which `jax.export` has to allow."""
        return []

    def bound_to_jaxlib(self, module: bytes) -> bool:
        """Whether a serialised module runs under the version of jaxlib alone that made it."""
        return False
