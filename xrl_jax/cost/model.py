"""The cost oracle of a search: stored timings, new ones from the worker, the roofline for the rest.

This is the host side of `roofline`: it decides what is measured, keeps every timing in the store,
and provides the `CostTable` that searches compute with inside jit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from xrl_jax.cost import calibration, regions, roofline
from xrl_jax.cost.calibration import Sample
from xrl_jax.cost.config import DEFAULT, CostConfig
from xrl_jax.cost.fusion import Sharing, sharing
from xrl_jax.cost.rates import DEFAULT_RATES, Rates, first_rates
from xrl_jax.cost.regions import Region
from xrl_jax.cost.roofline import CostTable
from xrl_jax.cost.view import CLASS_OF, MEASURED, CostView, signature
from xrl_jax.graph import ops
from xrl_jax.graph.graph import TensorGraph
from xrl_jax.graph.hash import timing_key
from xrl_jax.measure.base import Job, Measurer
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.store import TimingStore
from xrl_jax.measure.target import Target
from xrl_jax.measure.timing import Timing
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.runtime.engine_jit import engine_jit

_WORTH_TIMING = np.array([CLASS_OF[n] in MEASURED for n in ops.OP_NAMES])
_PLAIN_DTYPE = np.array([d not in ("none", "extended", "tuple") for d in ops.DTYPES])
_LEAST_TIMEOUT = 5.0  # seconds a region may take even when the budget ends before
_MIN_SECONDS = 2e-7
_LEAST_BATCH = 64  # least number of signatures computed at once
_LOAD = timing_key([], (), extra=["reference_seconds"])  # key of the first region's load


@dataclass
class Spending:
    """The measurements that a search has made; all times in seconds."""

    measurements: int = 0
    from_store: int = 0
    failures: int = 0
    compile_seconds: float = 0.0
    measure_seconds: float = 0.0  # in the worker, compiling included

    def as_dict(self) -> dict[str, float]:
        return dict(self.__dict__)


@dataclass
class Oracle:
    """Costs for one search on one machine under one set of compile options.

    Attributes:
      store: holds all timings, old and new.
      measurer: takes new timings.
      options: XLA compile options of the code that is timed.
      constants: whether prepared weights are constants of the compiled code, not arguments.
      config: hyperparameters of the cost model.
      spending: measurements made so far.
      rates: roofline parameters, recalibrated as timings come in.
    """

    store: TimingStore
    measurer: Measurer
    options: tuple[tuple[str, str], ...] = ()
    constants: bool = False
    config: CostConfig = DEFAULT
    spending: Spending = field(default_factory=Spending)
    rates: Rates = DEFAULT_RATES  # by default those of `first_rates`
    _sharing: Sharing = field(init=False)
    _loops: tuple[Sample, ...] = ()
    _failed: dict[str, Timing] = field(default_factory=dict)  # by identity of the job
    _known: dict[tuple[int, int], tuple[Region, float]] = field(default_factory=dict)
    _cut_short_keys: set[tuple[int, int]] = field(default_factory=set)  # timing was cut short
    _costs: CostTable = field(init=False)

    def __post_init__(self) -> None:
        self._sharing = sharing(self.target.platform)
        if self.rates is DEFAULT_RATES:
            self.rates = first_rates(self.target.platform)
        self._refit()

    @property
    def target(self) -> Target:
        """The target that the costs are for."""
        return self.store.target

    @property
    def costs(self) -> CostTable:
        """The table that graphs are priced with, from all timings so far; replaced with every new
        timing.
        """
        return self._costs

    def _refit(self) -> None:
        """Calibrate the rates and rebuild the table."""
        known = self._known.values()
        samples = [regions.region_sample(r, s) for r, s in known if np.isfinite(s)]
        samples += self._loops
        prior = calibration.priors(self.target.platform)
        self.rates = calibration.calibrate(samples, self.rates, prior, config=self.config)
        timings = {k: self._net_seconds(r, s) for k, (r, s) in self._known.items()}
        self._costs = roofline.cost_table(
            timings, self.rates, config=self.config, sharing=self._sharing
        )

    def _net_seconds(self, region: Region, seconds: float) -> float:
        """Return a region's time without its wrapping, or 1000 seconds if it could not be timed."""
        if not np.isfinite(seconds):
            return 1e3
        wrapping = sum(map(self.rates.pass_seconds, regions.wrapping_passes(region)))
        return max(seconds - min(wrapping, 0.5 * seconds), _MIN_SECONDS)

    def untimed_regions(self, view: CostView) -> dict[tuple[int, int], Region]:
        """Return the regions worth timing among the views (any leading dimensions) that have no
        timing yet, by signature.
        """
        op = np.asarray(view.op)
        wanted = (
            _WORTH_TIMING[op] & _PLAIN_DTYPE[np.asarray(view.dtype)] & ~np.asarray(view.weight_only)
        )
        wanted &= ~np.asarray(self._sharing.loops)[op]
        if not wanted.any():
            return {}
        rows = CostView._make(np.asarray(f)[wanted] for f in view)
        found: dict[tuple[int, int], Region] = {}
        for i, key in enumerate(signatures(rows)):
            if key not in self._known and key not in self._cut_short_keys and key not in found:
                found[key] = regions.region_of(rows, (i,), self.target.platform)
        return found

    def measure(
        self,
        wanted: Mapping[tuple[int, int], Region],
        *,
        clock: Stopwatch,
        limit: int | None = None,
        new: int | None = None,
    ) -> int:
        """Time regions, or find them in the store, until `clock` has run out or `limit` is reached.

        Args:
          wanted: regions by signature, the most important first.
          limit: bound on all measurements of this oracle.
          new: bound on the measurements of this call.

        Returns:
          The number of regions that became known.
        """
        by_key = {sig: self._key(r) for sig, r in wanted.items()}
        stored = self.store.get(by_key.values())
        done, before = 0, self.spending.measurements
        try:
            for sig, region in wanted.items():
                timing = stored.get(by_key[sig])
                if timing is None:
                    spent = self.spending.measurements
                    over = (limit is not None and spent >= limit) or (
                        new is not None and spent - before >= new
                    )
                    if over or clock.done:
                        continue
                    timeout = min(self.config.region_timeout, max(clock.left, _LEAST_TIMEOUT))
                    timing = self._time(region, timeout)
                    if self._cut_short(timing, timeout):
                        self._cut_short_keys.add(sig)
                        continue
                else:
                    self.spending.from_store += 1
                self._known[sig] = (region, timing.seconds)  # infinite where it failed
                done += 1
        finally:  # Ctrl-C keeps the timings made so far
            if done:
                self._refit()
        return done

    def measure_loops(self) -> None:
        """Time elementwise loops, or find them in the store.

        In a network, loops are priced by the time of a pass over an array on this machine; regions
        are timed between two of them.
        """
        timed = [(r, self._timing(r)) for r in regions.loops(self.target.platform)]
        self._loops = tuple(regions.region_sample(r, t.seconds) for r, t in timed if t.ok)
        self._refit()

    def _timing(self, region: Region) -> Timing:
        """Return the region's timing, from the store if it is there."""
        timing = self.store.get([self._key(region)]).get(self._key(region))
        if timing is None:
            return self._time(region, self.config.region_timeout)
        self.spending.from_store += 1
        return timing

    def _key(self, region: Region) -> str:
        return regions.region_key(region, self.options, constants=self.constants)

    def _time(self, region: Region, timeout: float) -> Timing:
        """Take a new timing of a region, without the worker's launch overhead, and store it.

        The overhead is subtracted before storing because it differs from worker to worker.
        """
        try:
            with plain_ctrl_c():
                job = regions.region_job(region, self.options, constants=self.constants)
        except Exception as error:  # a lowering that cannot be traced must not end the search
            timing = Timing.without("failed", f"{type(error).__name__}: {error}")
            self.spending.measurements += 1
            self.spending.failures += 1
        else:
            timing = self.time_job(job, seconds_per_job=0.08, timeout=timeout)
            if timing.ok:
                timing = self._normalised(timing)
                # Copies meant for the library that it did not take are merged into one by XLA.
                copies = 1 if region.in_partition and not job.custom_calls else region.copies
                overhead = 0.0 if job.slope else self.measurer.overhead_seconds
                timing = without_overhead(timing, overhead, copies)
        # Not stored: a lost worker, which may not be the region's fault, and a timeout shorter than
        # other searches would allow.
        impatient = timing.status == "timeout" and timeout < DEFAULT.region_timeout
        if timing.status != "killed" and not impatient and not self._cut_short(timing, timeout):
            self.store.put({self._key(region): timing})
        return timing

    def _cut_short(self, timing: Timing, timeout: float) -> bool:
        """Return whether the region timed out because the budget left less than it may take."""
        return timing.status == "timeout" and timeout < self.config.region_timeout

    def _normalised(self, timing: Timing) -> Timing:
        """Return the timing scaled to the machine's load when the first timing of the store was
        taken: the machine may be more or less busy now.
        """
        now = timing.reference_seconds
        if now is None:
            return timing
        first = self.store.get([_LOAD]).get(_LOAD)
        if first is None:
            first = Timing(now, now, now)
            self.store.put({_LOAD: first})
        k = first.seconds / now
        return replace(
            timing,
            seconds=k * timing.seconds,
            low=k * timing.low,
            high=k * timing.high,
            reference_seconds=first.seconds,
        )

    def time_job(
        self,
        job: Job,
        *,
        reference: Job | None = None,
        seconds_per_job: float = 1.0,
        timeout: float = 300.0,
    ) -> Timing:
        """Time a job, in turn with the reference; all timings of a search are made here.

        A job that fails, hangs or kills the worker is tried once: its timing is returned from then
        on, and as a reference it is left out.
        """
        if job.identity in self._failed:
            return self._failed[job.identity]
        if reference is not None and reference.identity in self._failed:
            reference = None
        clock = Stopwatch(timeout)
        timing = self.measurer.submit(
            [job], reference=reference, seconds_per_job=seconds_per_job, timeout=timeout
        )[0]
        self.spending.measurements += 1
        self.spending.compile_seconds += timing.compile_seconds
        self.spending.measure_seconds += clock.elapsed
        if not timing.ok:
            self._failed[job.identity] = timing
            self.spending.failures += 1
        elif reference is not None and timing.relative is None:
            self._failed[reference.identity] = Timing.without("failed", "cannot be a reference")
            self.spending.measurements += 1
            self.spending.failures += 1
        return timing

    def time_against(
        self,
        job: Job,
        reference: Job,
        *,
        turn: int = 0,
        seconds_per_job: float = 1.0,
        timeout: float = 300.0,
    ) -> Timing:
        """Time a whole program in turn with another.

        The timing is kept in the store, so that decisions based on it are repeatable. `turn`
        distinguishes timings of the same two programs.
        """
        # Increase the number when the timing method or the code that programs compile to changes:
        # timings taken for less time, cold, or of an older back end must not decide.
        key = timing_key([], (), extra=["against 8", str(turn), job.key, reference.key])
        timing = self.store.get([key]).get(key)
        if timing is not None:
            self.spending.from_store += 1
            return timing
        timing = self.time_job(
            job, reference=reference, seconds_per_job=seconds_per_job, timeout=timeout
        )
        if timing.relative is not None:
            self.store.put({key: timing})
        return timing

    def correct(self, shares: Sequence[Mapping[str, float]], measured: Sequence[float]) -> None:
        """Correct the table by whole-program timings; see `calibration.correct`."""
        self.rates = calibration.correct(self.rates, shares, measured, config=self.config)
        self._refit()


