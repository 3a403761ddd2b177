"""Comparison of a network's variants, timed in turn: the original under jax.jit, the results of
searches, and other runtimes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

import xrl_jax
from experiments import targets
from experiments.runtimes import (
    JIT_BF16,
    NARROWER,
    RUNTIMES,
    TOLERANCE,
    DisagreementError,
    Loaded,
    check_agreement,
    jit_in_bfloat16,
    onnx_model,
)
from xrl_jax.accept.accuracy import assess, references
from xrl_jax.accept.baselines import baselines, flat_original
from xrl_jax.accept.samples import N_USUAL, samples
from xrl_jax.backends.onnx.values import ExportError
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.measure.comparison import Comparison, compare
from xrl_jax.measure.target import target_here
from xrl_jax.measure.timing import Ratio
from xrl_jax.program.arguments import unflatten_args
from xrl_jax.program.program import Program

CONTROL = "A/A control"
_LARGEST_ERROR = 0.5  # of a runtime in a narrower type, which then has another function


class WrongResultError(ValueError):
    """A result does not compute the network's function; the message says which and how wrong."""


@dataclass(frozen=True)
class Entry:
    """One search's result in the comparison.

    Attributes:
      seconds: of one call.
      speedup, low, high: seconds of the strongest jit / seconds of this, with a 95 % interval; 1 if
        the original is returned.
      strongest: name of that jit.
      error, tolerance: against float64, relative.
    """

    seconds: float
    speedup: float
    low: float
    high: float
    strongest: str
    error: float
    tolerance: float


@dataclass(frozen=True)
class RuntimeEntry:
    """Another runtime in the comparison.

    Attributes:
      seconds: of one call; None if it does not run the network; `note` then says why.
      error: of its outputs against the network's, relative.
    """

    seconds: float | None
    error: float | None
    note: str = ""


@dataclass(frozen=True)
class SideBySide:
    """The comparison of all variants of one network.

    Attributes:
      jits: seconds of the original's variants under jax.jit.
      noise: interval of the ratio of the strongest of them to itself, compiled again.
      entries: results of searches, by search.
      ratios: ratios["a/b"] = (seconds of a / seconds of b, low, high), for searches and runtimes.
      runtimes: by name of the runtime.
    """

    network: str
    jits: dict[str, float]
    noise: tuple[float, float]
    entries: dict[str, Entry]
    ratios: dict[str, tuple[float, float, float]]
    runtimes: dict[str, RuntimeEntry]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SideBySide:
        entries = {name: Entry(**entry) for name, entry in values["entries"].items()}
        ratios = {name: (r[0], r[1], r[2]) for name, r in values["ratios"].items()}
        runtimes = {name: RuntimeEntry(**entry) for name, entry in values["runtimes"].items()}
        low, high = values["noise"]
        read = {"entries": entries, "ratios": ratios, "runtimes": runtimes, "noise": (low, high)}
        return cls(**{**values, **read})


class InRuntime(NamedTuple):
    """A network in a runtime: a call without arguments, and a wait until its threads are idle."""

    call: Callable[[], Any]
    wait_until_idle: Callable[[], Any]
    error: float


def in_runtimes(
    target: targets.Target, names: Sequence[str], model: Any = None
) -> dict[str, InRuntime | str]:
    """Load the network into these runtimes; for one that cannot run it or disagrees, return why.

    Args:
      names: keys of `RUNTIMES` and `NARROWER`, and `JIT_BF16`.
      model: the network's own ONNX model; None if it has none and must be exported.
    """
    if not names:
        return {}
    weights, *inputs = target.args
    if model is None:
        try:
            model = onnx_model(target.fn, weights, *inputs, name=target.name)
        except (ExportError, ValueError) as problem:
            return dict.fromkeys(names, f"{type(problem).__name__}: {problem}")
    return {name: _in_runtime(name, model, target) for name in names}


def _in_runtime(name: str, model: Any, target: targets.Target) -> InRuntime | str:
    weights, *inputs = target.args
    on_host = jax.tree.map(np.array, jax.device_get(inputs))  # writable, see `runtimes.openvino`
    tolerance = TOLERANCE if name in RUNTIMES else _LARGEST_ERROR
    try:
        run = _loaded(name, model, target)
        error = check_agreement(run, target.fn, weights, on_host, tolerance=tolerance)
    except (DisagreementError, ImportError, ValueError) as problem:
        return f"{type(problem).__name__}: {problem}"
    return InRuntime(functools.partial(run, *on_host), run.wait_until_idle, error)


def _loaded(name: str, model: Any, target: targets.Target) -> Loaded:
    if name == JIT_BF16:
        return jit_in_bfloat16(target.fn, target.args[0])
    return {**RUNTIMES, **NARROWER}[name](model, target_here().threads)


