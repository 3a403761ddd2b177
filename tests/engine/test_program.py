"""Rewriting programs by hand: listing the candidates, and applying one of them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.engine.program import apply, candidates
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import build, nodes_of
from xrl_jax.language.rule_files import load_rules
from xrl_jax.program.program import Program

X = jnp.arange(6.0).reshape(2, 3)
RULES = load_rules(
    """
    (rule two-negs (family test) (source "arithmetic") (evidence field)
      (lhs (neg (neg ?x))) (rhs ?x))
    (rule distribute (family test) (source "arithmetic") (evidence field)
      (lhs (mul ?x (add ?y ?z))) (rhs (add (mul ?x ?y) (mul ?x ?z))))
    (rule shared-negs (family test) (source "arithmetic") (evidence field)
      (symmetric) (lhs (mul ?x ?y :as a) (mul ?x ?z :as b))
      (rhs (mul ?y ?x) (mul ?z ?x)))
    """
)
TWO_NEGS, DISTRIBUTE, SHARED = RULES


def ops_of(program: Program, graph: int = 0) -> list[str]:
    return [n.op for n in nodes_of(program.graphs[graph])[0]]


def test_candidates_name_rule_and_place() -> None:
    program = from_jax(lambda x: jnp.sin(jnp.negative(-x)), X)
    (found,) = candidates(program, [TWO_NEGS])
    assert (found.rule, found.graph, found.root, found.partner) == ("two-negs", 0, 3, 0)
    assert str(found) == "two-negs at %3 neg[2,3]"


def test_apply_rewrites_one_place_and_leaves_the_original_unchanged() -> None:
    program = from_jax(lambda x: jnp.sin(jnp.negative(-x)), X)
    (found,) = candidates(program, [TWO_NEGS])
    after = apply(program, found)
    assert ops_of(after) == ["input", "sin"]
    assert ops_of(program) == ["input", "neg", "neg", "sin"]
    np.testing.assert_array_equal(after(X), jnp.sin(X))


def test_a_candidate_that_no_longer_matches_is_refused() -> None:
    program = from_jax(lambda x: jnp.sin(jnp.negative(-x)), X)
    (found,) = candidates(program, [TWO_NEGS])
    with pytest.raises(ValueError, match="two-negs at %3 .* does not apply to this program"):
        apply(apply(program, found), found)


def test_operand_orders_with_the_same_result_are_one_candidate() -> None:
    def square_of_sum(x, y):
        s = x + y
        return s * s

    found = candidates(from_jax(square_of_sum, X, X), [DISTRIBUTE])
    results = [str(apply(from_jax(square_of_sum, X, X), c)) for c in found]
    assert len(results) == len(set(results)) == len(set(map(str, found)))


def test_two_roots_are_found_at_a_shared_operand() -> None:
    program = from_jax(lambda x, y, z: (x * y, x * z), X, X, X)
    found = [c for c in candidates(program, [SHARED]) if "exchanged" not in c.place]
    assert {(c.root, c.partner) for c in found} == {(4, 5)}
    assert str(found[0]) == "shared-negs at %4 mul[2,3] and %5 mul[2,3]"


def test_bodies_have_candidates_too() -> None:
    def fn(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(jnp.negative(-c)), None), x, None, length=3)[0]

    program = from_jax(fn, X)
    (found,) = candidates(program, [TWO_NEGS])
    assert found.graph == 1 and str(found).endswith("of body 0")
    after = apply(program, found)
    assert "neg" not in ops_of(after, 1)
    np.testing.assert_allclose(after(X), fn(X), rtol=1e-6)


def test_a_full_graph_grows() -> None:
    def fn(x, y):
        out = x * (x + y)
        for _ in range(59):
            out = jnp.sin(out)
        return out

    program = from_jax(fn, X, X, fold=False)
    nodes, outputs, _ = nodes_of(program.graph)
    assert len(nodes) == 63
    program = replace(program, graph=build(nodes, outputs, bucket=64))  # full, as slot 0 is a hole
    found = candidates(program, [DISTRIBUTE])[0]
    after = apply(program, found)
    assert after.graph.nodes.op.shape == (128,)
    assert ops_of(after).count("mul") == 2
    np.testing.assert_allclose(after(X, X), fn(X, X), rtol=1e-5)


def test_rules_are_chosen_by_name_and_unknown_ones_refused() -> None:
    program = from_jax(lambda x: x.T.T, X)
    assert [str(c) for c in candidates(program, "transpose-transpose")] == [
        "transpose-transpose at %3 transpose[2,3]"
    ]
    with pytest.raises(ValueError, match="no rule or family 'transpose-transpos'"):
        candidates(program, "transpose-transpos")
