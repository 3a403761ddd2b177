"""Benchmark of the rewriting engine: finding candidates, applying them, random rewriting in a
batch, compilation, memory.

    python -m experiments.engine_benchmark --out=out/engine.json

Each network runs in two processes of its own: one with an empty compilation cache, and one that
finds the cache filled. The baseline is a plain Python matcher over the same rules
(`tests/engine/oracle.py`), which has to find the same candidates.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from experiments import children, models
from tests.engine import oracle
from xrl_jax.engine import match as match_lib
from xrl_jax.engine.apply import apply
from xrl_jax.engine.match import Candidates
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import TensorGraph, n_live
from xrl_jax.language.rule_files import load_rules, select_rules, standard_rules
from xrl_jax.language.table import CompiledRules, RuleTable, compile_rules

NETWORKS = {
    "bert": ("bert", False),
    "bert_folded": ("bert", True),
    "inception": ("inceptionv3", False),
}
LEAST_SPEEDUP = 100.0  # over plain Python in wall and in processor time, for unfolded BERT
ROUNDS = 3  # in which the engine and plain Python are timed in turn
DRAWS = 4  # candidates drawn for a random rewrite
MOST_BYTES = 4 << 30

FLAGS = flags.FLAGS
flags.DEFINE_string("out", "", "where to write the figures as JSON")
flags.DEFINE_list("rules", [], "names or families of rules; all by default")
flags.DEFINE_integer("batch", 64, "graphs rewritten at once")
flags.DEFINE_integer("steps", 20, "random rewrites of each graph")
flags.DEFINE_integer("repeats", 9, "timings, of which the median is reported")
flags.DEFINE_list("networks", list(NETWORKS), "networks to measure")
flags.DEFINE_boolean("compare", True, "also time the plain Python matcher, which takes minutes")
flags.DEFINE_enum(
    "process",
    "",
    ["", "measure", "compile"],
    "internal: the task of a process that this command starts",
)

EXTRA = '(rule one-more (source "benchmark") (lhs (sub (neg ?x) (neg ?y))) (rhs (sub ?y ?x)))'


def timed(fn: Callable[..., Any], *args: Any) -> tuple[Any, float, float]:
    """Return the result, wall seconds and processor seconds (of all threads) of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(fn(*args))
    return result, time.perf_counter() - wall, time.process_time() - cpu


