"""Helpers of the engine's tests: one table size and one bucket, so that each function is compiled
once, and views of results on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.engine import oracle
from tests.graph.parsed import parse_graph
from xrl_jax.engine import match as match_lib
from xrl_jax.engine.apply import Applied, apply
from xrl_jax.engine.match import Candidates
from xrl_jax.graph.graph import TensorGraph, build
from xrl_jax.language.rule import Rule
from xrl_jax.language.rule_files import load_rules
from xrl_jax.language.table import CompiledRules, RuleTable, compile_rules
from xrl_jax.runtime.engine_jit import engine_jit

BUCKET = 128
SIZE = 512  # room for candidates
ROWS, CODE = 1024, 128

ASSOCIATE = '(rule associate (source "test") (lhs (add (add ?x ?y) ?z)) (rhs (add ?x (add ?y ?z))))'
ADD_ZERO = '(rule add-zero (source "test") (lhs (add ?x ?c)) (when (is-value ?c 0.0)) (rhs ?x))'
TURN_BACK = """
(rule transposes (source "test") (lhs (transpose (transpose ?x :perm p) :perm q)) (rhs (transpose
?x :perm (gather p q))))
"""
DOUBLE = '(rule double (source "test") (lhs (add ?x ?x)) (rhs (mul ?x (const 2.0 :dtype-of ?x))))'
CONCATS = """
(rule concats (source "test") (lhs (concat (concat ?x ?y :axis i) ?z :axis i)) (rhs (concat ?x ?y
?z :axis (at i 0))))
"""
MERGE = """
(rule merge (source "test") (symmetric) (lhs (dot ?x ?w1 :as d1) (dot ?x ?w2 :as d2))
  (when (= (attrs d1) (attrs d2)) (= (attr d1 rhs_contract) 1) (= (attr d1 lhs_batch) 0) (= (rank
  ?w1) 2) (= (rank ?w2) 2))
  (let out (- (rank d1) 1)) (let n1 (at (shape ?w1) 1)) (let n2 (at (shape ?w2) 1))
  (node y (dot ?x (concat ?w1 ?w2 :axis 1) :like d1))
  (rhs (slice y :limit (shape d1))
       (slice y :start (if (= (lane) out) n1 0) :limit (if (= (lane) out) (+ n1 n2) (shape d2)))))
"""


class Found(NamedTuple):
    """A candidate with the name of its rule."""

    rule: str
    root: int
    partner: int


def matched(table: RuleTable, graph: TensorGraph) -> tuple[jax.Array, Candidates]:
    """Return the masks and candidates of a graph."""
    masks = match_lib.match(table, graph)
    return masks, match_lib.candidates(table, graph, masks, size=SIZE)


full = engine_jit(matched)
rematch = engine_jit(match_lib.rematch)
rewrite: Callable[..., Any] = engine_jit(apply)


def rules_of(*texts: str) -> CompiledRules:
    """Compile rule texts into a table of the size that all tests share."""
    return table_of(load_rules("\n".join(texts)))


def table_of(rules: Sequence[Rule]) -> CompiledRules:
    return compile_rules(rules, min_trees=ROWS, min_code=CODE)


def graph_of(text: str) -> TensorGraph:
    """Return the graph of a text in the bucket that all tests share; slots are as numbered in the
    text.
    """
    graph = oracle.host_graph(parse_graph("graph {\n" + text + "\n}"))
    nodes = [
        replace(graph.node(s), args=tuple(a - 1 for a in graph.node(s).args)) for s in graph.slots()
    ]
    return build(nodes, [o - 1 for o in graph.outputs], bucket=BUCKET)


def listed(rules: CompiledRules, found: Candidates) -> list[tuple[int, Found]]:
    """Return the variant of every candidate, with its rule's name, its root and partner."""
    count, size = int(found.count), found.variant.shape[0]
    assert count <= size, f"{count} candidates, room for {size}"
    host = jax.tree.map(np.asarray, found)
    names = [
        rules.rules[i].name for i in np.asarray(rules.table.variant_rule)[host.variant[:count]]
    ]
    rows = zip(
        host.variant[:count].tolist(),
        host.root[:count].tolist(),
        host.partner[:count].tolist(),
        strict=True,
    )
    return [(e, Found(name, r, p)) for name, (e, r, p) in zip(names, rows, strict=True)]


def find(rules: CompiledRules, graph: TensorGraph) -> list[Found]:
    """Return all candidates, sorted."""
    return sorted(c for _, c in listed(rules, full(rules.table, graph)[1]))


def rewritten(rules: CompiledRules, graph: TensorGraph, index: int = 0) -> Applied:
    """Apply the candidate at `index`."""
    found = full(rules.table, graph)[1]
    return rewrite(
        rules.table, graph, found.variant[index], found.root[index], found.partner[index]
    )


def expected(rules: Sequence[Rule], graph: oracle.Graph) -> dict[Found, set]:
    """Return the oracle's candidates, each with the structures that its rewrites lead to."""
    results: dict[Found, set] = {}
    for c in oracle.candidates(rules, graph):
        after = oracle.apply(graph, c)
        assert after is not None
        results.setdefault(Found(c.rule.name, c.root, c.partner), set()).add(
            oracle.structure(after)
        )
    return results
