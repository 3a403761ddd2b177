"""Benchmark of all networks by all searches, against jax.jit, ONNX Runtime and OpenVINO.

  python -m experiments.benchmark --searches=random,local,greedy,taso --budget_seconds=300

Each search runs in a process of its own, with an empty timing store. The compiled engine is kept in
--out for later searches, as on a user's machine: the first search and seed pay for compiling it.
Then all variants of a network are timed in turn in this process: jax.jit with weights as arguments
and closed over (also under the compile options that a result uses), the result of every search,
other runtimes with the same weights and number of threads, and an A/A control. Before that, every
result is checked against float64. Speed-ups are over the strongest jit. The search xrlflow consists
of the policy's rollouts alone: the programs they find are not refined. The folder --out gets a
folder for each network and search, benchmark.json and benchmark.png. After a run was killed, the
same command continues it; Ctrl-C prints the results so far.

--budget_measurements also bounds the timings of each search.

--tolerance=1e-2 runs each search a second time, as SEARCH@1e-2, with that tolerance, and compares
its result with the first: in time, and in its error against float64.

--target=h200 searches for a GPU that need not be here, with the last of --searches, and prints
kernels and times before and after. Operators cost what experiments.gpu_lab recorded on such a GPU,
all else what is predicted; with --predicted nothing is taken from a record. This needs the compiler
for CUDA: python -m xrl_jax.measure.gpu.install

--seeds=5 does all of this for five seeds, each in a folder of its own, then prints the means over
seeds and how the last of --searches compares with the best of the others (over_seeds.json).
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

from experiments import models, over_seeds, predicted, targets
from experiments.benchmark_table import WITHIN, plot, summary, table
from experiments.children import run, search_command
from experiments.lab.record import RecordError
from experiments.recorded import NoRecordError
from experiments.runtimes import JIT_BF16, NARROWER, RUNTIMES
from experiments.side_by_side import SideBySide, WrongResultError, in_runtimes, side_by_side
from experiments.targets import require_known
from xrl_jax.measure.gpu.devices import GPUS
from xrl_jax.measure.worker import WorkerError
from xrl_jax.rl.policy import load_policy
from xrl_jax.runtime.compile_cache import COMPILED
from xrl_jax.search.base import Budget
from xrl_jax.strategies import SEARCHES

GROUPS = {"seven": models.SEVEN, "twelve": models.TWELVE, "bf16": models.BF16}
INTERRUPTED = 130  # exit status after Ctrl-C


@dataclass(frozen=True)
class Config:
    """Configuration of a benchmark.

    Attributes:
      tolerance: of a second run of each search, as for `experiments.optimize`; empty for none.
      engine: folder of the compiled engine, shared by all searches; None for one in `out`.
    """

    networks: tuple[str, ...]
    searches: tuple[str, ...]
    budget_seconds: float
    compare_seconds: float
    seed: int
    runtimes: tuple[str, ...]
    out: Path
    budget_measurements: int | None = None
    tolerance: str = ""
    engine: Path | None = None

    def __post_init__(self) -> None:
        require_known("networks", self.networks, models.MODELS)
        require_known("searches", self.searches, SEARCHES)
        if self.runtimes:
            require_known("runtimes", self.runtimes, {**RUNTIMES, **NARROWER, JIT_BF16: None})

    @property
    def entrants(self) -> tuple[str, ...]:
        """The searches, and again with the tolerance."""
        within = (f"{s}{WITHIN}{self.tolerance}" for s in self.searches if self.tolerance)
        return (*self.searches, *within)

    def command(self) -> str:
        """Return the command that repeats this benchmark, without the folder of the results."""
        words = [f"--networks={','.join(self.networks)}", f"--searches={','.join(self.searches)}"]
        words += [f"--budget_seconds={self.budget_seconds:g}"]
        if self.budget_measurements is not None:
            words += [f"--budget_measurements={self.budget_measurements}"]
        words += [f"--tolerance={self.tolerance}"] if self.tolerance else []
        words += [f"--seed={self.seed}"]
        words += [f"--compare_seconds={self.compare_seconds:g}"]
        words += [f"--runtimes={','.join(self.runtimes)}"]
        return shlex.join(["python", "-m", "experiments.benchmark", *words])


def command_of(config: Config, network: str, search: str, folder: Path) -> list[str]:
    """Return the command that runs one search, of `Config.entrants`."""
    search, _, tolerance = search.partition(WITHIN)
    command = search_command(
        network,
        search,
        seconds=config.budget_seconds,
        measurements=config.budget_measurements,
        seed=config.seed,
        cache=folder / "cache",
        out=folder,
    )
    command += [f"--tolerance={tolerance}"] if tolerance else []
    return [*command, "--alone"] if search == "xrlflow" else command


def run_search(config: Config, network: str, search: str) -> dict[str, Any]:
    """Run one search unless its results exist; return its peak memory and exit status."""
    folder = config.out / network / search
    record, command = folder / "run.json", command_of(config, network, search, folder)
    made_by = command_of(config, network, search, Path())[1:]  # without the folder
    if record.is_file():
        values = json.loads(record.read_text(encoding="utf-8"))
        if values["made_by"] == made_by:
            return values
    share_engine(folder / "cache", config.engine or config.out / COMPILED)
    ended = run(command, log=folder / "log.txt")
    if ended.interrupted:
        raise KeyboardInterrupt
    values = {
        "made_by": made_by,
        "ended": datetime.datetime.now().isoformat(),
        "status": ended.status,
        "peak_bytes": ended.peak_bytes,
    }
    if ended.status:
        print(f"{network} by {search} failed: see {folder / 'log.txt'}", file=sys.stderr)
        return values  # not recorded, so that the next run tries again
    record.write_text(json.dumps(values), encoding="utf-8")
    return values


def share_engine(cache: Path, engine: Path) -> None:
    """Make `cache` an empty cache folder that shares only the compiled engine, in `engine`."""
    if cache.exists():
        shutil.rmtree(cache)
    engine.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True)
    (cache / COMPILED).symlink_to(engine.resolve(), target_is_directory=True)


def compared(config: Config, network: str) -> SideBySide | None:
    """Compare the network's results, or read the comparison if it exists; return None if all
    searches failed or a result is wrong.
    """
    runs = {s: run_search(config, network, s) for s in announced(config, network)}
    folders = {s: config.out / network / s for s, run in runs.items() if run["status"] == 0}
    if not folders:
        return None
    kept = config.out / network / "side_by_side.json"
    made_of = {
        "searches": {s: runs[s]["ended"] for s in folders},
        "seconds": config.compare_seconds,
        "runtimes": list(config.runtimes),
    }
    if kept.is_file():
        values = json.loads(kept.read_text(encoding="utf-8"))
        if values["made_of"] == made_of:
            return SideBySide.from_dict(values["result"])
    print(f"{network}: timing all variants in turn", file=sys.stderr)
    try:
        target = targets.from_model(network, seed=config.seed)
        result = side_by_side(
            target,
            folders,
            seconds=config.compare_seconds,
            seed=config.seed,
            runtimes=in_runtimes(target, config.runtimes),
        )
    except WrongResultError as error:
        print(f"error: {error}", file=sys.stderr)
        return None
    kept.write_text(json.dumps({"made_of": made_of, "result": result.as_dict()}), encoding="utf-8")
    jax.clear_caches()
    gc.collect()
    return result


def announced(config: Config, network: str) -> Iterator[str]:
    """Yield the searches of a network, announcing each."""
    first = config.networks.index(network) * len(config.entrants)
    total = len(config.networks) * len(config.entrants)
    for n, search in enumerate(config.entrants, start=first + 1):
        print(f"[{n}/{total}] {network} by {search}", file=sys.stderr)
        yield search


def reports(config: Config, results: Sequence[SideBySide]) -> dict[str, dict[str, Any]]:
    """Return the reports of all searches, by network and search, with peak memory and end time."""
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        for search in result.entries:
            folder = config.out / result.network / search
            values = json.loads((folder / "report.json").read_text(encoding="utf-8"))
            run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            values |= {"peak_bytes": run["peak_bytes"], "ended": run["ended"]}
            found.setdefault(result.network, {})[search] = values
    return found


def days(of_searches: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the day on which the searches ended, or the first and the last such day."""
    ended = [r["ended"][:10] for of in of_searches.values() for r in of.values()]
    return " to ".join(sorted({min(ended), max(ended)}))


