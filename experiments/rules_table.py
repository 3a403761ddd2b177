"""Which rules of the library fire on the networks, and what they gain.

    python -m experiments.rules_table --out=out/rules.json

Each graph of each network (at full size, folded) is searched greedily until nothing gains, and by
random walks from the start and from that end, all under the roofline with its default rates. A rule

    pays      if a step of it is predicted to give a graph that is faster than the start and all
              other graphs of the walk so far (so nothing is earned by undoing a random step),
    enables   if a step of it does not pay, but afterwards another rule pays, at more places than
              before,
    fires     if it matches, and none of the above was seen; "not seen" if it never matches (each
              rule fires in the verifier's tests, though maybe in rarer graphs than are drawn here).

Rules are also tried on small graphs drawn from their patterns, as the verifier draws them; this
decides for those that do not pay in the networks. The roofline does not distinguish lowerings:
rules of the families `lowering_*` are decided by timing, and `--reports` tells which of them the
results have used.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from experiments import models
from xrl_jax.cost import roofline
from xrl_jax.cost.roofline import CostTable
from xrl_jax.engine.apply import apply
from xrl_jax.engine.delta import deltas
from xrl_jax.engine.match import candidates, rematch
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import TensorGraph, build_on_host
from xrl_jax.language.rule import Rule
from xrl_jax.language.rule_files import select_rules, standard_rules
from xrl_jax.language.table import CompiledRules, RuleTable, compile_rules, variants
from xrl_jax.verify.instances import Instance, hints_of, propose

LEAST = 60  # required number of rules that pay or enable one that does
GAIN = 1e-8  # seconds; a smaller gain is a rounding error
ROUNDING = 1e-6  # relative rounding error of a sum of seconds
STEPS = 25  # of a walk
MOST_GREEDY = 20  # most greedy walks, each from the end of the last
DRAWS = 128  # small graphs for each rule
SMALL_BUCKET = 64

FLAGS = flags.FLAGS
flags.DEFINE_string("out", "", "where to write the table as JSON")
flags.DEFINE_list("networks", list(models.MODELS), "networks to survey")
flags.DEFINE_list("rules", [], "names or families of rules; all by default")
flags.DEFINE_list("reports", [], "report.json files, to count the rules that their results use")
flags.DEFINE_integer(
    "walks", 4, "random walks from each graph, and from the end of its greedy walk"
)
flags.DEFINE_integer("seed", 0, "seed of the random walks and the small graphs")


class State(NamedTuple):
    """A graph between steps."""

    graph: TensorGraph  # priced
    masks: jax.Array  # [N, W] where rules match, before the changes below
    changed: jax.Array  # [N] bool


class Seen(NamedTuple):
    """The candidates before each of S steps of a walk, and the step taken."""

    variant: jax.Array  # [S, M] int32, candidates; -1 empty
    root: jax.Array  # [S, M] int32
    partner: jax.Array  # [S, M] int32
    delta: jax.Array  # [S, M] float32 seconds
    seconds: jax.Array  # [S] float32, of the graph before the step
    chosen: jax.Array  # [S] int32, which candidate was taken
    ok: jax.Array  # [S] bool, whether it was applied


@dataclass
class Row:
    """The findings about one rule; dictionaries are by network."""

    rule: str
    family: str
    evidence: str
    # Number of places where it matches, in the graph of the network with the most of them: at the
    # start, and at any time in a walk.
    start: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    gain: dict[str, float] = field(default_factory=dict)  # seconds below the best earlier graph
    enables: list[str] = field(default_factory=list)
    small_gain: float | None = None  # seconds, in the best small graph; None: in no graph
    results: int = 0  # steps in the results of the reports

    @property
    def verdict(self) -> str:
        if self.gain:
            return "pays"
        if self.enables:
            return "enables"
        if self.results:
            return "pays by timing"
        if self.small_gain is not None and self.small_gain > GAIN:
            return "pays in a small graph"
        if self.most:
            return "fires"
        return "not seen" if self.small_gain is None else "fires in a small graph"


@jax.jit
def start_state(table: RuleTable, costs: CostTable, graph: TensorGraph) -> State:
    """Return the graph priced, with nothing matched yet."""
    n = graph.nodes.op.shape[0]
    nothing = jnp.zeros((n, table.n_words), jnp.uint32)
    return State(costs.priced(graph), nothing, jnp.ones(n, bool))


@jax.jit
def walk(
    table: RuleTable, costs: CostTable, state: State, key: jax.Array, greedy: jax.Array
) -> tuple[State, Seen]:
    """Take `STEPS` steps: by the best candidate while it gains, or at random (rule, then place)."""
    n, n_rules = state.graph.nodes.op.shape[0], table.variant_rule.shape[0]

    def step(state: State, key: jax.Array) -> tuple[State, Seen]:
        masks = rematch(table, state.graph, state.masks, state.changed)
        found = candidates(table, state.graph, masks, size=4 * n, pair_size=n)
        price = costs.price_of_new(state.graph)
        delta = deltas(table, state.graph, found, price, keep=lambda new: ()).seconds
        rule = jnp.where(found.variant >= 0, table.variant_rule[found.variant], n_rules)
        often = jnp.zeros(n_rules + 1).at[rule].add(1.0)
        chance = jnp.where(found.variant >= 0, -jnp.log(often[rule]), -jnp.inf)
        best = jnp.argmin(delta)
        i = jnp.where(greedy, best, jax.random.categorical(key, chance))
        variant = jnp.where(greedy & (delta[best] >= -GAIN), -1, found.variant[i])
        done = apply(table, state.graph, variant, found.root[i], found.partner[i])
        seen = Seen(*found[:3], delta, roofline.total(state.graph), i, done.ok)
        return State(costs.priced(done.graph), masks, done.changed), seen

    return jax.lax.scan(step, state, jax.random.split(key, STEPS))


def record(
    rules: CompiledRules, rows: Sequence[Row], network: str, seen: Seen, *, first: bool
) -> None:
    """Record in `rows` what a walk has seen; its first state is the network's own if `first`."""
    variant_rule = np.asarray(rules.table.variant_rule)
    seconds = seen.seconds.astype(np.float64)
    best_before = np.minimum.accumulate(seconds) * (1 - ROUNDING) - GAIN
    n_paying: list[Counter[int]] = []  # at how many places each rule pays, for each state
    for t in range(len(seen.ok)):
        present = np.flatnonzero((seen.variant[t] >= 0) & np.isfinite(seen.delta[t]))
        by_place: dict[tuple[int, int, int], float] = {}
        for i in present:
            at = (
                int(variant_rule[seen.variant[t, i]]),
                int(seen.root[t, i]),
                int(seen.partner[t, i]),
            )
            by_place[at] = min(by_place.get(at, np.inf), float(seen.delta[t, i]))
        for rule, n in Counter(rule for rule, _, _ in by_place).items():
            row = rows[rule]
            row.most[network] = max(row.most.get(network, 0), n)
            if first and t == 0:
                row.start[network] = max(row.start.get(network, 0), n)
        good = {p: best_before[t] - seconds[t] - d for p, d in by_place.items()}
        good = {p: saved for p, saved in good.items() if saved > 0}
        for (rule, _, _), saved in good.items():
            rows[rule].gain[network] = max(rows[rule].gain.get(network, 0.0), saved)
        n_paying.append(Counter(rule for rule, _, _ in good))
        if t == 0 or not seen.ok[t - 1]:
            continue
        step = int(seen.chosen[t - 1])
        if seconds[t - 1] + seen.delta[t - 1, step] < best_before[t - 1]:
            continue
        row = rows[int(variant_rule[seen.variant[t - 1, step]])]
        for rule, n in n_paying[t].items():
            name = rules.rules[rule].name
            if n > n_paying[t - 1][rule] and name not in (row.rule, *row.enables):
                row.enables.append(name)


