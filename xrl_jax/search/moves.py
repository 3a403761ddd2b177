"""Moves of the refinement: each gives all equal operators of a program another lowering."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost.model import Oracle, price
from xrl_jax.cost.roofline import CostTable
from xrl_jax.cost.view import signature, view_graph
from xrl_jax.graph.graph import TensorGraph, nodes_of
from xrl_jax.language.rule import Rule
from xrl_jax.lower.table import LOWERINGS, applicable
from xrl_jax.program.program import Program
from xrl_jax.runtime.engine_jit import engine_jit

_HOPE = 1.5  # a lowering is tried if it is predicted to take at most this many times as long
_SHARE = 2e-3  # least share of the program's time that operators must take to be worth a trial


class Move(NamedTuple):
    """A change of the lowering of all operators that are equal in the program."""

    places: tuple[tuple[int, int], ...]  # (graph, slot)
    lowering: int
    rule: str
    text: str
    gain: float  # expected seconds saved in one run of the program
    ratio: float  # expected time of these operators after the move / before it


def chooses_lowering(rule: Rule) -> bool:
    """Return whether a rule only chooses a lowering."""
    return rule.lowering is not None


def rules_by_choice(rules: Sequence[Rule]) -> dict[tuple[str, str], str]:
    """Return the name of the rule that chooses a lowering, by (operator, lowering)."""
    chosen: dict[tuple[str, str], str] = {}
    for rule in rules:
        if rule.lowering is not None:
            chosen.setdefault(rule.lowering, rule.name)
    return chosen


@engine_jit
def _costs_as(costs: CostTable, graph: TensorGraph, lowering: jax.Array) -> jax.Array:
    """Return the seconds [N] of each node if it had this lowering, the others unchanged."""
    view = view_graph(costs.sharing, graph)
    return costs.costs(view._replace(lowering=jnp.full_like(view.lowering, lowering)))


@engine_jit
def _signatures(costs: CostTable, graph: TensorGraph) -> jax.Array:
    return signature(view_graph(costs.sharing, graph))


def moves_of(oracle: Oracle, rules: Sequence[Rule], program: Program) -> list[Move]:
    """Return the moves that are worth a trial according to the cost model.

    Moves of the most promising operators come first. Those of the same operators are adjacent, so
    that the program they are compared with is compiled once.
    """
    chosen = rules_by_choice(rules)
    costs = oracle.costs
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    choices: dict[tuple[int, int], tuple[Any, tuple[int, ...]]] = {}
    current_seconds: dict[tuple[int, int], float] = {}
    other_seconds: dict[tuple[tuple[int, int], int], float] = {}
    total = 0.0
    for g, (graph, count) in enumerate(zip(program.graphs, program.counts, strict=True)):
        nodes, _, slots = nodes_of(graph)
        keys = np.asarray(_signatures(costs, graph))
        weight_only = np.asarray(graph.nodes.weight_only)
        now = np.asarray(price(costs, graph)[0].nodes.cost)
        total += count * float(now.sum())
        costs_by_lowering = {}
        for node, slot in zip(nodes, slots, strict=True):
            if len(LOWERINGS[node.op]) == 1 or weight_only[slot]:
                continue
            key = (int(keys[slot][0]), int(keys[slot][1]))
            groups.setdefault(key, []).append((g, slot))
            if key not in choices:
                fit = applicable(node, tuple(nodes[a] for a in node.args))
                choices[key] = node, fit
            current_seconds[key] = current_seconds.get(key, 0.0) + count * float(now[slot])
            for lowering in choices[key][1]:
                if lowering not in costs_by_lowering:
                    changed_costs = _costs_as(costs, graph, jnp.int32(lowering))
                    costs_by_lowering[lowering] = np.asarray(changed_costs)
                at, seconds = (key, lowering), float(costs_by_lowering[lowering][slot])
                other_seconds[at] = other_seconds.get(at, 0.0) + count * seconds
    found = []
    for key, (node, fit) in choices.items():
        if current_seconds[key] < _SHARE * total:
            continue
        for lowering in fit:
            before, after = current_seconds[key], other_seconds[key, lowering]
            rule = chosen.get((node.op, LOWERINGS[node.op][lowering].name))
            if lowering == node.lowering or rule is None or after > _HOPE * before:
                continue
            text = f"{node.op}[{','.join(map(str, node.shape))}]"
            gain, ratio = before - after, after / before
            found.append(Move(tuple(groups[key]), lowering, rule, text, gain, ratio))
    largest_gain: dict[tuple[tuple[int, int], ...], float] = {}
    for c in sorted(found, key=lambda c: -c.gain):
        largest_gain.setdefault(c.places, c.gain)
    return sorted(found, key=lambda c: (-largest_gain[c.places], c.places, -c.gain))


def by_lowering(found: Iterable[Move], *, least: int, ratio: float) -> list[list[Move]]:
    """Return the moves grouped by lowering, the most promising lowering first.

    A group has the moves with a `Move.ratio` of at most `ratio`, and is left out if these are fewer
    than `least`. A lowering can be good or bad in the whole program in ways that no region shows
    (what a library leaves in the caches, how it shares the threads), and equally so for all
    operators that take it.
    """
    by_rule: dict[str, list[Move]] = {}
    for move in found:
        if move.ratio <= ratio:
            by_rule.setdefault(move.rule, []).append(move)
    large = [group for group in by_rule.values() if len(group) >= least]
    return sorted(large, key=lambda group: -sum(c.gain for c in group))


def moved(program: Program, made: Iterable[Move]) -> Program:
    """Return the program after these moves."""
    graphs = list(program.graphs)
    for move in made:
        for g, slot in move.places:
            nodes = graphs[g].nodes
            lowering = nodes.lowering.at[slot].set(move.lowering)
            graphs[g] = graphs[g]._replace(nodes=nodes._replace(lowering=lowering))
    return program.with_graphs(graphs)
