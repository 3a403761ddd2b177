"""A program: a main graph, folded bodies, and what their nodes refer to on the host.

The graphs are arrays and are rewritten inside jit; the bindings never change while a program is
optimised, so a rewritten program is the old one with other graphs (`with_graphs`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import graph as graph_lib
from xrl_jax.graph import ops
from xrl_jax.graph.graph import TensorGraph


@dataclass(frozen=True)
class Input:
    """A flat argument of the graph (main or body) that holds the node."""

    position: int


@dataclass(frozen=True)
class Array:
    """A constant array, or an array the function closes over."""

    value: Any  # numpy or jax array, of the node's shape and dtype


@dataclass(frozen=True)
class Equation:
    """An equation the op table cannot say: bound again as it was, with its operands in order."""

    primitive: Any
    params: dict[str, Any]
    n_outputs: int
    avals: tuple[Any, ...]  # of the results; one result: the node itself, several: its projections

    @property
    def name(self) -> str:
        return str(self.primitive.name)


# Parameters of control flow that hold its jaxprs, in the order of `Call.bodies`.
CONTROL_FLOW: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
)


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many constants a scan with these parameters has, and how many values it carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since jax 0.12
    return len(consts), len(carry)


@dataclass(frozen=True)
class Call:
    """A run of folded bodies: inlined, or as the control flow of `equation` (scan, while, cond)
    with the bodies put in.

    `kind` is "inline", "scan", "while" or "cond"; for the last three `bodies` are in the order of
    the equation's jaxprs (scan: the body; while: condition, body; cond: the branches).
    """

    kind: str
    bodies: tuple[int, ...]
    equation: Equation | None = None


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """An argument leaf that is no array (a string, a function), or a number that the function must
    know while it is traced: part of the tree structure, not of the leaves.
    """

    value: Any


def is_array_like(leaf: Any) -> bool:
    """Whether JAX traces this leaf: an array, what has a shape and a dtype, or a number."""
    if isinstance(leaf, (type, np.dtype)):  # NumPy's scalar types have both attributes, too
        return False
    return isinstance(leaf, (bool, int, float, complex)) or (
        hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    )


def flatten_args(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Array leaves of `(args, kwargs)` and the tree structure, which holds every other leaf as a
    `Static`.

    The structure is the one of `Program.in_tree`; two calls agree in it only when their static
    leaves are equal.
    """
    wrapped = jax.tree.map(lambda x: x if is_array_like(x) else Static(x), (args, kwargs))
    return jax.tree.flatten(wrapped)


