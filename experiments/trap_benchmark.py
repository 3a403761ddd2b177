"""Graphs in which greedy search gets stuck: does a trained policy get out?

  python -m experiments.trap_benchmark --families=layout,merge,adapter,split --seed=0

For each family (experiments/traps.py) every state of every block is visited and its operators are
timed on this machine, so the optimum is known, and so is the least cost that steps which each gain
can reach (downhill). A policy is trained on small members. Then greedy search, backtracking with an
alpha of 1, taso with its defaults, random search, and the policy's rollouts alone, before and after
training, search unseen members of up to twice the size, also with block sizes not trained on; each
of --searches has --seconds. The command prints the blocks, and how far above the optimum each
search ends. Timings, traps.json and a policy for each family are kept in --out; the same command
continues from there, also after kill -9.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.environments import devices, params_of
from experiments.exhaust import Exhausted, visit
from experiments.targets import ConfigError, require_known
from experiments.traps import FAMILIES, Family, Members, Size, draw_members, member
from xrl_jax.cost.model import Oracle
from xrl_jax.language.table import CompiledRules
from xrl_jax.measure.store import STORE_FILE, TimingStore
from xrl_jax.measure.worker import Worker
from xrl_jax.program.program import Program
from xrl_jax.rl.networks import NetworkConfig
from xrl_jax.rl.policy import Policy, PolicyError, load_policy
from xrl_jax.rl.strategy import XRLflow
from xrl_jax.rl.train import spread
from xrl_jax.rl.train_config import TrainConfig
from xrl_jax.runtime.compile_cache import COMPILED, persistent_cache
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.runtime.files import atomic_write
from xrl_jax.search.backtracking import Taso
from xrl_jax.search.base import Budget, Problem, Strategy, predicted
from xrl_jax.search.greedy import Greedy
from xrl_jax.search.random import Random

AT_OPTIMUM = 1e-3  # a search reaches the optimum if it ends at most this share above it
_TRAP = 1e-2  # a block is a trap if downhill ends more than this share above the optimum
SEARCHES = ("greedy", "backtracking", "taso", "random", "untrained policy", "policy")


@dataclasses.dataclass(frozen=True)
class Config:
    """Configuration of the benchmark; a field for each flag of that name."""

    families: tuple[str, ...]
    searches: tuple[str, ...]
    members: int
    unseen: int
    blocks: int
    envs: int
    updates: int
    devices: int
    seconds: float
    seed: int
    out: Path

    def __post_init__(self) -> None:
        require_known("families", self.families, FAMILIES)
        require_known("searches", self.searches, SEARCHES)

    def decides(self) -> str:
        """Return the fields that decide which policy is trained, as JSON."""
        fields = ("members", "blocks", "envs", "updates", "devices", "seed")
        return json.dumps({name: getattr(self, name) for name in fields}, indent=1)

    def policy_file(self, family: str) -> Path:
        """Return the file in which the policy of a family is kept."""
        return self.out / f"{family}.msgpack"


class EndCosts(NamedTuple):
    """Predicted seconds at which searches end on one unseen member."""

    sizes: tuple[Size, ...]
    start: float
    optimum: float
    downhill: float
    found: dict[str, float]  # by search


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of the blocks and members of a family, from one oracle."""

    family: Family
    rules: CompiledRules
    oracle: Oracle

    def problem(self, program: Program) -> Problem:
        return Problem(program, self.rules, self.oracle)

    def blocks(self) -> dict[Size, Exhausted]:
        """Visit all states of every block; return the blocks' costs, all under one table."""
        sizes = [*self.family.sizes, *self.family.unseen]
        visited = {s: visit(self.problem(member(self.family, [s]))) for s in sizes}
        return {s: v.under(self.oracle.costs) for s, v in visited.items()}

    def of_member(self, sizes: Sequence[Size], blocks: Mapping[Size, Exhausted]) -> Exhausted:
        """Return the costs of a member: sums over its blocks, with the sine between two of them
        counted once.
        """
        first = next(iter(blocks))
        both = member(self.family, [first, first])
        between = 2 * blocks[first].start - predicted(both, self.oracle.costs)
        parts = [blocks[s] for s in sizes]

        def total(field: str) -> float:
            return sum(getattr(p, field) for p in parts) - (len(parts) - 1) * between

        states = int(np.prod([float(p.states) for p in parts]))
        return Exhausted(total("start"), total("downhill"), total("optimum"), (), states)


