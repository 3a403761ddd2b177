"""How long compiled functions take, and how sure one can be of it.

Nothing here knows graphs. Functions are timed in turn, in one process, in an order shuffled anew in
every round, because on a shared machine the load drifts by more than the differences of interest:
what two functions have in common within a round cancels in their ratio. Medians and order
statistics are used throughout, since the noise has one long tail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from xrl_jax.measure.inputs import hlo_hash, random_input
from xrl_jax.runtime.ctrl_c import raise_lost_ctrl_c

STATUSES = ("ok", "failed", "timeout", "killed")


@dataclasses.dataclass(frozen=True)
class Timing:
    """What was measured of one function; all times in seconds per call.

    A timing that did not come about has status "failed" (an error was raised), "timeout" or
    "killed" (the process died), the reason in `error`, and infinite `seconds`, so that no search
    prefers it.
    """

    seconds: float  # median
    low: float  # [low, high]: a 95 % interval of the median
    high: float
    repeats: int = 0  # samples behind the median
    compile_seconds: float = 0.0
    hlo_hash: str = ""  # `hlo_hash` of the optimised HLO, "" where it is unknown
    status: str = "ok"
    error: str = ""
    relative: float | None = None  # seconds / seconds of the reference, interleaved with it
    reference: str = ""  # key of that reference
    # Where there was no reference: seconds the worker's yardstick took for a multiplication and an
    # addition, interleaved. Timings of busy and quiet hours compare by seconds / pace.
    pace: float | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @classmethod
    def without(cls, status: str, error: str, **fields: Any) -> Timing:
        """The timing of something that could not be timed."""
        return cls(math.inf, math.inf, math.inf, status=status, error=error, **fields)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, fit for strict JSON: infinite times become None."""
        values = dataclasses.asdict(self)
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Timing:
        """The inverse of `as_dict`. Unknown names are ignored; ValueError if the rest is not a
        timing.
        """
        try:
            status = str(values["status"])
            if status not in STATUSES:
                raise ValueError(f"status {status!r} is none of {STATUSES}")
            relative, pace = values.get("relative"), values.get("pace")
            return cls(
                **{name: _finite_or_inf(values[name]) for name in ("seconds", "low", "high")},
                repeats=int(values.get("repeats", 0)),
                compile_seconds=float(values.get("compile_seconds", 0.0)),
                hlo_hash=str(values.get("hlo_hash", "")),
                status=status,
                error=str(values.get("error", "")),
                relative=None if relative is None else float(relative),
                reference=str(values.get("reference", "")),
                pace=None if pace is None else float(pace),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a timing: {error!r}") from error


def _finite_or_inf(value: Any) -> float:
    return math.inf if value is None else float(value)


# Estimates ---------------------------------------------------------------------------------------


def median_interval(samples: Sequence[float], *, level: float = 0.95) -> tuple[float, float, float]:
    """Median of `samples` and a distribution-free interval for the true median.

    The number of samples below the median is Binomial(n, 1/2), so [x_(k), x_(n+1-k)] holds it with
    probability 1 - 2 P(B < k); k is the largest that keeps `level`. Fewer than six samples cannot
    give 95 %: then the range is returned. Source: Conover, Practical Nonparametric Statistics, 3.2.
    """
    ordered = np.sort(np.asarray(samples, np.float64))
    n = ordered.size
    if n == 0:
        raise ValueError("median_interval needs at least one sample")
    k, below = 0, 0.0
    while k < n // 2:
        log_mass = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        below += math.exp(log_mass - n * math.log(2.0))  # P(B <= k)
        if below > (1.0 - level) / 2.0:
            break
        k += 1
    k = max(k, 1)
    return float(np.median(ordered)), float(ordered[k - 1]), float(ordered[n - k])


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times longer one thing takes than another, with a 95 % interval [low, high]."""

    value: float
    low: float
    high: float


def paired_ratio(
    numerator: Sequence[float],
    denominator: Sequence[float],
    *,
    rng: np.random.Generator,
    resamples: int = 2000,
    level: float = 0.95,
) -> Ratio:
    """Ratio of two times from samples taken in the same rounds: exp(median(log a_i / b_i)).

    The logarithm makes paired_ratio(a, b) the exact inverse of paired_ratio(b, a). The interval is
    the percentile bootstrap over rounds (Efron and Tibshirani, An Introduction to the Bootstrap,
    13.3).
    """
    a, b = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    if a.shape != b.shape or a.ndim != 1 or a.size == 0:
        raise ValueError(
            f"paired samples must be two non-empty lists of one length, got {a.shape} and {b.shape}"
        )
    logs = np.log(a) - np.log(b)
    # In slices, so that many rounds do not need resamples x rounds numbers at once.
    step = max(1, 1_000_000 // logs.size)
    medians = np.concatenate(
        [
            np.median(
                logs[rng.integers(0, logs.size, (min(step, resamples - start), logs.size))], axis=1
            )
            for start in range(0, resamples, step)
        ]
    )
    low, high = np.quantile(medians, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    value = float(np.median(logs))
    return Ratio(math.exp(value), math.exp(min(low, value)), math.exp(max(high, value)))


# Clocks ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keeps Python's cyclic collector, a source of millisecond pauses, out of the block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def call_seconds(fn: Callable[[], Any], calls: int = 1) -> float:
    """Seconds per call over `calls` calls in a row, each waited for until its result is there."""
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(fn())
    return (time.perf_counter() - start) / calls


def warm_up(fn: Callable[[], Any]) -> tuple[float, float]:
    """Calls `fn` three times; (seconds of the first call, seconds of the better of the others)."""
    first = call_seconds(fn)
    return first, min(call_seconds(fn), call_seconds(fn))


def calls_per_turn(seconds_per_call: float, turn_seconds: float) -> int:
    """Calls in a row that fill a turn, so that the clock and cold caches do not dominate short
    functions.
    """
    return max(1, min(1000, math.ceil(turn_seconds / max(seconds_per_call, 1e-9))))


# After ResNeXt-50 under jax.jit (168 ms, 104 MB from the system in each call) the next function had
# 4.3 ms of the system's time in its own.
_PAUSE = 0.05  # share of a turn
_LONGEST_PAUSE = 0.01  # seconds


# NASRNN, 48 MB of weights, called after others: under jax.jit it takes 3.6 ms, then 2.6, 2.3 and
# 2.2 from there on; what is 1.4 ms in the end takes 2.7, then 2.4, 2.2, 2.1 and twelve calls until
# it is there. Networks that take 70 ms show no such thing.
_WARM_CALLS, _WARM_SECONDS = 12, 0.025
_LONG_CALL = 0.05  # seconds


def _warm_caches(fn: Callable[[], Any]) -> None:
    """Untimed calls, until what the function reads is where it is when it is called in a loop.

    Others have pushed it out of the caches, less so what they share: a result with weights of its
    own would be timed with cold ones, the forms of the original, which share them, with warm ones.
    """
    start = time.perf_counter()
    for _ in range(_WARM_CALLS):
        jax.block_until_ready(fn())
        if time.perf_counter() - start > _WARM_SECONDS:
            break


def interleave(
    fns: Mapping[str, Callable[[], Any]],
    calls: Mapping[str, int],
    *,
    seconds: float,
    min_rounds: int,
    max_rounds: int,
    rng: np.random.Generator,
    warm_caches: bool,
    progress: Callable[[int, float], None] | None = None,
    after: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Times functions in turn: in every round each gets one turn of `calls[name]` calls, in a
    shuffled order, with `warm_caches` after untimed ones. What `after` holds for a name is called
    after its turns, untimed. Then there is a short pause: what a call allocated is given back to
    the system after it has returned, which would slow down whoever is next.

    Rounds go on until `seconds` are over, but never fewer than `min_rounds` nor more than
    `max_rounds`. Returns seconds per call by name, one sample per round. `progress(rounds,
    elapsed_seconds)` is called after each round.
    """
    names = list(fns)
    samples: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    with without_garbage_collection():
        for done in range(1, max_rounds + 1):
            for index in rng.permutation(len(names)):
                name = names[index]
                if warm_caches and (not samples[name] or samples[name][-1] < _LONG_CALL):
                    _warm_caches(fns[name])
                per_call = call_seconds(fns[name], calls[name])
                samples[name].append(per_call)
                time.sleep(min(_PAUSE * per_call * calls[name], _LONGEST_PAUSE))
                if name in after:
                    after[name]()
            elapsed = time.perf_counter() - start
            if progress is not None:
                progress(done, elapsed)
            if elapsed >= seconds and done >= min_rounds:
                break
    return samples


def timing_of(samples: Sequence[float], **fields: Any) -> Timing:
    """The Timing that `samples` (seconds per call) amount to."""
    seconds, low, high = median_interval(samples)
    return Timing(seconds, low, high, repeats=len(samples), **fields)


# Comparison of functions in this process ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Functions timed in the same rounds. `ratios[name]` is baseline / name: above 1 where `name`
    is faster.
    """

    baseline: str
    timings: dict[str, Timing]
    ratios: dict[str, Ratio]  # of those that ran
    samples: dict[str, list[float]]  # seconds per call, one per round
    seed: int

    def ratio(self, slow: str, fast: str) -> Ratio:
        """Seconds of `slow` / seconds of `fast`, from the rounds both were in."""
        for name in (slow, fast):
            if name not in self.samples:
                known = ", ".join(self.samples)
                raise ValueError(f"{name!r} was not timed; there are timings of: {known}")
        rng = np.random.default_rng(self.seed)
        return paired_ratio(self.samples[slow], self.samples[fast], rng=rng)


def compare(
    fns: Mapping[str, Callable[[], Any]],
    *,
    seconds: float,
    min_rounds: int = 5,
    max_rounds: int = 10_000,
    turn_seconds: float = 5e-3,
    baseline: str,
    seed: int,
    progress: Callable[[int, float], None] | None = None,
    after: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
    decides: Callable[[Comparison], bool] = lambda _: True,
    longest: float = 0.0,
) -> Comparison:
    """Times functions of no arguments against `baseline`, interleaved, for about `seconds` in all
    after the warm-up; and again, up to `longest` seconds, until all rounds together decide what was
    asked.

    A function that raises during its warm-up is left out with status "failed"; the baseline's error
    is raised. Raises ValueError when `baseline` is not among `fns`. `progress(rounds,
    elapsed_seconds)` follows each round; `after[name]()` each turn of `name`, untimed: for what
    leaves threads behind that would be in the next one's way.
    """
    if baseline not in fns:
        raise ValueError(f"the baseline {baseline!r} is not among the functions: {', '.join(fns)}")
    timings: dict[str, Timing] = {}
    compile_seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    for name, fn in fns.items():
        try:
            first, warm = warm_up(fn)
        except Exception as error:  # one that cannot run must not cost the others their timing
            if name == baseline:
                raise
            timings[name] = Timing.without("failed", error_text(error))
            continue
        compile_seconds[name] = max(0.0, first - warm)
        calls[name] = calls_per_turn(warm, turn_seconds)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    rng = np.random.default_rng(seed)
    clock = Stopwatch(longest)
    while True:
        more = interleave(
            {name: fns[name] for name in calls},
            calls,
            seconds=seconds,
            min_rounds=min_rounds,
            max_rounds=max_rounds,
            rng=rng,
            warm_caches=True,
            progress=progress,
            after=after,
        )
        samples = {name: samples[name] + more[name] for name in calls}
        for name, values in samples.items():
            timings[name] = timing_of(values, compile_seconds=compile_seconds[name])
        comparison = Comparison(baseline, {name: timings[name] for name in fns}, {}, samples, seed)
        ratios = {name: comparison.ratio(baseline, name) for name in samples}
        comparison = dataclasses.replace(comparison, ratios=ratios)
        if clock.elapsed + seconds > longest or decides(comparison):
            return comparison


def measure(fn: Callable[..., Any], *args: Any, seconds: float = 1.0) -> Timing:
    """Times one function at `args`: arrays, or jax.ShapeDtypeStructs, for which random inputs are
    made.

    A function that is not jitted yet is jitted. Errors of `fn` are raised: there is only one
    function to lose.
    """
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    args = jax.tree.map(
        lambda leaf: random_input(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, args
    )
    # Host arrays would be copied to the device in every call.
    args = jax.tree.map(
        lambda leaf: jax.device_put(leaf) if isinstance(leaf, np.ndarray) else leaf, args
    )
    start = time.perf_counter()
    lowered = jitted.lower(*args)
    if lowered.donate_argnums:
        raise ValueError(
            f"arguments {lowered.donate_argnums} are donated: only a function that keeps its "
            "arguments can be called repeatedly"
        )
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - start

    def run() -> Any:
        return jitted(*args)

    _, warm = warm_up(run)
    samples = interleave(
        {"fn": run},
        {"fn": calls_per_turn(warm, 1e-3)},
        seconds=seconds,
        min_rounds=5,
        max_rounds=10_000,
        rng=np.random.default_rng(0),
        warm_caches=False,
    )["fn"]
    return timing_of(
        samples, compile_seconds=compile_seconds, hlo_hash=hlo_hash(compiled.as_text() or "")
    )


def error_text(error: BaseException, *, limit: int = 2000) -> str:
    """The error in one string, cut to `limit` characters from its start."""
    return f"{type(error).__name__}: {error}"[:limit]


@dataclasses.dataclass
class Stopwatch:
    """What is left of a budget of seconds; the only clock a search sees."""

    seconds: float
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        return self.seconds - self.elapsed

    @property
    def done(self) -> bool:
        """Whether nothing is left. Raises a Ctrl-C that was lost: whoever looks here would stop."""
        raise_lost_ctrl_c()
        return self.left <= 0

    def part(self, share: float) -> Stopwatch:
        """A stopwatch that starts now and ends after `share` of what is left."""
        return Stopwatch(max(self.left, 0.0) * share)
