"""The last word on a result: is it right, and faster than the original's strongest form?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.accept.accuracy import Accuracy, assess, references
from xrl_jax.accept.baselines import AS_ARGUMENTS, Original, baselines, compiled
from xrl_jax.accept.reference import Reference
from xrl_jax.backends.domain import (
    Bounds,
    bounds_of,
    needs_domain,
    right_everywhere,
    right_inside,
)
from xrl_jax.backends.fast import Fast
from xrl_jax.cost.programs import Options, Timed
from xrl_jax.graph.bindings import Array
from xrl_jax.graph.graph import nodes_of
from xrl_jax.measure.inputs import random_input
from xrl_jax.measure.timing import Comparison, Ratio, Timing, compare, error_text
from xrl_jax.program.arguments import unflatten_args
from xrl_jax.program.program import Program, weakened
from xrl_jax.runtime.ctrl_c import plain_ctrl_c, raise_lost_ctrl_c
from xrl_jax.runtime.memory import give_back

OPTIMISED = "optimised"
CONTROL = "A/A control"
ORIGINAL = "the original in the timing worker"
UNPREPARED = "optimised, weights not prepared"
# What is not decided is timed for so many times as long, and so many seconds, at most.
_LONGER, _LEAST_LONGER = 5.0, 12.0
_UNPREPARED = 0.2  # share of the time
# Of all that, for each node and each GB of weights, and runs that it takes; on two cores.
_LEAST_SECONDS, _NODE_SECONDS, _GB_SECONDS, _RUNS = 2.0, 0.02, 55.0, 120.0
_ZEROS, _NEGATIVE, _OUTLIERS = 0.1, 0.5, 0.01  # shares of the elements of a sample
_SPECIAL = (np.nan, np.inf, -np.inf)


@dataclass(frozen=True)
class Settled:
    """What is returned to the user and why.

    Attributes:
      program, options: of the candidate that was settled on.
      index: of the program among the search's results.
      used: whether the candidate is returned; else the original is.
      reason: why, in a sentence.
      accuracy: of the candidate.
      baselines: timings of the original's forms by name; `baseline` names the strongest. `ORIGINAL`
        alone where the final timing was interrupted.
      optimised: timing of the candidate.
      speedup: strongest baseline / candidate.
      noise: strongest baseline / itself compiled again.
      unprepared: the original / the candidate, weights being arguments of both, as where they are
        traced; None where there are none, or this was not timed.
      weight_bytes_added: by prepared weights.
      close_over: whether prepared weights are constants of the compiled code.
      domain: what arguments the candidate is right on; None for all.
    """

    program: Program
    options: Options
    index: int
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
        """Of what runs where weights are traced; 1 where that is the original."""
        ratio = self.unprepared if any(self.program.weights) else self.speedup
        return ratio.value if self.used and ratio is not None and ratio.low > 1.0 else 1.0


def concrete(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """Flat arguments as device arrays, random where only a shape is known."""
    leaves = []
    for given, aval in zip(arguments, program.in_avals, strict=True):
        known = not isinstance(given, jax.ShapeDtypeStruct) and hasattr(given, "shape")
        if known or isinstance(given, (bool, int, float, complex)):
            leaf = jax.device_put(given) if known else jnp.asarray(given, aval.dtype)
        else:
            leaf = random_input(aval)
        # A program that was made for a number of Python takes no other type for one.
        leaves.append(weakened(leaf) if getattr(aval, "weak_type", False) else leaf)
    return leaves


def samples(program: Program, leaves: Sequence[Any]) -> list[list[Any]]:
    """Argument lists to check on: the example, and the example with its real inputs drawn again,
    four times: at their own scale; with zeros, negative numbers and a few that are several times as
    large; as large as a domain goes; with NaN and infinities. The example alone where no input is
    real, as where all are tokens.
    """
    bounds = bounds_of(program, leaves)
    drawn: list[list[Any]] = []
    for i, (x, w) in enumerate(zip(leaves, program.weights, strict=True)):
        if w or not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
            continue
        drawn = drawn or [list(leaves) for _ in range(4)]
        host = np.asarray(x, np.float64)
        finite = host[np.isfinite(host)]
        middle, scale = (finite.mean(), finite.std()) if finite.size > 1 else (0.0, 0.0)
        again = middle + (scale or 1.0) * np.asarray(
            random_input(jax.ShapeDtypeStruct(x.shape, np.float32), seed=i + 1)
        )
        for sample, values in zip(drawn, _kinds(again, bounds[i] or 1.0, i), strict=True):
            leaf = jnp.asarray(values, x.dtype)
            # Of another type, it would be the original that runs on it.
            sample[i] = weakened(leaf) if getattr(x, "weak_type", False) else leaf
    return [list(leaves), *drawn]


def _kinds(drawn: np.ndarray, bound: float, seed: int) -> list[np.ndarray]:
    """The numbers drawn; mixed with zeros, other signs and large ones; scaled to the bound; with
    special values in a few places.
    """
    rng = np.random.default_rng(seed)
    mixed = np.where(rng.random(drawn.shape) < _ZEROS, 0.0, drawn)
    mixed = np.where(rng.random(drawn.shape) < _NEGATIVE, -mixed, mixed)
    mixed = np.where(rng.random(drawn.shape) < _OUTLIERS, bound / 2 * np.sign(mixed), mixed)
    largest = np.max(np.abs(drawn))
    special = drawn.copy()
    places = rng.permutation(drawn.size)[: len(_SPECIAL)]
    special.reshape(-1)[places] = _SPECIAL[: len(places)]
    return [drawn, mixed, drawn * (bound / largest if largest > 0 else 1.0), special]


def last_seconds(program: Program, run_seconds: float | None = None) -> float:
    """What the check and the final timing of a program take, roughly: compiling, and running it in
    float64 and in turn with others.

    Args:
      run_seconds: of one run; None for compiling alone, the least that they take.
    """
    compiling = _LEAST_SECONDS + _NODE_SECONDS * sum(len(nodes_of(g)[0]) for g in program.graphs)
    if run_seconds is None:
        return compiling
    weights = [a for a, w in zip(program.in_avals, program.weights, strict=True) if w]
    held = [b.value for b in program.bindings if isinstance(b, Array)]
    nbytes = sum(a.size * a.dtype.itemsize for a in weights)
    nbytes += sum(getattr(x, "nbytes", 0) for x in held)
    return compiling + _GB_SECONDS * nbytes / 1e9 + _RUNS * run_seconds


def settle(
    program: Program,
    finalists: Sequence[Timed],
    arguments: Sequence[Any],
    *,
    tolerance: float | None,
    seconds: Callable[[], float],
    close_over: bool = False,
    guarded: bool = True,
    seed: int = 0,
    tell: Callable[[str], Any] = lambda _: None,
) -> Settled:
    """Check the finalists in order until one is right, time it in turn with the original's forms,
    and decide.

    Ctrl-C while checking settles on the original; while timing, on what the finalists' own timings
    say.

    Args:
      program: the original.
      finalists: rewritten programs, fastest first; not empty; their timings are relative to the
        original.
      arguments: flat example arguments.
      tolerance: relative error allowed; None for the default.
      seconds: for the final timing; asked for after the check, which may take long.
      close_over: prepared weights become constants of the compiled code.
      guarded: a candidate that is not right on all arguments looks at those it is given.
    """
    chosen = finalists[0]
    domain: Bounds | None = None
    accuracy = _unknown("the check against the original was interrupted")
    timed = _timed_before(chosen)
    added, cut_short = 0, False
    try:
        with plain_ctrl_c():
            leaves = concrete(program, arguments)
            tell("checking against float64")
            domain, checks = bounds_of(program, leaves), samples(program, leaves)
            exact = references(program, checks)
            original = Original(program, leaves)
            for candidate in _candidates(program, finalists, domain, close_over, guarded):
                chosen, fast = candidate
                found = _check(original, fast, checks, exact, tolerance)
                if found.ok:
                    break
            accuracy, added = found, fast.weight_bytes_added if found.ok else 0
            timed, domain = _timed_before(chosen), fast.domain
            tell("timing against jax.jit")
            spare = seconds()
            timed = _time_in_turn(
                program, original, fast, leaves, (1.0 - _UNPREPARED) * spare, seed
            )
            if timed.faster and any(program.weights):
                with suppress(KeyboardInterrupt):
                    ratio = _time_unprepared(original, fast, leaves, _UNPREPARED * spare, seed)
                    timed = timed._replace(unprepared=ratio)
    except KeyboardInterrupt:
        cut_short = True
    return _settled(chosen, accuracy, timed, added, close_over, domain, cut_short)


def unchecked(finalists: Sequence[Timed], reason: str) -> Settled:
    """The original, where there is no time to check anything else."""
    chosen = finalists[0]
    return _settled(chosen, _unknown(reason), _timed_before(chosen), 0, False, None, False)


def _settled(
    chosen: Timed,
    accuracy: Accuracy,
    timed: _InTurn,
    added: int,
    close_over: bool,
    domain: Bounds | None,
    cut_short: bool,
) -> Settled:
    """What follows from what was found of a candidate."""
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
    if accuracy.ok and cut_short:
        reason += " (the final timing was interrupted: this is what the worker measured before)"
    return Settled(
        chosen.program,
        chosen.options,
        chosen.index,
        accuracy.ok and timed.faster,
        reason,
        accuracy,
        timed.rivals,
        timed.baseline,
        timed.optimised,
        speedup,
        timed.noise,
        timed.unprepared,
        added,
        close_over,
        domain,
    )


def _candidates(
    program: Program,
    finalists: Sequence[Timed],
    domain: Bounds,
    close_over: bool,
    guarded: bool,
) -> Iterator[tuple[Timed, Fast]]:
    """The finalists as functions, in order, each followed by itself with forms that are right on
    all arguments where it has others.
    """
    for chosen in finalists:
        inside = right_inside(chosen.program)
        for candidate in dict.fromkeys((inside, right_everywhere(inside))):
            bounded = guarded and needs_domain(candidate)
            fast = Fast(
                candidate,
                program.fn,
                options=chosen.options,
                close_over=close_over,
                original=program,
                domain=domain if bounded else None,
            )
            yield replace(chosen, program=candidate), fast


class _InTurn(NamedTuple):
    """Forms of the original and the candidate, timed in turn."""

    rivals: dict[str, Timing]
    baseline: str  # the strongest of them
    optimised: Timing
    speedup: Ratio  # the strongest form / the candidate
    noise: Ratio
    gain: Ratio  # the strongest form without our compile options / the candidate
    unprepared: Ratio | None = None  # weights as arguments: the original / the candidate

    @property
    def threshold(self) -> float:
        """What a ratio must exceed to be beyond noise."""
        return max(1.0, self.noise.value, 1.0 / self.noise.value)

    @property
    def faster(self) -> bool:
        """Whether the candidate is faster than what the user would run, and no slower than that
        with our compile options.
        """
        gains = self.gain.low > 1.0 and self.gain.value > self.threshold
        return self.optimised.ok and gains and self.speedup.value * self.threshold >= 1.0

    @property
    def is_open(self) -> bool:
        """Whether more timing may show it to be faster."""
        return self.optimised.ok and not self.faster and self.gain.high > self.threshold


def _unknown(reason: str) -> Accuracy:
    inf = float("inf")
    return Accuracy(inf, inf, 0.0, inf, (), False, reason)


def _check(
    original: Original,
    fast: Fast,
    checks: Sequence[Sequence[Any]],
    exact: Callable[[], Sequence[Reference]],
    tolerance: float | None,
) -> Accuracy:
    """Accuracy of a candidate on argument lists; one that cannot be run is wrong."""

    def before(*leaves: Any) -> list[Any]:
        return original.on(leaves)

    def without_prepared_weights() -> None:
        """That memory is for weights in float64, and for the original with its closed over."""
        fast.forget()
        give_back()

    for sample in checks:
        jax.block_until_ready(before(*sample))  # what the original raises is for the user to see
    try:
        with plain_ctrl_c(), warnings.catch_warnings():
            # The samples are outside of its domain, too.
            warnings.filterwarnings("ignore", "the optimised function runs the original here")
            return assess(
                before,
                flat_call(fast),
                exact,
                checks,
                tolerance=tolerance,
                ran=without_prepared_weights,
            )
    except Exception as error:
        return _unknown(f"the result cannot be run ({error_text(error, limit=300)})")
    finally:
        without_prepared_weights()


def _timed_before(chosen: Timed) -> _InTurn:
    """What the worker measured of the candidate, in turn with the original."""
    timing = chosen.timing
    if not timing.ok or timing.relative is None:
        lost = Timing.without("failed", "interrupted before the final timing")
        one = Ratio(1.0, 1.0, 1.0)
        return _InTurn({ORIGINAL: lost}, ORIGINAL, lost, one, one, one)
    seconds = timing.seconds / timing.relative
    original = replace(timing, seconds=seconds, low=seconds, high=seconds, relative=None)
    speedup = Ratio(1.0 / timing.relative, seconds / timing.high, seconds / timing.low)
    return _InTurn({ORIGINAL: original}, ORIGINAL, timing, speedup, Ratio(1.0, 1.0, 1.0), speedup)


def _time_in_turn(
    program: Program,
    original: Original,
    fast: Fast,
    leaves: Sequence[Any],
    seconds: float,
    seed: int,
) -> _InTurn:
    """The candidate against the original's forms, under its compile options too, and an A/A
    control; until all rounds together say whether it is faster, or the time for that is spent.
    """
    forms = baselines(program, leaves, first=original)
    _compile_each(forms)
    first = compare(
        forms, seconds=0.1 * seconds, min_rounds=3, baseline=next(iter(forms)), seed=seed
    )
    strongest = min(first.samples, key=lambda n: first.timings[n].seconds)
    entrants = dict(forms)
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

    def told(comparison: Comparison) -> _InTurn:
        return _told(comparison, strongest, tuple(forms))

    comparison = _in_turn(
        entrants,
        strongest,
        seconds,
        seed,
        decides=lambda so_far: not told(so_far).is_open,
        longest=max(_LONGER * seconds, _LEAST_LONGER),
    )
    return told(comparison)


def _time_unprepared(
    original: Original, fast: Fast, leaves: Sequence[Any], seconds: float, seed: int
) -> Ratio | None:
    """The original / the candidate, weights being arguments of both; None where it cannot be timed.

    Alone, because the forms with weights closed over, and prepared ones, take several times the
    memory of the weights.
    """
    fast.forget()
    give_back()
    entrants = {
        AS_ARGUMENTS: original,
        # Inside another jit our compile options are lost.
        UNPREPARED: compiled(fast.flat, leaves),
    }
    _compile_each(entrants)
    comparison = _in_turn(entrants, AS_ARGUMENTS, seconds, seed)
    ok = comparison.timings[UNPREPARED].ok
    return comparison.ratio(AS_ARGUMENTS, UNPREPARED) if ok else None


def _in_turn(
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


def _compile_each(forms: Mapping[str, Callable[[], Any]]) -> None:
    """Run each form once, giving back what compiling it took: with weights closed over, that is
    several times what they take. Where one cannot be run, the comparison says so.
    """
    for form in forms.values():
        with suppress(Exception):
            jax.block_until_ready(form())
        give_back()


def _told(comparison: Comparison, strongest: str, forms: Sequence[str]) -> _InTurn:
    """What a comparison tells; `strongest` of the original's `forms` is its baseline."""
    ours = (CONTROL, OPTIMISED)
    rivals = {n: t for n, t in comparison.timings.items() if n not in ours}
    baseline = min(rivals, key=lambda n: rivals[n].seconds)
    noise = comparison.ratio(strongest, CONTROL)
    optimised = comparison.timings[OPTIMISED]
    none = Ratio(0.0, 0.0, 0.0)
    speedup = comparison.ratio(baseline, OPTIMISED) if optimised.ok else none
    plain = min(forms, key=lambda n: comparison.timings[n].seconds)
    gain = comparison.ratio(plain, OPTIMISED) if optimised.ok else none
    return _InTurn(
        rivals,
        baseline,
        optimised,
        speedup,
        noise,
        gain,
    )


def flat_call(fast: Fast) -> Callable[..., list[Any]]:
    """`fast` on flat leaves, called as a user would call it."""

    def run(*leaves: Any) -> list[Any]:
        args, kwargs = unflatten_args(fast.program.in_tree, leaves)
        return jax.tree.leaves(fast(*args, **kwargs))

    return run
