"""Timing of functions in this process, one on its own or several in turn.

Nothing here depends on graphs. Functions are timed in turn, in one process, in an order shuffled in
every round, because on a shared machine the load drifts by more than the differences of interest:
the drift that two functions share within a round cancels in their ratio. Medians and order
statistics are used throughout, since the noise has one long tail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from xrl_jax.measure.inputs import hlo_hash, random_input
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.timing import Ratio, Timing, error_text, paired_ratio, timing_of


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keep Python's cyclic collector, a source of millisecond pauses, out of the block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# A GPU that waits for every call is idle while the host makes the next one; in use it is not.
_GPU_CALLS = 8


def call_seconds(fn: Callable[[], Any], calls: int = 1) -> float:
    """Return the seconds per call over `calls` calls in a row, each with a wait for its result; on
    a GPU with a wait after every eighth.
    """
    in_a_row = _GPU_CALLS if jax.default_backend() == "gpu" else 1
    start = time.perf_counter()
    for first in range(0, calls, in_a_row):
        results = [fn() for _ in range(first, min(first + in_a_row, calls))]
        jax.block_until_ready(results)
    return (time.perf_counter() - start) / calls


def warm_up(fn: Callable[[], Any]) -> tuple[float, float]:
    """Call `fn` three times; return the seconds of the first call and the least of the others."""
    first = call_seconds(fn)
    return first, min(call_seconds(fn), call_seconds(fn))


def calls_per_turn(seconds_per_call: float, turn_seconds: float) -> int:
    """Return how many calls in a row fill a turn, so that the clock and cold caches do not dominate
    short functions.
    """
    return max(1, min(1000, math.ceil(turn_seconds / max(seconds_per_call, 1e-9))))


# After ResNeXt-50 under jax.jit (168 ms, 104 MB allocated from the system in each call), the next
# function's time included 4.3 ms of system time.
_PAUSE = 0.05  # share of a turn
_LONGEST_PAUSE = 0.01  # seconds


# NASRNN, 48 MB of weights, called after other functions: under jax.jit it takes 3.6 ms, then 2.6,
# 2.3, and 2.2 from there on; a result that takes 1.4 ms in the end takes 2.7, then 2.4, 2.2, 2.1,
# and reaches 1.4 after twelve calls. Networks that take 70 ms show no such effect.
_WARM_CALLS, _WARM_SECONDS = 12, 0.025
_LONG_CALL = 0.05  # seconds


def _warm_caches(fn: Callable[[], Any]) -> None:
    """Call `fn` untimed until the arrays it reads are in the caches, as they are when it runs in a
    loop.

    The other functions have evicted them, except arrays that they share. So a result with weights
    of its own would be timed with cold caches, and variants of the original, which share theirs,
    with warm ones.
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
    """Time functions in turn.

    In every round each function gets one turn of `calls[name]` calls, in a shuffled order, and with
    `warm_caches` untimed calls before it. After a turn comes a short pause, because memory that a
    call allocated is returned to the system after the call, which would slow down the next
    function; then `after[name]`, if present, is called untimed. Rounds go on until `seconds` are
    over, but never fewer than `min_rounds` nor more than `max_rounds`. `progress(rounds,
    elapsed_seconds)` is called after each round.

    Returns:
      Seconds per call by name, one sample per round.
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
        """Return seconds of `slow` / seconds of `fast`, from the rounds that both were in."""
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
    """Time functions of no arguments against `baseline`, interleaved.

    This takes about `seconds` in all after the warm-up. It is repeated, up to `longest` seconds,
    until `decides` holds for all rounds together. `progress(rounds, elapsed_seconds)` is called
    after each round, and `after[name]()` after each turn of `name`, untimed: for functions that
    leave threads behind which would disturb the next one.

    A function that raises during its warm-up is left out with status "failed"; the baseline's error
    is raised. Raises ValueError when `baseline` is not among `fns`.
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
    """Time one function at `args`: arrays, or jax.ShapeDtypeStructs, for which random inputs are
    made.

    A function that is not jitted yet is jitted. Errors of `fn` are raised, because no other
    function's timing depends on them. Raises ValueError if arguments are donated.
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
