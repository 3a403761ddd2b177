"""Openings: programs to begin a search from, a long way off the original.

Convolutions run fastest features last on most machines, but a network converts only as a whole: one
operator's conversion costs two transposes, which cancel once its neighbours have followed. A
descent does not get there and a queue gets there late, so the conversion is made at once, by the
rules that any search has: scales and shifts are folded into weights, convolutions are converted,
then transposes are moved down until they meet and cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from xrl_jax.cost.roofline import CostTable
from xrl_jax.cost.timing import Stopwatch
from xrl_jax.graph.program import Program
from xrl_jax.rewrite.interface import features_last
from xrl_jax.rewrite.rule import Rule
from xrl_jax.rewrite.table import CompiledRules
from xrl_jax.search.base import Reached, Step, assemble
from xrl_jax.search.states import Space, State, in_one_bucket

_FOLD = "fold"  # the family that moves scales and shifts into weights
# Rules that move broadcasts of weights down, so that a vector is a vector until it meets an image.
_JOINS = ("-of-broadcast", "-of-broadcasts", "-of-broadcast-scalar")
_JOINS_ONLY = ("broadcast-broadcast", "sub-bias", "div-scale")
_CONVERTS = ("conv-to-nhwc",)
# Rules with a transpose above on the left and below on the right. Each makes the sum of the
# transposes' distances to the outputs smaller, so that they come to an end.
_SINKS = ("-pull-transpose", "-pull-transposes", "-pull-transpose-scalar", "-transpose-broadcast")
_SINKS_ONLY = (
    "concat-of-transposes",
    "pad-of-transpose",
    "slice-of-transpose",
    "softmax-of-transpose",
    "transpose-of-broadcast",
    "transpose-transpose",
    "transpose-away",
    *(f"reduce_{r}-of-transpose" for r in ("sum", "max", "min")),
    *(f"window_{r}-of-transpose" for r in ("sum", "max", "min")),
)
_PASSES = 64  # a transpose moves past one operator in a pass


class Opening(NamedTuple):
    """A program to start from and the rewrites that led to it."""

    program: Program
    steps: tuple[Step, ...] = ()


def entries_of(rules: CompiledRules, wanted: Callable[[Rule], bool]) -> np.ndarray:
    """[E] bool: which entries of the rule table belong to wanted rules."""
    fits = np.array([wanted(r) for r in rules.rules], bool)
    rule_of = np.asarray(rules.table.entry_rule)
    return fits[rule_of] & (rule_of >= 0)


def sweep(
    space: Space,
    reached: Reached,
    index: int,
    costs: CostTable,
    allowed: np.ndarray,
    clock: Stopwatch,
    *,
    gain: bool = False,
) -> Reached:
    """Apply every candidate of the allowed entries [E] until there is none or the clock has run
    out: whatever it costs, or with `gain` only where it gains.
    """
    state, steps = reached
    for _ in range(_PASSES):
        if clock.done:
            break
        state = space.matched(state)
        moves = space.moves(state, costs).among(allowed)
        taken = 0
        candidates = zip(moves.entry, moves.root, moves.partner, moves.delta, strict=True)
        for entry, root, partner, delta in candidates:
            if clock.done:
                return state, steps
            if gain and delta >= 0:
                break  # the cheapest come first
            after = space.step(state, costs, int(entry), int(root), int(partner))
            if after is None:  # an earlier one of this pass changed what it matched
                continue
            step = _step(space, state, after, index, int(entry), int(root))
            grown = after.graph.nodes.op.shape != state.graph.nodes.op.shape
            state, steps, taken = after, [*steps, step], taken + 1
            if grown:
                break  # slots moved with the bucket: find the candidates again
        if not taken:
            break
    return state, steps


def _step(space: Space, before: State, after: State, index: int, entry: int, root: int) -> Step:
    gain = before.seconds - after.seconds
    return Step(index, space.rule_name(entry), space.place(before, root), gain)


def openings(
    program: Program, rules: CompiledRules, costs: CostTable, clock: Stopwatch
) -> list[Opening]:
    """Where a search may begin, the most promising first: with convolutions features last and
    transposes only where nothing cancels them (left out where no convolution changes, or the rules
    for it are switched off), and as the program is; both with scales and shifts folded.
    """
    joins = entries_of(rules, lambda r: r.name in _JOINS_ONLY or r.name.endswith(_JOINS))
    folds = entries_of(rules, lambda r: r.family == _FOLD)
    converts = entries_of(rules, lambda r: r.name in _CONVERTS)
    sinks = entries_of(rules, lambda r: r.name in _SINKS_ONLY or r.name.endswith(_SINKS))

    def through(start: Program, *sweeps: tuple[np.ndarray, bool]) -> tuple[Opening, list[int]]:
        """The opening that sweeps lead to, and how many steps each took."""
        space = Space(rules, jnp.asarray(start.digests()))
        graphs, steps, taken = {}, [], [0] * len(sweeps)
        for index, graph in enumerate(in_one_bucket(start)):
            reached: Reached = (space.start(graph, costs), [])
            for n, (allowed, gain) in enumerate(sweeps):
                before = len(reached[1])
                reached = sweep(space, reached, index, costs, allowed, clock, gain=gain)
                taken[n] += len(reached[1]) - before
            graphs[index] = reached[0].graph
            steps += reached[1]
        return Opening(assemble(start, graphs), tuple(steps)), taken

    fold = (joins, False), (folds, True)
    folded, _ = through(program, *fold)
    if not converts.any():
        return [folded]
    turn = (converts, False), (sinks, False)
    last, (*_, converted, _) = through(features_last(program), *fold, *turn)
    return [last, folded] if converted else [folded]
