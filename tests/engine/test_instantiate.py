"""Rules on many bindings at once, of which only distinct ones are evaluated."""

from __future__ import annotations

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np

from tests.engine import harness
from xrl_jax.engine.instantiate import instantiate
from xrl_jax.graph.graph import Node, build
from xrl_jax.language.rule_files import load_rules
from xrl_jax.language.table import P

SUM = """
(rule factor (family test) (source "test") (evidence field) (assumes finite)
  (lhs (add (mul ?x ?y) (mul ?x ?z))) (rhs (mul ?x (add ?y ?z))))
"""


def test_bindings_with_the_same_nodes_in_other_places_are_distinct() -> None:
    """A scalar in places 1 and 4 was once taken for one in places 2 and 3."""
    rules = harness.table_of(load_rules(SUM))
    scalar, square = Node("input", shape=(), ref=0), Node("input", shape=(2, 2), ref=1)
    graph = build([scalar, square, Node("add", (0, 1), shape=(2, 2))], [2])
    pairs = list(combinations(range(2 * P), 2))
    bound = np.full((len(pairs), 2 * P), 2, np.int32)  # the square, in slot 2
    for row, pair in zip(bound, pairs, strict=True):
        row[list(pair)] = 1  # the scalar, in slot 1
    many = jax.vmap(instantiate, (None, None, 0, None))(
        rules.table, jnp.int32(0), jnp.asarray(bound), graph
    )
    one = jax.jit(instantiate)
    for i, row in enumerate(bound):
        alone = one(rules.table, jnp.int32(0), jnp.asarray(row), graph)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a, b[i]), alone, many)
