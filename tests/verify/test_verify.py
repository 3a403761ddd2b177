"""The verifier: every rule of the library passes, wrong rules do not, and it says why."""

from __future__ import annotations

import pytest

from xrl_jax.language.rule import Rule
from xrl_jax.language.rule_files import all_rules, load_rules, proof_rules, standard_rules
from xrl_jax.language.sexpr import RuleError
from xrl_jax.verify.verify import Verdict, require, verify_rules


def failures(verdicts: tuple[Verdict, ...]) -> list[str]:
    return [f"{v.rule}: {v.counterexample}" for v in verdicts if not v.ok]


def broken(verdicts: tuple[Verdict, ...]) -> set[str]:
    """Return the names of rules that change special values."""
    return {v.rule for v in verdicts if v.breaks}


def assuming(rules: list[Rule]) -> set[str]:
    """Return the names of rules that may change special values, finite ones too."""
    return {r.name for r in rules if "finite" in r.assumes}


def test_every_rule_of_the_library_is_verified(record_property) -> None:
    library = (*all_rules(), *proof_rules(("finite",)))
    rules = [r for r in library if not r.family.startswith("lowering")]
    verdicts = verify_rules(rules, samples=2)
    assert failures(verdicts) == []
    assert broken(verdicts) <= assuming(rules)
    assert all(v.samples >= 2 for v in verdicts)
    exact = [v for v in verdicts if v.evidence in ("field", "exp")]
    assert max(v.bound for v in exact) < 1e-6
    fired = sum(v.samples for v in verdicts)
    record_property(
        "figure",
        f"{len(rules)} rules verified on {fired} instances, {len(exact)} over a prime field",
    )


@pytest.mark.slow
def test_every_lowering_of_the_library_is_verified() -> None:
    rules = [r for r in all_rules() if r.family.startswith("lowering")]
    assert failures(verify_rules(rules, samples=4)) == []


@pytest.mark.slow
def test_every_rule_is_verified_with_many_samples() -> None:
    library = (*all_rules(), *proof_rules(("finite",)))
    rules = [r for r in library if not r.family.startswith("lowering")]
    verdicts = verify_rules(rules, samples=400, seed=1)
    assert failures(verdicts) == []
    # It differs only if XLA fuses the product with the sum.
    not_found = {"sum-of-products"}
    assert broken(verdicts) <= assuming(rules) <= broken(verdicts) | not_found


WRONG = """
(rule factor (source "s") (evidence field)
  (lhs (add (mul ?x ?y) (mul ?x ?z))) (rhs (mul ?x (sub ?y ?z))))
(rule drops-y (source "TASO conv_mul") (evidence field)
  (lhs (mul (conv ?x ?w :as d) ?y)) (rhs (conv ?x ?w :like d)))
(rule mixes (source "s") (evidence field)
  (lhs (add ?x (cast ?y))) (when (same-shape ?x ?y)) (rhs (add ?x ?y)))
(rule never (source "s") (evidence field) (lhs (neg ?x)) (when (< (rank ?x) 0)) (rhs ?x))
(rule relu-away (source "s") (evidence maxplus) (lhs (max ?x ?c)) (when (is-value ?c 0)) (rhs ?x))
(rule exp-of-product (source "s") (evidence exp)
  (lhs (mul (exp ?x) (exp ?y))) (rhs (exp (mul ?x ?y))))
(rule short (source "s") (evidence field)
  (lhs (slice (slice ?x :as a) :as b)) (rhs (slice ?x :like b)))
(rule square-root (source "s") (evidence float64) (lhs (sqrt (square ?x))) (rhs (copy ?x)))
"""


def test_wrong_rules_are_refused_with_a_counterexample() -> None:
    verdicts = {v.rule: v for v in verify_rules(load_rules(WRONG), samples=16, rounds=6)}
    assert [name for name, v in verdicts.items() if v.ok] == []
    assert verdicts["factor"].counterexample.startswith("the sides differ")
    assert verdicts["never"].counterexample.startswith("it fired on none of ")
    assert "mixes dtypes" in verdicts["mixes"].counterexample
    assert (
        "before:" in verdicts["short"].counterexample
        and "after:" in verdicts["short"].counterexample
    )


# `order` gathers with (invert p) where p would be correct: if sizes differ, the right-hand side has
# the wrong type and the rule does not fire.
WRONG_WHERE_EQUAL = """
(rule sum-of-transpose (source "s") (evidence field)
  (lhs (reduce_sum (transpose ?x :perm p) :axes m :as r))
  (let gone (and (inside ?x) (gather (flags m) (invert p))))
  (let kept (and (inside ?x) (not gone)))
  (let order (compress (gather (before kept) (invert p)) (and (inside ?x) (not (flags m)))))
  (rhs (transpose (reduce_sum ?x :axes (mask gone)) :perm (perm-of order (rank r)))))
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_axis_whose_types_fit_only_if_sizes_are_equal_is_refused(seed: int) -> None:
    (verdict,) = verify_rules(load_rules(WRONG_WHERE_EQUAL), samples=2, seed=seed)
    assert verdict.counterexample.startswith("the sides differ")


def test_a_refusal_by_an_exact_domain_names_the_domain() -> None:
    """The exact domain knows nothing about log, so even a true rule for log is refused."""
    (rule,) = load_rules("""
        (rule log-of-sqrt (source "powers") (evidence exp)
          (lhs (log (sqrt ?x))) (rhs (mul (log ?x) (const 0.5 :dtype-of ?x))))""")
    refused = verify_rules([rule])[0].counterexample
    assert "by evidence exp, which knows nothing of functions other than its own" in refused
    assert verify_rules([rule], evidence="float64")[0].ok


BEYOND_THE_RANK = """
(rule softmax-of-transpose (source "s") (evidence exp)
  (lhs (softmax (transpose ?x :perm p :as t) :axes m))
  (rhs (transpose (softmax ?x :axes (shl m 1)) :like t)))
"""


def test_an_axis_beyond_the_rank_is_refused() -> None:
    (verdict,) = verify_rules(load_rules(BEYOND_THE_RANK), samples=16)
    assert "is out of bounds" in verdict.counterexample


def test_require_raises_for_a_rule_that_is_not_verified() -> None:
    require(Verdict("good", "field", True, 8, 1e-9))
    with pytest.raises(RuleError, match="rule bad is not verified: the sides differ"):
        require(Verdict("bad", "field", False, 1, 1.0, "the sides differ"))


def test_the_same_seed_gives_the_same_verdicts() -> None:
    rules = standard_rules()[:3]
    assert verify_rules(rules, samples=4, seed=3) == verify_rules(rules, samples=4, seed=3)
