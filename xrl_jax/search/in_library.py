"""Programs with all of their kernels in one library, made without a search.

Where a library runs many kernels in one call, a kernel's own time does not show its value there: a
single kernel may lose more by entering the library than it gains, and the saving between kernels
that share a call belongs to none of them. So such a program is made at once, without a prediction,
and judged by timing it whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from xrl_jax.graph.graph import nodes_of
from xrl_jax.language.rule import Rule
from xrl_jax.libraries.base import Library
from xrl_jax.lower.table import LOWERINGS, applicable, number_of, shares_calls
from xrl_jax.program.program import Program
from xrl_jax.search.base import Step
from xrl_jax.search.moves import rules_by_choice
from xrl_jax.search.states import place_text


def in_library(
    program: Program, rules: Sequence[Rule], library: Library | None
) -> tuple[Program, tuple[Step, ...]]:
    """Return the program with every operator on activations in the lowering that the library
    prefers for it, as far as a rule chooses that lowering, and the steps that lead there.

    The library is one whose kernels share calls; where it is None, return the program itself and no
    steps.
    """
    chosen = rules_by_choice(rules)
    if library is None:
        return program, ()
    graphs, steps = [], []
    for index, graph in enumerate(program.graphs):
        f = graph.nodes
        lowering, weight_only = np.array(f.lowering), np.asarray(f.weight_only)
        places = [np.asarray(v) for v in (f.op, f.shape, f.rank)]
        nodes, _, slots = nodes_of(graph)
        for node, slot in zip(nodes, slots, strict=True):
            if weight_only[slot] or shares_calls(node.op, node.lowering, library):
                continue
            args = tuple(nodes[a] for a in node.args)
            names = [n for n in library.preferred(node, args) if (node.op, n) in chosen]
            fit = applicable(node, args) if names else ()
            numbers = [i for i in (number_of(node.op, n) for n in names) if i in fit]
            if not numbers:
                continue
            lowering[slot] = numbers[0]
            text = place_text(slot, *(v[slot] for v in places))
            rule = chosen[node.op, LOWERINGS[node.op][numbers[0]].name]
            steps.append(Step(index, rule, text, 0.0))
        graphs.append(graph._replace(nodes=f._replace(lowering=jnp.asarray(lowering))))
    return program.with_graphs(graphs), tuple(steps)
