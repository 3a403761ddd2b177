"""Starting points: programs to begin a search from, a long way off the original.

Convolutions run fastest features last on most machines, and products with a weight often with the
weight on the left and features first, but a network converts only as a whole: one operator's
conversion costs two transposes, which cancel once its neighbours have followed. A descent does not
get there and a queue gets there late, so the conversion is made at once, by the rules that any
search has: scales and shifts are folded into weights, operators are converted, then transposes are
moved down until they meet and cancel. Rules say themselves which part they take in that
(`language.rule.Role`), so that a user's own take it, too.

Where a library takes many kernels in one call, one starting point has all of its kernels
(`search.in_library`), and the others those that are predicted to gain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from xrl_jax.cost.model import price
from xrl_jax.cost.roofline import CostTable
from xrl_jax.graph import ops
from xrl_jax.graph.graph import TensorGraph, args_of
from xrl_jax.language.rule import Role
from xrl_jax.language.table import CompiledRules
from xrl_jax.libraries.registry import by_name
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.program.program import Program
from xrl_jax.search.base import Step, assemble
from xrl_jax.search.in_library import in_library
from xrl_jax.search.run import Reached
from xrl_jax.search.states import Space, entries_of, in_one_bucket
from xrl_jax.transform.layout import FEATURES_FIRST, FEATURES_LAST, Layout, laid_out

_STORED_BY_OUTPUT = ("dot", "flat")  # the lowering that stores a weight on the left [out, in]
_PASSES = 64  # a transpose moves past one operator in a pass
_WORTH = 0.1  # of the program's predicted time, for products with weights to be worth a conversion


class StartingPoint(NamedTuple):
    """A program to start from and the rewrites that led to it."""

    program: Program
    steps: tuple[Step, ...] = ()


def with_layout(program: Program, layout: Layout) -> StartingPoint:
    """The program in this layout, with a step that says so; as it is where that concerns nothing.

    It is no rule's step: what crosses the border of a folded body is turned on both sides at once.
    """
    there = laid_out(program, layout)
    if there is program:
        return StartingPoint(program)
    step = Step(0, f"laid-out-{layout.name}", "values at the borders of graphs", 0.0)
    return StartingPoint(there, (step,))


class MacroAction(NamedTuple):
    """Rewriting to a fixpoint: candidates that are applied until there is none.

    Attributes:
      variants: [V] bool, of these variants of the rule table.
      gain: only where they gain; else whatever they cost.
      roots: [N] bool for a graph, only at these nodes; at all of them for None.
    """

    variants: np.ndarray
    gain: bool = False
    roots: Callable[[TensorGraph], np.ndarray] | None = None


def in_role(rules: CompiledRules, *roles: Role) -> np.ndarray:
    """[V] bool: which variants of the rule table belong to rules with one of these roles."""
    return entries_of(rules, lambda r: not set(roles).isdisjoint(r.roles))


def run_macro(
    space: Space,
    reached: Reached,
    index: int,
    costs: CostTable,
    macro: MacroAction,
    clock: Stopwatch,
) -> Reached:
    """The state after a macro-action, or where the clock ran out."""
    state, steps = reached
    for _ in range(_PASSES):
        if clock.done:
            break
        state = space.matched(state)
        candidates = space.candidates(state, costs, macro.variants)
        wanted = np.ones(len(candidates.variant), bool)
        if macro.gain:
            wanted &= candidates.delta < 0
        if macro.roots:
            wanted &= macro.roots(state.graph)[candidates.root]
        chosen = np.flatnonzero(wanted)
        columns = (candidates.variant[chosen], candidates.root[chosen], candidates.partner[chosen])
        listed = list(zip(*(c.tolist() for c in columns), strict=True))
        after, taken = space.steps(state, costs, listed)
        for i in taken:
            variant, root, _ = listed[i]
            gain = -float(candidates.delta[chosen[i]])
            steps = [*steps, Step(index, space.rule_name(variant), space.place(state, root), gain)]
        state = after
        if not taken:
            break
    return state, steps


def _with_weight(graph: TensorGraph, side: int) -> np.ndarray:
    """[N] bool: products of an activation with a weight on this side (0 left, 1 right)."""
    fixed = np.asarray(graph.nodes.weight_only)
    args = np.asarray(args_of(graph))
    is_dot = np.asarray(graph.nodes.op) == ops.OPS["dot"].code
    return is_dot & fixed[args[:, side]] & ~fixed[args[:, 1 - side]]


def _weight_left(graph: TensorGraph) -> np.ndarray:
    return _with_weight(graph, 0)


def _weight_right(graph: TensorGraph) -> np.ndarray:
    return _with_weight(graph, 1)


def _share_on_weights(program: Program, costs: CostTable) -> float:
    """How much of the program's predicted time goes to products with weights."""
    there, total = 0.0, 0.0
    for graph, count in zip(in_one_bucket(program), program.counts, strict=True):
        cost = count * np.asarray(price(costs, graph)[0].nodes.cost)
        there += float(cost[_weight_right(graph)].sum())
        total += float(cost.sum())
    return there / max(total, 1e-12)