def flatten_as(tree: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """`flatten_args`, numbers held static where the structure `tree` of such arguments has them
    so.
    """
    return flatten_args(*hold_static(static_numbers(tree), args, kwargs))


def static_numbers(tree: Any) -> frozenset[int]:
    """The places of the numbers that a structure of arguments holds static, among all leaves that
    the arguments have for JAX.
    """
    wrapped = jax.tree.unflatten(tree, [object()] * tree.num_leaves)
    leaves = jax.tree.leaves(wrapped, is_leaf=lambda x: isinstance(x, Static))
    return frozenset(
        i for i, x in enumerate(leaves) if isinstance(x, Static) and is_array_like(x.value)
    )


def hold_static(
    places: Collection[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the leaves at these places static."""
    if not places:
        return args, kwargs
    leaves, tree = jax.tree.flatten((args, kwargs))
    held = [Static(x) if i in places else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, held)


def unflatten_args(tree: Any, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` from what `flatten_args` returned."""
    wrapped = jax.tree.unflatten(tree, leaves)
    return jax.tree.map(
        lambda x: x.value if isinstance(x, Static) else x,
        wrapped,
        is_leaf=lambda x: isinstance(x, Static),
    )


Binding = Input | Array | Equation | Call


@dataclass(frozen=True)
class Body:
    """A graph that runs `count` times for one run of the program (an estimate for while loops and
    branches).
    """

    graph: TensorGraph
    in_avals: tuple[Any, ...]
    n_outputs: int
    count: float
    name: str = "body"


@dataclass(frozen=True, eq=False)  # arrays are not comparable; `jax.jit` asks for a hash
class Program:
    """What `from_jax` returns and searches rewrite; two are equal where they are one object.

    Attributes:
      graph: the main graph; nodes `input` and `weight` refer to `Input(position)` among the flat
        arguments.
      bodies: folded bodies, callees before callers.
      bindings: what `ref` of any node of any graph indexes.
      in_avals: shape and dtype of every flat argument.
      weights: for every flat argument, whether it stays the same between calls.
      in_tree: structure of `(args, kwargs)` as `flatten_args` gives it.
      out_tree: structure of the result.
      n_outputs: number of flat results.
      fn: the traced function, for derivatives and for calls of other shapes; None where there is
        none (a loaded program).
      weak_outputs: positions of the flat results whose type is weak (`2 * 3.0` is; such a result
        takes on the dtype of what it is combined with).
    """

    graph: TensorGraph
    bodies: tuple[Body, ...]
    bindings: tuple[Binding, ...]
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    weights: tuple[bool, ...]
    in_tree: Any
    out_tree: Any
    n_outputs: int
    fn: Callable[..., Any] | None = None
    weak_outputs: tuple[int, ...] = ()

    @property
    def graphs(self) -> tuple[TensorGraph, ...]:
        """The main graph, then the bodies' graphs."""
        return (self.graph, *(b.graph for b in self.bodies))

    @property
    def counts(self) -> tuple[float, ...]:
        """How often each of `graphs` runs."""
        return (1.0, *(b.count for b in self.bodies))

    def with_graphs(self, graphs: Sequence[TensorGraph]) -> Program:
        """The same program with rewritten graphs, in the order of `graphs`."""
        bodies = tuple(replace(b, graph=g) for b, g in zip(self.bodies, graphs[1:], strict=True))
        return replace(self, graph=graphs[0], bodies=bodies)

    def digests(self) -> np.ndarray:
        """Content of every binding as [D, 2] uint32, for the identity hash; at least one row."""
        rows = [_digest(b) for b in self.bindings] or [np.zeros(2, np.uint32)]
        return np.stack(rows)

    def opaque_share(self) -> float:
        """Share of opaque nodes among all nodes, bodies counted once, sources left out."""
        nodes = [n for g in self.graphs for n in graph_lib.nodes_of(g)[0]]
        work = [n for n in nodes if n.op not in (*ops.SOURCES, "pack", "proj")]
        return sum(n.op == "opaque" for n in work) / max(len(work), 1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program as it stands, node by node through its lowerings (traceable)."""
        # The way out; imported late, because graphs know no backend.
        from xrl_jax.backends.xla import to_jax

        return to_jax(self)(*args, **kwargs)

    def __str__(self) -> str:
        from xrl_jax.graph.text import format_program

        return format_program(self)


def _digest(binding: Binding) -> np.ndarray:
    h = hashlib.sha256()
    match binding:
        case Input(position):
            h.update(f"input {position}".encode())
        case Array(value):
            if jnp.issubdtype(value.dtype, jax.dtypes.extended):
                h.update(str(value.dtype).encode())
                value = jax.random.key_data(value)
            host = np.asarray(value)
            h.update(f"array {host.dtype} {host.shape}".encode())
            h.update(np.ascontiguousarray(host).tobytes())
        case Equation(_, params, _, avals):
            named = sorted((k, str(v)) for k, v in params.items())
            h.update(f"equation {binding.name} {named} {avals}".encode())
        case Call(kind, bodies, equation):
            h.update(f"call {kind} {bodies}".encode())
            if equation is not None:
                h.update(_digest(equation).tobytes())
    return np.frombuffer(h.digest()[:8], np.uint32).copy()
