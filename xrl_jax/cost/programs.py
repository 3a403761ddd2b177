"""Whole programs: compile options to try, jobs for the worker, and the choice among the best few of a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xrl_jax.backends.hoist import split
from xrl_jax.backends.xla import evaluate
from xrl_jax.cost.model import Oracle, class_shares, merge_shares
from xrl_jax.cost.timing import Stopwatch, Timing
from xrl_jax.cost.worker import Job
from xrl_jax.graph.graph import nodes_of
from xrl_jax.graph.hash import timing_key
from xrl_jax.graph.program import Program

Options = tuple[tuple[str, str], ...]

_YNN = "xla_cpu_experimental_ynn_fusion_type"
# Compile options worth trying on each platform, the default first. On the CPU the list names what goes to the YNNPACK library and
# what to XLA's own kernels; measured on single operators they differ by up to 2 either way.
OPTION_SETS: Mapping[str, tuple[Options, ...]] = {
    "cpu": (
        (),
        ((_YNN, ""),),
        ((_YNN, "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"),),
        ((_YNN, "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"),),
        ((_YNN, "LIBRARY_FUSION_TYPE_ELTWISE"),),
    ),
}
# Options must gain this share over none: they are one more thing that can change under the user's feet.
_OPTIONS_MUST_GAIN = 0.03


def option_sets() -> tuple[Options, ...]:
    """The compile options to try on the default device."""
    return OPTION_SETS.get(jax.default_backend(), ((),))


def program_job(program: Program, options: Options = ()) -> Job:
    """The program as a worker job, work on weights prepared beforehand."""
    hoisted = split(lambda *flat: evaluate(program, 0, flat), program.in_avals, program.weights)
    inputs = [a for a, w in zip(program.in_avals, program.weights, strict=True) if not w]
    artifact = jax.export.export(jax.jit(hoisted.call))(hoisted.avals, inputs).serialize()
    text = [timing_key(*nodes_of(g)[:2]) for g in program.graphs]
    key = timing_key([], (), extra=["program", *text, *(f"{k}={v}" for k, v in options)])
    return Job(key, bytes(artifact), options)


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
    tell: Callable[[str], Any] = lambda _: None,
) -> list[Timed]:
    """Time programs (the most promising first), fastest first in the result.

    The first is timed under every option set, the others under the best of them; all in turn with the last program, which is the
    reference. Programs for which there is no time left are dropped, but for the first.
    """
    reference = program_job(programs[-1])
    timed: list[Timed] = []

    def one(index: int, options: Options) -> None:
        try:
            job = program_job(programs[index], options)
        except Exception as error:  # a program that cannot be exported is not a candidate
            timing = Timing.without("failed", f"{type(error).__name__}: {error}")
        else:
            timing = oracle.time_jobs([job], reference=reference)[0]
        timed.append(Timed(programs[index], options, timing, index))

    for options in option_sets():
        if timed and clock.done:
            break
        tell(f"timing the best program ({len(timed) + 1})")
        one(0, options)
    best = min(timed, key=relative)
    for index in range(1, len(programs) - 1):
        if clock.done:
            break
        tell(f"timing program {index + 1}")
        one(index, best.options)
    plain = [t for t in timed if not t.options]
    if (
        plain
        and best.options
        and relative(min(plain, key=relative)) <= relative(best) * (1 + _OPTIONS_MUST_GAIN)
    ):
        timed = plain + [t for t in timed if t.options and t is not best] + [best]
        return timed
    return sorted(timed, key=relative)


def relative(timed: Timed) -> float:
    """Time against the reference, measured in turn; absolute where that is missing."""
    t = timed.timing
    return t.relative if t.relative is not None else t.seconds if t.ok else float("inf")


def shares(program: Program) -> dict[str, float]:
    """Predicted seconds of a priced program by class of operators."""
    return merge_shares(
        class_shares(np.asarray(g.nodes.cost), np.asarray(g.nodes.op), c)
        for g, c in zip(program.graphs, program.counts, strict=True)
    )
