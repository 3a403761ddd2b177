"""Starting points: programs far from the original, from which a search begins.

On most machines convolutions run fastest with features last, and products with a weight often with
the weight on the left and features first. But a network gains only when it is converted as a whole:
converting one operator costs two transposes, which cancel only after its neighbours have been
converted. A descent does not get there and a queue gets there late, so the conversion is made at
once, by the rules that any search has: scales and shifts are folded into weights, operators are
converted, then transposes are moved down until they meet and cancel. A rule states its own part in
this (`language.rule.Role`), so that a user's rules take part as well.

Where a library runs many kernels in one call, one starting point has all kernels in that library
(`search.in_library`), and the others have the kernels that are predicted to gain there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from xrl_jax.search.states import Space, in_one_bucket, variants_where
from xrl_jax.transform.layout import FEATURES_FIRST, FEATURES_LAST, Layout, convert_layout

_STORED_BY_OUTPUT = ("dot", "flat")  # the lowering that stores a weight on the left as [out, in]
_PASSES = 64  # most passes of a macro-action
_DOUBLINGS = 4  # siblings are merged in pairs, then pairs of pairs
_NOTHING = 1e-8  # seconds; work on weights, which is done once, is charged about so much
_LEAST_SHARE = 0.1  # share of predicted time above which products with weights are converted


class StartingPoint(NamedTuple):
    """A program to start from and the rewrites that led to it."""

    program: Program
    steps: tuple[Step, ...] = ()


def with_layout(program: Program, layout: Layout) -> StartingPoint:
    """Return the program in this layout, with a step that says so; the program unchanged where the
    layout concerns no value.

    The step belongs to no rule: values that cross the boundary of a folded body are transposed on
    both sides at once.
    """
    there = convert_layout(program, layout)
    if there is program:
        return StartingPoint(program)
    step = Step(0, f"laid-out-{layout.name}", "values at the boundaries of graphs", 0.0)
    return StartingPoint(there, (step,))


class MacroAction(NamedTuple):
    """Rewriting to a fixpoint: candidates are applied until there is none.

    Attributes:
      variants: [V] bool, the variants of the rule table that are applied.
      gain: whether only candidates that cost nothing more are applied, work on weights apart;
        otherwise their cost does not matter.
      passes: most passes; a transpose, for one, moves past one operator in each.
      roots: returns [N] bool, the nodes of a graph at which they are applied; None for all nodes.
    """

    variants: np.ndarray
    gain: bool = False
    passes: int = _PASSES
    roots: Callable[[TensorGraph], np.ndarray] | None = None


def in_role(rules: CompiledRules, *roles: Role) -> np.ndarray:
    """Return [V] bool: which variants of the rule table belong to rules with one of these roles."""
    return variants_where(rules, lambda r: not set(roles).isdisjoint(r.roles))


def run_macro(
    space: Space,
    reached: Reached,
    index: int,
    costs: CostTable,
    macro: MacroAction,
    clock: Stopwatch,
) -> Reached:
    """Return the state after a macro-action, or the state in which the clock ran out."""
    state, steps = reached
    for _ in range(macro.passes):
        if clock.done:
            break
        state = space.matched(state)
        candidates = space.candidates(state, costs, macro.variants)
        wanted = np.ones(len(candidates.variant), bool)
        if macro.gain:
            wanted &= candidates.delta < _NOTHING
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


def siblings_merged(rules: CompiledRules) -> tuple[MacroAction, ...]:
    """Return what merges the products, and the convolutions, of one operand: pairs, then pairs of
    pairs.

    What reads the slices is joined before the next pair is merged: it fits two slices only. Costs
    do not decide: rates that were fitted to small kernels overestimate a larger one.
    """
    merge = MacroAction(in_role(rules, "merge-siblings"), passes=1)
    join = MacroAction(in_role(rules, "join-slices", "sink-broadcast"))
    return (merge, join) * _DOUBLINGS


def _with_weight(graph: TensorGraph, side: int) -> np.ndarray:
    """Return [N] bool: products of an activation with a weight on this side (0 left, 1 right)."""
    fixed = np.asarray(graph.nodes.weight_only)
    args = np.asarray(args_of(graph))
    is_dot = np.asarray(graph.nodes.op) == ops.OPS["dot"].code
    return is_dot & fixed[args[:, side]] & ~fixed[args[:, 1 - side]]


def _weight_left(graph: TensorGraph) -> np.ndarray:
    return _with_weight(graph, 0)


def _weight_right(graph: TensorGraph) -> np.ndarray:
    return _with_weight(graph, 1)


def _share_on_weights(program: Program, costs: CostTable) -> float:
    """Return the share of the predicted time in products with a weight on the right."""
    there, total = 0.0, 0.0
    for graph, count in zip(in_one_bucket(program), program.counts, strict=True):
        cost = count * np.asarray(price(costs, graph)[0].nodes.cost)
        there += float(cost[_weight_right(graph)].sum())
        total += float(cost.sum())
    return there / max(total, 1e-12)


def _after_macros(
    rules: CompiledRules,
    costs: CostTable,
    clock: Stopwatch,
    start: StartingPoint,
    *macros: MacroAction,
) -> tuple[StartingPoint, list[int]]:
    """Return the starting point after the macro-actions, and the number of steps of each."""
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


def starting_points(
    program: Program, rules: CompiledRules, costs: CostTable, clock: Stopwatch
) -> list[StartingPoint]:
    """Return the programs from which a search may begin, the most promising first.

    These are the program with siblings merged (on GPUs), with all kernels in the library, with
    convolutions features last, with products with weights features first (transposes remain only
    where nothing cancels them), and without a conversion; all have scales and shifts folded. A
    conversion is left out where it changes or gains nothing, or where its rules are switched off.
    """
    # Before folding, vectors are brought unbroadcast to the operators that add them or multiply by
    # them. Folding then moves what is added or multiplied after an operator into its weights.
    prepare_rules = in_role(rules, "sink-broadcast", "to-bias-or-scale")
    fold_rules = in_role(rules, "fold-into-weights")
    # The two conversions: of convolutions, and of products with a weight on the right.
    convert_rules = in_role(rules, "to-features-last")
    transpose_rules = in_role(rules, "transpose-product")
    # The rules for the transposes that the conversions made. Sinking a transpose reduces the sum of
    # the transposes' distances to the outputs, so that it terminates.
    sink_rules = in_role(rules, "sink-transpose")
    cancel_rules = in_role(rules, "cancel-transpose")
    absorb_rules = in_role(rules, "absorb-transpose")
    store_rules = variants_where(rules, lambda r: r.lowering == _STORED_BY_OUTPUT)

    apply_macros = partial(_after_macros, rules, costs, clock)
    library = costs.sharing.library  # its kernels are lowerings of this name
    library_rules = variants_where(
        rules, lambda r: r.lowering is not None and r.lowering[1] == library
    )
    fold = MacroAction(prepare_rules), MacroAction(fold_rules, gain=True)
    kernels_last = MacroAction(library_rules, gain=True)
    found = []
    folded, _ = apply_macros(StartingPoint(program), *fold)
    in_lib, steps = in_library(
        folded.program, rules.rules, None if library is None else by_name(library)
    )
    found += [StartingPoint(in_lib, (*folded.steps, *steps))] if steps else []
    if convert_rules.any():
        start = with_layout(program, FEATURES_LAST)
        point, taken = apply_macros(
            start,
            *fold,
            MacroAction(convert_rules),
            MacroAction(sink_rules | cancel_rules),
            kernels_last,
        )
        found += [point] if taken[2] else []
    if transpose_rules.any() and _share_on_weights(program, costs) > _LEAST_SHARE:
        start = with_layout(program, FEATURES_FIRST)
        sink_or_absorb = sink_rules | absorb_rules
        # At a source a transpose and its inverse are adjacent. They must not cancel each other
        # before the other transposes have been moved down to meet them.
        point, taken = apply_macros(
            start,
            *fold,
            MacroAction(transpose_rules, roots=_weight_right),
            MacroAction(sink_or_absorb),
            MacroAction(sink_or_absorb | cancel_rules),
            MacroAction(store_rules, roots=_weight_left),
            kernels_last,
        )
        found += [point] if taken[2] else []
    unconverted, _ = apply_macros(folded, kernels_last)
    if costs.sharing.loops[ops.OPS["slice"].code]:  # where cutting a result costs next to nothing
        merged, taken = apply_macros(unconverted, *siblings_merged(rules))
        found = [merged, *found] if taken[0] else found
    return [*found, unconverted]
