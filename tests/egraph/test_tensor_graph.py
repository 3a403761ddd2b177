"""E-graphs of tensors: matches are those of the searches' matcher, and every program that is
extracted computes the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import targets
from xrl_jax.accept.reference import reference
from xrl_jax.egraph import arrays
from xrl_jax.egraph.arrays import EGraph
from xrl_jax.egraph.seminaive import Stamps, no_stamps
from xrl_jax.egraph.tensor_graph import egraph_of, extracted
from xrl_jax.egraph.tensor_step import TensorStep, iterate_now, patterns_of
from xrl_jax.egraph.tree_cost import cheapest_now
from xrl_jax.engine import match
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph import ops
from xrl_jax.graph.graph import GraphError, TensorGraph
from xrl_jax.language.rule_files import standard_rules
from xrl_jax.language.table import CompiledRules, compile_rules
from xrl_jax.program.check import check_program
from xrl_jax.program.program import Program
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.transform.start import start_of

BUCKET, WINDOW = 2048, 1024
X, W = jnp.ones((4, 8)), jnp.full((8, 8), 0.25)


@cache
def rules() -> CompiledRules:
    """All rules but those that choose lowerings, and those that share equal nodes: an e-graph has
    no equal ones.
    """
    chosen = [r for r in standard_rules() if r.lowering is None]
    return compile_rules([r for r in chosen if not r.name.startswith("same-")])


def iterated(graph: EGraph, *names: str, stamps: Stamps | None = None) -> TensorStep:
    """Do one iteration with these rules, all by default; without `stamps` as the first one."""
    table = rules().table
    wanted = [not names or r.name in names for r in rules().rules]
    active = jnp.asarray(wanted)[jnp.maximum(table.variant_rule, 0)] & (table.variant_rule >= 0)
    patterns = patterns_of(table)
    stamps = no_stamps(BUCKET, len(active)) if stamps is None else stamps
    sizes = {"window": WINDOW, "n_halves": 4 * BUCKET}
    return iterate_now(table, patterns, active, graph, stamps, BUCKET, **sizes)


def by_rule(variants: Sequence[int]) -> Counter[str]:
    of = np.asarray(rules().table.variant_rule)
    return Counter(rules().rules[of[v]].name for v in variants if v >= 0)


@engine_jit
def matched(graph: TensorGraph) -> match.Candidates:
    table = rules().table
    return match.candidates(table, graph, match.match(table, graph), size=4096)


def program_of(network: str, **shape: int) -> Program:
    target = targets.from_model(network, **shape)
    return start_of(from_jax(target.fn, *target.args, weights=target.weights), "cpu")


@pytest.mark.parametrize("network", ["squeezenet", "bert"])
def test_matches_are_those_of_the_matcher(network):
    """In the graph of a layer, or of the network where it has no equal layers."""
    graph = program_of(network).graphs[-1]
    done = iterated(egraph_of([graph], BUCKET))
    counts = np.asarray(done.matches)
    found = by_rule(np.repeat(np.arange(len(counts)), counts).tolist())
    assert found == by_rule(np.asarray(matched(graph).variant).tolist())
    assert found.total() > 20 and int(done.missing) == 0


def test_equal_nodes_are_one_enode():
    program = from_jax(lambda x: jnp.tanh(x) + jnp.tanh(x), X)
    assert int(arrays.counts(egraph_of([program.graph], BUCKET))[0]) == 3


def test_arguments_of_commutative_operators_are_in_order():
    program = from_jax(lambda x, y: (x + y) * (y + x), X, X)
    assert int(arrays.counts(egraph_of([program.graph], BUCKET))[0]) == 4


def test_products_of_one_array_are_merged():
    """The merged product is in the e-graph, and its two parts in the classes of the products."""
    program = from_jax(lambda x, v, w: (x @ v, x @ w), X, W, 2 * W, weights=(1, 2))
    graph = egraph_of([program.graph], BUCKET)
    done = iterated(graph, "merge-dots-by-left")
    assert int(done.matches.sum()) == 1
    new = np.asarray(done.graph.op)
    for op, count in (("dot", 3), ("concat", 1), ("slice", 2)):
        assert (new == ops.OPS[op].code).sum() == count
    classes = np.asarray(done.graph.parent)
    slices = classes[new == ops.OPS["slice"].code]
    assert sorted(slices) == sorted(np.asarray(done.graph.roots)[:2])


def test_a_full_bucket_is_reported_and_leaves_an_egraph():
    """The third iteration would make 2,866 e-nodes."""
    graph, full = egraph_of([program_of("squeezenet").graph], BUCKET), []
    for _ in range(3):
        done = iterated(graph)
        graph = done.graph
        full.append(bool(done.full))
    assert full == [False, False, True]
    assert 1191 < int(arrays.counts(graph)[0]) < BUCKET


@pytest.mark.parametrize("network", ["squeezenet", "bert", "nasrnn"])
def test_matches_that_were_applied_before_would_add_nothing(network):
    """Iterations that skip them make the same e-graph as those that do not."""
    graph = again = egraph_of([program_of(network).graphs[-1]], BUCKET)
    stamps, applied = None, []
    for _ in range(4):
        done, every = iterated(graph, stamps=stamps), iterated(again)
        applied.append((int(done.matches.sum()), int(every.matches.sum())))
        graph, again, stamps = done.graph, every.graph, done.stamps
        if bool(done.full):
            break
        for one, other in zip(graph, again, strict=True):
            np.testing.assert_array_equal(one, other)
    assert applied[0][0] == applied[0][1]
    assert all(new < every for new, every in applied[1:])


def test_a_choice_with_a_cycle_or_without_an_enode_is_refused():
    """x, tanh x; then tanh x reads itself."""
    graph = egraph_of([from_jax(jnp.tanh, X).graph], BUCKET)
    chosen = np.asarray(graph.parent).copy()
    with pytest.raises(GraphError, match="has no e-node"):
        extracted(graph, np.zeros_like(chosen), 1)
    looped = graph._replace(args=graph.args.at[2, 0].set(2))
    with pytest.raises(GraphError, match="cycle through class 2"):
        extracted(looped, chosen, 1)


def grown(program: Program, iterations: int) -> list[EGraph]:
    graphs = [egraph_of([g], BUCKET) for g in program.graphs]
    for _ in range(iterations):
        graphs = [iterated(g).graph for g in graphs]
    return graphs


def check_random_extractions(
    program: Program, leaves: Sequence[Any], graphs: Sequence[EGraph], seeds: Sequence[int]
) -> None:
    """Extract programs under random costs of e-nodes, and compare them in float64."""
    exact = reference(program, errors=False)(leaves)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        new = []
        for before, graph in zip(program.graphs, graphs, strict=True):
            costs = jnp.asarray(rng.exponential(1.0, graph.bucket) + 1e-3, jnp.float32)
            n_outputs = int((np.asarray(before.globals.outputs) >= 0).sum())
            new.append(extracted(graph, np.asarray(cheapest_now(graph, costs).node), n_outputs))
        rewritten = program.with_graphs(new)
        check_program(rewritten)
        found = reference(rewritten, errors=False)(leaves)
        for a, b in zip(found.exact, exact.exact, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * np.abs(b).max())


def layer(x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, b: jax.Array) -> jax.Array:
    """Attention of one head with a residual and a norm."""
    scores = jax.nn.softmax((x @ q) @ (x @ k).T / 4.0)
    y = x + scores @ (x @ v + b)
    centred = y - y.mean(1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(1, keepdims=True) + 1e-5)


def convolutions(x: jax.Array, v: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """A fire module and a pooling."""

    def conv(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")

    parts = [jax.nn.relu(conv(x, k) + b[:, None, None]) for k in (v, w)]
    return jnp.concatenate(parts, axis=1).mean((2, 3))


def arguments(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


SMALL: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "attention": (layer, [(6, 8), (8, 8), (8, 8), (8, 8), (8,)]),
    "fire": (convolutions, [(1, 4, 6, 6), (4, 4, 1, 1), (4, 4, 3, 3), (4,)]),
}


@pytest.mark.parametrize("name", SMALL)
def test_extracted_programs_compute_the_same(name):
    fn, shapes = SMALL[name]
    leaves = arguments(0, *shapes)
    program = start_of(from_jax(fn, *leaves, weights=tuple(range(1, len(leaves)))), "cpu")
    check_random_extractions(program, leaves, grown(program, 2), range(6))


@pytest.mark.slow
@pytest.mark.parametrize("network", ["nasrnn", "squeezenet", "bert", "mobilenetv2"])
def test_programs_extracted_from_networks_compute_the_same(network):
    target = targets.from_model(network)
    program = start_of(from_jax(target.fn, *target.args, weights=target.weights), "cpu")
    leaves = jax.tree.leaves(target.args)
    check_random_extractions(program, leaves, grown(program, 2), range(20))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_a_thousand_extracted_programs_compute_the_same(name, first):
    """Of each of the two, with other arguments for each hundred."""
    fn, shapes = SMALL[name]
    leaves = arguments(first, *shapes)
    program = start_of(from_jax(fn, *leaves, weights=tuple(range(1, len(leaves)))), "cpu")
    check_random_extractions(program, leaves, grown(program, 3), range(first, first + 100))
