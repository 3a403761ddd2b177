"""Networks written by others against the same functions in plain JAX: both should gain as much.

  python -m experiments.spellings --networks=gpt2,bert

Each network of `experiments.wild_networks.plain` is optimised as its package implements it and as a
plain function of the same weights; then both results and jax.jit are timed in turn, and both are
checked against the package's function in float64. Results of searches are kept in --out, and the
same command continues after an interruption; `experiments.wild` with the same --out and flags
shares them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

from experiments import targets, wild
from experiments.benchmark import INTERRUPTED
from experiments.side_by_side import SideBySide, WrongResultError, side_by_side
from experiments.targets import ConfigError, Target
from experiments.wild_networks import NETWORKS, PLAIN
from experiments.wild_networks.plain import TWINS
from xrl_jax.strategies import SEARCHES

WRITTEN, PLAINLY = "as written", "plain"


def both(config: wild.Config, network: str) -> SideBySide:
    """Optimise the network in both spellings and compare the results.

    Raises:
      WrongResultError: a result does not compute the network's function.
      RuntimeError: a search failed; the message names its log.
      KeyboardInterrupt: Ctrl-C.
    """
    folders = {
        WRITTEN: wild.optimised(config, network),
        PLAINLY: wild.optimised(config, network + PLAIN),
    }
    target = Target(network, *NETWORKS[network].make())
    return side_by_side(target, folders, seconds=config.compare_seconds, seed=config.seed)


def table(results: Sequence[SideBySide]) -> Table:
    """Return the table to print."""
    shown = Table(title="seconds as written / plain", title_justify="left")
    for name in ("network", "as written, ms", "plain, ms", "ratio", "95 %", "speed-ups"):
        shown.add_column(name, justify="right")
    for r in results:
        written, plainly = r.entries[WRITTEN], r.entries[PLAINLY]
        value, low, high = r.ratios[f"{WRITTEN}/{PLAINLY}"]
        shown.add_row(
            r.network,
            *(f"{1e3 * e.seconds:.2f}" for e in (written, plainly)),
            f"{value:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{written.speedup:.2f}, {plainly.speedup:.2f}",
        )
    return shown


def define_flags() -> None:
    """Add the flags of this command."""
    flags.DEFINE_list("networks", list(TWINS), f"Networks, of {', '.join(TWINS)}.")
    flags.DEFINE_string("search", "taso", f"Search strategy: {', '.join(SEARCHES)}.")
    flags.DEFINE_float("budget_seconds", 120.0, "Seconds of each search.")
    flags.DEFINE_float("compare_seconds", 30.0, "Seconds to time both results in turn.")
    flags.DEFINE_integer("seed", 0, "Seed of searches.")
    flags.DEFINE_string("out", "out/wild", "Folder of all results.")


def main(argv: Sequence[str]) -> int:
    """Run the comparison. Exit status: 2 for bad flags, 130 after Ctrl-C, 1 if a result is wrong or
    missing.
    """
    logging.set_verbosity(logging.ERROR)
    values = flags.FLAGS
    try:
        if len(argv) > 1:
            raise ConfigError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
        targets.require_known("networks", values.networks, TWINS)
        targets.require_known("search", [values.search], SEARCHES)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config = wild.Config(
        *(tuple(values.networks), values.search, values.budget_seconds, values.compare_seconds),
        *(values.seed, (), Path(values.out)),
    )
    results: list[SideBySide] = []
    status = 0
    try:
        for n, network in enumerate(config.networks, start=1):
            print(f"[{n}/{len(config.networks)}] {network}", file=sys.stderr)
            try:
                results.append(both(config, network))
            except (WrongResultError, RuntimeError, ImportError) as error:
                print(f"error: {error}", file=sys.stderr)
                status = 1
    except KeyboardInterrupt:
        print("interrupted: the same command continues from here", file=sys.stderr)
        status = INTERRUPTED
    Console(width=120).print(table(results))
    return status


if __name__ == "__main__":
    define_flags()
    app.run(main)
