"""Benchmark of a search on networks written by others, as their packages provide them.

  python -m experiments.wild --search=taso --budget_seconds=120
  python -m experiments.wild --networks=transformers,ppocr_v4_rec

Each network is optimised in a process of its own, with an empty timing store, then timed in turn
with jax.jit (the strongest of weights as arguments and closed over), the other runtimes that run
the network, and an A/A control; results are checked against float64 once more. The packages are the
extra `wild`: pip install -e ".[wild,onnx,onednn]"; networks of missing packages are left out. The
folder --out gets a folder for each network and wild.json; existing results are not made again.
Ctrl-C prints the results so far.

The exit status is 1 if a result is wrong, slower than the strongest jit, or missing.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

from experiments import targets
from experiments.benchmark import INTERRUPTED, share_engine
from experiments.benchmark_table import geometric_mean
from experiments.children import run
from experiments.runtimes import RUNTIMES, TITLES
from experiments.side_by_side import SideBySide, WrongResultError, in_runtimes, side_by_side
from experiments.targets import ConfigError, Target
from experiments.wild_networks import NETWORKS
from xrl_jax.runtime.compile_cache import COMPILED
from xrl_jax.strategies import SEARCHES

_MODULE = "experiments.wild_networks"
_WRONG = 3  # exit status of a comparison whose result is wrong


@dataclass(frozen=True)
class Config:
    """Configuration of the benchmark, given by the flags."""

    networks: tuple[str, ...]
    search: str
    budget_seconds: float
    compare_seconds: float
    seed: int
    runtimes: tuple[str, ...]
    out: Path
    here: bool = False

    def search_command(self, network: str) -> list[str]:
        """Return the command of a search, without the folders of its results."""
        return [
            *(sys.executable, "-m", "experiments.optimize", f"--fn={_MODULE}:{network}"),
            *(f"--search={self.search}", f"--budget_seconds={self.budget_seconds:g}"),
            f"--seed={self.seed}",
        ]

    def compare_command(self, network: str) -> list[str]:
        """Return the command that compares the result of a search."""
        return [
            *(sys.executable, "-m", "experiments.wild", "--here", f"--networks={network}"),
            *(f"--search={self.search}", f"--compare_seconds={self.compare_seconds:g}"),
            f"--seed={self.seed}",
            *(f"--runtimes={','.join(self.runtimes)}", f"--out={self.out}"),
        ]


def optimised(config: Config, network: str) -> Path:
    """Return the folder of the network's result; run the search unless the result exists.

    Raises:
      RuntimeError: the search failed; the message names its log.
      KeyboardInterrupt: Ctrl-C.
    """
    folder = config.out / network
    record, command = folder / "run.json", config.search_command(network)
    if record.is_file() and json.loads(record.read_text(encoding="utf-8")) == command[1:]:
        return folder
    share_engine(folder / "cache", config.out / COMPILED)
    log = folder / "log.txt"
    command += [f"--cache_dir={folder / 'cache'}", f"--out={folder}"]
    ended = run(command, log=log)
    if ended.interrupted:
        raise KeyboardInterrupt
    if ended.status:
        raise RuntimeError(f"the search failed: see {log}")
    record.write_text(json.dumps(config.search_command(network)[1:]), encoding="utf-8")
    (folder / "side_by_side.json").unlink(missing_ok=True)
    return folder


def compared(config: Config, network: str) -> SideBySide:
    """Compare a network's result with jax.jit and other runtimes, in a process of its own, so that
    networks do not affect each other.

    Raises:
      ImportError: its package is not installed.
      WrongResultError, RuntimeError: its result is wrong, or something else failed.
      KeyboardInterrupt: Ctrl-C.
    """
    family = NETWORKS[network].family
    if importlib.util.find_spec(family) is None:
        raise ImportError(f"package {family!r} is not installed (see the extra `wild`)")
    folder = optimised(config, network)
    kept, log = folder / "side_by_side.json", folder / "compared.txt"
    if not kept.is_file():
        ended = run(config.compare_command(network), log=log)
        if ended.interrupted:
            raise KeyboardInterrupt
        if ended.status == _WRONG:
            raise WrongResultError(log.read_text(encoding="utf-8").strip().splitlines()[-1])
        if not kept.is_file():
            raise RuntimeError(f"the comparison failed: see {log}")
    return SideBySide.from_dict(json.loads(kept.read_text(encoding="utf-8")))


def compare_here(config: Config, network: str) -> None:
    """Compare a network's result in this process, and write the comparison to its folder.

    Raises:
      WrongResultError: its result is wrong.
    """
    fn, args, weights = NETWORKS[network].make()
    target = Target(network, fn, args, weights)
    folder = config.out / network
    result = side_by_side(
        target,
        {config.search: folder},
        seconds=config.compare_seconds,
        seed=config.seed,
        runtimes=in_runtimes(target, config.runtimes, _onnx_model(network, target)),
    )
    text = json.dumps(result.as_dict())
    (folder / "side_by_side.json").write_text(text, encoding="utf-8")


def _onnx_model(network: str, target: Target) -> Any:
    """Return the model of an ONNX file, with the shapes of the inputs; None for a JAX network."""
    file = NETWORKS[network].file
    if file is None:
        return None
    import onnx

    from xrl_jax.frontends.onnx import load_onnx

    model = onnx.load(file.find())
    names = load_onnx(model, input_shapes=file.shapes, constants=file.constants).input_names
    shapes = dict(zip(names, (a.shape for a in target.args[1:]), strict=True))
    for value in model.graph.input:
        for dim, size in zip(
            value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False
        ):
            dim.dim_value = size
    for name, number in file.constants.items():
        kind = next(v for v in model.graph.input if v.name == name).type.tensor_type.elem_type
        model.graph.initializer.append(onnx.helper.make_tensor(name, kind, (), [number]))
    return model


def report_of(config: Config, network: str) -> dict[str, Any]:
    path = config.out / network / "report.json"
    return json.loads(path.read_text(encoding="utf-8"))


def table(config: Config, results: Sequence[SideBySide], missing: dict[str, str]) -> Table:
    """Return the table to print, with a row for each network."""
    drawn = Table(title=f"{config.search}, {config.budget_seconds:g} s each")
    drawn.add_column("network")
    headings = ("strongest jit", "result", "speed-up", "95 % interval", "noise")
    ratios = [f"{TITLES[name]} / result" for name in config.runtimes]
    for heading in (*headings, *ratios, "error", "allowed", "took"):
        drawn.add_column(heading, justify="right")
    for r in results:
        entry = r.entries[config.search]
        seconds = report_of(config, r.network)["total_seconds"]
        drawn.add_row(
            r.network,
            f"{1e3 * entry.seconds * entry.speedup:.3g} ms",
            f"{1e3 * entry.seconds:.3g} ms",
            f"{entry.speedup:.2f}",
            f"{entry.low:.2f} to {entry.high:.2f}",
            f"{r.noise[0]:.2f} to {r.noise[1]:.2f}",
            *(ratio_of(r, name, config.search) for name in config.runtimes),
            f"{entry.error:.1e}",
            f"{entry.tolerance:.1e}",
            f"{seconds:.0f} s",
        )
    for network, why in missing.items():
        drawn.add_row(network, why)
    return drawn


def ratio_of(result: SideBySide, runtime: str, search: str) -> str:
    """Return a runtime's time / the result's time as text, or why the runtime is missing."""
    ratio = result.ratios.get(f"{runtime}/{search}")
    return f"{ratio[0]:.2f}" if ratio else result.runtimes[runtime].note.partition(":")[0]


def is_slower(result: SideBySide, search: str) -> bool:
    """Return whether a result is slower than the strongest jit beyond noise."""
    entry = result.entries[search]
    return entry.high < 1.0 and entry.speedup < min(result.noise[0], 1.0 / result.noise[1], 1.0)


def config_of(values: flags.FlagValues) -> Config:
    """Return the configuration given by parsed flags; raise ConfigError if they are invalid."""
    by_family: dict[str, list[str]] = {}
    for name, network in NETWORKS.items():
        by_family.setdefault(network.family, []).append(name)
    given = [n for name in values.networks for n in by_family.get(name, [name])]
    networks = tuple(dict.fromkeys(given)) if values.networks else tuple(NETWORKS)
    targets.require_known("networks", networks, [*NETWORKS, *by_family])
    targets.require_known("search", [values.search], SEARCHES)
    if values.runtimes:
        targets.require_known("runtimes", values.runtimes, RUNTIMES)
    return Config(
        networks,
        values.search,
        values.budget_seconds,
        values.compare_seconds,
        values.seed,
        tuple(values.runtimes),
        Path(values.out),
        values.here,
    )


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Add the flags of this command to `values`."""
    families = dict.fromkeys(network.family for network in NETWORKS.values())
    names = f"{', '.join(NETWORKS)}; {', '.join(families)}"
    to: Any = {"flag_values": values}
    flags.DEFINE_list(
        "networks", [], f"Networks or families of them, all by default: {names}.", **to
    )
    flags.DEFINE_string("search", "taso", f"Search strategy: {', '.join(SEARCHES)}.", **to)
    flags.DEFINE_float("budget_seconds", 120.0, "Seconds of each search.", **to)
    flags.DEFINE_float("compare_seconds", 30.0, "Seconds to time a result in turn.", **to)
    flags.DEFINE_integer("seed", 0, "Seed of searches.", **to)
    meaning = "Other runtimes to compare with; may be empty."
    flags.DEFINE_list("runtimes", list(RUNTIMES), meaning, **to)
    flags.DEFINE_string("out", "out/wild", "Folder of all results.", **to)
    flags.DEFINE_bool("here", False, "Only compare the results in --out, in this process.", **to)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Exit status: as the module says, 2 for bad flags, 130 after Ctrl-C, and
    with --here 3 for a wrong result.
    """
    logging.set_verbosity(logging.ERROR)
    try:
        if len(argv) > 1:
            raise ConfigError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
        config = config_of(flags.FLAGS)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if config.here:
        try:
            for network in config.networks:
                compare_here(config, network)
        except WrongResultError as error:
            print(error)
            return _WRONG
        return 0
    results: list[SideBySide] = []
    missing: dict[str, str] = {}
    status = 0
    try:
        for n, network in enumerate(config.networks, start=1):
            print(f"[{n}/{len(config.networks)}] {network}", file=sys.stderr)
            try:
                results.append(compared(config, network))
            except ImportError as error:
                missing[network] = "not installed"
                print(f"left out: {error}", file=sys.stderr)
            except (WrongResultError, RuntimeError) as error:
                missing[network] = "wrong" if isinstance(error, WrongResultError) else "failed"
                print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: the same command continues from here", file=sys.stderr)
        status = INTERRUPTED
    slower = [r.network for r in results if is_slower(r, config.search)]
    mean = geometric_mean(r.entries[config.search].speedup for r in results)
    Console(width=160).print(table(config, results, missing))
    print(f"geometric mean of {len(results)}: {mean:.2f}; slower: {', '.join(slower) or 'none'}")
    values = {
        "date": datetime.date.today().isoformat(),
        "search": config.search,
        "budget_seconds": config.budget_seconds,
        "geometric_mean": mean,
        "missing": missing,
        "networks": [r.as_dict() for r in results],
    }
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "wild.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    return status or int(bool(slower or missing))


if __name__ == "__main__":
    define_flags()
    app.run(main)
