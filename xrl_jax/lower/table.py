"""The table of lowerings: the implementations of every operator, as lax code or as kernels.

Its rows come from the libraries, in the order of `libraries.registry`. `Node.lowering` is an index
into the rows of the operator; row 0 is the plain lowering. The conditions of a row are written once
and evaluated both on the host (`applicable`) and inside jit (`fits`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import GraphError, Node
from xrl_jax.graph.view import NodeView, view_of
from xrl_jax.libraries.base import (
    NO_EPILOGUE,
    Condition,
    Epilogue,
    Facts,
    Library,
    Lowering,
    all_of,
)
from xrl_jax.libraries.registry import is_for, libraries


class Row(NamedTuple):
    """A lowering of an operator, and its library."""

    lowering: Lowering
    library: Library


def _rows() -> Mapping[str, tuple[Row, ...]]:
    found: dict[str, list[Row]] = {op: [] for op in ops.OPS}
    for library in libraries():
        for op, lowerings in library.lowerings().items():
            found[op] += [Row(lowering, library) for lowering in lowerings]
    return MappingProxyType({op: tuple(rows) for op, rows in found.items()})


_ROWS = _rows()
LOWERINGS: Mapping[str, tuple[Lowering, ...]] = MappingProxyType(
    {op: tuple(row.lowering for row in rows) for op, rows in _ROWS.items()}
)
_FACTS: Mapping[str, type[Facts]] = MappingProxyType(
    {op: kind for library in libraries() for op, kind in library.facts().items()}
)
# (operator, lowering) for all lowerings of the operators that have more than one, except those that
# are chosen only under a tolerance.
CHOICES: tuple[tuple[str, int], ...] = tuple(
    (op, i)
    for op, rows in LOWERINGS.items()
    if len(rows) > 1
    for i, row in enumerate(rows)
    if row.rounds is None
)
CHOICE: Mapping[tuple[str, int], int] = MappingProxyType({c: n for n, c in enumerate(CHOICES)})


def _kind(op: str) -> type[Facts] | str:
    """Return a key for the facts of an operator; operators with the same key share them."""
    return _FACTS.get(op, op)


# The conditions of all choices, each once per kind of facts.
_CONDITIONS: tuple[tuple[type[Facts] | str, Condition], ...] = tuple(
    dict.fromkeys((_kind(op), test) for op, i in CHOICES for test in LOWERINGS[op][i].when)
)


def _needed() -> np.ndarray:
    """Return the conditions that each choice needs as bits: [W, C] uint32, W words, C choices."""
    needed = np.zeros((-(-len(_CONDITIONS) // 32), len(CHOICES)), np.uint32)
    for bit, (kind, test) in enumerate(_CONDITIONS):
        for c, (op, i) in enumerate(CHOICES):
            if kind == _kind(op) and test in LOWERINGS[op][i].when:
                needed[bit // 32, c] |= np.uint32(1 << bit % 32)
    return needed


_NEEDED = _needed()
_OPERATOR = np.array([ops.OPS[op].code for op, _ in CHOICES], np.int32)
_NUMBER = np.array([i for _, i in CHOICES], np.int32)


def number_of(op: str, name: str) -> int:
    """Return the index of an operator's lowering by name.

    Raises:
      KeyError: the operator has no lowering of this name; the message lists those it has.
    """
    names = [lowering.name for lowering in LOWERINGS[op]]
    if name not in names:
        raise KeyError(f"{op} has no lowering {name!r} (it has: {', '.join(names)})")
    return names.index(name)


def name_of(node: Node) -> str:
    """Return the name of a node's lowering."""
    return _chosen(node).name


def applicable(node: Node, args: tuple[Node, ...]) -> tuple[int, ...]:
    """Return the indices of the lowerings that are right for the node; 0 is always among them."""
    rows = LOWERINGS[node.op]
    return (0,) if len(rows) == 1 else _right(node, args, narrow=False)


def narrow(node: Node, args: tuple[Node, ...]) -> tuple[int, ...]:
    """Return the indices of the lowerings that would be right for the node if its operands were
    rounded to a narrower type.
    """
    return _right(node, args, narrow=True)


def _right(node: Node, args: tuple[Node, ...], *, narrow: bool) -> tuple[int, ...]:
    rows = [(i, r) for i, r in enumerate(LOWERINGS[node.op]) if (r.rounds is not None) == narrow]
    facts = facts_of(node, args) if rows else None
    return tuple(
        i for i, row in rows if facts is not None and all(facts.holds(test) for test in row.when)
    )


def facts_of(node: Node, args: tuple[Node, ...]) -> Facts:
    """Return the facts of a node, to evaluate conditions on the host."""
    return _facts(np, view_of(node, args), node.op)


def fits(view: NodeView) -> jax.Array:
    """Return which of `CHOICES` may be chosen for one node, [C] bool (traceable; vmap for more).

    These are the lowerings that are right for the node, without the one that it has.
    """
    # Unstacked here once, instead of indexed wherever a condition reads an entry.
    view = view._replace(attrs=jnp.unstack(view.attrs), arg_ranks=jnp.unstack(view.arg_ranks))
    facts = {_kind(op): _facts(jnp, view, op) for op, _ in CHOICES}
    held = [jnp.uint32(0)] * len(_NEEDED)
    for bit, (kind, condition) in enumerate(_CONDITIONS):
        held[bit // 32] |= facts[kind].holds(condition).astype(jnp.uint32) << bit % 32
    right = all_of((word & needed) == needed for word, needed in zip(held, _NEEDED, strict=True))
    return (view.op == _OPERATOR) & (view.lowering != _NUMBER) & right


def _facts(xp: Any, view: NodeView, op: str) -> Facts:
    return _FACTS.get(op, Facts)(xp, view, op)


def is_available(op: str, lowering: int, platform: str) -> bool:
    """Return whether a lowering is worth trying on a JAX platform."""
    row, library = _ROWS[op][lowering]
    platforms = row.platforms
    if platforms and platform not in platforms:
        return False
    return row.without_library or (is_for(library, platform) and library.available())


def shares_calls(op: str, lowering: int, library: Library | None) -> bool:
    """Return whether a lowering becomes part of a call of this library with several operators."""
    rows = _ROWS[op]
    if lowering >= len(rows) or rows[lowering].library is not library:
        return False
    return not rows[lowering].lowering.alone


def absorbs(node: Node, args: tuple[Node, ...]) -> bool:
    """Return whether the chosen lowering takes an epilogue; see `chains`."""
    test = _chosen(node).absorbs
    return test is not None and bool(_facts(np, view_of(node, args), node.op).holds(test))


def lower(node: Node, *arrays: jax.Array, epilogue: Epilogue = NO_EPILOGUE) -> jax.Array:
    """Return the node's value, computed by its chosen lowering.

    An epilogue may be given only if the lowering `absorbs` one.
    """
    more = {} if epilogue is NO_EPILOGUE else {"epilogue": epilogue}
    return _chosen(node).fn(node, *arrays, **more)


def _chosen(node: Node) -> Lowering:
    rows = LOWERINGS[node.op]
    if not 0 <= node.lowering < len(rows):
        raise GraphError(
            f"operator {node.op!r} has {len(rows)} lowerings, "
            f"but a node asks for number {node.lowering}"
        )
    return rows[node.lowering]


@functools.cache
def names() -> str:
    """Return all operators and their lowerings as text, for the keys of files that store indices of
    lowerings.
    """
    return "\n".join(f"{op} {' '.join(r.name for r in rows)}" for op, rows in LOWERINGS.items())