def define_flags() -> None:
    flags.DEFINE_list("networks", ["twelve"], f"Networks, or groups of them: {', '.join(GROUPS)}.")
    flags.DEFINE_list(
        "searches", ["random", "local", "greedy", "taso"], "Search strategies to compare."
    )
    flags.DEFINE_float("budget_seconds", 300.0, "Seconds of each search.")
    flags.DEFINE_integer(
        "budget_measurements", None, "Timings that each search may make at most.", lower_bound=0
    )
    flags.DEFINE_string("tolerance", "", "Tolerance of a second run of each search; empty: none.")
    flags.DEFINE_float("compare_seconds", 60.0, "Seconds to time a network's results in turn.")
    flags.DEFINE_integer("seed", 0, "Seed of searches and weights; with --seeds, the first.")
    flags.DEFINE_integer("seeds", 1, "Number of seeds.", lower_bound=1)
    flags.DEFINE_list(
        "runtimes",
        list(RUNTIMES),
        "Other runtimes to compare with; may be empty. With --tolerance also in narrower types.",
    )
    flags.DEFINE_string("out", "out/benchmark", "Folder of all results.")
    flags.DEFINE_string("target", "", f"Another target than this machine: {', '.join(GPUS)}.")
    flags.DEFINE_bool("predicted", False, "Predict all times on --target, without a record.")
    flags.DEFINE_list("assume", [], "With --target: assumptions, as for xrl_jax.optimize.")


