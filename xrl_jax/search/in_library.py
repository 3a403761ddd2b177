"""A program with all of its kernels in one library: what needs no search.

Where a library takes many kernels in one call, no kernel's own time tells what it is worth there:
one alone may lose what it costs to enter the library, and what is saved between those that share a
call is nobody's. So the form is made at once, without a prediction, and judged by timing it whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from xrl_jax.backends.dnnl.library import library
from xrl_jax.backends.lowerings import LOWERINGS, applicable
from xrl_jax.graph.graph import nodes_of
from xrl_jax.graph.program import Program
from xrl_jax.rewrite.rule import Rule
from xrl_jax.search.base import Step
from xrl_jax.search.changes import forms_by_rule
from xrl_jax.search.states import place_text

_FORM = "onednn"


def in_library(program: Program, rules: Sequence[Rule]) -> tuple[Program, tuple[Step, ...]]:
    """The program with every convolution and product of activations in the form of the library, as
    far as rules choose it, and the steps there; the same and none where there is no library.
    """
    chosen = {op: rule for (op, form), rule in forms_by_rule(rules).items() if form == _FORM}
    if library() is None or not chosen:
        return program, ()
    graphs, steps = [], []
    for index, graph in enumerate(program.graphs):
        f = graph.nodes
        lowering, weight_only = np.array(f.lowering), np.asarray(f.weight_only)
        places = [np.asarray(v) for v in (f.op, f.shape, f.rank)]
        nodes, _, slots = nodes_of(graph)
        for node, slot in zip(nodes, slots, strict=True):
            if node.op not in chosen or weight_only[slot]:
                continue
            form = [lower.name for lower in LOWERINGS[node.op]].index(_FORM)
            args = tuple(nodes[a] for a in node.args)
            if form == node.lowering or form not in applicable(node, args):
                continue
            lowering[slot] = form
            text = place_text(slot, *(v[slot] for v in places))
            steps.append(Step(index, chosen[node.op], text, 0.0))
        graphs.append(graph._replace(nodes=f._replace(lowering=jnp.asarray(lowering))))
    return program.with_graphs(graphs), tuple(steps)
