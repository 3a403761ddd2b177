"""Comparison of ways to choose precisions: knapsack, greedy, and everything in one type.

  python -m experiments.precision --networks=resnet50,squeezenet --tolerances=3e-3,1e-2,3e-2

Each network is optimised without a tolerance first. Then the precisions of its products and
convolutions are chosen for each of --tolerances by xrl_jax's knapsack and by a greedy choice (the
largest gain per squared error first, as long as it fits). "all in TYPE" gives every operator that
type; "knapsack, as all in TYPE" may err as much as that. All programs are timed in turn in this
process, as is the strict program a second time (A/A). Errors are against float64 on inputs on which
no choice was made. --out gets precision.json. Ctrl-C ends the choices, and what was chosen is
timed; another one ends that, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

import xrl_jax
from experiments import targets
from experiments.targets import ConfigError, Target
from xrl_jax.accept.coarse import coarse_error
from xrl_jax.accept.reference import reference
from xrl_jax.backends.fast import Fast
from xrl_jax.libraries.registry import calling
from xrl_jax.measure.comparison import compare
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.precision.budget import ErrorBudget, error_budget
from xrl_jax.precision.choices import Choice, choice_within, worthwhile
from xrl_jax.precision.choose import Option, knapsack
from xrl_jax.precision.errors import Errors
from xrl_jax.precision.gains import seconds_saved
from xrl_jax.precision.narrow import LowerPrecision, narrowing_starts_from
from xrl_jax.precision.units import measured_units
from xrl_jax.program.program import Program
from xrl_jax.search.base import Budget, Problem, SearchResult
from xrl_jax.search.chain import WithShare, chain
from xrl_jax.search.time_whole import TimeWhole
from xrl_jax.strategies import SEARCHES, find_strategy
from xrl_jax.transform.narrow import narrowed, type_of

FLAGS = flags.FLAGS
STRICT, CONTROL = "strict", "strict again (A/A)"
_SEARCH_SHARE = 0.5
_CHECKED_ON = 4  # inputs


def greedy(options: Sequence[Sequence[Option]], budget: float) -> list[Option | None]:
    """Return for each operator an option or None: the largest gain per squared error first, as long
    as the sum of squared errors is at most the square of the budget.

    >>> fine, coarse = Option("fine", 1.0, 3e-3), Option("coarse", 1.5, 8e-3)
    >>> [o and o.name for o in greedy([[fine, coarse], [coarse]], 9e-3)]
    ['fine', 'coarse']
    """
    chosen: list[Option | None] = [None] * len(options)
    order = [(n, o) for n, own in enumerate(options) for o in own if o.gain > 0]
    order.sort(key=lambda pair: pair[1].error ** 2 / pair[1].gain)
    left = budget**2
    for n, option in order:
        if chosen[n] is None and option.error**2 <= left:
            chosen[n] = option
            left -= option.error**2
    return chosen


@dataclass(frozen=True)
class Row:
    """A way to choose precisions, and the result.

    Attributes:
      operators: how many operators have a lower precision.
      predicted: seconds saved, as predicted.
      seconds: of one call.
      ratio, low, high: seconds of the strict program / seconds of this, with a 95 % interval.
      error: the largest on inputs without a part in the choice, against float64.
    """

    network: str
    way: str
    operators: int
    predicted: float
    seconds: float
    ratio: float
    low: float
    high: float
    error: float


@dataclass(frozen=True)
class Chosen:
    """Stage that collects choices, by name, for the best program found so far."""

    errors: ErrorBudget
    tolerances: Sequence[float]
    choices: dict[str, tuple[Choice, Program]] = field(default_factory=dict)

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        clock = Stopwatch(budget.seconds)
        library = calling(problem.oracle.target.platform)
        program = narrowing_starts_from(problem).program
        self.choices[STRICT] = self.choices[CONTROL] = Choice({}, 0.0), program
        stage = LowerPrecision(1.0, self.errors.chosen_on)
        places = {} if library is None else stage.places(program, library)
        if library is None or not places:
            return problem.so_far
        timing = clock.part(stage.timing_share)
        gains = seconds_saved(problem.oracle, program, places, library, timing)
        gains = worthwhile(gains, stage.negligible)
        if not gains:
            return problem.so_far
        measured = Errors(
            program, {s: tuple(own) for s, own in gains.items()}, self.errors.chosen_on
        )
        units = measured_units(gains, measured, clock)

        def keep(way: str, choice: Choice) -> None:
            if choice.options:
                self.choices[way] = choice, narrowed(program, choice.types, library)

        for dtype in sorted({type_of(p) for own in gains.values() for p in own} - {"uint8"}):
            options = {
                site: Option(p, gain, 0.0)
                for site, own in gains.items()
                for p, gain in own.items()
                if type_of(p).removeprefix("u") == dtype
            }
            choice = Choice(options, 0.0)
            error = float(measured.of(choice.types).max())
            keep(f"all in {dtype}", choice._replace(error=error))
            keep(f"knapsack, as all in {dtype}", choice_within(error, units, measured))
        for tolerance in self.tolerances:
            for way in (knapsack, greedy):
                name = f"{way.__name__} {tolerance:g}"
                keep(name, choice_within(tolerance, units, measured, way))
        return problem.so_far


def rows_of(target: Target, chosen: Chosen, seconds: float, seed: int) -> list[Row]:
    """Time all chosen programs in turn, and measure their errors."""
    run = {way: Fast(program, target.fn) for way, (_, program) in chosen.choices.items()}
    found = compare(
        {way: (lambda f=f: jax.block_until_ready(f(*target.args))) for way, f in run.items()},
        seconds=seconds,
        baseline=STRICT,
        seed=seed,
    )
    exact_of = reference(chosen.choices[STRICT][1], errors=False)
    inputs = chosen.errors.checked_on[:_CHECKED_ON]
    exact = [exact_of(flat) for flat in inputs]
    rows = []
    for way, (choice, program) in chosen.choices.items():
        results = [jax.tree.leaves(run[way](*_arguments(program, flat))) for flat in inputs]
        ratio = found.ratios[way]
        rows.append(
            Row(
                target.name,
                way,
                len(choice.options),
                sum(o.gain for o in choice.options.values()),
                found.timings[way].seconds,
                ratio.value,
                ratio.low,
                ratio.high,
                max(coarse_error(r, e) for r, e in zip(results, exact, strict=True)),
            )
        )
    return rows


def _arguments(program: Program, flat: Sequence[Any]) -> tuple[Any, ...]:
    args, _ = jax.tree.unflatten(program.in_tree, flat)
    return args


def compared(target: Target) -> list[Row]:
    """Optimise a network, choose precisions in all ways, and compare the results."""
    program = xrl_jax.from_jax(target.fn, *target.args, weights=target.weights)
    errors = error_budget(program, jax.tree.leaves(target.args), 1.0)
    chosen = Chosen(errors, [float(t) for t in FLAGS.tolerances])
    search = find_strategy(FLAGS.search)
    xrl_jax.optimize(
        target.fn,
        *target.args,
        weights=target.weights,
        search=chain(WithShare(search, _SEARCH_SHARE), TimeWhole(), chosen),
        budget=Budget(seconds=FLAGS.budget_seconds),
        key=jax.random.key(FLAGS.seed),
        cache_dir=Path(FLAGS.out) / "cache",
    )
    return rows_of(target, chosen, FLAGS.compare_seconds, FLAGS.seed)


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    titles = "operators", "ms", "saved, ms", "as predicted", "strict / this", "error"
    table = Table("network", "way", *titles)
    strict = {row.network: row.seconds for row in rows if row.way == STRICT}
    for row in rows:
        saved = strict[row.network] - row.seconds
        times = (f"{1e3 * t:.3g}" for t in (row.seconds, saved, row.predicted))
        interval = f"{row.ratio:.2f} ({row.low:.2f}-{row.high:.2f})"
        table.add_row(
            row.network, row.way, f"{row.operators}", *times, interval, f"{row.error:.1e}"
        )
    Console(width=140).print(table)


def define_flags() -> None:
    flags.DEFINE_list("networks", ["squeezenet"], "Networks of experiments.models.")
    flags.DEFINE_list("tolerances", ["1e-3", "1e-2", "1e-1"], "Largest errors, relative.")
    flags.DEFINE_enum("search", "taso", sorted(SEARCHES), "Search without a tolerance.")
    flags.DEFINE_float("budget_seconds", 240.0, "Seconds of the search and the choices together.")
    flags.DEFINE_float("compare_seconds", 30.0, "Seconds of the comparison.")
    flags.DEFINE_integer("seed", 0, "Seed of the search.")
    flags.DEFINE_string("out", "out/precision", "Folder of the results.")


def main(argv: Sequence[str]) -> int:
    """Run the comparison. The exit status is 2 for bad flags."""
    if not FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    try:
        if len(argv) > 1:
            raise ConfigError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
        for name in FLAGS.networks:
            targets.require_network(name)
        for tolerance in FLAGS.tolerances:
            if not _is_positive(tolerance):
                raise ConfigError(f"--tolerances: {tolerance!r} is no positive number")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out, rows = Path(FLAGS.out), list[Row]()
    out.mkdir(parents=True, exist_ok=True)
    try:
        for name in FLAGS.networks:
            rows += compared(targets.from_model(name, seed=FLAGS.seed))
            text = json.dumps([asdict(row) for row in rows], indent=1)
            (out / "precision.json").write_text(text, encoding="utf-8")
    except KeyboardInterrupt:
        print("interrupted: the table has the networks so far", file=sys.stderr)
    show(rows)
    print(f"results are in {out}")
    return 0


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


if __name__ == "__main__":
    define_flags()
    app.run(main)
