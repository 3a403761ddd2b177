"""The report of an optimisation: its gain, the uncertainty of that gain, and its cost.

A `Report` holds plain values only, so that it can be saved as JSON and read on another machine.
Values that follow from its fields (milliseconds, rules fired, calls to break even) are properties.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from xrl_jax.measure.timing import Timing
from xrl_jax.report.units import (
    bytes_text,
    count_text,
    interval_text,
    seconds_text,
)
from xrl_jax.search.base import FrontierPoint, Step, StopReason, options_text

FORMAT = 1  # version of `as_dict`; newer ones are refused
USED = ("optimized", "original")
_MAX_RULES = 14  # rows of the rule table, so that a report fits on one screen
_MAX_NARROWED = 8  # steps with an error that are listed
_WIDTH = 100  # characters at which such a row is cut


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of `optimize` in numbers; `str(report)` is the readable form.

    Times are in seconds unless the name says otherwise; errors are relative.

    Attributes:
      name: name of the function or network.
      search: name of the strategy.
      settings: hyperparameters of the search, its stages and the cost model, by name;
        `changed_settings` names those that differ from the defaults.
      seed: the seed of the search, if its key was made from one.
      machine: processor and device.
      versions: versions of jax and jaxlib.
      options: XLA compile options of the optimised function.
      used: the function that is returned, "optimized" or "original".
      reason: why that one is returned, in one sentence.
      stop_reason: why the search ended.
      baselines: timings of the original in several variants, in the same rounds as `optimized`.
      baseline_name: the strongest baseline, which `speedup` refers to.
      optimized: timing of the best program found, whether or not it is returned.
      speedup: of the returned function over the strongest baseline; 1 if that is the original.
      interval: 95 % interval of `speedup`.
      traced_speedup: speedup for traced weights (arguments of a surrounding jit, or variables of a
        derivative), which cannot be prepared, over jit with weights as arguments; 1 if the original
        runs.
      noise_interval: the interval for the baseline timed against itself (an A/A control).
      max_error: error of the optimised function.
      reference_error: error of the original.
      tolerance: the largest `max_error` allowed.
      narrow: names of equations that cannot be run in float64: in the reference they run in the
        precision of the function.
      assumed: rules applied that hold only if all values are finite and in range.
      domain: for each flat argument, a bound on its values, or None: the original runs for larger
        values, NaN and infinities. None on the whole if the result is right for all values.
      weight_bytes_added: memory of prepared weights in addition to the original ones.
      predicted_ms_before, predicted_ms_after: predictions for the original and the result.
      steps: the rewrites that led to the result.
      history: (seconds since the search began, best predicted seconds) at each improvement.
      nodes_before, nodes_after: numbers of live nodes, each body counted once.
      body_counts: how often each folded body runs in one call.
      candidates: number of rewrites examined.
      measurements: number of timings made; `failures` of them failed.
      from_store: number of timings found in the store instead.
      compile_seconds: time spent compiling.
      measure_seconds: time spent timing, without compiling.
      search_seconds: time spent matching, applying and choosing rewrites.
      total_seconds: time from the call of `optimize` to its return.
      note: anything else worth knowing about the search.
      frontier: where a tolerance was given, what time each budget of error buys: the choices among
        which `tolerance` decided.
    """

    name: str
    search: str
    seed: int | None
    machine: str
    versions: str
    options: tuple[tuple[str, str], ...]
    used: str
    reason: str
    stop_reason: StopReason
    baselines: Mapping[str, Timing]
    baseline_name: str
    optimized: Timing
    speedup: float
    interval: tuple[float, float]
    traced_speedup: float
    noise_interval: tuple[float, float]
    max_error: float
    reference_error: float
    tolerance: float
    weight_bytes_added: int
    predicted_ms_before: float
    predicted_ms_after: float
    steps: tuple[Step, ...]
    history: tuple[tuple[float, float], ...]
    nodes_before: int
    nodes_after: int
    body_counts: tuple[float, ...]
    candidates: int
    measurements: int
    from_store: int
    failures: int
    compile_seconds: float
    measure_seconds: float
    search_seconds: float
    total_seconds: float
    narrow: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    domain: tuple[float | None, ...] | None = None
    note: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changed_settings: tuple[str, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()

    def __post_init__(self) -> None:
        if self.used not in USED:
            raise ValueError(f"Report.used is {self.used!r}, must be one of {', '.join(USED)}")
        if self.baseline_name not in self.baselines:
            known = ", ".join(self.baselines)
            raise ValueError(f"baseline {self.baseline_name!r} was not timed; timed were: {known}")

    @property
    def baseline_ms(self) -> float:
        """Milliseconds per call of the strongest baseline."""
        return 1e3 * self.baselines[self.baseline_name].seconds

    @property
    def optimized_ms(self) -> float:
        """Milliseconds per call of the best program found."""
        return 1e3 * self.optimized.seconds

    @property
    def rules_fired(self) -> dict[str, int]:
        """How often each rule was applied, most frequent first; rewrites in a body count once."""
        return dict(Counter(step.rule for step in self.steps).most_common())

    @property
    def break_even_calls(self) -> int | None:
        """Number of calls that repay the time spent optimising; None if it is never repaid."""
        saved = (self.baseline_ms - self.optimized_ms) / 1e3
        if self.used == "original" or not saved > 0:
            return None
        return math.ceil(self.total_seconds / saved)

    def as_dict(self) -> dict[str, Any]:
        """Return fields and properties as strict JSON values (NaN and infinities become None)."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values |= {name: getattr(self, name) for name in _DERIVED}
        values |= {
            "format": FORMAT,
            "stop_reason": self.stop_reason.name,
            "baselines": {name: t.as_dict() for name, t in self.baselines.items()},
            "optimized": self.optimized.as_dict(),
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "frontier": [dataclasses.asdict(point) for point in self.frontier],
        }
        return _plain(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """Return the report that `values` from `as_dict` describe; unknown names are ignored.

        Raises:
          ValueError: the values are not a report, or have a newer format.
        """
        try:
            if values["format"] > FORMAT:
                raise ValueError(
                    f"the report has format {values['format']}, this version reads up to {FORMAT}: "
                    "use a newer xrl_jax"
                )
            given = {"frontier": (), **values}  # reports without a tolerance may lack it
            return cls(**{f.name: _READ[f.name](given[f.name]) for f in dataclasses.fields(cls)})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a report: {type(error).__name__} {error}") from error

    def __str__(self) -> str:
        return "\n".join(_lines(self))


_DERIVED = ("baseline_ms", "optimized_ms", "rules_fired", "break_even_calls")


def _plain(value: Any) -> Any:
    """Return the value with tuples as lists, and NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _float(value: Any) -> float:
    return math.inf if value is None else float(value)


def _floats(values: Any) -> tuple[Any, ...]:
    return tuple(_float(v) for v in values)


def _step(value: Any) -> Step:
    place, error = str(value["place"]), _float(value.get("error", 0.0))
    return Step(int(value["graph"]), str(value["rule"]), place, _float(value["gain"]), error)


# By field: the function that reads it back from the values of `as_dict`.
_READ: dict[str, Any] = {
    **dict.fromkeys(("name", "search", "machine", "versions", "used"), str),
    **dict.fromkeys(("reason", "baseline_name", "note"), str),
    **dict.fromkeys(("weight_bytes_added", "nodes_before", "nodes_after"), int),
    **dict.fromkeys(("candidates", "measurements", "from_store", "failures"), int),
    **dict.fromkeys(("speedup", "traced_speedup"), _float),
    **dict.fromkeys(("max_error", "reference_error", "tolerance"), _float),
    **dict.fromkeys(("predicted_ms_before", "predicted_ms_after"), _float),
    **dict.fromkeys(("compile_seconds", "measure_seconds"), _float),
    **dict.fromkeys(("search_seconds", "total_seconds"), _float),
    **dict.fromkeys(("interval", "noise_interval", "body_counts"), _floats),
    "seed": lambda value: None if value is None else int(value),
    "options": lambda pairs: tuple((str(k), str(v)) for k, v in pairs),
    **dict.fromkeys(
        ("narrow", "assumed", "changed_settings"), lambda names: tuple(map(str, names))
    ),
    "settings": dict,
    "domain": lambda bounds: None if bounds is None else tuple(bounds),
    "stop_reason": lambda name: StopReason[name],
    "baselines": lambda named: {str(n): Timing.from_dict(t) for n, t in named.items()},
    "optimized": Timing.from_dict,
    "steps": lambda steps: tuple(_step(s) for s in steps),
    "history": lambda pairs: tuple(_floats(p) for p in pairs),
    "frontier": lambda points: tuple(FrontierPoint(**p) for p in points),
}


def _lines(r: Report) -> Iterator[str]:
    if r.used == "optimized":
        low, high = r.interval
        yield f"{r.name}: {r.speedup:.2f} times as fast ({low:.2f} to {high:.2f})"
    else:
        yield f"{r.name}: nothing gained"
    yield f"  {r.reason}"
    low, high = r.noise_interval
    yield f"  noise: a function timed against itself gives {low:.3f} to {high:.3f}"
    yield ""
    yield "time per call"
    width = max(len(name) for name in (*r.baselines, "optimised"))
    for name, timing in r.baselines.items():
        mark = "  strongest baseline" if name == r.baseline_name else ""
        yield _timing_line(name, width, timing) + mark
    yield _timing_line("optimised", width, r.optimized)
    before, after = (seconds_text(ms / 1e3) for ms in (r.predicted_ms_before, r.predicted_ms_after))
    yield f"  the cost model predicted {before} before, {after} after"
    yield ""
    narrow = f" (computed in their own precision: {', '.join(r.narrow)})" if r.narrow else ""
    yield (
        f"errors against float64{narrow}: original {r.reference_error:.1e}, "
        f"optimised {r.max_error:.1e}, allowed {r.tolerance:.1e}"
    )
    yield from _precision_lines(r)
    if r.domain is not None:
        limits = ", ".join(f"{b:.4g}" for b in r.domain if b is not None)
        yield f"domain: finite inputs up to {limits}; on others the original runs"
    if r.assumed:
        yield f"assumption: all values are finite (rules {', '.join(r.assumed)})"
    if r.used == "optimized":
        faster = f"{r.traced_speedup:.2f} times as fast"
        yield (
            "where weights are traced, as inside another jit: "
            f"{faster if r.traced_speedup > 1.0 else 'the original runs'}"
        )
    yield f"memory added by prepared weights: {bytes_text(r.weight_bytes_added)}"
    calls = r.break_even_calls
    yield f"calls to break even: {'never' if calls is None else count_text(calls)}"
    yield ""
    yield from _rule_lines(r)
    yield ""
    rest = r.total_seconds - r.compile_seconds - r.measure_seconds - r.search_seconds
    yield (
        f"time spent: {seconds_text(r.total_seconds)} "
        f"(compiling {seconds_text(r.compile_seconds)}, "
        f"measuring {seconds_text(r.measure_seconds)}, searching {seconds_text(r.search_seconds)}, "
        f"other {seconds_text(max(rest, 0.0))})"
    )
    seed = "" if r.seed is None else f", seed {r.seed}"
    yield (
        f"search {r.search}{seed}: {r.stop_reason.value}; {count_text(r.candidates)} candidates, "
        f"{count_text(r.measurements)} measured ({count_text(r.failures)} failed), "
        f"{count_text(r.from_store)} from the store"
    )
    if r.changed_settings:
        yield f"  with {', '.join(f'{name}={r.settings[name]}' for name in r.changed_settings)}"
    if r.note:
        yield f"  {r.note}"
    yield f"nodes: {r.nodes_before} before, {r.nodes_after} after{_bodies(r.body_counts)}"
    yield f"compile options: {options_text(r.options)}"
    yield f"machine: {r.machine}"
    yield f"versions: {r.versions}"


def _precision_lines(r: Report) -> Iterator[str]:
    """Yield what narrower types buy: the frontier, and the steps with the largest errors."""
    if not r.frontier:
        return
    yield "time as a share of the original's, by the error that narrower types cause:"
    for point in r.frontier:
        types = point.types or "no narrower types"
        yield f"  {point.relative:.2f}  error {point.error:.1e}  {types}"
    steps = sorted((s for s in r.steps if s.error), key=lambda s: -s.error)
    if steps and r.used == "optimized":
        yield "narrower types, by the error that each causes on its own (predicted gain):"
        for s in steps[:_MAX_NARROWED]:
            gain = seconds_text(s.gain)
            yield f"  {s.error:.1e}  {s.rule}  {_where(s)} ({gain})"
        if len(steps) > _MAX_NARROWED:
            yield f"  and {len(steps) - _MAX_NARROWED} more"


def _where(step: Step) -> str:
    return step.place if step.graph == 0 else f"body {step.graph}: {step.place}"


def _timing_line(name: str, width: int, timing: Timing) -> str:
    if not timing.ok:
        reason = timing.error.splitlines()[0] if timing.error else ""
        return f"  {name:{width}}  {timing.status}: {reason}"
    interval = interval_text(timing.low, timing.high)
    return f"  {name:{width}}  {seconds_text(timing.seconds):>9}  ({interval})"


def _bodies(counts: tuple[float, ...]) -> str:
    if not counts:
        return ""
    noun = "1 folded body runs" if len(counts) == 1 else f"{len(counts)} folded bodies run"
    shown = ", ".join(count_text(c) for c in counts[:8]) + (", ..." if len(counts) > 8 else "")
    return f"; {noun} {shown} times"


def _rule_lines(r: Report) -> Iterator[str]:
    """Yield one row for each rule, largest predicted gain first.

    A gain in a body is multiplied by the number of times the body runs.
    """
    if not r.steps:
        yield "rules fired: none"
        return
    counts = (1.0, *r.body_counts)
    gains: dict[str, float] = {}
    places: dict[str, list[str]] = {}
    for step in r.steps:
        runs = counts[step.graph] if step.graph < len(counts) else 1.0
        gains[step.rule] = gains.get(step.rule, 0.0) + step.gain * runs
        places.setdefault(step.rule, []).append(_where(step))
    total = f"{len(r.steps)} rewrites by {len(gains)} rules"
    kept = "" if r.used == "optimized" else ", in a program that is not returned"
    yield f"rules fired: {total}{kept} (predicted gain, first place)"
    rows = sorted(gains, key=lambda rule: -gains[rule])
    width = max(len(rule) for rule in rows[:_MAX_RULES])
    for rule in rows[:_MAX_RULES]:
        gain = seconds_text(gains[rule])
        yield f"  {rule:{width}} {len(places[rule]):>4} x  {gain:>9}  {places[rule][0]}"[:_WIDTH]
    if len(rows) > _MAX_RULES:
        left = sum(len(places[rule]) for rule in rows[_MAX_RULES:])
        gain = seconds_text(sum(gains[rule] for rule in rows[_MAX_RULES:]))
        yield f"  and {left} rewrites by {len(rows) - _MAX_RULES} more rules, {gain}"
