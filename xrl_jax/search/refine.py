"""Refinement: other forms for operators of the fastest program, judged by timing it whole.

A region's own time is not its time in the network: caches are warm or cold, a producer is fused or
not. So, with the time that is left, equal operators change their form together, the most promising
change first, and what makes the whole program faster stays. This is coordinate descent on measured
programs, from where the search has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.backends.lowerings import LOWERINGS, applicable
from xrl_jax.cost import roofline
from xrl_jax.cost.model import Oracle
from xrl_jax.cost.programs import Timed, program_job
from xrl_jax.cost.roofline import CostTable
from xrl_jax.cost.timing import Stopwatch, Timing, plain_ctrl_c
from xrl_jax.cost.worker import Job
from xrl_jax.graph.graph import TensorGraph, nodes_of
from xrl_jax.graph.program import Program
from xrl_jax.rewrite.rule import Rule, Term
from xrl_jax.search.base import Step
from xrl_jax.search.greedy import is_lowering

_PLAIN = "xla"  # the name of lowering 0
_GAIN = 0.99  # of the program's time must be left at most, for a change to stay
_HOPE = 2.0  # a form is tried if the model gives it at most this many times the present one's time
_SHARE = 2e-3  # of the program's time, at least, for operators to be worth a trial
_TURNS = 12  # a program and its rival are timed for about as many runs each
_SECONDS = (0.3, 1.5)  # least and most for one trial, compiling apart


class Change(NamedTuple):
    """Another form for all operators that are equal in the program."""

    places: tuple[tuple[int, int], ...]  # (graph, slot)
    lowering: int
    rule: str
    text: str
    gain: float  # predicted seconds of one run of the program


def forms_by_rule(rules: Sequence[Rule]) -> dict[tuple[str, str], str]:
    """The rule that chooses a form, by operator and lowering."""
    chosen: dict[tuple[str, str], str] = {}
    for rule in rules:
        for term in rule.rhs:
            if is_lowering(rule.family) and isinstance(term, Term):
                chosen.setdefault((term.op, term.lowering or _PLAIN), rule.name)
    return chosen


@jax.jit
def _costs_as(costs: CostTable, graph: TensorGraph, lowering: jax.Array) -> jax.Array:
    """Seconds [N] of all nodes if each had this lowering."""
    nodes = graph.nodes._replace(lowering=jnp.full_like(graph.nodes.lowering, lowering))
    return roofline.seconds(costs, roofline.view_graph(graph._replace(nodes=nodes)))


@jax.jit
def _signatures(graph: TensorGraph) -> jax.Array:
    return roofline.signature(roofline.view_graph(graph))


def changes(oracle: Oracle, rules: Sequence[Rule], program: Program) -> list[Change]:
    """Changes worth a trial, the most promising first, as the model has it."""
    chosen = forms_by_rule(rules)
    costs = oracle.table()
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    forms: dict[tuple[int, int], tuple[Any, tuple[int, ...]]] = {}
    present: dict[tuple[int, int], float] = {}
    other: dict[tuple[tuple[int, int], int], float] = {}
    total = 0.0
    for g, (graph, count) in enumerate(zip(program.graphs, program.counts, strict=True)):
        nodes, _, slots = nodes_of(graph)
        keys = np.asarray(_signatures(graph))
        weight_only = np.asarray(graph.nodes.weight_only)
        now = np.asarray(roofline.priced(costs, graph).nodes.cost)
        total += count * float(now.sum())
        as_form = {}
        for node, slot in zip(nodes, slots, strict=True):
            if len(LOWERINGS[node.op]) == 1 or weight_only[slot]:
                continue
            key = (int(keys[slot][0]), int(keys[slot][1]))
            groups.setdefault(key, []).append((g, slot))
            if key not in forms:
                fit = applicable(node, tuple(nodes[a] for a in node.args))
                forms[key] = node, fit
            present[key] = present.get(key, 0.0) + count * float(now[slot])
            for form in forms[key][1]:
                if form not in as_form:
                    as_form[form] = np.asarray(_costs_as(costs, graph, jnp.int32(form)))
                at = (key, form)
                other[at] = other.get(at, 0.0) + count * float(as_form[form][slot])
    found = []
    for key, (node, fit) in forms.items():
        if present[key] < _SHARE * total:
            continue
        for form in fit:
            name = LOWERINGS[node.op][form].name
            rule = chosen.get((node.op, name))
            if form == node.lowering or rule is None or other[key, form] > _HOPE * present[key]:
                continue
            text = f"{node.op}[{','.join(map(str, node.shape))}]"
            gain = present[key] - other[key, form]
            found.append(Change(tuple(groups[key]), form, rule, text, gain))
    return sorted(found, key=lambda c: -c.gain)


def changed(program: Program, change: Change) -> Program:
    """The program with the change made."""
    graphs = list(program.graphs)
    for g, slot in change.places:
        nodes = graphs[g].nodes
        lowering = nodes.lowering.at[slot].set(change.lowering)
        graphs[g] = graphs[g]._replace(nodes=nodes._replace(lowering=lowering))
    return program.with_graphs(graphs)


def _faster(oracle: Oracle, job: Job, incumbent: Job, run_seconds: float) -> Timing | None:
    """The job's timing against the incumbent if it gains, and does so again when timed for longer:
    of many changes that gain nothing, some seem to.
    """
    once = float(np.clip(2 * _TURNS * run_seconds, *_SECONDS))
    timing = None
    for turn in range(2):
        timing = oracle.time_against(
            job, incumbent, turn=turn, seconds_per_job=(1 + turn) * once, timeout=60.0
        )
        if not timing.ok or timing.relative is None or timing.relative > _GAIN:
            return None
    return timing


def refine(
    oracle: Oracle,
    rules: Sequence[Rule],
    start: Timed,
    clock: Stopwatch,
    *,
    measurements: int | None = None,
    tell: Callable[[str], Any] = lambda _: None,
) -> tuple[Timed, tuple[Step, ...]]:
    """The program after all changes that make it faster, with its timing, and these changes.

    Goes through the changes once, and again after those that stayed, until none stays or the clock
    has run out. Ctrl-C keeps what has been found.

    Args:
      start: the program, with a timing relative to the original.
      measurements: bound for all that the oracle may measure; None for no bound.
    """
    best, steps = start, []
    tried: set[tuple[tuple[tuple[int, int], ...], int]] = set()
    if not start.timing.ok or start.timing.relative is None:
        return best, ()
    try:
        with plain_ctrl_c():
            incumbent = program_job(best.program, best.options, constants=oracle.constants)
            while True:
                todo = [c for c in changes(oracle, rules, best.program) if c[:2] not in tried]
                stayed = False
                for n, change in enumerate(todo):
                    spent = oracle.spending.measurements
                    if clock.done or (measurements is not None and spent >= measurements):
                        return best, tuple(steps)
                    tell(f"refining ({n + 1} of {len(todo)})")
                    tried.add(change[:2])
                    after = changed(best.program, change)
                    job = program_job(after, best.options, constants=oracle.constants)
                    timing = _faster(oracle, job, incumbent, best.timing.seconds)
                    if timing is None:
                        continue
                    ratio, before = timing.relative, best.timing
                    gain = before.seconds * (1.0 - ratio)  # type: ignore[operator]
                    relative = before.relative * ratio  # type: ignore[operator]
                    timing = replace(timing, relative=relative)
                    best = Timed(after, best.options, timing, best.index)
                    steps.append(Step(change.places[0][0], change.rule, change.text, gain))
                    incumbent, stayed = job, True
                    break
                if not stayed:
                    return best, tuple(steps)
    except KeyboardInterrupt:
        tell("interrupted")
        return best, tuple(steps)
