"""Extraction from e-graphs in the JSON format of extraction-gym, beside the extractors of others.

  python -m experiments.extract FILE.json FILE.json.gz ... --seconds=60

prints the cost of each extractor, all as the sum over the chosen e-nodes, each once:

  trees     egg's: least cost of the tree
  sets      extraction-gym's greedy extractor for shared parts
  estimate  that of Hartmann, He and Yoneki (PACT 2024)
  greedy    ours in milliseconds, then `found`: ours after --seconds at most

Exit status: 1 if a file could not be read, 2 for bad flags, 130 after Ctrl-C, which prints the best
so far.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from absl import app, flags

from xrl_jax.egraph.extraction.compared import by_estimate, by_sets, by_trees
from xrl_jax.egraph.extraction.extract import Extracted, extract
from xrl_jax.egraph.extraction.instance import Choice, Instance, InstanceError, from_json
from xrl_jax.measure.stopwatch import Stopwatch

_OTHERS: dict[str, Callable[[Instance], Choice]] = {
    "trees": by_trees,
    "sets": by_sets,
    "estimate": by_estimate,
}


@dataclass(frozen=True)
class Row:
    """One file; `seconds` are those of our extractor, `others` costs by name."""

    name: str
    nodes: int
    classes: int
    others: dict[str, float]
    found: Extracted
    seconds: float

    def cells(self) -> list[str]:
        proof = "optimal" if self.found.proven else ""
        costs = [*self.others.values(), self.found.greedy, self.found.choice.cost]
        sizes = [f"{self.nodes:,}", f"{self.classes:,}"]
        return [self.name, *sizes, *(f"{c:.6g}" for c in costs), proof, f"{self.seconds:.1f}"]


HEADER = ["file", "e-nodes", "classes", *_OTHERS, "greedy", "found", "proof", "s"]


def read(path: Path) -> Instance:
    """Read an e-graph, which may be compressed.

    Raises:
      InstanceError: it is no such e-graph.
      OSError: there is no such file.
    """
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise InstanceError(f"not an e-graph of extraction-gym: {error}") from None
    return from_json(text)


def run_file(path: Path, seconds: float, seed: int, tell: Callable[[str], None]) -> Row:
    """Extract from one file by all extractors."""
    instance = read(path)
    name = path.name.removesuffix(".gz").removesuffix(".json")
    clock = Stopwatch(seconds)

    def better(choice: Choice) -> None:
        tell(f"[{clock.elapsed:4.0f} s] {name}: {choice.cost:.6g}")

    found = extract(instance, lambda: clock.left, seed=seed, tell=better)
    elapsed = clock.elapsed
    others = {other: by(instance).cost for other, by in _OTHERS.items()}
    return Row(name, len(instance.cost), len(set(instance.owner.tolist())), others, found, elapsed)


def define_flags() -> None:
    flags.DEFINE_float("seconds", 60.0, "Time limit for each file.", lower_bound=0.0)
    flags.DEFINE_integer("seed", 0, "Seed of the neighbourhood search.")


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        print("error: give at least one file", file=sys.stderr)
        return 2
    print(f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER), sep="\n")
    status = 0
    f = flags.FLAGS
    for name in argv[1:]:
        try:
            row = run_file(Path(name), f.seconds, f.seed, lambda text: print(text, file=sys.stderr))
        except (InstanceError, OSError) as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            status = 1
            continue
        except KeyboardInterrupt:
            return 130
        print(f"| {' | '.join(row.cells())} |", flush=True)
        if row.found.interrupted:
            return 130
    return status


if __name__ == "__main__":
    define_flags()
    app.run(main)