def config_of(values: flags.FlagValues) -> Config:
    """Return the configuration given by parsed flags; raise ValueError if they are invalid."""
    given = [m for name in values.networks for m in GROUPS.get(name, [name])]
    networks = tuple(dict.fromkeys(given))
    runtimes = tuple(values.runtimes)
    if values.tolerance and runtimes:
        runtimes = tuple(dict.fromkeys((*runtimes, *NARROWER, JIT_BF16)))
    return Config(
        networks,
        tuple(values.searches),
        values.budget_seconds,
        values.compare_seconds,
        values.seed,
        runtimes,
        Path(values.out),
        values.budget_measurements,
        values.tolerance,
    )


def run_seed(config: Config) -> tuple[list[SideBySide], int]:
    """Run, print and write everything for one seed; return the results and the exit status."""
    results: list[SideBySide] = []
    status = 0
    try:
        for network in config.networks:
            result = compared(config, network)
            results += [] if result is None else [result]
            status |= result is None or len(result.entries) < len(config.entrants)
    except KeyboardInterrupt:
        print("interrupted: the same command continues from here", file=sys.stderr)
        status = INTERRUPTED
    if results:
        of_searches = reports(config, results)
        figures = summary(results, of_searches)
        print(table(results, figures))
        values = {
            "command": config.command(),
            "date": days(of_searches),
            "summary": figures,
            "networks": [r.as_dict() for r in results],
            "reports": of_searches,
        }
        path = config.out / "benchmark.json"
        path.write_text(json.dumps(values, indent=1), encoding="utf-8")
        plot(results, config.out / "benchmark.png")
        print(f"\nresults are in {config.out}")
    return results, status


def run_seeds(config: Config, n: int) -> int:
    """Run everything for `n` seeds, then summarise them together; return the exit status."""
    of_seeds, status = [], 0
    for seed in range(config.seed, config.seed + n):
        print(f"seed {seed}", file=sys.stderr)
        of_one = dataclasses.replace(
            config, seed=seed, out=config.out / f"seed_{seed}", engine=config.out / COMPILED
        )
        results, ended = run_seed(of_one)
        of_seeds += [results] if results else []
        status |= ended
        if ended == INTERRUPTED:
            break
    if of_seeds:
        last = config.searches[-1]
        notes = {}
        if "xrlflow" in config.searches:
            notes["xrlflow"] = f"the policy was trained on {load_policy().trained}"
        print("\n" + over_seeds.table(of_seeds, last, notes))
        values = {
            "command": f"{config.command()} --seeds={n}",
            "date": datetime.date.today().isoformat(),
            "notes": notes,
            "networks": over_seeds.summary(of_seeds, last),
        }
        path = config.out / "over_seeds.json"
        path.write_text(json.dumps(values, indent=1), encoding="utf-8")
    return status


def run_for_gpu(config: Config, kind: str) -> int:
    """Search under a GPU's costs and print the results; return the exit status."""
    budget = Budget(config.budget_seconds, config.budget_measurements)
    try:
        return predicted.run(
            kind,
            config.networks,
            config.searches[-1],
            budget,
            config.out,
            seed=config.seed,
            assume=tuple(flags.FLAGS.assume),
            from_record=not flags.FLAGS.predicted,
        )
    except (WorkerError, NoRecordError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Exit status: 2 for bad flags, 1 if a search failed, 130 after Ctrl-C."""
    try:
        if len(argv) > 1:
            raise ValueError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
        config = config_of(flags.FLAGS)
        if flags.FLAGS.target:
            require_known("target", (flags.FLAGS.target,), GPUS)
        elif flags.FLAGS.predicted:
            raise ValueError("--predicted needs --target")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.set_verbosity(logging.ERROR)  # else JAX logs every backend that is missing
    if flags.FLAGS.target:
        return run_for_gpu(config, flags.FLAGS.target)
    n = flags.FLAGS.seeds
    return run_seed(config)[1] if n == 1 else run_seeds(config, n)


if __name__ == "__main__":
    define_flags()
    app.run(main)
