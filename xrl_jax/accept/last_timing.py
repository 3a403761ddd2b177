"""The final timing of a result, interleaved with the baselines: the original as a user would run
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from xrl_jax.accept.baselines import AS_ARGUMENTS, Original, baselines, compiled
from xrl_jax.backends.fast import Fast
from xrl_jax.measure.comparison import Comparison, compare
from xrl_jax.measure.timing import Ratio, Timing
from xrl_jax.program.arguments import unflatten_args
from xrl_jax.program.program import Program
from xrl_jax.runtime.ctrl_c import raise_lost_ctrl_c
from xrl_jax.runtime.memory import release_memory
from xrl_jax.search.base import Found

OPTIMISED = "optimised"
CONTROL = "A/A control"
ORIGINAL = "the original in the timing worker"
UNPREPARED = "optimised, weights not prepared"
# An undecided timing goes on for so many times as long, or so many seconds if that is more.
_LONGER, _LEAST_LONGER = 5.0, 12.0


class InterleavedTimings(NamedTuple):
    """Timings of the baselines and the candidate, interleaved."""

    jits: dict[str, Timing]  # the original, by variant and compile options
    baseline: str  # the strongest of them
    optimised: Timing
    speedup: Ratio  # time of the strongest baseline / of the candidate
    noise: Ratio
    gain: Ratio  # the same for the strongest without the candidate's compile options
    unprepared: Ratio | None = None  # the original / the candidate, weights as arguments

    @property
    def threshold(self) -> float:
        """The value that a ratio must exceed to be beyond noise."""
        return max(1.0, self.noise.value, 1.0 / self.noise.value)

    @property
    def faster(self) -> bool:
        """Whether the candidate is faster than the code that the user would run, and no slower than
        that under the candidate's compile options.
        """
        gains = self.gain.low > 1.0 and self.gain.value > self.threshold
        return self.optimised.ok and gains and self.speedup.value * self.threshold >= 1.0

    @property
    def is_undecided(self) -> bool:
        """Whether more timing may show the candidate to be faster."""
        return self.optimised.ok and not self.faster and self.gain.high > self.threshold


def earlier_timings(chosen: Found) -> InterleavedTimings:
    """Return the worker's timing of the candidate, interleaved with the original."""
    timing = chosen.timing
    if timing is None or not timing.ok or timing.relative is None:
        lost = Timing.without("failed", "interrupted before the final timing")
        one = Ratio(1.0, 1.0, 1.0)
        return InterleavedTimings({ORIGINAL: lost}, ORIGINAL, lost, one, one, one)
    seconds = timing.seconds / timing.relative
    original = replace(timing, seconds=seconds, low=seconds, high=seconds, relative=None)
    speedup = Ratio(1.0 / timing.relative, seconds / timing.high, seconds / timing.low)
    return InterleavedTimings(
        {ORIGINAL: original}, ORIGINAL, timing, speedup, Ratio(1.0, 1.0, 1.0), speedup
    )


def time_interleaved(
    program: Program,
    original: Original,
    fast: Fast,
    leaves: Sequence[Any],
    seconds: float,
    seed: int,
) -> InterleavedTimings:
    """Time the candidate interleaved with the baselines, with the strongest of them under the
    candidate's compile options, and with an A/A control. Stop when all rounds together decide
    whether the candidate is faster, or when the time is spent.
    """
    jits = baselines(program, leaves, first=original)
    _compile_each(jits)
    first = compare(jits, seconds=0.1 * seconds, min_rounds=3, baseline=next(iter(jits)), seed=seed)
    strongest = min(first.samples, key=lambda n: first.timings[n].seconds)
    entrants = dict(jits)
    if fast.options:
        options = tuple(fast.options.items())
        entrants |= {
            n: f for n, f in baselines(program, leaves, options).items() if n.startswith(strongest)
        }
    again = None if strongest == AS_ARGUMENTS else original
    entrants[CONTROL] = baselines(program, leaves, first=again)[strongest]
    _compile_each(entrants)
    args, kwargs = unflatten_args(program.in_tree, leaves)
    entrants[OPTIMISED] = lambda: fast(*args, **kwargs)
    _compile_each({OPTIMISED: entrants[OPTIMISED]})

    def outcome(comparison: Comparison) -> InterleavedTimings:
        return _outcome(comparison, strongest, tuple(jits))

    comparison = _compare(
        entrants,
        strongest,
        seconds,
        seed,
        decides=lambda so_far: not outcome(so_far).is_undecided,
        longest=max(_LONGER * seconds, _LEAST_LONGER),
    )
    return outcome(comparison)


def time_unprepared(
    original: Original, fast: Fast, leaves: Sequence[Any], seconds: float, seed: int
) -> Ratio | None:
    """Return the ratio original / candidate with weights as arguments of both; None where the
    candidate cannot be timed.

    This is a timing of its own, because baselines with weights closed over, and prepared weights,
    take several times the memory of the weights.
    """
    fast.forget()
    release_memory()
    entrants = {
        AS_ARGUMENTS: original,
        # Inside another jit the candidate's compile options are lost.
        UNPREPARED: compiled(fast.flat, leaves),
    }
    _compile_each(entrants)
    comparison = _compare(entrants, AS_ARGUMENTS, seconds, seed)
    ok = comparison.timings[UNPREPARED].ok
    return comparison.ratio(AS_ARGUMENTS, UNPREPARED) if ok else None


def _compare(
    entrants: Mapping[str, Callable[[], Any]],
    baseline: str,
    seconds: float,
    seed: int,
    **until: Any,
) -> Comparison:
    return compare(
        entrants,
        seconds=seconds,
        min_rounds=7,
        baseline=baseline,
        seed=seed,
        progress=lambda *_: raise_lost_ctrl_c(),
        **until,
    )


def _compile_each(fns: Mapping[str, Callable[[], Any]]) -> None:
    """Run each function once, and return the memory that compiling took to the system: with weights
    closed over, it is several times that of the weights. Errors are left for the comparison.
    """
    for fn in fns.values():
        with suppress(Exception):
            jax.block_until_ready(fn())
        release_memory()


def _outcome(
    comparison: Comparison, strongest: str, baselines: Sequence[str]
) -> InterleavedTimings:
    """Return the outcome of a comparison with the baseline `strongest`, one of `baselines`."""
    extra = (CONTROL, OPTIMISED)
    jits = {n: t for n, t in comparison.timings.items() if n not in extra}
    baseline = min(jits, key=lambda n: jits[n].seconds)
    noise = comparison.ratio(strongest, CONTROL)
    optimised = comparison.timings[OPTIMISED]
    none = Ratio(0.0, 0.0, 0.0)
    speedup = comparison.ratio(baseline, OPTIMISED) if optimised.ok else none
    plain = min(baselines, key=lambda n: comparison.timings[n].seconds)
    gain = comparison.ratio(plain, OPTIMISED) if optimised.ok else none
    return InterleavedTimings(
        jits,
        baseline,
        optimised,
        speedup,
        noise,
        gain,
    )
