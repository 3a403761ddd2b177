"""Rewriting: tests on small hand-written graphs, then comparison with the plain-Python rewriter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine import harness, oracle
from tests.engine.harness import graph_of, rewritten, rules_of
from tests.engine.test_match import SIBLINGS
from tests.graph.generators import random_graph
from tests.graph.valid import is_acyclic
from xrl_jax.engine.apply import apply_instantiated, instantiated, match_in
from xrl_jax.graph.check import check
from xrl_jax.graph.graph import build, n_live, nodes_of
from xrl_jax.graph.passes import use_counts
from xrl_jax.graph.text import format_graph
from xrl_jax.language.rule_files import select_rules, standard_rules
from xrl_jax.runtime.engine_jit import engine_jit


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def body(graph: harness.TensorGraph) -> list[str]:
    return lines(format_graph(graph))[1:-1]


def test_the_root_is_replaced_and_dead_nodes_are_removed() -> None:
    graph = graph_of("""
      %1: float32[2,3,4] = input() ref=@0
      %2: float32[3,4,2] = transpose(%1) {perm=(1, 2, 0)}
      %3: float32[4,3,2] = transpose(%2) {perm=(1, 0, 2)}
      %4: float32[4,3,2] = tanh(%3)
      return %4
    """)
    after = rewritten(rules_of(harness.TURN_BACK), graph)
    assert bool(after.ok) and not bool(after.full)
    assert body(after.graph) == lines("""
      %1: float32[2,3,4] = input() ref=@0
      %2: float32[4,3,2] = transpose(%1) {perm=(2, 1, 0)}
      %3: float32[4,3,2] = tanh(%2)
      return %3
    """)


def test_an_inner_node_with_another_use_stays() -> None:
    graph = graph_of("""
      %1: float32[2,3] = input() ref=@0
      %2: float32[3,2] = transpose(%1) {perm=(1, 0)}
      %3: float32[2,3] = transpose(%2) {perm=(1, 0)}
      return %2, %3
    """)
    after = rewritten(rules_of(harness.TURN_BACK), graph)
    assert body(after.graph) == lines("""
      %1: float32[2,3] = input() ref=@0
      %2: float32[3,2] = transpose(%1) {perm=(1, 0)}
      %3: float32[2,3] = transpose(%1)
      return %2, %3
    """)


def test_a_root_that_is_an_output_may_become_an_input() -> None:
    graph = graph_of("""
      %1: float32[2] = input() ref=@0
      %2: float32[] = const() value=0.0
      %3: float32[2] = add(%1, %2)
      return %3
    """)
    after = rewritten(rules_of(harness.ADD_ZERO), graph)
    assert body(after.graph) == ["%1: float32[2] = input() ref=@0", "return %1"]


def test_a_merge_replaces_both_roots() -> None:
    after = rewritten(rules_of(harness.MERGE), graph_of(SIBLINGS))
    assert body(after.graph) == lines("""
      %1: float32[4,8] = input() ref=@0
      %2: float32[8,3] = weight() ref=@1
      %3: float32[8,5] = weight() ref=@2
      %4: float32[8,5] = weight() ref=@3
      %5: float32[4,5] = dot(%1, %4) {lhs_contract=[1], rhs_contract=[0]}
      %6: float32[8,8] = concat(%2, %3) {axis=1}
      %7: float32[4,8] = dot(%1, %6) {lhs_contract=[1], rhs_contract=[0]}
      %8: float32[4,3] = slice(%7) {limit=(4, 3)}
      %9: float32[4,5] = slice(%7) {start=(0, 3), limit=(4, 8)}
      return %8, %9, %5
    """)
    assert (
        np.asarray(after.graph.nodes.weight_only).sum() == 4
    )  # three weights and their concatenation


MADE_LIKE = """
(rule made-like (source "test") (lhs (dot ?x ?w :as d)) (rhs (dot ?x (neg ?w) :like d)))
"""
SCALE = """
(rule scale (source "test") (lhs (mul (dot ?x ?w :as d) ?c)) (when (is-scalar ?c) (weight-only ?w))
  (rhs (dot ?x (mul ?w ?c) :like d)))
