"""Matching: tests on small hand-written graphs, then comparison with the plain-Python matcher."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import models
from tests.engine import harness, oracle
from tests.engine.harness import Found, find, graph_of, rules_of
from tests.graph.generators import random_graph
from xrl_jax.engine.match import candidates, match, sample, trees_of_rule
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph import ops
from xrl_jax.graph.graph import build
from xrl_jax.language.rule_files import standard_rules
from xrl_jax.runtime.engine_jit import engine_jit

ADD3 = """
  %1: float32[2] = input() ref=@0
  %2: float32[2] = input() ref=@1
  %3: float32[2] = input() ref=@2
"""


def test_a_commutative_operator_matches_in_either_operand_order() -> None:
    left = ADD3 + "%4: float32[2] = add(%1, %2)\n %5: float32[2] = add(%4, %3)\n return %5"
    right = ADD3 + "%4: float32[2] = add(%1, %2)\n %5: float32[2] = add(%3, %4)\n return %5"
    rules = rules_of(harness.ASSOCIATE)
    # The inner sum matches in two operand orders: the result is x + (y + z) or y + (x + z).
    assert find(rules, graph_of(left)) == [Found("associate", 5, 0)] * 2
    assert find(rules, graph_of(right)) == [Found("associate", 5, 0)] * 2


def test_a_repeated_variable_matches_one_node_only() -> None:
    rules = rules_of(harness.DOUBLE)
    twice = ADD3 + "%4: float32[2] = add(%1, %1)\n return %4"
    two = ADD3 + "%4: float32[2] = add(%1, %2)\n return %4"
    assert find(rules, graph_of(twice)) == [Found("double", 4, 0)]
    assert find(rules, graph_of(two)) == []


def test_matches_can_be_restricted_to_one_rule() -> None:
    rules = rules_of(harness.DOUBLE, harness.ASSOCIATE)
    graph = graph_of(
        ADD3 + "%4: float32[2] = add(%1, %1)\n %5: float32[2] = add(%4, %3)\n return %5"
    )
    masks = harness.full(rules.table, graph)[0]
    for index, rule in enumerate(rules.rules):
        mine = masks & trees_of_rule(rules.table, jnp.int32(index))
        assert (
            np.flatnonzero(mine.any(axis=1)).tolist()
            == {"double": [4], "associate": [5]}[rule.name]
        )


def test_a_rule_may_require_the_value_of_a_constant() -> None:
    graph = """
      %1: float32[2] = input() ref=@0
      %2: float32[] = const() value=0.0
      %3: float32[] = const() value=1.0
      %4: float32[2] = add(%2, %1)
      %5: float32[2] = add(%4, %3)
      return %5
    """
    assert find(rules_of(harness.ADD_ZERO), graph_of(graph)) == [Found("add-zero", 4, 0)]


def test_a_concat_of_another_arity_does_not_match() -> None:
    rules = rules_of(harness.CONCATS)
    inner = ADD3 + "%4: float32[4] = concat(%1, %2)\n"
    three = ADD3 + "%4: float32[6] = concat(%1, %2, %3)\n"
    assert find(rules, graph_of(inner + "%5: float32[6] = concat(%4, %3)\n return %5")) == [
        Found("concats", 5, 0)
    ]
    assert find(rules, graph_of(three + "%5: float32[8] = concat(%4, %3)\n return %5")) == []


SIBLINGS = """
  %1: float32[4,8] = input() ref=@0
  %2: float32[8,3] = weight() ref=@1
  %3: float32[8,5] = weight() ref=@2
  %4: float32[8,5] = weight() ref=@3
  %5: float32[4,3] = dot(%1, %2) {lhs_contract=[1], rhs_contract=[0]}
  %6: float32[4,5] = dot(%1, %3) {lhs_contract=[1], rhs_contract=[0]}
  %7: float32[4,5] = dot(%1, %4) {lhs_contract=[1], rhs_contract=[0]}
  return %5, %6, %7