class Policies(NamedTuple):
    """A policy for a family before and after training."""

    untrained: Policy
    trained: Policy


def policies(config: Config, costs: Costs, members: Members, file: Path) -> Policies:
    """Train a policy on the small members and save it to the file; load it if the file exists."""
    programs = [member(costs.family, sizes) for sizes in members.training]
    params = params_of(programs, costs.rules, envs=config.envs, costs=costs.oracle.costs)
    settings = TrainConfig(
        network=NetworkConfig(n_rules=len(costs.rules.rules)), updates=config.updates
    )
    training = spread(settings, jax.devices()[: config.devices])
    names = tuple(r.name for r in costs.rules.rules)
    state = engine_jit(training.init)(jax.random.key(config.seed), params)
    untrained = Policy(settings.network, state.weights, names, trained="nothing")
    if file.is_file():
        return Policies(untrained, load_policy(file))
    update = engine_jit(training.update)
    began = time.monotonic()
    for _ in track(range(config.updates), "training", disable=not sys.stderr.isatty()):
        state, _ = update(state, params)
    jax.block_until_ready(state.weights)
    text = f"{len(programs)} members in {(time.monotonic() - began) / 60:.1f} min"
    policy = Policy(settings.network, state.weights, names, trained=text)
    policy.save(file)
    return Policies(untrained, policy)


def searches_with(policies: Policies) -> dict[str, Strategy]:
    """Return the searches by name (see `SEARCHES`)."""
    found = (
        Greedy(),
        Taso(alpha=1.0, own_start=True),
        Taso(),
        Random(),
        XRLflow(policies.untrained, time_programs=False),
        XRLflow(policies.trained, time_programs=False),
    )
    return dict(zip(SEARCHES, found, strict=True))


def end_costs(
    config: Config,
    costs: Costs,
    blocks: Mapping[Size, Exhausted],
    members: Members,
    searches: Mapping[str, Strategy],
) -> list[EndCosts]:
    """Run each search on each unseen member and return the costs at which they end."""
    found = []
    for sizes in members.unseen:
        known = costs.of_member(sizes, blocks)
        problem = costs.problem(member(costs.family, sizes))
        each = {}
        for name, search in searches.items():
            key = jax.random.key(config.seed + SEARCHES.index(name))
            result = search(problem, Budget(seconds=config.seconds), key)
            each[name] = min(f.seconds for f in result.best)
        found.append(EndCosts(sizes, known.start, known.optimum, known.downhill, each))
    return found


def block_table(name: str, family: Family, blocks: Mapping[Size, Exhausted]) -> Table:
    """Return the table of a family's blocks, in microseconds."""
    shown = Table(title=f"{name}: {family.why}", title_justify="left")
    for column in ("block", "states", "start, us", "downhill", "optimum", "trap", "steps"):
        shown.add_column(column, justify="right")
    for size, b in blocks.items():
        shown.add_row(
            ",".join(map(str, size)) + ("" if size in family.sizes else " unseen"),
            str(b.states),
            *(f"{1e6 * seconds:.1f}" for seconds in (b.start, b.downhill, b.optimum)),
            "yes" if is_trap(b) else "no",
            str(len(b.steps)),
        )
    return shown


def is_trap(block: Exhausted) -> bool:
    """Return whether steps that each gain end above the optimum even at best."""
    return block.downhill > block.optimum * (1 + _TRAP)


def summary(found: Sequence[EndCosts]) -> dict[str, dict[str, float]]:
    """Return, by search and for the least that downhill can reach, on how many unseen members it
    ends at the optimum, and how far above it on average.
    """
    ways = {"downhill, at best": [e.downhill for e in found]}
    ways |= {name: [e.found[name] for e in found] for name in found[0].found}
    optimum = np.array([e.optimum for e in found])
    above = {name: np.array(v) / optimum - 1 for name, v in ways.items()}
    return {
        name: {"reached": int((a <= AT_OPTIMUM).sum()), "of": len(a), "above": float(a.mean())}
        for name, a in above.items()
    }