def starting_points(
    program: Program, rules: CompiledRules, costs: CostTable, clock: Stopwatch
) -> list[StartingPoint]:
    """Where a search may begin, the most promising first: with all kernels in the library, with
    convolutions features last, with products with weights features first (each with transposes only
    where nothing cancels them), each left out where it changes or gains nothing, or its rules are
    switched off; and as the program is, all with scales and shifts folded.
    """
    # Before folds: vectors reach the operators that they are added to or multiplied by as vectors,
    # not as images of them. Then what is added or multiplied after an operator is in its weights.
    readies = in_role(rules, "sink-broadcast", "to-bias-or-scale")
    folds = in_role(rules, "fold-into-weights")
    # The two conversions: of convolutions, and of products with a weight on the right.
    converts = in_role(rules, "to-features-last")
    turns = in_role(rules, "transpose-product")
    # What becomes of the transposes that they made. Each that sinks one makes the sum of their
    # distances to the outputs smaller, so that they come to an end.
    sinks = in_role(rules, "sink-transpose")
    cancels = in_role(rules, "cancel-transpose")
    absorbs = in_role(rules, "absorb-transpose")
    stores = entries_of(rules, lambda r: r.lowering == _STORED_BY_OUTPUT)

    def through(start: StartingPoint, *macros: MacroAction) -> tuple[StartingPoint, list[int]]:
        """The starting point that macro-actions lead to, and how many steps each took."""
        space = Space(rules, jnp.asarray(start.program.digests()))
        graphs, steps, taken = {}, list(start.steps), [0] * len(macros)
        for index, graph in enumerate(in_one_bucket(start.program)):
            reached: Reached = (space.start(graph, costs), [])
            for n, macro in enumerate(macros):
                before = len(reached[1])
                reached = run_macro(space, reached, index, costs, macro, clock)
                taken[n] += len(reached[1]) - before
            graphs[index] = reached[0].graph
            steps += reached[1]
        return StartingPoint(assemble(start.program, graphs), tuple(steps)), taken

    library = costs.sharing.library  # rules choose the lowering that is called like it
    kernels = entries_of(rules, lambda r: r.lowering is not None and r.lowering[1] == library)
    fold = MacroAction(readies), MacroAction(folds, gain=True)
    kernels_last = MacroAction(kernels, gain=True)
    found = []
    folded, _ = through(StartingPoint(program), *fold)
    handed, steps = in_library(
        folded.program, rules.rules, None if library is None else by_name(library)
    )
    found += [StartingPoint(handed, (*folded.steps, *steps))] if steps else []
    if converts.any():
        start = with_layout(program, FEATURES_LAST)
        point, taken = through(
            start, *fold, MacroAction(converts), MacroAction(sinks | cancels), kernels_last
        )
        found += [point] if taken[2] else []
    if turns.any() and _share_on_weights(program, costs) > _WORTH:
        start = with_layout(program, FEATURES_FIRST)
        down = sinks | absorbs
        # What is turned at a source is turned back next to it: first the others must meet it.
        point, taken = through(
            start,
            *fold,
            MacroAction(turns, roots=_weight_right),
            MacroAction(down),
            MacroAction(down | cancels),
            MacroAction(stores, roots=_weight_left),
            kernels_last,
        )
        found += [point] if taken[2] else []
    as_it_is, _ = through(folded, kernels_last)
    return [*found, as_it_is]