def checked(
    name: str, fast: Callable[..., Any], program: Program, leaves: list[Any]
) -> tuple[float, float]:
    """Return error and tolerance of a result against float64; raise WrongResultError if wrong.

    A result within a tolerance is checked against that, and on usual inputs only.
    """

    def flat(*given: Any) -> list[Any]:
        args, kwargs = unflatten_args(program.in_tree, given)
        return jax.tree.leaves(fast(*args, **kwargs))

    original = flat_original(program)
    report = getattr(fast, "report", None)
    tolerance = report.tolerance if report is not None and report.frontier else None
    checks = samples(program, leaves)[: None if tolerance is None else N_USUAL]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of inputs outside of its domain
        exact = references(program, checks)
        found = assess(jax.jit(original), flat, exact, checks, tolerance=tolerance)
    if not found.ok:
        raise WrongResultError(f"the result of {name} is wrong: {found.reason}")
    return found.error, found.tolerance


def side_by_side(
    target: targets.Target,
    folders: Mapping[str, Path],
    *,
    seconds: float,
    seed: int = 0,
    runtimes: Mapping[str, InRuntime | str] = MappingProxyType({}),
) -> SideBySide:
    """Time all variants of one network in turn, in this process.

    Args:
      target: the network.
      folders: folders that `experiments.optimize` wrote, by search.
      seconds: for the timing.
      runtimes: see `in_runtimes`.

    Raises:
      WrongResultError: a result does not compute the network's function.
    """
    network = target.name
    program = from_jax(target.fn, *target.args, weights=target.weights)
    leaves = jax.tree.leaves(target.args)
    entrants = dict(baselines(program, leaves))
    plain = list(entrants)
    jits_of: dict[str, list[str]] = {}  # jits that a search's result has to beat
    errors: dict[str, tuple[float, float]] = {}
    for search, folder in folders.items():
        fast = xrl_jax.load(folder / "optimized.xrl")
        jits_of[search] = list(plain)
        if fast.report.used == "original":
            continue
        errors[search] = checked(f"{network} by {search}", fast, program, leaves)
        if fast.report.options:
            under = baselines(program, leaves, fast.report.options)
            named = {f"{n} of {search}": call for n, call in under.items()}
            entrants |= named
            jits_of[search] += list(named)
        entrants[search] = functools.partial(fast, *target.args)
    running = {name: r for name, r in runtimes.items() if isinstance(r, InRuntime)}
    entrants |= {name: r.call for name, r in running.items()}
    after = {
        name: functools.partial(rest_and_wake, r.wait_until_idle, entrants[plain[0]])
        for name, r in running.items()
    }
    first = compare(
        {n: entrants[n] for n in plain}, seconds=1.0, min_rounds=3, baseline=plain[0], seed=seed
    )
    strongest = min(plain, key=lambda n: first.timings[n].seconds)
    entrants[CONTROL] = baselines(program, leaves)[strongest]
    timed = compare(
        entrants, seconds=seconds, min_rounds=7, baseline=strongest, seed=seed, after=after
    )
    noise = timed.ratio(strongest, CONTROL)
    entries = {s: _entry(timed, s, jits_of[s], errors.get(s)) for s in folders}
    # A search that returns the original is represented by the strongest jit.
    sample_of = {s: s if s in timed.samples else e.strongest for s, e in entries.items()}
    sample_of |= {name: name for name in running}
    return SideBySide(
        network,
        {n: timed.timings[n].seconds for n in plain},
        (noise.low, noise.high),
        entries,
        {
            f"{a}/{b}": _plain(timed.ratio(sample_of[a], sample_of[b]))
            for a in sample_of
            for b in entries
            if sample_of[a] != sample_of[b]
        },
        {
            name: RuntimeEntry(timed.timings[name].seconds, r.error)
            if isinstance(r, InRuntime)
            else RuntimeEntry(None, None, r)
            for name, r in runtimes.items()
        },
    )


def _plain(ratio: Ratio) -> tuple[float, float, float]:
    return ratio.value, ratio.low, ratio.high


def rest_and_wake(wait_until_idle: Callable[[], Any], call: Callable[[], Any]) -> None:
    """Wait until a runtime's threads are idle, then wake the cores, which slept meanwhile, by an
    untimed call, so that the next function finds the machine as it is after any other.
    """
    wait_until_idle()
    jax.block_until_ready(call())


def _entry(
    timed: Comparison, search: str, jits: list[str], error: tuple[float, float] | None
) -> Entry:
    strongest = min(jits, key=lambda n: timed.timings[n].seconds)
    if error is None:  # the original is the result
        return Entry(timed.timings[strongest].seconds, 1.0, 1.0, 1.0, strongest, 0.0, 0.0)
    ratio = timed.ratio(strongest, search)
    return Entry(timed.timings[search].seconds, *_plain(ratio), strongest, *error)
