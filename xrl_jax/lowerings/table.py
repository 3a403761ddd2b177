"""The table of lowerings: for every operator, the ways in which it can become lax code.

`Node.lowering` indexes the operator's row. Entry 0 is the plain form; a new form goes to the end
of its row, for the indices are part of saved programs and of the keys under which timings are
stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax

from xrl_jax.graph import ops
from xrl_jax.graph.graph import GraphError, Node
from xrl_jax.libraries.onednn import calls as onednn
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.calls import NOTHING, Epilogue
from xrl_jax.lowerings.conv import CONV
from xrl_jax.lowerings.dot import DOT
from xrl_jax.lowerings.plain import PLAIN, Lowering
from xrl_jax.lowerings.pool import REDUCE_SUM, SOFTMAX, WINDOW

_FORMS: dict[str, tuple[Lowering, ...]] = {
    "conv": CONV,
    "dot": DOT,
    "window_sum": WINDOW,
    "window_max": WINDOW,
    "window_min": WINDOW,
    "reduce_sum": REDUCE_SUM,
    "softmax": SOFTMAX,
}

LOWERINGS: Mapping[str, tuple[Lowering, ...]] = MappingProxyType(
    {name: (PLAIN[name], *_FORMS.get(name, ())) for name in ops.OPS}
)


def applicable(node: Node, args: tuple[Node, ...]) -> tuple[int, ...]:
    """Indices of the lowerings that are right for the node with these arguments; always 0."""
    return tuple(
        i for i, form in enumerate(LOWERINGS[node.op]) if i == 0 or form.applies(node, args)
    )


def is_offered(name: str) -> bool:
    """Whether the form of this name is worth a trial here: a library's is XLA's where that is not
    there.
    """
    return not name.startswith("onednn") or onednn.available()


def in_partition(name: str) -> bool:
    """Whether the form of this name becomes part of a call of the library; see `dnnl.partition`."""
    return name.startswith(("onednn", "winograd")) and library() is not None


def absorbs(node: Node, args: tuple[Node, ...]) -> bool:
    """Whether the chosen lowering takes an epilogue; see `epilogue`."""
    return _chosen(node).absorbs(node, args)


def lower(node: Node, *arrays: jax.Array, epilogue: Epilogue = NOTHING) -> jax.Array:
    """The node's value through its chosen lowering; with an epilogue where that absorbs one."""
    more = {} if epilogue is NOTHING else {"epilogue": epilogue}
    return _chosen(node).fn(node, *arrays, **more)


def _chosen(node: Node) -> Lowering:
    forms = LOWERINGS[node.op]
    if not 0 <= node.lowering < len(forms):
        raise GraphError(
            f"operator {node.op!r} has {len(forms)} lowerings, "
            f"a node asks for number {node.lowering}"
        )
    return forms[node.lowering]
