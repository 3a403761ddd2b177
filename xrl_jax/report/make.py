"""Makes a report from the results of the parts of `optimize`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jaxlib.version

from xrl_jax.accept.accept import Acceptance
from xrl_jax.cost.model import Oracle
from xrl_jax.graph.graph import nodes_of
from xrl_jax.language.rule import Rule
from xrl_jax.program.program import Program
from xrl_jax.report.text import Report
from xrl_jax.search.base import SearchResult, Strategy, predicted
from xrl_jax.search.chain import changed_settings, name_of, settings


def make_report(
    *,
    name: str,
    strategy: Strategy,
    seed: int | None,
    program: Program,
    found: SearchResult,
    accepted: Acceptance,
    rules: Sequence[Rule],
    oracle: Oracle,
    search_seconds: float,
    total_seconds: float,
) -> Report:
    """Return the report of one optimisation.

    Args:
      program: the original.
      rules: the rules available to the search.
      oracle: the cost oracle in its final state.
    """
    chosen, spending, target = accepted.candidate, oracle.spending, oracle.target
    measured = max(spending.measure_seconds - spending.compile_seconds, 0.0)
    speedup = accepted.speedup
    fired = {step.rule for step in chosen.steps}
    # Inside a domain operands are finite.
    no_domain = accepted.domain is None
    assumed = tuple(
        r.name
        for r in rules
        if r.name in fired and ("finite" in r.assumes or (r.assumes and no_domain))
    )
    return Report(
        name=name,
        search=name_of(strategy),
        settings=settings(strategy, oracle.config),
        changed_settings=changed_settings(strategy, oracle.config),
        seed=seed,
        machine=f"{target.cpu}, {target.device}, {target.threads} threads",
        versions=f"jax {jax.__version__}, jaxlib {jaxlib.version.__version__}",
        options=chosen.options,
        used="optimized" if accepted.used else "original",
        reason=accepted.reason,
        stop_reason=found.stop,
        baselines=accepted.baselines,
        baseline_name=accepted.baseline,
        optimized=accepted.optimised,
        speedup=speedup.value if accepted.used else 1.0,
        interval=(speedup.low, speedup.high) if accepted.used else (1.0, 1.0),
        traced_speedup=accepted.traced_speedup,
        noise_interval=(accepted.noise.low, accepted.noise.high),
        max_error=accepted.accuracy.error,
        reference_error=accepted.accuracy.original_error,
        tolerance=accepted.accuracy.tolerance,
        assumed=assumed if accepted.used else (),
        domain=accepted.domain if accepted.used else None,
        narrow=accepted.accuracy.narrow,
        weight_bytes_added=accepted.weight_bytes_added,
        predicted_ms_before=1e3 * predicted(program, oracle.costs),
        predicted_ms_after=1e3 * predicted(chosen.program, oracle.costs),
        steps=chosen.steps,
        history=found.history,
        frontier=found.frontier,
        note=found.note,
        nodes_before=n_nodes(program),
        nodes_after=n_nodes(chosen.program),
        body_counts=program.counts[1:],
        candidates=found.candidates,
        measurements=spending.measurements,
        from_store=spending.from_store,
        failures=spending.failures,
        compile_seconds=spending.compile_seconds,
        measure_seconds=measured,
        search_seconds=max(search_seconds - spending.measure_seconds, 0.0),
        total_seconds=total_seconds,
    )


def n_nodes(program: Program) -> int:
    """Return the number of live nodes in all graphs, each body counted once."""
    return sum(len(nodes_of(g)[0]) for g in program.graphs)
