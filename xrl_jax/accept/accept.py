"""The final decision on a result: is it right, and faster than the strongest baseline?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax

from xrl_jax.accept.accuracy import Accuracy, assess, references
from xrl_jax.accept.baselines import Original
from xrl_jax.accept.coarse import coarse_error, coarse_results
from xrl_jax.accept.last_timing import (
    InterleavedTimings,
    earlier_timings,
    time_interleaved,
    time_unprepared,
)
from xrl_jax.accept.samples import N_USUAL, concrete, samples
from xrl_jax.backends.domain import (
    Bounds,
    bounds_of,
    keeps_finite,
    needs_domain,
    right_everywhere,
    right_inside,
)
from xrl_jax.backends.fast import Fast
from xrl_jax.graph import ops
from xrl_jax.graph.bindings import Array
from xrl_jax.graph.graph import nodes_of
from xrl_jax.measure.timing import Ratio, Timing, error_text
from xrl_jax.program.arguments import unflatten_args
from xrl_jax.program.program import Program
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.runtime.memory import release_memory
from xrl_jax.search.base import Found

_UNPREPARED = 0.2  # share of the final timing's seconds for timing without prepared weights
# Of check and final timing on two cores: constant seconds, seconds per node and per GB of weights,
# number of runs.
_LEAST_SECONDS, _NODE_SECONDS, _GB_SECONDS, _RUNS = 2.0, 0.02, 55.0, 120.0
_NOT_SHOWN = "rules for finite operands made it, and it has operands that may not be finite"


@dataclass(frozen=True)
class Acceptance:
    """The decision on what is returned to the user, and the reasons.

    Attributes:
      candidate: the one that was accepted, or tried last.
      used: whether the candidate is returned; otherwise the original is.
      reason: why, in a sentence.
      accuracy: of the candidate.
      baselines: timings of the original as a user would run it, by name; `baseline` names the
        strongest. Only `ORIGINAL` where the final timing was interrupted.
      optimised: timing of the candidate.
      speedup: time of the strongest baseline / time of the candidate.
      noise: time of the strongest baseline / time of the same, compiled again.
      unprepared: time of the original / time of the candidate, with weights as arguments of both,
        as when they are traced; None where there are no weights, or this was not timed.
      weight_bytes_added: bytes that prepared weights add.
      close_over: whether prepared weights are constants of the compiled code.
      domain: the arguments on which the candidate is right; None for all.
    """

    candidate: Found
    used: bool
    reason: str
    accuracy: Accuracy
    baselines: dict[str, Timing]
    baseline: str
    optimised: Timing
    speedup: Ratio
    noise: Ratio
    unprepared: Ratio | None
    weight_bytes_added: int
    close_over: bool
    domain: Bounds | None

    @property
    def traced_speedup(self) -> float:
        """The speedup where weights are traced; 1 where the original runs then."""
        ratio = self.unprepared if any(self.candidate.program.weights) else self.speedup
        return ratio.value if self.used and ratio is not None and ratio.low > 1.0 else 1.0


def last_seconds(program: Program, run_seconds: float | None = None) -> float:
    """Estimate the seconds that the check and the final timing of a program take: compiling,
    running in float64, and runs interleaved with the baselines.

    Args:
      run_seconds: of one run; None for compiling only, the least that they take.
    """
    compiling = _LEAST_SECONDS + _NODE_SECONDS * sum(len(nodes_of(g)[0]) for g in program.graphs)
    if run_seconds is None:
        return compiling
    weights = [a for a, w in zip(program.in_avals, program.weights, strict=True) if w]
    held = [b.value for b in program.bindings if isinstance(b, Array)]
    nbytes = sum(a.size * a.dtype.itemsize for a in weights)
    nbytes += sum(getattr(x, "nbytes", 0) for x in held)
    return compiling + _GB_SECONDS * nbytes / 1e9 + _RUNS * run_seconds


def accept(
    program: Program,
    candidates: Sequence[Found],
    arguments: Sequence[Any],
    *,
    tolerance: float | None,
    typical: Sequence[Sequence[Any]] = (),
    seconds: Callable[[], float],
    close_over: bool = False,
    bounded_rules: frozenset[str] = frozenset(),
    guarded: bool = True,
    seed: int = 0,
    tell: Callable[[str], Any] = lambda _: None,
) -> Acceptance:
    """Check the candidates in order until one is right, time it interleaved with the baselines, and
    decide.

    Ctrl-C during the check accepts the original; during the timing, the candidate's own timing
    decides.

    Args:
      program: the original.
      candidates: rewritten programs, fastest first; not empty; their timings are relative to the
        original.
      arguments: flat example arguments.
      tolerance: relative error allowed; None for the default.
      typical: further flat argument lists to check on, with the weights of `arguments`.
      seconds: returns the seconds for the final timing; called after the check, which may take
        long.
      close_over: whether prepared weights become constants of the compiled code.
      bounded_rules: names of rules whose results are right only on a domain.
      guarded: whether a candidate that is not right on all arguments checks those it is called on.
    """
    chosen = candidates[0]
    domain: Bounds | None = None
    accuracy = _unknown("the check against the original was interrupted")
    timed = earlier_timings(chosen)
    added, interrupted, refused = 0, False, ""
    try:
        with plain_ctrl_c():
            leaves = concrete(program, arguments)
            tell("checking against float64")
            domain = bounds_of(program, leaves)
            checks = _Checks(program, samples(program, leaves), typical, tolerance)
            original = Original(program, leaves)
            for candidate in _variants(
                program, candidates, domain if guarded else None, close_over, bounded_rules
            ):
                chosen, fast = candidate
                if _is_rewritten(chosen, bounded_rules) and not keeps_finite(chosen.program):
                    found = _unknown(_NOT_SHOWN)  # samples need not show it
                else:
                    found = _check(original, fast, checks)
                if found.ok:
                    break
                refused = refused or found.reason
            accuracy, added = found, fast.weight_bytes_added if found.ok else 0
            timed, domain = earlier_timings(chosen), fast.domain
            tell("timing against jax.jit")
            spare = seconds()
            share = (1.0 - _UNPREPARED) * spare
            timed = time_interleaved(program, original, fast, leaves, share, seed)
            if timed.faster and any(program.weights):
                with suppress(KeyboardInterrupt):
                    ratio = time_unprepared(original, fast, leaves, _UNPREPARED * spare, seed)
                    timed = timed._replace(unprepared=ratio)
    except KeyboardInterrupt:
        interrupted = True
    decided = _accepted(chosen, accuracy, timed, added, close_over, domain, interrupted)
    if accuracy.ok and refused:
        reason = f"{decided.reason}; a program that was faster earlier was refused: {refused}"
        decided = replace(decided, reason=reason)
    return decided


def unchecked(candidates: Sequence[Found], reason: str) -> Acceptance:
    """Return the decision for the original, where there is no time to check anything else."""
    chosen = candidates[0]
    return _accepted(chosen, _unknown(reason), earlier_timings(chosen), 0, False, None, False)


def _accepted(
    chosen: Found,
    accuracy: Accuracy,
    timed: InterleavedTimings,
    added: int,
    close_over: bool,
    domain: Bounds | None,
    interrupted: bool,
) -> Acceptance:
    """Return the decision that follows from the accuracy and the timing of a candidate."""
    speedup = timed.speedup
    if not accuracy.ok:
        reason = f"the original is returned: {accuracy.reason}"
    elif not timed.optimised.ok:
        reason = (
            f"the original is returned: the result could not be timed ({timed.optimised.error})"
        )
    elif not timed.faster:
        reason = "the original is returned: nothing found is faster beyond noise"
    elif speedup.low > 1.0 and speedup.value > timed.threshold:
        reason = "the optimised function is returned: it is right and faster beyond noise"
    else:
        reason = (
            "the optimised function is returned: it is right and faster than jax.jit, which is as "
            "fast only with the same compile options"
        )
    if accuracy.ok and interrupted:
        reason += " (the final timing was interrupted: these are earlier timings by the worker)"
    return Acceptance(
        chosen,
        accuracy.ok and timed.faster,
        reason,
        accuracy,
        timed.jits,
        timed.baseline,
        timed.optimised,
        speedup,
        timed.noise,
        timed.unprepared,
        added,
        close_over,
        domain,
    )


def _variants(
    program: Program,
    candidates: Sequence[Found],
    domain: Bounds | None,
    close_over: bool,
    bounded_rules: frozenset[str],
) -> Iterator[tuple[Found, Fast]]:
    """Yield the candidates as functions, in order. A candidate with lowerings that are not right on
    all arguments is followed by the same with lowerings that are.

    Args:
      domain: that of candidates which are not right on all arguments; None to check no arguments.
    """
    for chosen in candidates:
        inside = right_inside(chosen.program)
        for candidate in dict.fromkeys((inside, right_everywhere(inside))):
            bounded = _is_rewritten(chosen, bounded_rules) or needs_domain(candidate)
            fast = Fast(
                candidate,
                program.fn,
                options=chosen.options,
                close_over=close_over,
                original=program,
                domain=domain if bounded else None,
            )
            yield replace(chosen, program=candidate), fast


def _is_rewritten(candidate: Found, rules: frozenset[str]) -> bool:
    """Return whether one of these rules made the candidate."""
    return any(step.rule in rules for step in candidate.steps)


def _unknown(reason: str) -> Accuracy:
    inf = float("inf")
    return Accuracy(inf, inf, 0.0, inf, (), False, reason)


class _Checks:
    """The argument lists that candidates are checked on, and what is allowed there.

    Args:
      samples: as from `samples`: the example, others like it, and unusual ones.
      typical: more like the example.
    """

    def __init__(
        self,
        program: Program,
        samples: Sequence[Sequence[Any]],
        typical: Sequence[Sequence[Any]],
        tolerance: float | None,
    ) -> None:
        self.samples = [*samples, *typical]
        self.tolerance = tolerance
        # Errors of elements say which integers a rounding error may change.
        nodes, outputs, _ = nodes_of(program.graph)
        all_floats = all(nodes[o].dtype in ops.FLOAT_DTYPES for o in outputs)
        errors = tolerance is None or not all_floats
        self.exact = references(program, self.samples, errors=errors)
        coarse = coarse_results(program, "bf16")

        @cache
        def allowed(n: int) -> float:
            return coarse_error(coarse(self.samples[n]), self.exact()[n])

        self.unusual = {n: partial(allowed, n) for n in range(N_USUAL, len(samples))}


def _check(original: Original, fast: Fast, checks: _Checks) -> Accuracy:
    """Return the accuracy of a candidate; one that cannot be run is wrong."""

    def before(*leaves: Any) -> list[Any]:
        return original.on(leaves)

    def without_prepared_weights() -> None:
        """Free their memory for float64 weights, and for the original with weights closed over."""
        fast.forget()
        release_memory()

    for sample in checks.samples:
        jax.block_until_ready(before(*sample))  # errors of the original go to the user
    try:
        with plain_ctrl_c(), warnings.catch_warnings():
            # Some samples are outside of the candidate's domain.
            warnings.filterwarnings("ignore", "the optimised function runs the original here")
            return assess(
                before,
                flat_call(fast),
                checks.exact,
                checks.samples,
                tolerance=checks.tolerance,
                unusual=checks.unusual,
                after_runs=without_prepared_weights,
            )
    except Exception as error:
        return _unknown(f"the result cannot be run ({error_text(error, limit=300)})")
    finally:
        without_prepared_weights()


def flat_call(fast: Fast) -> Callable[..., list[Any]]:
    """Return a function of flat leaves that calls `fast` as a user would call it."""

    def run(*leaves: Any) -> list[Any]:
        args, kwargs = unflatten_args(fast.program.in_tree, leaves)
        return jax.tree.leaves(fast(*args, **kwargs))

    return run