def survey(
    rules: CompiledRules,
    costs: CostTable,
    rows: Sequence[Row],
    network: str,
    *,
    n_walks: int,
    seed: int,
) -> None:
    """Search all graphs of a network and record the findings in `rows`."""
    model = models.get(network)
    program = from_jax(model.fn, model.weights, *model.inputs, weights=(0,))
    keys = iter(jax.random.split(jax.random.key(seed), 1000))
    for graph in program.graphs:
        origin = end = start_state(rules.table, costs, graph)
        for k in range(MOST_GREEDY):
            end, seen = walk(rules.table, costs, end, next(keys), jnp.bool_(True))
            seen = jax.device_get(seen)
            record(rules, rows, network, seen, first=k == 0)
            if not seen.ok.all():
                break
        for state in (origin, end):
            for _ in range(n_walks):
                seen = walk(rules.table, costs, state, next(keys), jnp.bool_(False))[1]
                record(rules, rows, network, jax.device_get(seen), first=False)


@functools.partial(jax.vmap, in_axes=(None, None, 0, 0, 0, 0))
def gain(
    table: RuleTable,
    costs: CostTable,
    graph: TensorGraph,
    variant: jax.Array,
    root: jax.Array,
    partner: jax.Array,
) -> jax.Array:
    """Return the seconds saved by a rewrite; -inf if it does not apply."""
    done = apply(table, graph, variant, root, partner)
    before, after = (roofline.total(costs.priced(g)) for g in (graph, done.graph))
    return jnp.where(done.ok, before - after, -jnp.inf)