def median(fn: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Return the median wall and processor seconds over repeated calls of a compiled function."""
    runs = [timed(fn, *args)[1:] for _ in range(FLAGS.repeats)]
    return {
        "wall": statistics.median(w for w, _ in runs),
        "cpu": statistics.median(c for _, c in runs),
    }


def find(
    table: RuleTable, graph: TensorGraph, *, size: int, pair_size: int
) -> tuple[jax.Array, Candidates]:
    """Return the match masks and the candidates of a graph."""
    masks = match_lib.match(table, graph)
    return masks, match_lib.candidates(table, graph, masks, size=size, pair_size=pair_size)


def apply_each(table: RuleTable, graph: TensorGraph, found: Candidates) -> jax.Array:
    """Return the number of live nodes [M] after each candidate on its own; -1 if it does not apply.
    Candidates are applied 64 at a time, to bound the memory.
    """

    def one(candidate: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        after = apply(table, graph, *candidate)
        return jnp.where(after.ok, n_live(after.graph), -1)

    return jax.lax.map(one, (found.variant, found.root, found.partner), batch_size=64)


def walk(
    table: RuleTable, graph: TensorGraph, masks: jax.Array, key: jax.Array, *, n_steps: int
) -> jax.Array:
    """Return whether each of `n_steps` random rewrites was applied; to be vmapped over keys."""

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        graph, masks = carry
        # Pairs that fail their checks leave empty slots: the first valid candidate is taken.
        found = match_lib.sample(table, graph, masks, key, size=DRAWS)
        at = jnp.argmax(found.variant >= 0)
        after = apply(table, graph, found.variant[at], found.root[at], found.partner[at])
        masks = match_lib.rematch(table, after.graph, masks, after.changed)
        return (after.graph, masks), after.ok

    return jax.lax.scan(step, (graph, masks), jax.random.split(key, n_steps))[1]


def graph_of(network: str) -> TensorGraph:
    """Return the graph to rewrite: the largest one, in a folded network the body of its layers."""
    name, fold = NETWORKS[network]
    model = models.get(name)
    program = from_jax(model.fn, model.weights, *model.inputs, weights=(0,), fold=fold)
    return max(program.graphs, key=lambda g: int(n_live(g)))


def capacities(graph: TensorGraph) -> dict[str, int]:
    """Return the capacities for candidates and pairs: four and one for each slot of the graph."""
    n = graph.nodes.op.shape[0]
    return {"size": 4 * n, "pair_size": n}


def compiled(fn: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, float]]:
    """Compile a function for its arguments; return it and the seconds that this took."""
    result, wall, cpu = timed(lambda: jax.jit(fn).lower(*args).compile())
    return result, {"wall": wall, "cpu": cpu}


def measure(network: str, rules: CompiledRules) -> dict[str, Any]:
    """Return all figures of one network, measured in this process; with --process=compile, only
    its compile times.
    """
    graph, table = graph_of(network), rules.table
    capacity = capacities(graph)
    finding, find_compile = compiled(lambda t, g: find(t, g, **capacity), table, graph)
    masks, found = finding(table, graph)
    keys = jax.random.split(jax.random.key(0), FLAGS.batch)
    batched = jax.vmap(
        lambda t, g, m, k: walk(t, g, m, k, n_steps=FLAGS.steps), in_axes=(None, None, None, 0)
    )
    walking, walk_compile = compiled(batched, table, graph, masks, keys)
    applying, apply_compile = compiled(apply_each, table, graph, found)
    figures: dict[str, Any] = {
        "compile": {"find": find_compile, "walk": walk_compile, "apply": apply_compile}
    }
    if FLAGS.process == "compile":
        return figures
    count = int(found.count)
    if count > capacity["size"]:
        raise RuntimeError(
            f"{network}: {count} candidates exceed the capacity of {capacity['size']}"
        )
    sizes = np.asarray(applying(table, graph, found))[:count]
    if (sizes < 0).any():
        raise RuntimeError(f"{network}: {int((sizes < 0).sum())} candidates do not apply")
    done, wall, cpu = timed(walking, table, graph, masks, keys)
    figures |= {
        "bucket": graph.nodes.op.shape[0],
        "nodes": int(n_live(graph)),
        "rules": len(rules.rules),
        "rows": int(jnp.sum(table.tree_root >= 0)),
        "candidates": count,
        "find": median(finding, table, graph),
        "apply": dict(zip(("wall", "cpu"), timed(applying, table, graph, found)[1:], strict=True)),
        "steps_per_second": float(np.asarray(done).sum() / wall),
        "steps_per_cpu_second": float(np.asarray(done).sum() / cpu),
        "recompiled_for_a_rule_more": recompiles(rules, graph, capacity),
    }
    if FLAGS.compare:
        figures |= compare(rules, graph, found, finding)
    return figures


def recompiles(rules: CompiledRules, graph: TensorGraph, capacity: dict[str, int]) -> bool:
    """Return whether adding a rule within the bucket causes a compilation."""
    finding = jax.jit(lambda t, g: find(t, g, **capacity))
    finding(rules.table, graph)
    before = finding._cache_size()  # type: ignore[attr-defined]
    more = compile_rules([*rules.rules, *load_rules(EXTRA)])
    if more.table.code.shape != rules.table.code.shape:
        raise RuntimeError(
            "one more rule does not fit into the bucket of the rule table: choose other rules"
        )
    jax.block_until_ready(finding(more.table, graph))
    return finding._cache_size() != before  # type: ignore[attr-defined]


def compare(
    rules: CompiledRules, graph: TensorGraph, found: Candidates, finding: Callable[..., Any]
) -> dict[str, Any]:
    """Return the times of the engine and of the plain Python matcher, measured in turn, and whether
    both find the same candidates.
    """
    host = oracle.host_graph(graph)
    plain = oracle.candidates(rules.rules, host)
    rounds = [
        (median(finding, rules.table, graph), timed(oracle.candidates, rules.rules, host)[1:])
        for _ in range(ROUNDS)
    ]
    variant_rule, count = np.asarray(rules.table.variant_rule), int(found.count)
    rows = np.stack(
        [np.asarray(v)[:count] for v in (found.variant, found.root, found.partner)], axis=1
    )
    engine = {(rules.rules[variant_rule[e]].name, int(r), int(p)) for e, r, p in rows}
    return {
        "find": {c: statistics.median(own[c] for own, _ in rounds) for c in ("wall", "cpu")},
        "plain_find": {
            "wall": statistics.median(wall for _, (wall, _) in rounds),
            "cpu": statistics.median(cpu for _, (_, cpu) in rounds),
        },
        "same_candidates": engine == {(c.rule.name, c.root, c.partner) for c in plain},
    }


def in_process(network: str, process: str, cache: str) -> dict[str, Any]:
    """Measure a network in a new process, with `cache` as its compilation cache."""
    command = [
        sys.executable,
        "-m",
        "experiments.engine_benchmark",
        f"--networks={network}",
        f"--process={process}",
    ]
    command += [
        f"--{name}={FLAGS[name].value}" for name in ("batch", "steps", "repeats", "compare")
    ]
    command += [f"--rules={','.join(FLAGS.rules)}", f"--out={cache}/{process}.json"]
    ended = children.run(command, env={**_environment(), "JAX_COMPILATION_CACHE_DIR": cache})
    if ended.interrupted:
        raise KeyboardInterrupt
    if ended.status:
        raise RuntimeError(f"{' '.join(command)} failed with status {ended.status}")
    figures = json.loads(Path(cache, f"{process}.json").read_text(encoding="utf-8"))
    return figures | {"peak_bytes": ended.peak_bytes}


def _environment() -> dict[str, str]:
    cached = {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return {**os.environ, **cached}


def benchmark(network: str) -> dict[str, Any]:
    """Return the figures of one network, with compile times for an empty and a filled cache."""
    with tempfile.TemporaryDirectory() as cache:
        figures = in_process(network, "measure", cache)
        warm = in_process(network, "compile", cache)
    return figures | {"compile_cached": warm["compile"]}


def problems(network: str, figures: dict[str, Any]) -> list[str]:
    """Return a message for each requirement that the figures violate."""
    found = []
    if figures["peak_bytes"] > MOST_BYTES:
        found.append(
            f"{network}: a peak memory of {figures['peak_bytes'] / 2**30:.2f} GiB is too high"
        )
    if figures["recompiled_for_a_rule_more"]:
        found.append(f"{network}: adding a rule within the bucket causes a recompilation")
    if not figures.get("same_candidates", True):
        found.append(
            f"{network}: the engine and the plain Python matcher find different candidates"
        )
    if network == "bert" and "plain_find" in figures:
        speedup = min(figures["plain_find"][c] / figures["find"][c] for c in ("wall", "cpu"))
        if speedup < LEAST_SPEEDUP:
            found.append(
                f"{network}: the engine is only {speedup:.0f} times as fast as plain Python"
            )
    return found


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print the figures as a table with a column for each network."""
    table = Table("", *results, title="rewriting engine (wall / processor seconds)")

    def pair(f: dict[str, float], scale: float = 1.0) -> str:
        return f"{f['wall'] * scale:.4g} / {f['cpu'] * scale:.4g}"

    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("nodes (bucket)", lambda r: f"{r['nodes']} ({r['bucket']})"),
        ("rules (rows)", lambda r: f"{r['rules']} ({r['rows']})"),
        ("candidates", lambda r: str(r["candidates"])),
        ("find all, ms", lambda r: pair(r["find"], 1e3)),
        ("plain Python, ms", lambda r: pair(r["plain_find"], 1e3) if "plain_find" in r else "-"),
        (
            "times as fast",
            lambda r: (
                " / ".join(f"{r['plain_find'][c] / r['find'][c]:.0f}" for c in ("wall", "cpu"))
                if "plain_find" in r
                else "-"
            ),
        ),
        ("apply all, ms", lambda r: pair(r["apply"], 1e3)),
        (
            "random steps per second",
            lambda r: f"{r['steps_per_second']:.0f} / {r['steps_per_cpu_second']:.0f}",
        ),
        ("peak memory, GiB", lambda r: f"{r['peak_bytes'] / 2**30:.2f}"),
        *(
            (f"compile {n}, s", lambda r, n=n: pair(r["compile"][n]))
            for n in ("find", "apply", "walk")
        ),
        *(
            (f"cached {n}, s", lambda r, n=n: pair(r["compile_cached"][n]))
            for n in ("find", "apply", "walk")
        ),
    ]
    for title, cell in rows:
        table.add_row(title, *(cell(r) for r in results.values()))
    Console().print(table)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    if FLAGS.process:
        rules = compile_rules(select_rules(standard_rules(), FLAGS.rules or None))
        results: dict[str, Any] = measure(FLAGS.networks[0], rules)
    else:
        results = {network: benchmark(network) for network in FLAGS.networks}
        show(results)
    if FLAGS.out:
        Path(FLAGS.out).parent.mkdir(parents=True, exist_ok=True)
        Path(FLAGS.out).write_text(json.dumps(results, indent=1), encoding="utf-8")
    wrong = [] if FLAGS.process else [p for n, r in results.items() for p in problems(n, r)]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    app.run(main)
