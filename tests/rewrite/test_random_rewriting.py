"""Any sequence of rewrites keeps the function: random walks over random graphs and over the
networks at reduced width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from experiments import models
from tests.graph.generators import random_graph
from tests.rewrite import harness
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.check import check
from xrl_jax.graph.graph import BUCKETS, Node, TensorGraph, build, grow, n_live, nodes_of
from xrl_jax.rewrite.domains import Floats
from xrl_jax.rewrite.evaluate import evaluate
from xrl_jax.rewrite.library import standard_rules
from xrl_jax.rewrite.table import CompiledRules

TOLERANCE = 1e-7  # of the largest value of an output; rounding alone is eight digits smaller


def sources(nodes: Sequence[Node], seed: int) -> dict[int, np.ndarray]:
    """A random value for each node that refers to the bindings: an opaque one is any function, so
    any value will do."""
    rng = np.random.default_rng(seed)
    values: dict[int, np.ndarray] = {}
    for node in nodes:
        if node.ref >= 0 and node.ref not in values:
            if "float" in node.dtype:
                values[node.ref] = rng.uniform(-1.0, 1.0, node.shape)
            else:
                values[node.ref] = rng.integers(0, 2, node.shape).astype(float)
    return values


def results(graph: TensorGraph, values: dict[int, np.ndarray]) -> list[np.ndarray]:
    nodes, outputs, _ = nodes_of(graph)
    return [np.asarray(v) for v in evaluate(nodes, outputs, values, Floats())]


def assert_same(got: list[np.ndarray], want: list[np.ndarray], context: str) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        scale = np.max(np.abs(b[np.isfinite(b)]), initial=1.0)
        np.testing.assert_allclose(
            a, b, rtol=0.0, atol=TOLERANCE * scale, err_msg=f"{context}: output {i}"
        )


def walk(
    rules: CompiledRules, graph: TensorGraph, n_steps: int, seed: int, *, every: int = 1
) -> int:
    """Take `n_steps` random rewrites and compare with the start after each `every`; how many were
    taken."""
    rng = np.random.default_rng(seed)
    nodes, _, _ = nodes_of(graph)
    values = sources(nodes, seed)
    want = results(graph, values)
    trail: list[str] = []
    for taken in range(n_steps):
        found = harness.full(rules.table, graph)[1]
        count = min(int(found.count), harness.SIZE)
        if count == 0:
            return taken
        i = int(rng.integers(count))
        entry, root, partner = (v[i] for v in (found.entry, found.root, found.partner))
        if int(entry) < 0:  # more candidates than there is room for, and pairs among those left out
            continue
        name = rules.rules[int(rules.table.entry_rule[int(entry)])].name
        trail.append(f"{name} at %{int(root)}, %{int(partner)}")
        after = harness.rewrite(rules.table, graph, entry, root, partner)
        if bool(after.full):
            return taken
        graph = after.graph
        context = f"seed {seed}, step {taken}: " + "; ".join(trail[-8:])
        assert bool(after.ok), context
        if taken % every == every - 1 or taken == n_steps - 1:
            check(graph)
            assert_same(results(graph, values), want, context)
    return n_steps


@pytest.fixture(scope="module")
def library() -> CompiledRules:
    return harness.table_of(standard_rules())


def random_in_bucket(seed: int) -> TensorGraph:
    return build(*random_graph(np.random.default_rng(seed), 24), bucket=harness.BUCKET)


@pytest.mark.parametrize("seeds", [range(0, 8), range(8, 16), range(16, 24)])
def test_random_rewrites_keep_the_function(library: CompiledRules, seeds: range) -> None:
    taken = sum(walk(library, random_in_bucket(seed), 10, seed) for seed in seeds)
    assert taken >= 5 * len(seeds)


N_STEPS = 10_000
SMALL = {
    "bert": dict(layers=1, width=8, heads=2, vocabulary=10, tokens=4),
    "squeezenet": dict(image_size=32, width=0.1, classes=10),
    "resnext50": dict(image_size=32, width=0.125, groups=4, classes=10),
}


@pytest.mark.slow
def test_many_random_rewrites_keep_the_function(library: CompiledRules, record_property) -> None:  # type: ignore[no-untyped-def]
    taken, seed = 0, 1000
    while taken < N_STEPS * 9 // 10:
        taken += walk(library, random_in_bucket(seed), 40, seed, every=2)
        seed += 1
    record_property(
        "figure", f"{taken} random rewrites of {seed - 1000} random graphs, all functions kept"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALL))
def test_random_rewrites_keep_networks(library: CompiledRules, name: str, record_property) -> None:  # type: ignore[no-untyped-def]
    model = models.get(name, **SMALL[name])
    program = from_jax(model.fn, model.weights, *model.inputs, weights=(0,), fold=False)
    graph = program.graph
    graph = grow(graph, next(b for b in BUCKETS if b >= 2 * int(n_live(graph))))
    taken = sum(
        walk(library, graph, 60, seed, every=20)
        for seed in range(N_STEPS // 10 // 60 // len(SMALL) + 1)
    )
    assert taken >= 100
    record_property("figure", f"{taken} random rewrites of {name}, all functions kept")
