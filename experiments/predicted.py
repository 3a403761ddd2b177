"""Searches for a GPU that this machine need not have: the part of `experiments.benchmark` that
--target and --predicted choose.

XLA compiles every candidate for the GPU; the kernels it would launch are counted and priced
(`xrl_jax.measure.gpu`). Operators cost what was recorded on a GPU (`experiments.recorded`), or are
predicted, too. The program found is checked against float64 on this machine, with the kernels of
xrl_jax interpreted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments import targets
from experiments.recorded import recorded
from experiments.side_by_side import WrongResultError, checked
from xrl_jax.backends.domain import rules_for
from xrl_jax.backends.fast import Fast
from xrl_jax.cost.model import Oracle
from xrl_jax.cost.programs import (
    WITHOUT_TRYING,
    Options,
    base_options,
    job_or_failure,
    option_sets,
)
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.language.rule_files import available_rules
from xrl_jax.language.table import compile_rules
from xrl_jax.libraries.triton.partition import interpreted
from xrl_jax.measure.base import Job, Measurer
from xrl_jax.measure.gpu.fit import Fit
from xrl_jax.measure.gpu.predictor import Predictor
from xrl_jax.measure.store import STORE_FILE, TimingStore
from xrl_jax.measure.timing import Timing
from xrl_jax.measure.worker import WorkerError
from xrl_jax.program.arguments import flatten_as
from xrl_jax.program.program import Program
from xrl_jax.report.live import LiveProgress
from xrl_jax.report.units import three_digits
from xrl_jax.runtime.compile_cache import COMPILED, persistent_cache
from xrl_jax.runtime.engine_jit import on_cpu
from xrl_jax.runtime.target_platform import making_for
from xrl_jax.search.base import Budget, Found, Problem
from xrl_jax.search.chain import chain
from xrl_jax.search.time_whole import TimeWhole
from xrl_jax.strategies import find_strategy
from xrl_jax.transform.start import start_of

PLATFORM = "gpu"
_TIMEOUT = 600.0  # seconds for compiling a whole network
_INTERRUPTED = 130  # exit status after Ctrl-C


@dataclass(frozen=True)
class Variant:
    """A way to run a network.

    Attributes:
      seconds: predicted.
      kernels: see `gpu.predict.summary`.
      options: compile options.
    """

    seconds: float
    kernels: Mapping[str, int]
    options: Options = ()

    @property
    def count(self) -> str:
        """The number of kernels, and whether one CUDA graph holds them all."""
        in_one = self.kernels["graphs"] == 1 and not self.kernels["outside graphs"]
        return f"{self.kernels['all']}{'' if in_one else ' *'}"


@dataclass(frozen=True)
class Prediction:
    """What was predicted for one network.

    Attributes:
      default: jax.jit with weights as arguments, without options.
      strongest: the fastest of jax.jit with weights as arguments or closed over, under any options.
      found: the program that the search found.
      error: of that program against float64 on this machine.
    """

    network: str
    default: Variant
    strongest: Variant
    found: Variant
    error: float

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Prediction:
        variants = {n: Variant(**values[n]) for n in ("default", "strongest", "found")}
        return cls(network=values["network"], error=values["error"], **variants)


class Costs(NamedTuple):
    """What a search's costs are.

    Attributes:
      measurer: says what a job takes on the GPU.
      options: compile options under which operators are priced.
      about: a line about where the costs come from.
    """

    measurer: Measurer
    options: Options
    about: str


@contextlib.contextmanager
def costs_of(kind: str, folder: Path, *, from_record: bool) -> Iterator[Costs]:
    """Return the costs on a GPU of this kind: recorded, or else all predicted.

    Args:
      folder: keeps predictions.

    Raises:
      ValueError: there is no such GPU, or nothing was recorded on one.
    """
    if not from_record:
        with Predictor(kind) as predictor:
            yield Costs(predictor, WITHOUT_TRYING, f"Predicted for {kind}, not measured.")
        return
    with recorded(kind, folder) as (measurer, fit):
        yield Costs(measurer, base_options(PLATFORM), about_fit(kind, fit))


def about_fit(kind: str, fit: Fit) -> str:
    """Return a line about what was recorded, and how far predictions are off."""
    each = [
        f"{k} {fit.counts[k]} (x {fit.factors[k]:.2f}, error {100 * fit.errors[k]:.0f} %)"
        for k in fit.counts
    ]
    return (
        f"Operators cost what was recorded on {kind}; all else is predicted, with factors fitted "
        f"on recorded operators: {', '.join(each) or 'none'}."
    )


def predicted_for(
    costs: Costs,
    network: str,
    search: str,
    budget: Budget,
    folder: Path,
    *,
    seed: int = 0,
    assume: Sequence[str] = (),
    progress: bool = True,
) -> Prediction:
    """Search for a network's fastest program on a GPU by these costs.

    Args:
      folder: keeps predicted costs and the compiled engine.
      assume: assumptions about values, as for `xrl_jax.optimize`.
      progress: whether to show a live display.

    Raises:
      ValueError: there is no such search.
      WorkerError: the compiler for the GPU is not installed; says how to install it.
      WrongResultError: the program found does not compute the network's function.
    """
    target = targets.from_model(network, seed=seed)
    original = from_jax(target.fn, *target.args, weights=target.weights)
    with (
        making_for(PLATFORM),
        LiveProgress(network, budget.seconds, progress=progress) as live,
    ):
        live.phase("compiling jax.jit")
        default, strongest = _baselines(costs.measurer, original)
        store = TimingStore(folder / STORE_FILE, target=costs.measurer.target)
        with store, persistent_cache(folder / COMPILED), on_cpu():
            oracle = Oracle(store, costs.measurer, options=costs.options)
            start = start_of(original, PLATFORM)
            table = compile_rules(
                available_rules(rules_for(start, tuple(assume), PLATFORM), PLATFORM)
            )
            problem = Problem(start, table, oracle, live, live.phase)
            strategy = chain(find_strategy(search), TimeWhole())
            result = strategy(problem, budget, jax.random.key(seed))
    if result.interrupted:  # what it found is not what the budget would find
        raise KeyboardInterrupt
    found = result.best[0]
    leaves, _ = flatten_as(original.in_tree, target.args, {})
    fast = Fast(dataclasses.replace(found.program, fn=original.fn), original.fn)
    print(f"checking the program found for {network}, its kernels interpreted", file=sys.stderr)
    with making_for(PLATFORM), interpreted():
        error, _ = checked(search, fast, original, leaves)
    return Prediction(network, default, strongest, best_of(network, strongest, found), error)


def best_of(network: str, strongest: Variant, found: Found) -> Variant:
    """Return what a user gets: the program found, or the original in its strongest variant where
    nothing is faster, or where the search had no time to compile a program.
    """
    timing = found.timing or Timing.without("failed", "no time was left")
    if not timing.ok:
        print(
            f"{network}: no program was compiled as a whole ({timing.error}); "
            "give the search more seconds (--budget_seconds)",
            file=sys.stderr,
        )
        return strongest
    variant = Variant(timing.seconds, timing.kernels, found.options)
    return min(strongest, variant, key=lambda v: v.seconds)


def _baselines(measurer: Measurer, original: Program) -> tuple[Variant, Variant]:
    """Return jax.jit as it is, and the fastest of its variants."""
    found: list[Variant] = []
    for constants in (False, True):
        for options in option_sets(measurer.target):
            job = job_or_failure(original, options, constants=constants)
            if isinstance(job, Job):
                # jax.jit takes its arguments row-major.
                job = dataclasses.replace(job, any_layout=0)
                job = measurer.submit([job], timeout=_TIMEOUT)[0]
            if job.ok:
                found.append(Variant(job.seconds, job.kernels, options))
            elif not found:
                raise WorkerError(f"jax.jit could not be compiled: {job.error}")
    return found[0], min(found, key=lambda v: v.seconds)


def table(about: str, predictions: Sequence[Prediction]) -> str:
    """Return Markdown: where costs come from, a row for each network, then means."""
    lines = [
        f"{about} Kernels outside of one CUDA graph: *.",
        "",
        "| network | jit: kernels | us | strongest jit: kernels | us | found: kernels | us "
        "| over jit | over strongest | error |",
        "|" + "---|" * 10,
    ]
    for p in predictions:
        cells = [p.network]
        for v in (p.default, p.strongest, p.found):
            cells += [v.count, three_digits(1e6 * v.seconds)]
        cells += [f"{over(p, v):.2f}" for v in ("default", "strongest")] + [f"{p.error:.1e}"]
        lines.append("| " + " | ".join(cells) + " |")
    if predictions:
        means = [
            math.exp(statistics.fmean(math.log(over(p, v)) for p in predictions))
            for v in ("default", "strongest")
        ]
        cells = ["geometric mean", *[""] * 6, *(f"{m:.2f}" for m in means), ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def over(prediction: Prediction, variant: str) -> float:
    """Return a variant's predicted seconds / those of the program found."""
    return getattr(prediction, variant).seconds / prediction.found.seconds