def without_overhead(timing: Timing, overhead: float, copies: int = 1) -> Timing:
    """Return the timing of one of several copies, less `overhead` seconds in all, but at least a
    fifth of a microsecond.
    """
    seconds, low, high = (
        max((s - overhead) / copies, _MIN_SECONDS)
        for s in (timing.seconds, timing.low, timing.high)
    )
    return replace(timing, seconds=seconds, low=low, high=high)


@engine_jit
def price(costs: CostTable, graph: TensorGraph) -> tuple[TensorGraph, jax.Array]:
    """Return the graph with every node's cost set from the table, and their sum."""
    graph = costs.priced(graph)
    return graph, roofline.total(graph)


_signature = engine_jit(signature)


def signatures(views: CostView) -> list[tuple[int, int]]:
    """Return the signatures of host-side views [M].

    The views are padded to one of few sizes (64 times a power of four), because M changes all the
    time and each size is compiled.
    """
    count = len(views.op)
    size = _LEAST_BATCH
    while size < count:
        size *= 4
    padded = (np.pad(f, [(0, size - count)] + [(0, 0)] * (f.ndim - 1)) for f in views)
    keys = np.asarray(_signature(CostView._make(padded)))  # type: ignore[arg-type]
    return [(int(a), int(b)) for a, b in keys[:count]]