"""


def test_a_node_made_like_another_keeps_its_lowering() -> None:
    graph = graph_of("""
      %1: float32[4,8] = input() ref=@0
      %2: float32[8,3] = weight() ref=@1
      %3: float32[] = const() value=2.0
      %4: float32[4,3] = dot(%1, %2) {lhs_contract=[1], rhs_contract=[0]} lowering=3
      %5: float32[4,3] = mul(%4, %3)
      return %5
    """)
    assert body(rewritten(rules_of(SCALE), graph).graph) == lines("""
      %1: float32[4,8] = input() ref=@0
      %2: float32[8,3] = weight() ref=@1
      %3: float32[] = const() value=2.0
      %4: float32[8,3] = mul(%2, %3)
      %5: float32[4,3] = dot(%1, %4) {lhs_contract=[1], rhs_contract=[0]} lowering=3
      return %5
    """)


@pytest.mark.parametrize(
    "other",
    [
        MADE_LIKE.replace("?x (neg ?w) :like d", "?w ?x :like d"),  # operands of other types
        MADE_LIKE.replace(":like d", ":like d :precision 2"),
    ],
)
def test_a_lowering_is_dropped_if_operand_types_or_attributes_differ(other: str) -> None:
    """The lowering is dropped if operand types differ (the right operand is no weight) or if
    attributes differ.
    """
    graph = graph_of("""
      %1: float32[8,8] = input() ref=@0
      %2: float32[8,8] = weight() ref=@1
      %3: float32[8,8] = dot(%1, %2) {lhs_contract=[1], rhs_contract=[0]} lowering=3
      return %3
    """)
    for rule, kept in ((MADE_LIKE, 3), (other, 0)):
        nodes, _, _ = nodes_of(rewritten(rules_of(rule), graph).graph)
        assert [n.lowering for n in nodes if n.op == "dot"] == [kept]


def test_a_full_bucket_is_reported_and_the_graph_is_unchanged() -> None:
    chain = "\n".join(f"%{i}: float32[4,5] = tanh(%{i - 1})" for i in range(8, 126))
    graph = graph_of(SIBLINGS.replace("return %5, %6, %7", f"{chain}\nreturn %5, %6, %125"))
    after = rewritten(rules_of(harness.MERGE), graph)  # creates four nodes; two slots are free
    assert bool(after.full) and not bool(after.ok)
    jax.tree.map(np.testing.assert_array_equal, after.graph, graph)


def test_a_candidate_that_does_not_match_changes_nothing() -> None:
    rules, graph = rules_of(harness.MERGE), graph_of(SIBLINGS)
    for variant, root, partner in ((-1, 5, 6), (0, 5, 5), (0, 1, 6)):
        after = harness.rewrite(
            rules.table, graph, np.int32(variant), np.int32(root), np.int32(partner)
        )
        assert not bool(after.ok) and not bool(after.full) and not after.changed.any()
        jax.tree.map(np.testing.assert_array_equal, after.graph, graph)


def test_a_lowering_that_is_no_longer_applicable_is_not_chosen() -> None:
    """A candidate does nothing in a later graph if its lowering is not applicable there, because
    the weight is contracted over its other axis, or if the lowering is already chosen.
    """
    rules = harness.table_of(select_rules(standard_rules(), ["dot-as-flat"]))
    text = """
      %1: float32[4,8] = input() ref=@0
      %2: float32[8,8] = weight() ref=@1
      %3: float32[4,8] = dot(%1, %2) {lhs_contract=[1], rhs_contract=[AXIS]}
      return %3
    """
    before, turned = (graph_of(text.replace("AXIS", axis)) for axis in "10")
    assert len(harness.find(rules, before)) == 1 and harness.find(rules, turned) == []
    first = harness.rewrite(rules.table, before, np.int32(0), np.int32(3), np.int32(0))
    assert [n.lowering for n in nodes_of(first.graph)[0]] == [0, 0, 1]
    for graph in (turned, first.graph):
        after = harness.rewrite(rules.table, graph, np.int32(0), np.int32(3), np.int32(0))
        assert not bool(after.ok) and not bool(after.full) and not after.changed.any()
        jax.tree.map(np.testing.assert_array_equal, after.graph, graph)


def test_work_on_weights_alone_is_not_merged_with_work_on_inputs() -> None:
    rules = harness.table_of(select_rules(standard_rules(), ["merge-dots-by-right"]))
    graph = """
      %1: float32[4,8] = input() ref=@0
      %2: float32[5,8] = {second}() ref=@1
      %3: float32[8,3] = weight() ref=@2
      %4: float32[4,3] = dot(%1, %3) {{lhs_contract=[1], rhs_contract=[0]}}
      %5: float32[5,3] = dot(%2, %3) {{lhs_contract=[1], rhs_contract=[0]}}
      %6: float32[5,3] = tanh(%5)
      return %4, %6
    """
    assert len(harness.find(rules, graph_of(graph.format(second="input")))) == 1
    assert harness.find(rules, graph_of(graph.format(second="weight"))) == []


@pytest.mark.parametrize("seeds", [range(0, 8), range(8, 16)])
def test_results_equal_the_plain_rewriters_on_random_graphs(seeds: range) -> None:
    library = harness.table_of(standard_rules())
    for seed in seeds:
        rng = np.random.default_rng(seed)
        graph = build(*random_graph(rng, int(rng.integers(12, 40))), bucket=harness.BUCKET)
        wanted = harness.expected(library.rules, oracle.host_graph(graph))
        results: dict[harness.Found, set] = {}
        found = harness.full(library.table, graph)[1]
        for i, (_, candidate) in enumerate(harness.listed(library, found)):
            after = harness.rewrite(
                library.table, graph, found.variant[i], found.root[i], found.partner[i]
            )
            assert bool(after.ok), candidate
            assert bool(is_acyclic(after.graph)), candidate
            np.testing.assert_array_equal(after.uses, use_counts(after.graph))
            check(after.graph)
            assert int(n_live(after.graph)) == len(oracle.host_graph(after.graph).slots())
            results.setdefault(candidate, set()).add(
                oracle.structure(oracle.host_graph(after.graph))
            )
        assert results == wanted, f"seed {seed}"


CROSSED = """
  %1: float32[4,4] = input() ref=@0
  %2: float32[4,4] = input() ref=@1
  %3: float32[4,4] = weight() ref=@2
  %4: float32[4,4] = dot(%1, %3) {lhs_contract=[1], rhs_contract=[0]}
  %5: float32[4,4] = dot(%2, %3) {lhs_contract=[1], rhs_contract=[0]}
  %6: float32[4,4] = tanh(%4)
  %7: float32[4,4] = tanh(%5)
  %8: float32[4,4] = dot(%1, %7) {lhs_contract=[1], rhs_contract=[0]}
  %9: float32[4,4] = dot(%2, %6) {lhs_contract=[1], rhs_contract=[0]}
  return %8, %9
