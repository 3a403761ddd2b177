"""Whole programs: compile options to try, jobs for the worker, and the choice among the best few of
a search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xrl_jax.backends.hoist import split
from xrl_jax.cost.model import Oracle, price
from xrl_jax.cost.roofline import CostTable
from xrl_jax.cost.view import CORRECTED
from xrl_jax.graph.graph import nodes_of
from xrl_jax.graph.hash import timing_key
from xrl_jax.graph.work import node_work
from xrl_jax.libraries import registry
from xrl_jax.measure.base import Job
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.target import Target
from xrl_jax.measure.timing import Timing
from xrl_jax.program.program import Program, evaluate
from xrl_jax.runtime.compile_options import YNN
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.runtime.engine_jit import engine_jit

Options = tuple[tuple[str, str], ...]

# Compile options worth trying on each platform, the default first. On the CPU the list names what
# goes to the YNNPACK library and what to XLA's own kernels; measured on single operators they
# differ by up to 2 either way.
OPTION_SETS: Mapping[str, tuple[Options, ...]] = {
    "cpu": (
        (),
        ((YNN, ""),),
        ((YNN, "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"),),
    ),
}
# Options must gain this share over none: they are lost where the result is called inside another
# jit, and one more thing that can change under the user's feet.
_OPTIONS_MUST_GAIN = 0.15
_CONFIRM_SECONDS = 3.0  # for that, timed in turn
# And so must constants: they compile for longer, and again for other weights.
_CONSTANTS_MUST_GAIN = 0.05
_CONVOLVED = 0.2  # of the flops, at least, for them to be tried
_LEAST_TIMEOUT = (
    120.0  # seconds a program is given to compile and run, even when the budget runs out before
)


def option_sets(target: Target) -> tuple[Options, ...]:
    """The compile options to try on a target."""
    return OPTION_SETS.get(target.platform, ((),))


def program_key(program: Program) -> tuple[str, ...]:
    """What tells programs apart whose timings differ: a key for each graph."""
    return tuple(timing_key(*nodes_of(g)[:2]) for g in program.graphs)


def program_job(program: Program, options: Options = (), *, constants: bool = False) -> Job:
    """The program as a worker job, work on weights prepared beforehand.

    Args:
      constants: prepared weights are constants of the compiled code instead of arguments.
    """
    hoisted = split(lambda *flat: evaluate(program, 0, flat), program.in_avals, program.weights)
    inputs = [a for a, w in zip(program.in_avals, program.weights, strict=True) if not w]
    exported = registry.exported(hoisted.call, hoisted.avals, inputs)
    how = [f"constants={constants}", *(f"{k}={v}" for k, v in options)]
    key = timing_key([], (), extra=["program", *program_key(program), *how])
    n_constants = len(hoisted.avals) if constants else 0
    artifact, targets = bytes(exported.serialize()), registry.custom_calls(exported)
    return Job(key, artifact, options, constants=n_constants, custom_calls=targets)


def job_or_failure(program: Program, options: Options, *, constants: bool) -> Job | Timing:
    """The program's job, or the failed timing that says why there is none."""
    try:
        with plain_ctrl_c():
            return program_job(program, options, constants=constants)
    except Exception as error:  # host callbacks and the like cannot be exported
        return Timing.without("failed", f"{type(error).__name__}: {error}")


def constants_pay(oracle: Oracle, program: Program) -> bool:
    """Whether the original runs faster with its weights as constants of the compiled code.

    XLA:CPU hands a convolution with a constant kernel to another library than one whose kernel is
    an argument; products it computes alike, and hundreds of megabytes of constants take a quarter
    of a minute to compile, so this is asked of programs only whose work is in convolutions. The
    timing is kept in the store: what follows from it must be the same the next time.
    """
    if _convolved(program) < _CONVOLVED:
        return False
    try:
        as_constants = program_job(program, oracle.options, constants=True)
        if not as_constants.constants:
            return False
        as_arguments = program_job(program, oracle.options)
    except Exception:  # a program that cannot be exported is not timed in the worker at all
        return False
    # The worker keeps what it times others against, and where constants pay that is what it needs.
    timing = oracle.time_against(as_arguments, as_constants)
    return timing.relative is not None and 1 / timing.relative < 1 - _CONSTANTS_MUST_GAIN


def _convolved(program: Program) -> float:
    """The share of convolutions in a program's flops."""
    there, total = 0.0, 1.0
    for graph, count in zip(program.graphs, program.counts, strict=True):
        nodes, _, _ = nodes_of(graph)
        for node in nodes:
            flops, _ = node_work(node, [nodes[a] for a in node.args])
            total += count * flops
            there += count * flops * (node.op == "conv")
    return there / total


@dataclass(frozen=True)
class Timed:
    """A program with the options it was timed under."""

    program: Program
    options: Options
    timing: Timing
    index: int  # among the programs given


