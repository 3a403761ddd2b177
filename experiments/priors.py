"""Priors of the cost model: the usual time of each lowering, in multiples of the plain one's.

  python -m experiments.priors --networks=resnext50,bert --out=out/priors.json

times every distinct operator of the networks (of the originals and of a search's starting points,
which have other layouts) in each lowering that applies to it, and prints the medians of lowering /
plain by operator and kind, in the format in which libraries state them (`Library.priors`). A search
uses the priors for what it has not timed yet: they decide what is timed first, nothing else. Run
this on a quiet machine; timings are kept in --cache_dir, so that a second run continues. Ctrl-C
prints the medians so far.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.progress import track

from experiments import models, targets
from xrl_jax.cost.model import Oracle
from xrl_jax.cost.regions import Region, region_key, region_of
from xrl_jax.cost.roofline import cost_table
from xrl_jax.cost.view import CostView, view_graph
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.language.rule_files import standard_rules
from xrl_jax.language.table import compile_rules
from xrl_jax.lower.table import LOWERINGS, applicable, is_available
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.store import STORE_FILE, TimingStore, default_cache_dir
from xrl_jax.measure.worker import Worker
from xrl_jax.program.program import Program
from xrl_jax.runtime.target_platform import target_platform
from xrl_jax.search.starting_points import starting_points

FLAGS = flags.FLAGS
views_of = jax.jit(lambda costs, graph: view_graph(costs.sharing, graph))
FOREVER = Stopwatch(float("inf"))


@dataclass(frozen=True)
class Multiple:
    """The time of one lowering of one region, as a multiple of the plain lowering's."""

    op: str
    kind: int  # see `view.lowering_kind_of`
    lowering: str
    multiple: float


def programs_of(name: str) -> Iterator[Program]:
    """Yield the network and its starting points."""
    target = targets.from_model(name)
    program = from_jax(target.fn, *target.args, weights=target.weights)
    yield program
    rules = compile_rules(standard_rules())
    for point in starting_points(program, rules, cost_table({}), FOREVER):
        yield point.program


def regions_of(programs: Iterable[Program]) -> list[Region]:
    """Return each distinct region whose operator has several lowerings, in the plain one."""
    found: dict[str, Region] = {}
    for program in programs:
        for graph in program.graphs:
            plain = graph._replace(
                nodes=graph.nodes._replace(lowering=jnp.zeros_like(graph.nodes.lowering))
            )
            view = CostView(*map(np.asarray, views_of(cost_table({}), plain)))  # type: ignore[arg-type]
            for at in np.flatnonzero(~view.weight_only & (view.op > 0)):  # type: ignore[operator]
                region = region_of(view, (int(at),), target_platform())
                if len(LOWERINGS[region.node.op]) > 1:
                    found.setdefault(region_key(region, ()), region)
    return list(found.values())


def lowered(region: Region) -> list[Region]:
    """Return the region in every lowering that applies and is worth a trial, plain one first."""
    return [
        Region(
            replace(region.node, lowering=i),
            region.args,
            (*region.lowering_kind[:2], i),
            region.platform,
        )
        for i in applicable(region.node, region.args)
        if is_available(region.node.op, i, region.platform)
    ]


def multiples(timed: Mapping[Region, float], least: float) -> Iterator[Multiple]:
    """Yield the multiples of one region's lowerings; none if the plain one takes less than `least`.

    Args:
      timed: seconds of the lowerings, the plain one first.
    """
    (_, plain), *others = timed.items()
    for region, seconds in others if least <= plain < float("inf") else ():
        _, kind, i = region.lowering_kind
        if np.isfinite(seconds):
            name = LOWERINGS[region.node.op][i].name
            yield Multiple(region.node.op, kind, name, seconds / plain)


def medians(found: Iterable[Multiple]) -> dict[tuple[str, int], dict[str, float]]:
    """Return the median multiple of each lowering by operator and kind, the fastest first."""
    by_kind: dict[tuple[str, int], dict[str, list[float]]] = {}
    for m in found:
        by_kind.setdefault((m.op, m.kind), {}).setdefault(m.lowering, []).append(m.multiple)
    return {
        at: dict(sorted(((f, float(np.median(v))) for f, v in by_name.items()), key=lambda x: x[1]))
        for at, by_name in sorted(by_kind.items())
    }


def as_source(table: Mapping[tuple[str, int], Mapping[str, float]]) -> str:
    """Return the medians as source code of a library, one line for each operator and kind."""
    lines = []
    for at, by_name in table.items():
        words = " ".join(f"{name} {multiple:.2g}" for name, multiple in by_name.items())
        lines.append(f'    {at!r}: "{words}",'.replace("'", '"'))
    return "\n".join(lines)


def define_flags() -> None:
    flags.DEFINE_list("networks", "squeezenet,resnext50,bert", "Networks of experiments.models.")
    flags.DEFINE_string("cache_dir", "", "Folder of the timing store; empty: the user's cache.")
    flags.DEFINE_string("out", "", "Where to write the multiples as JSON.")
    flags.DEFINE_float(
        "least_microseconds", 20.0, "Operators that XLA runs in less time than this are left out."
    )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        targets.require_known("networks", FLAGS.networks, models.MODELS)
    except targets.ConfigError as error:
        raise app.UsageError(str(error)) from error
    regions = regions_of(p for name in FLAGS.networks for p in programs_of(name))
    found: list[Multiple] = []
    folder = Path(FLAGS.cache_dir or default_cache_dir())
    with TimingStore(folder / STORE_FILE) as store, Worker() as worker:
        oracle = Oracle(store, worker, constants=jax.default_backend() == "cpu")
        try:
            for n, region in enumerate(track(regions, "timing", disable=not sys.stdout.isatty())):
                variants = lowered(region)
                oracle.measure({(n, i): f for i, f in enumerate(variants)}, clock=FOREVER)
                keys = [region_key(f, (), constants=oracle.constants) for f in variants]
                stored = store.get(keys)
                # A timing during which the worker was lost is not stored.
                seconds = {
                    f: stored[k].seconds if k in stored else float("inf")
                    for f, k in zip(variants, keys, strict=True)
                }
                found += multiples(seconds, FLAGS.least_microseconds * 1e-6)
        except KeyboardInterrupt:
            print("interrupted; results so far:", file=sys.stderr)
    table = medians(found)
    print(f"{len(regions)} operators of {', '.join(FLAGS.networks)}; {store.target}")
    print(as_source(table))
    if FLAGS.out:
        values = [
            {"op": op, "kind": kind, "lowerings": by_name} for (op, kind), by_name in table.items()
        ]
        Path(FLAGS.out).parent.mkdir(parents=True, exist_ok=True)
        Path(FLAGS.out).write_text(json.dumps(values, indent=1), encoding="utf-8")


if __name__ == "__main__":
    define_flags()
    app.run(main)