def run_family(config: Config, name: str, oracle: Oracle, console: Console) -> dict[str, Any]:
    """Run everything for one family; print it and return it as plain data."""
    family = FAMILIES[name]
    costs = Costs(family, family.compiled(), oracle)
    blocks = costs.blocks()
    console.print(block_table(name, family, blocks))
    members = draw_members(
        family,
        training=config.members,
        unseen=config.unseen,
        blocks=config.blocks,
        seed=config.seed,
    )
    both = policies(config, costs, members, config.policy_file(name))
    searches = searches_with(both)
    compared = {search: searches[search] for search in config.searches}
    found = end_costs(config, costs, blocks, members, compared)
    figures = summary(found)
    for way, row in figures.items():
        console.print(
            f"  {way}: {row['reached']} of {row['of']} at the optimum, "
            f"{row['above']:.1%} above it on average"
        )
    return {
        "blocks": {",".join(map(str, s)): b._asdict() for s, b in blocks.items()},
        "trained": both.trained.trained,
        "ends": [e._asdict() for e in found],
        "summary": figures,
    }


def define_flags() -> None:
    flags.DEFINE_list("families", list(FAMILIES), "Kinds of traps.")
    flags.DEFINE_list("searches", list(SEARCHES), "Searches to compare.")
    flags.DEFINE_integer("members", 16, "Members of each family to train on.", lower_bound=1)
    flags.DEFINE_integer(
        "unseen", 10, "Unseen members of each family to search afterwards.", lower_bound=1
    )
    flags.DEFINE_integer("blocks", 6, "Most blocks of a member in training.", lower_bound=1)
    flags.DEFINE_integer("envs", 32, "Environments, of all members together.", lower_bound=1)
    flags.DEFINE_integer(
        "updates", 100, "Number of rollouts, each followed by learning from it.", lower_bound=1
    )
    flags.DEFINE_integer(
        "devices", 1, "Devices to spread environments over; of a CPU, its cores.", lower_bound=1
    )
    flags.DEFINE_float("seconds", 60.0, "Budget of each search.", lower_bound=1e-3)
    flags.DEFINE_integer("seed", 0, "Seed of all random choices.")
    flags.DEFINE_string("out", "out/traps", "Folder of the results.")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. The exit status is 2 for bad flags."""
    values = flags.FLAGS
    try:
        if len(argv) > 1:
            raise ConfigError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
        given: dict[str, Any] = {f.name: values[f.name].value for f in dataclasses.fields(Config)}
        config = Config(
            **{
                **given,
                **{name: tuple(given[name]) for name in ("families", "searches")},
                "out": Path(given["out"]),
            }
        )
        if config.envs % config.members:
            raise ConfigError(f"--envs={config.envs} must be a multiple of --members")
        if config.envs % config.devices:
            raise ConfigError(f"--envs={config.envs} must be a multiple of --devices")
        devices(config.devices)
        written, text = config.out / "config.json", config.decides()
        if written.is_file() and written.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{config.out} holds results of other flags: choose another --out")
        for kept in filter(Path.is_file, map(config.policy_file, config.families)):
            load_policy(kept)  # fails now, not after all blocks were timed
    except PolicyError as error:
        print(f"error: {error}, or choose another --out", file=sys.stderr)
        return 2
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config.out.mkdir(parents=True, exist_ok=True)
    written.write_text(text, encoding="utf-8")
    console, results = Console(width=120), config.out / "traps.json"
    figures = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else {}
    with (
        persistent_cache(str(config.out / COMPILED)),
        TimingStore(str(config.out / STORE_FILE)) as store,
        Worker() as worker,
    ):
        oracle = Oracle(store, worker)
        oracle.measure_loops()
        for name in config.families:
            figures[name] = run_family(config, name, oracle, console)
            values = json.dumps(figures, indent=1, default=dataclasses.asdict)
            with atomic_write(results) as file:  # the next run reads it
                file.write(values.encode())
    print(f"results are in {config.out}")
    return 0


if __name__ == "__main__":
    define_flags()
    app.run(main)
