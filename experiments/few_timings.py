"""Comparison of greedy search with a policy that may make only a tenth of its timings.

Each search runs in a process of its own with an empty timing store: greedy search first, without a
bound on its timings; then the policy's rollouts alone, which may time a tenth as many regions and
programs. Their results are loaded and timed in turn with `jax.jit` in one process.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from experiments import children
from experiments.children import search_command
from experiments.side_by_side import SideBySide, side_by_side
from experiments.targets import from_model

SHARE = 10  # timings of greedy search for each one that the policy may make


class SearchFailedError(RuntimeError):
    """A search ended with an error; the message names its log."""


def policy_command(
    network: str, policy: Path, folder: Path, *, seconds: float, limit: int, seed: int
) -> list[str]:
    """Return the command that runs the policy's rollouts alone, with at most `limit` timings."""
    command = search_command(
        network,
        "xrlflow",
        seconds=seconds,
        measurements=limit,
        seed=seed,
        cache=folder / "cache",
        out=folder,
    )
    return [*command, "--alone", f"--policy={policy}"]


def _measurements(command: list[str], folder: Path) -> int:
    """Run a search in an empty folder and return how many timings it made."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ended = children.run(command, log=folder / "log.txt")
    if ended.interrupted:
        raise KeyboardInterrupt
    if ended.status:
        raise SearchFailedError(f"a search failed: see {folder / 'log.txt'}")
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return int(report["measurements"])


def few_timings(
    network: str, policy: Path, out: Path, *, seconds: float, compare_seconds: float, seed: int = 0
) -> dict[str, Any]:
    """Run both searches on a network, each with a budget of `seconds`, and compare their results.

    Raises:
      SearchFailedError: a search ended with an error.
      WrongResultError: a result does not compute the network's function.
    """
    greedy, mine = out / "greedy", out / "policy"
    print(f"{network} by greedy search", file=sys.stderr)
    command = search_command(
        network, "greedy", seconds=seconds, seed=seed, cache=greedy / "cache", out=greedy
    )
    made = {"greedy": _measurements(command, greedy)}
    limit = max(made["greedy"] // SHARE, 1)
    print(f"{network} by the policy, at most {limit} timings", file=sys.stderr)
    command = policy_command(network, policy, mine, seconds=seconds, limit=limit, seed=seed)
    made["policy"] = _measurements(command, mine)
    found = side_by_side(
        from_model(network, seed=seed),
        {"greedy": greedy, "policy": mine},
        seconds=compare_seconds,
        seed=seed,
    )
    return row_of(made, found)


def row_of(made: dict[str, int], found: SideBySide) -> dict[str, Any]:
    """Return timings made, speed-ups over the strongest jit, and greedy's time / the policy's."""
    same = (1.0, 1.0, 1.0)  # if both return the original
    return {
        "measurements": made,
        "speedup": {s: e.speedup for s, e in found.entries.items()},
        "greedy_over_policy": found.ratios.get("greedy/policy", same),
        "noise": found.noise,
    }
