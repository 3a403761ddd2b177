"""How far the searches get at the same costs in the same time.

  python -m experiments.search_table --networks=bert,vit --searches=taso,tensat --seconds=30
  python -m experiments.search_table --networks=twelve --seeds=5 --out=out/search_table

Costs are fixed: the operators of each network are timed before, by TASO's search and by Tensat's
for --timing_seconds each (kept in --out); untimed lowerings get pessimistic estimates. So a search
times nothing, and its result is a number that can be compared to the last digit. Compiling does not
count: each search runs for a few seconds before. Cells are the predicted time of the best program
as a share of the original's, in percent: mean and standard deviation over seeds; then the seconds
that the search took. --plain gives the searches only the program itself: no other starting points,
no greedy descent before.

Exit status: 2 for bad flags, 130 after Ctrl-C, which prints the rows so far.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags
from rich.console import Console
from rich.table import Table

from experiments import models, targets
from experiments.environments import program_of
from experiments.targets import ConfigError
from experiments.timed_costs import load_costs, oracle_of, save_costs
from xrl_jax.cost.calibration import pessimistic_costs
from xrl_jax.cost.model import Oracle
from xrl_jax.cost.roofline import CostTable
from xrl_jax.language.rule_files import available_rules, standard_rules
from xrl_jax.language.table import CompiledRules, compile_rules
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.store import TimingStore
from xrl_jax.measure.worker import Worker
from xrl_jax.program.program import Program
from xrl_jax.rl.prior import PolicyPrior
from xrl_jax.rl.strategy import XRLflow
from xrl_jax.runtime.compile_cache import COMPILED, persistent_cache
from xrl_jax.runtime.target_platform import target_platform
from xrl_jax.search.backtracking import Taso
from xrl_jax.search.base import Budget, Problem, Strategy, predicted
from xrl_jax.search.engine import compile_engine
from xrl_jax.search.eqsat_mcts import EqsatMCTS, Prior
from xrl_jax.search.greedy import Greedy
from xrl_jax.search.stages import compile_search
from xrl_jax.search.tensat import Tensat

Cell = dict[str, float]
_WARM_SECONDS = 10.0


def searches(*, plain: bool) -> Mapping[str, Callable[[], Strategy]]:
    """Return the searches by name."""
    own: dict[str, Any] = {"own_start": True} if plain else {}
    alone: dict[str, Any] = {**own, "greedy_share": 0.0} if plain else {}

    def tensat(nodes: int, merging: int) -> Callable[[], Strategy]:
        return lambda: Tensat(nodes=nodes, merging=merging, **alone)

    def mcts(simulations: int, prior: Prior | None = None) -> Callable[[], Strategy]:
        return lambda: EqsatMCTS(simulations=simulations, prior=prior, **alone)

    return {
        "greedy": Greedy,
        "taso": lambda: Taso(**own),
        "tensat": tensat(Tensat.nodes, Tensat.merging),
        "eqsat-mcts": mcts(EqsatMCTS.simulations),
        "xrlflow": lambda: XRLflow(time_programs=False),
        **{
            f"tensat-{nodes}-{k}": tensat(nodes, k)
            for nodes in (2000, 10_000, 50_000)
            for k in (0, 1, 2, 3)
        },
        **{f"eqsat-mcts-{n}": mcts(n) for n in (0, 16, 32, 64, 256)},
        **{f"eqsat-mcts-{n}-policy": mcts(n, PolicyPrior()) for n in (16, 32, 64, 128)},
    }


class FixedOracle(Oracle):
    """An oracle that times nothing: its costs stay the same."""

    def __init__(self, table: CostTable) -> None:
        super().__init__(TimingStore(None), Worker())
        self._costs = table

    def _refit(self) -> None:
        pass

    def untimed_regions(self, view: Any) -> dict[Any, Any]:
        return {}

    def measure_loops(self) -> None:
        pass


def fixed_costs(
    program: Program, rules: CompiledRules, out: Path, *, seconds: float, seed: int
) -> CostTable:
    """Return the costs of the operators of a program, timed once and kept in the folder `out`."""
    kept = out / "costs.npz"
    if not kept.is_file():
        with oracle_of(out) as oracle:
            oracle.measure_loops()
            for search in (Taso(), Tensat()):
                compile_search(search, Problem(program, rules, oracle))
                key = jax.random.key(seed)
                search(Problem(program, rules, oracle), Budget(seconds=seconds), key)
            save_costs(oracle.costs, kept)
    return pessimistic_costs(load_costs(kept))


def run(
    search: Strategy, program: Program, rules: CompiledRules, table: CostTable, **how: Any
) -> Cell:
    """Run a search and return what it found.

    Args:
      how: `seconds` and `seed`.
    """
    oracle = FixedOracle(table)
    problem = Problem(program, rules, oracle)
    compile_search(search, problem)
    key = jax.random.key(how["seed"])
    clock = Stopwatch(0.0)
    found = search(problem, Budget(seconds=how["seconds"]), key)
    best = min(predicted(f.program, table) for f in found.best)
    return {
        "share": best / predicted(program, table),
        "seconds": clock.elapsed,
        "candidates": float(found.candidates),
    }


def table_of(rows: Mapping[str, Mapping[str, Sequence[Cell]]], names: Sequence[str]) -> Table:
    """Return the results as a table: networks by searches."""
    table = Table("network", *names)
    for network, cells in rows.items():
        shown = []
        for name in names:
            shares = [100 * c["share"] for c in cells.get(name, ())]
            if not shares:
                shown.append("")
                continue
            spread = f" ± {statistics.stdev(shares):.1f}" if len(shares) > 1 else ""
            seconds = statistics.fmean(c["seconds"] for c in cells[name])
            shown.append(f"{statistics.fmean(shares):.1f}{spread}  {seconds:.0f} s")
        table.add_row(network, *shown)
    return table


def define_flags() -> None:
    names = ", ".join(searches(plain=False))
    flags.DEFINE_list("networks", ["bert"], "Networks, or twelve.")
    flags.DEFINE_list("searches", ["greedy", "taso", "tensat", "eqsat-mcts"], f"Of: {names}.")
    flags.DEFINE_float("seconds", 30.0, "Time of each search.", lower_bound=0.001)
    flags.DEFINE_float("timing_seconds", 120.0, "Time of each search that times operators.")
    flags.DEFINE_integer("seeds", 1, "Number of seeds.", lower_bound=1)
    flags.DEFINE_bool("plain", False, "Begin with the program itself only.")
    flags.DEFINE_string("out", "out/search_table", "Folder for costs and results.")


def main(argv: Sequence[str]) -> int:
    f = flags.FLAGS
    known = searches(plain=f.plain)
    networks = list(models.TWELVE) if f.networks == ["twelve"] else f.networks
    try:
        targets.require_known("networks", networks, models.MODELS)
        targets.require_known("searches", f.searches, known)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out = Path(f.out)
    rules = compile_rules(available_rules(standard_rules(), target_platform()))
    rows: dict[str, dict[str, list[Cell]]] = {}
    status = 0
    try:
        with persistent_cache(str(out / COMPILED)):
            for network in networks:
                program = program_of(network, fold=True, seed=0)
                folder = out / network
                table = fixed_costs(program, rules, folder, seconds=f.timing_seconds, seed=0)
                compile_engine(program, rules, table)
                cells = rows.setdefault(network, {})
                for name in f.searches:
                    warm = min(_WARM_SECONDS, f.seconds)
                    run(known[name](), program, rules, table, seconds=warm, seed=0)
                    for seed in range(f.seeds):
                        cell = run(
                            known[name](), program, rules, table, seconds=f.seconds, seed=seed
                        )
                        cells.setdefault(name, []).append(cell)
                        text = f"{network} {name} {seed}: {100 * cell['share']:.2f} %"
                        print(f"{text}, {cell['seconds']:.1f} s", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        status = 130
    Console(width=200).print(table_of(rows, f.searches))
    about = {"seconds": f.seconds, "seeds": f.seeds, "plain": f.plain, "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    (out / "search_table.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    return status


if __name__ == "__main__":
    define_flags()
    app.run(main)