def run(
    kind: str,
    networks: Sequence[str],
    search: str,
    budget: Budget,
    out: Path,
    *,
    seed: int,
    assume: Sequence[str] = (),
    from_record: bool = False,
) -> int:
    """Search for all networks, print the table and return the exit status.

    Results of an earlier run with the same settings and costs are kept in `out`.

    Args:
      from_record: operators cost what was recorded on a GPU; see `recorded`.
    """
    out.mkdir(parents=True, exist_ok=True)
    with costs_of(kind, out, from_record=from_record) as costs:
        target = costs.measurer.target.versions
        settings = [kind, search, budget.seconds, budget.measurements, seed, *assume, target]
        done, status = _all(costs, networks, search, budget, out, settings, seed, assume)
        print(table(costs.about, done))
    return status


def _all(
    costs: Costs,
    networks: Sequence[str],
    search: str,
    budget: Budget,
    out: Path,
    settings: Sequence[Any],
    seed: int,
    assume: Sequence[str],
) -> tuple[list[Prediction], int]:
    """Return the results for all networks, and the exit status."""
    done: list[Prediction] = []
    status = 0
    for n, network in enumerate(networks, start=1):
        kept = out / network / "predicted.json"
        if kept.is_file():
            values = json.loads(kept.read_text(encoding="utf-8"))
            if values["settings"] == list(settings):
                done.append(Prediction.from_dict(values["prediction"]))
                continue
        print(f"[{n}/{len(networks)}] {network} by {search}", file=sys.stderr)
        try:
            of_one = predicted_for(costs, network, search, budget, out, seed=seed, assume=assume)
            done.append(of_one)
        except KeyboardInterrupt:
            status = _INTERRUPTED
            break
        except WrongResultError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
            continue
        kept.parent.mkdir(parents=True, exist_ok=True)
        values = {"settings": settings, "prediction": dataclasses.asdict(done[-1])}
        kept.write_text(json.dumps(values), encoding="utf-8")
    return done, status
