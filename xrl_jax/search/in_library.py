"""A program with all of its kernels in one library: what needs no search.

Where a library takes many kernels in one call, no kernel's own time tells what it is worth there:
one alone may lose what it costs to enter the library, and what is saved between those that share a
call is nobody's. So the form is made at once, without a prediction, and judged by timing it whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from xrl_jax.graph.graph import Node, nodes_of
from xrl_jax.graph.program import Program
from xrl_jax.language.rule import Rule
from xrl_jax.libraries.onednn import winograd
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.lowerings.plain import conv_layouts
from xrl_jax.lowerings.table import LOWERINGS, applicable, in_partition
from xrl_jax.search.base import Step
from xrl_jax.search.changes import forms_by_rule
from xrl_jax.search.states import place_text

_FORM = "onednn"
# So many tiles make matrices that products are fast on; the largest tiles first, which take the
# fewest products.
_LEAST_TILES = 25
_TILES = tuple(sorted(winograd.TILES, reverse=True))
# Products that each number of a tile takes part in, at least: moving tiles costs more than they
# save where images have few features; twice as many where the tiles are more than a cache holds.
_LEAST_PRODUCTS, _CACHED_BYTES = 10, 6 << 20


def in_library(program: Program, rules: Sequence[Rule]) -> tuple[Program, tuple[Step, ...]]:
    """The program with every convolution and product of activations in a form of the library, as
    far as rules choose it, and the steps there; the same and none where there is no library.

    Convolutions are Winograd's where that applies and images are large enough for its tiles.
    """
    chosen = forms_by_rule(rules)
    if library() is None:
        return program, ()
    graphs, steps = [], []
    for index, graph in enumerate(program.graphs):
        f = graph.nodes
        lowering, weight_only = np.array(f.lowering), np.asarray(f.weight_only)
        places = [np.asarray(v) for v in (f.op, f.shape, f.rank)]
        nodes, _, slots = nodes_of(graph)
        for node, slot in zip(nodes, slots, strict=True):
            names = [form.name for form in LOWERINGS[node.op]]
            if _FORM not in names or weight_only[slot] or in_partition(names[node.lowering]):
                continue
            args = [nodes[a] for a in node.args]
            fit = {names[i] for i in applicable(node, tuple(args))}
            wanted = [f for f in _preferred(node, args) if f in fit and (node.op, f) in chosen]
            if not wanted:
                continue
            lowering[slot] = names.index(wanted[0])
            text = place_text(slot, *(v[slot] for v in places))
            steps.append(Step(index, chosen[node.op, wanted[0]], text, 0.0))
        graphs.append(graph._replace(nodes=f._replace(lowering=jnp.asarray(lowering))))
    return program.with_graphs(graphs), tuple(steps)


def _preferred(node: Node, args: Sequence[Node]) -> list[str]:
    """Forms of the library, the best first, whether or not they apply."""
    if node.op != "conv":
        return [_FORM]
    image, _, result = conv_layouts(node)
    batch, made, *spatial = (node.shape[d] for d in result)
    taken = args[0].shape[image[1]]
    found = []
    for m in _TILES:
        tiles = batch * math.prod(-(-n // m) for n in spatial)
        moved = 4 * tiles * (m + winograd.KERNEL - 1) ** 2 * (taken + made)
        least = _LEAST_PRODUCTS * (1 if moved <= _CACHED_BYTES else 2)
        if tiles >= _LEAST_TILES and taken * made >= least * (taken + made):
            found.append(f"winograd{m}")
    return [*found, _FORM]