def try_small(rules: CompiledRules, costs: CostTable, rows: Sequence[Row], *, seed: int) -> None:
    """Record the gain of each rule in the best of the small graphs drawn from its pattern."""
    first_variant = np.searchsorted(np.asarray(rules.table.variant_rule), np.arange(len(rows)))
    gains = jax.jit(gain)
    for i, (rule, row) in enumerate(zip(rules.rules, rows, strict=True)):
        drawn = small_graphs(rule, np.random.default_rng([seed, i]))
        graphs = [build_on_host(d.nodes, d.roots, bucket=SMALL_BUCKET) for d in drawn]
        roots = np.array([[r + 1 for r in (*d.roots, -1)[:2]] for d in drawn], np.int32)
        variant = np.full(len(drawn), first_variant[i], np.int32)
        stacked: Any = jax.tree.map(lambda *leaves: np.stack(leaves), *graphs)
        saved = gains(rules.table, costs, stacked, variant, roots[:, 0], roots[:, 1])
        best = float(jnp.max(saved))
        row.small_gain = best if np.isfinite(best) else None


def small_graphs(rule: Rule, rng: np.random.Generator) -> list[Instance]:
    """Draw `DRAWS` graphs that contain the first commutative variant of the rule's pattern."""
    variant = variants(rule)[0]
    hints, drawn = hints_of(rule.conditions), []
    while len(drawn) < DRAWS:
        instance = propose(variant, hints, rng)
        if instance is not None and len(instance.nodes) + 12 < SMALL_BUCKET:
            drawn.append(instance)
    return drawn


def show(rows: Sequence[Row]) -> None:
    """Print the table, and the number of rules with each verdict."""
    table = Table(
        "rule", "family", "evidence", "verdict", "places at start / most", "best gain, us"
    )
    for row in sorted(rows, key=lambda r: (r.family, r.rule)):
        places = ", ".join(f"{n} {row.start.get(n, 0)}/{most}" for n, most in row.most.items())
        best = max([*row.gain.values(), 0.0]) or row.small_gain or 0.0
        verdict = row.verdict + (f" {row.enables[0]}" if row.verdict == "enables" else "")
        table.add_row(row.rule, row.family, row.evidence, verdict, places, f"{best * 1e6:.2f}")
    console = Console(width=180)
    console.print(table)
    for verdict, n in Counter(row.verdict for row in rows).most_common():
        console.print(f"{n:4d} {verdict}")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    rules = compile_rules(select_rules(standard_rules(), FLAGS.rules or None))
    costs = roofline.cost_table({})
    rows = [Row(r.name, r.family, r.evidence) for r in rules.rules]
    for network in FLAGS.networks:
        survey(rules, costs, rows, network, n_walks=FLAGS.walks, seed=FLAGS.seed)
    try_small(rules, costs, rows, seed=FLAGS.seed)
    taken: Counter[str] = Counter()
    for path in FLAGS.reports:
        taken.update(json.loads(Path(path).read_text(encoding="utf-8"))["rules_fired"])
    for row in rows:
        row.results = taken[row.rule]
    show(rows)
    if FLAGS.out:
        out = Path(FLAGS.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps([asdict(r) | {"verdict": r.verdict} for r in rows], indent=1))
    good = sum(row.verdict in ("pays", "enables", "pays by timing") for row in rows)
    if not FLAGS.rules and good < LEAST:
        raise SystemExit(f"only {good} rules pay or enable one that does; {LEAST} are required")


if __name__ == "__main__":
    app.run(main)