def time_programs(
    oracle: Oracle,
    programs: Sequence[Program],
    clock: Stopwatch,
    *,
    measurements: int | None = None,
    tell: Callable[[str], Any] = lambda _: None,
) -> list[Timed]:
    """Time programs (the most promising first), fastest first in the result.

    All but the last, the original, are timed as they are, then the fastest under every set of
    compile options; where these win, so is the original, and the fastest in turn with the fastest
    without options, which decides. The original is the reference of all, and the first of the
    result where nothing takes less. Programs for which no time or no timing is left are dropped,
    but for the first; Ctrl-C drops those that were not timed yet. What failed in the worker is
    dropped as well, since it must not be run here; what cannot be sent to the worker (host
    callbacks) is kept with a timing that says so. Where nothing is left, the original is the
    result.

    Args:
      measurements: bound for all that the oracle may measure; None for no bound.
    """
    last = len(programs) - 1
    timed: list[Timed] = []
    reference: Job | Timing | None = None

    def out_of_budget() -> bool:
        spent = oracle.spending.measurements
        return clock.done or (measurements is not None and spent >= measurements)

    @plain_ctrl_c()
    def one(index: int, options: Options) -> bool:
        """Whether it is worth the while to go on with this program."""
        job = job_or_failure(programs[index], options, constants=oracle.constants)
        if isinstance(job, Timing):
            timed.append(Timed(programs[index], options, job, index))
            return False
        timing = oracle.time_job(
            job,
            reference=reference if isinstance(reference, Job) else None,
            timeout=max(clock.left, _LEAST_TIMEOUT),
        )
        if timing.ok:
            timed.append(Timed(programs[index], options, timing, index))
        return timing.status not in ("timeout", "killed")

    try:
        reference = job_or_failure(programs[last], (), constants=oracle.constants)
        for index in range(max(last, 1)):
            if index and out_of_budget():
                break
            tell(f"timing program {index + 1}")
            one(index, ())
        fastest = next((t.index for t in ranked(timed) if t.timing.ok), None)
        for options in option_sets(oracle.target)[1:]:
            if fastest is None or out_of_budget():
                break
            tell(f"timing program {fastest + 1} under compile options")
            if not one(fastest, options):
                break
        best_options = ranked(timed)[0].options if timed else ()
        if best_options and fastest != last and not out_of_budget():
            # Options may be all that pays: the original under them is a candidate like any other.
            tell("timing the original under compile options")
            one(last, best_options)
        if best_options and not out_of_budget():
            tell("timing compile options against none")
            timed = _confirmed(oracle, timed, clock)
    except KeyboardInterrupt:
        tell("interrupted")
    if not timed:
        lost = Timing.without("failed", "no program could be timed")
        return [Timed(programs[last], (), lost, last)]
    return _at_least_the_reference(ranked(timed), programs[last], last)


def _at_least_the_reference(timed: list[Timed], original: Program, index: int) -> list[Timed]:
    """The same, led by the original where nothing takes less. What a search calls so was made of
    the user's function, and may be faster: steps unrolled, products of all steps in one.
    """
    first = timed[0].timing
    if index == 0 or first.relative is None or first.relative < 1.0:
        return timed
    seconds = first.seconds / first.relative
    timing = replace(first, seconds=seconds, low=seconds, high=seconds, relative=1.0)
    return [Timed(original, (), timing, index), *timed]


def _confirmed(oracle: Oracle, timed: Sequence[Timed], clock: Stopwatch) -> list[Timed]:
    """The same, less all under compile options where the fastest of these does not gain enough in
    turn with the fastest without: each was timed against the original, at another time, and the
    quotient of two such ratios is not a comparison.
    """
    first = ranked(timed)[0]
    plain = next((t for t in ranked(timed) if not t.options and t.timing.relative), None)
    if not first.options or plain is None:
        return list(timed)
    jobs = [program_job(t.program, t.options, constants=oracle.constants) for t in (first, plain)]
    timing = oracle.time_against(
        *jobs, seconds_per_job=_CONFIRM_SECONDS, timeout=max(clock.left, _LEAST_TIMEOUT)
    )
    if timing.relative is None or timing.relative * (1 + _OPTIONS_MUST_GAIN) >= 1:
        return [t for t in timed if not t.options]
    return list(timed)


def ranked(timed: Sequence[Timed]) -> list[Timed]:
    """Fastest first, except that compile options come behind where they gain too little."""
    order = sorted(timed, key=relative)
    plain = [t for t in order if not t.options]
    least = 1 + _OPTIONS_MUST_GAIN
    if plain and order[0].options and relative(plain[0]) <= relative(order[0]) * least:
        return [*plain, *(t for t in order if t.options)]
    return order


_shares = engine_jit(lambda costs, graph: costs.shares(graph))


def relative(timed: Timed) -> float:
    """Time against the reference, measured in turn; absolute where that is missing."""
    t = timed.timing
    return t.relative if t.relative is not None else t.seconds if t.ok else float("inf")


def learn_from(oracle: Oracle, timed: Sequence[tuple[Program, Timing]], original: Program) -> None:
    """Let programs timed whole, and the original in turn with them, correct the cost table."""
    known = [(program, t.seconds) for program, t in timed if t.ok]
    known += [(original, t.seconds / t.relative) for _, t in timed if t.ok and t.relative][:1]
    costs = oracle.table()
    oracle.correct([shares(program, costs) for program, _ in known], [s for _, s in known])


def shares(program: Program, costs: CostTable) -> dict[str, float]:
    """Predicted seconds of one run of a program, by what they are corrected with."""
    each = [np.asarray(_shares(costs, price(costs, graph)[0])) for graph in program.graphs]
    total = np.asarray(program.counts) @ np.stack(each)
    return {c: float(s) for c, s in zip(CORRECTED, total, strict=True) if s > 0}