"""


def merged(
    rules: harness.CompiledRules, graph: harness.TensorGraph, root: int, partner: int
) -> harness.Applied:
    """Apply the table's first rule at these roots, whether they are a candidate or not."""
    return harness.rewrite(rules.table, graph, *(np.int32(i) for i in (0, root, partner)))


def test_a_merge_that_would_create_a_cycle_after_another_does_nothing() -> None:
    """Each pair of products may be merged on its own; merging both would create a cycle."""
    rules, graph = rules_of(harness.MERGE), graph_of(CROSSED)
    first = merged(rules, graph, 4, 8)
    assert bool(first.ok)
    second = merged(rules, first.graph, 5, 9)
    assert not bool(second.ok) and not bool(second.full)
    assert format_graph(second.graph) == format_graph(first.graph)


@engine_jit
def applied_in_sequence(
    rules: harness.RuleTable, graph: harness.TensorGraph, roots: jax.Array
) -> list[harness.Applied]:
    """Instantiate the table's first rule at each root in `graph`, then apply the candidates in
    turn.
    """
    candidates = [instantiated(rules, graph, jnp.int32(0), root, jnp.int32(0)) for root in roots]
    done, now, uses = [], graph, use_counts(graph)
    for candidate in candidates:
        features = match_in(rules, graph, candidate).features
        done.append(apply_instantiated(rules, now, uses, candidate, features))
        now, uses = done[-1].graph, done[-1].uses
    return done


def test_candidates_instantiated_together_apply_in_sequence() -> None:
    graph = graph_of("""
      %1: float32[2,3] = input() ref=@0
      %2: float32[2,3] = tanh(%1)
      %3: float32[2,3] = add(%1, %1)
      %4: float32[2,3] = add(%2, %2)
      return %3, %4
    """)
    first, second = applied_in_sequence(rules_of(harness.DOUBLE).table, graph, jnp.array([3, 4]))
    assert bool(first.ok) and bool(second.ok)
    assert body(second.graph) == lines("""
      %1: float32[2,3] = input() ref=@0
      %2: float32[] = const() value=2.0
      %3: float32[] = const() value=2.0
      %4: float32[2,3] = tanh(%1)
      %5: float32[2,3] = mul(%1, %3)
      %6: float32[2,3] = mul(%4, %2)
      return %5, %6
    """)


def test_an_instantiated_candidate_is_skipped_if_its_match_has_changed() -> None:
    """The second candidate matches %3, which the first replaces by a transpose with another
    permutation.
    """
    graph = graph_of("""
      %1: float32[2,3,4] = input() ref=@0
      %2: float32[3,4,2] = transpose(%1) {perm=(1, 2, 0)}
      %3: float32[4,3,2] = transpose(%2) {perm=(1, 0, 2)}
      %4: float32[3,4,2] = transpose(%3) {perm=(1, 0, 2)}
      return %4
    """)
    rules = rules_of(harness.TURN_BACK).table
    first, second = applied_in_sequence(rules, graph, jnp.array([3, 4]))
    assert bool(first.ok) and not bool(second.ok) and not bool(second.full)
    assert format_graph(second.graph) == format_graph(first.graph)