"""


def test_each_pair_with_a_shared_operand_is_found_once() -> None:
    assert find(rules_of(harness.MERGE), graph_of(SIBLINGS)) == [
        Found("merge", 5, 6),
        Found("merge", 5, 7),
        Found("merge", 6, 7),
    ]


def test_a_pair_in_which_one_root_depends_on_the_other_is_refused() -> None:
    chain = """
      %1: float32[4,4] = input() ref=@0
      %2: float32[4,4] = weight() ref=@1
      %3: float32[4,4] = dot(%1, %2) {lhs_contract=[1], rhs_contract=[0]}
      %4: float32[4,4] = tanh(%3)
      %5: float32[4,4] = dot(%1, %4) {lhs_contract=[1], rhs_contract=[0]}
      %6: float32[4,4] = dot(%1, %1) {lhs_contract=[1], rhs_contract=[0]}
      return %5, %6
    """
    assert find(rules_of(harness.MERGE), graph_of(chain)) == [
        Found("merge", 3, 6),
        Found("merge", 5, 6),
    ]


def siblings(n: int) -> harness.TensorGraph:
    """Return a graph of products of one input with n weights."""
    dot = "float32[4,5] = dot(%1, %{}) {{lhs_contract=[1], rhs_contract=[0]}}"
    weights = "\n".join(f"%{i}: float32[8,5] = weight() ref=@{i}" for i in range(2, n + 2))
    dots = "\n".join(f"%{i + n}: {dot.format(i)}" for i in range(2, n + 2))
    ends = f"%{n + 2}, %{2 * n + 1}"
    return graph_of(f"%1: float32[4,8] = input() ref=@0\n{weights}\n{dots}\nreturn {ends}")


def test_candidates_beyond_the_available_slots_are_counted() -> None:
    count = harness.full(rules_of(harness.MERGE).table, siblings(34))[1].count
    assert int(count) >= 34 * 33 // 2 > harness.SIZE


def sampled(
    rules: harness.CompiledRules, graph: harness.TensorGraph, size: int, n: int
) -> tuple[list[list[tuple[int, int, int]]], int]:
    """Return (variant, root, partner) of each candidate in each of n samples, and the number of
    candidates that a sample reports.
    """
    masks = harness.full(rules.table, graph)[0]
    draw_all = engine_jit(
        jax.vmap(functools.partial(sample, size=size), in_axes=(None, None, None, 0))
    )
    found = draw_all(rules.table, graph, masks, jax.random.split(jax.random.key(0), n))
    columns = (np.asarray(c) for c in found[:3])
    each = [[c for c in zip(*row, strict=True) if c[0] >= 0] for row in zip(*columns, strict=True)]
    return [[(int(e), int(r), int(p)) for e, r, p in row] for row in each], int(found.count[0])


def test_a_sample_contains_every_candidate_if_all_fit(library: harness.CompiledRules) -> None:
    for seed in range(3):
        graph = random_in_bucket(seed)
        found = harness.full(library.table, graph)[1]
        n = int(found.count)
        listed = {
            (int(e), int(r), int(p)) for e, r, p in zip(*(c[:n] for c in found[:3]), strict=True)
        }
        (row,), count = sampled(library, graph, harness.SIZE, 1)
        assert count <= harness.SIZE
        assert len(row) == n and set(row) == listed


def test_a_sample_of_too_many_candidates_is_uniform() -> None:
    # 8 products form 28 pairs, numbered among 64 ordered ones; 16 slots hold a quarter of these.
    rows, count = sampled(rules_of(harness.MERGE), siblings(8), 16, 2048)
    assert count == 64
    assert all(len(set(row)) == len(row) for row in rows)
    often = collections.Counter(c for row in rows for c in row)
    assert len(often) == 28
    assert all(0.22 < n / len(rows) < 0.28 for n in often.values())


@pytest.fixture(scope="module")
def library() -> harness.CompiledRules:
    return harness.table_of(standard_rules())


def random_in_bucket(seed: int) -> harness.TensorGraph:
    rng = np.random.default_rng(seed)
    return build(*random_graph(rng, int(rng.integers(12, 48))), bucket=harness.BUCKET)


@pytest.mark.parametrize("seeds", [range(0, 20), range(20, 40)])
def test_candidates_equal_the_plain_matchers_on_random_graphs(
    library: harness.CompiledRules, seeds: range
) -> None:
    for seed in seeds:
        graph = random_in_bucket(seed)
        found = harness.listed(library, harness.full(library.table, graph)[1])
        assert len(set(found)) == len(found), "a variant is listed twice at one place"
        wanted = harness.expected(library.rules, oracle.host_graph(graph))
        assert {c for _, c in found} == set(wanted), f"seed {seed}"


SMALL = {
    "bert": dict(layers=1, width=8, heads=2, vocabulary=10, tokens=4),
    "squeezenet": dict(image_size=32, width=0.1, classes=10),
    "resnext50": dict(image_size=32, width=0.125, groups=4, classes=10),
    "inceptionv3": dict(image_size=75, width=0.05, classes=10),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALL))
def test_candidates_equal_the_plain_matchers_on_networks(
    library: harness.CompiledRules, name: str
) -> None:
    model = models.get(name, **SMALL[name])
    program = from_jax(model.fn, model.weights, *model.inputs, weights=(0,), fold=False)
    found = engine_jit(lambda t, g: candidates(t, g, match(t, g), size=8192))(
        library.table, program.graph
    )
    engine = {c for _, c in harness.listed(library, found)}
    plain = oracle.candidates(library.rules, oracle.host_graph(program.graph))
    assert engine == {Found(c.rule.name, c.root, c.partner) for c in plain}


def test_incremental_matching_equals_full_matching(library: harness.CompiledRules) -> None:
    table = library.table
    for seed in range(5):
        rng = np.random.default_rng(seed)
        graph = random_in_bucket(seed + 100)
        masks, found = harness.full(table, graph)
        for _ in range(8):
            if int(found.count) == 0:
                break
            i = int(rng.integers(int(found.count)))
            after = harness.rewrite(table, graph, found.variant[i], found.root[i], found.partner[i])
            if bool(after.full):
                break
            graph = after.graph
            again = harness.rematch(table, graph, masks, after.changed)
            masks, found = harness.full(table, graph)
            np.testing.assert_array_equal(again, masks)


def test_one_more_rule_in_a_table_of_the_same_size_compiles_nothing(
    library: harness.CompiledRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = random_in_bucket(0)
    fewer = find(library, graph)
    more = harness.table_of([*library.rules, *rules_of(harness.DOUBLE).rules])
    monkeypatch.delattr(harness.match_lib, "match")  # another trace would call it
    assert len(find(more, graph)) >= len(fewer)


def test_a_batch_of_graphs_is_matched_like_each_graph_alone(library: harness.CompiledRules) -> None:
    graphs = [random_in_bucket(seed) for seed in (1, 2, 3)]
    batch = jax.tree.map(lambda *v: jnp.stack(v), *graphs)
    masks, found = engine_jit(jax.vmap(harness.matched, in_axes=(None, 0)))(library.table, batch)
    for i, graph in enumerate(graphs):
        one_masks, one = harness.full(library.table, graph)
        np.testing.assert_array_equal(masks[i], one_masks)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda v, i=i: v[i], found), one)


def test_holes_match_nothing(library: harness.CompiledRules) -> None:
    graph = random_in_bucket(4)
    masks = np.asarray(harness.full(library.table, graph)[0])
    assert not masks[np.asarray(graph.nodes.op) == ops.HOLE].any()
