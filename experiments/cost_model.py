"""How well predicted times order programs: random rewritings of networks, predicted and timed.

  python -m experiments.cost_model --networks=squeezenet,bert --rewritings=30

Each rewriting is a random walk over candidates from the network, of random length, that stops
before a program that is predicted to take more than twice the network's time. Its regions are
timed, as a search times them; then the whole program is timed in the worker, in turn with the
network. The command prints for each network the median error of predicted / measured time, both
relative to the network's own, and Spearman's rank correlation over all rewritings. --out gets
cost_model.json and cost_model.png. Ctrl-C prints the results so far.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.progress import track
from scipy.stats import spearmanr

from experiments import models, targets
from xrl_jax.cost.model import Oracle
from xrl_jax.cost.programs import choose_constants, program_job
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.language.rule_files import available_rules, standard_rules
from xrl_jax.language.table import CompiledRules, compile_rules
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.store import STORE_FILE, TimingStore
from xrl_jax.measure.worker import Worker
from xrl_jax.program.program import Program
from xrl_jax.runtime.compile_cache import COMPILED, persistent_cache
from xrl_jax.search.base import assemble, predicted
from xrl_jax.search.descend import measure_graph
from xrl_jax.search.states import Space, State, in_one_bucket

FLAGS = flags.FLAGS
FOREVER = Stopwatch(float("inf"))
_LIMIT = 2.0  # most predicted time of a rewriting, relative to the network's


@dataclass(frozen=True)
class Point:
    """A rewriting: its seconds relative to the network's, and how many steps led to it."""

    predicted: float
    measured: float
    steps: int


@dataclass(frozen=True)
class Fit:
    """Predicted against measured times of one network's rewritings."""

    network: str
    points: tuple[Point, ...]

    @property
    def median_error(self) -> float:
        return float(np.median([abs(p.predicted / p.measured - 1.0) for p in self.points]))

    @property
    def rank_correlation(self) -> float:
        """Spearman's rank correlation; nan if all predictions or all measurements are equal."""
        found = spearmanr([p.predicted for p in self.points], [p.measured for p in self.points])
        return float(np.asarray(found)[0])


def rewriting(
    program: Program, rules: CompiledRules, oracle: Oracle, rng: np.random.Generator, length: int
) -> tuple[Program, int]:
    """Return a random rewriting and its number of steps, after timing its regions."""
    space = Space(rules, jnp.asarray(program.digests()))
    graphs, taken = {}, 0
    start = predicted(program, oracle.costs)
    states = [space.start(g, oracle.costs) for g in in_one_bucket(program)]
    shares = np.array([len(space.candidates(s, oracle.costs).variant) for s in states], float)
    if not shares.sum():
        return program, 0
    for index in rng.choice(len(states), size=length, p=shares / shares.sum()):
        state = states[index]
        candidates = space.candidates(state, oracle.costs)
        if not len(candidates.variant):
            continue
        # Sorted by place, not by prediction, so that the step does not depend on the model.
        columns = (candidates.variant, candidates.root, candidates.partner)
        listed = sorted(zip(*(c.tolist() for c in columns), strict=True))
        after = space.step(state, oracle.costs, *listed[int(rng.integers(len(listed)))])
        if after is None:
            continue
        candidate = assemble(program, {**graphs, index: after.graph})
        if predicted(candidate, oracle.costs) > _LIMIT * start:
            break
        states[index], graphs[index], taken = after, after.graph, taken + 1
    measure_all(oracle, states)
    return assemble(program, graphs), taken


def measure_all(oracle: Oracle, states: Sequence[State]) -> None:
    """Time every region of the states."""
    for state in states:
        measure_graph(oracle, state.graph, FOREVER, None)


def points_of(
    program: Program, rules: CompiledRules, oracle: Oracle, *, n: int, longest: int, seed: int
) -> Iterator[Point]:
    """Yield rewritings, predicted and timed; those that cannot be timed are left out."""
    choose_constants(oracle, program)
    oracle.measure_loops()
    space = Space(rules, jnp.asarray(program.digests()))
    measure_all(oracle, [space.start(g, oracle.costs) for g in in_one_bucket(program)])
    reference = program_job(program, constants=oracle.constants)
    rng = np.random.default_rng(seed)
    for _ in range(n):
        length = int(rng.integers(1, longest + 1))
        candidate, steps = rewriting(program, rules, oracle, rng, length)
        job = program_job(candidate, constants=oracle.constants)
        timing = oracle.time_job(job, reference=reference)
        if timing.ok and timing.relative is not None:
            costs = oracle.costs
            share = predicted(candidate, costs) / predicted(program, costs)
            yield Point(share, timing.relative, steps)


def plot(fits: Sequence[Fit], path: Path) -> None:
    """Plot predicted against measured times."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for fit in fits:
        axes.loglog(
            [p.measured for p in fit.points],
            [p.predicted for p in fit.points],
            "o",
            label=f"{fit.network} ({fit.rank_correlation:.2f})",
            alpha=0.7,
        )
    axes.plot([0.2, 3], [0.2, 3], color="grey", linewidth=0.8)
    axes.set(
        xlabel="measured time / the network's own", ylabel="predicted time / the network's own"
    )
    axes.legend(title="rank correlation")
    figure.savefig(path, dpi=150)


def define_flags() -> None:
    flags.DEFINE_list("networks", ["squeezenet", "bert"], "Networks of experiments.models.")
    flags.DEFINE_integer("rewritings", 30, "Rewritings of each network.", lower_bound=2)
    flags.DEFINE_integer("longest", 40, "Steps of a walk, at most.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of the walks and the weights.")
    flags.DEFINE_string("out", "out/cost_model", "Folder of the results and timings.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        targets.require_known("networks", FLAGS.networks, models.MODELS)
    except targets.ConfigError as error:
        raise app.UsageError(str(error)) from error
    out = Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    rules = compile_rules(available_rules(standard_rules(), jax.default_backend()))
    fits: list[Fit] = []
    with (
        TimingStore(out / STORE_FILE) as store,
        Worker() as worker,
        persistent_cache(out / COMPILED),
    ):
        for name in FLAGS.networks:
            target = targets.from_model(name, seed=FLAGS.seed)
            program = from_jax(target.fn, *target.args, weights=target.weights)
            points: list[Point] = []
            each = points_of(
                program,
                rules,
                Oracle(store, worker),
                n=FLAGS.rewritings,
                longest=FLAGS.longest,
                seed=FLAGS.seed,
            )
            try:
                shown = track(each, name, total=FLAGS.rewritings, disable=not sys.stdout.isatty())
                for point in shown:
                    points.append(point)
            except KeyboardInterrupt:
                print("interrupted; results so far:", file=sys.stderr)
            if len(points) >= 2:
                fit = Fit(name, tuple(points))
                fits.append(fit)
                print(
                    f"{name}: {len(points)} rewritings, median error {fit.median_error:.1%}, "
                    f"rank correlation {fit.rank_correlation:.3f}",
                    flush=True,
                )
    values = [
        {
            "network": f.network,
            "median_error": f.median_error,
            "rank_correlation": f.rank_correlation,
            "points": [asdict(p) for p in f.points],
        }
        for f in fits
    ]
    (out / "cost_model.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    if fits:
        plot(fits, out / "cost_model.png")
    print(f"results are in {out}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
