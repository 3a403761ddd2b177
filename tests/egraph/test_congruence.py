"""Congruence closure and its explanations."""

from __future__ import annotations

import random

import pytest

from xrl_jax.egraph.congruence import Congruence

A, B, C, D = ((i,) for i in range(4))  # operators of leaves
F, PLUS = (10,), (11,)


def test_terms_are_equal_where_their_arguments_are():
    known = Congruence()
    a, b = known.term(A, ()), known.term(B, ())
    fa, fb = known.term(F, (a,)), known.term(F, (b,))
    assert known.find(fa) != known.find(fb)
    known.unite(a, b, 0)
    assert known.find(fa) == known.find(fb)
    assert known.explain(fa, fb) == {0}


def test_a_new_term_equals_the_ones_that_are_there():
    known = Congruence()
    a, b = known.term(A, ()), known.term(B, ())
    fa = known.term(F, (a,))
    known.unite(a, b, 7)
    assert known.find(known.term(F, (b,))) == known.find(fa)
    assert known.term(A, ()) == a


def test_an_explanation_has_only_what_is_needed():
    """a = b = c by 0 and 1; d = a, by 2, has nothing to do with it."""
    known = Congruence()
    a, b, c, d = (known.term(leaf, ()) for leaf in (A, B, C, D))
    known.unite(d, a, 2)
    known.unite(a, b, 0)
    known.unite(b, c, 1)
    assert known.explain(a, c) == {0, 1}
    assert known.explain(d, a) == {2}
    assert known.explain(a, a) == set()


def test_arguments_of_commutative_operators_may_be_exchanged():
    """a + b = c + a once b = c."""
    known = Congruence(frozenset({PLUS[0]}))
    a, b, c = (known.term(leaf, ()) for leaf in (A, B, C))
    one, other = known.term(PLUS, (a, b)), known.term(PLUS, (c, a))
    assert known.explain(one, known.term(PLUS, (b, a))) == set()
    known.unite(b, c, 5)
    assert known.explain(one, other) == {5}


def test_what_is_not_known_is_not_explained():
    known = Congruence()
    with pytest.raises(ValueError, match="not known to be equal"):
        known.explain(known.term(A, ()), known.term(B, ()))


@pytest.mark.parametrize("seed", range(20))
def test_the_rewrites_of_an_explanation_suffice(seed):
    """Terms of depth three, and random equations between them."""
    draw = random.Random(seed)
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((i,), ()) for i in range(5)]
    for _ in range(40):
        args = tuple(draw.randrange(len(rows)) for _ in range(draw.choice([1, 2])))
        rows.append((F if len(args) == 1 else PLUS, args))
    unions = [(draw.randrange(45), draw.randrange(45)) for _ in range(12)]

    def closure(numbers: set[int]) -> tuple[Congruence, list[int]]:
        known = Congruence(frozenset({PLUS[0]}))
        terms: list[int] = []
        for operator, args in rows:
            terms.append(known.term(operator, [terms[a] for a in args]))
        for n in sorted(numbers):
            known.unite(terms[unions[n][0]], terms[unions[n][1]], n)
        return known, terms

    known, terms = closure(set(range(12)))
    equal = [(a, b) for a in terms for b in terms if a < b and known.find(a) == known.find(b)]
    for a, b in draw.sample(equal, min(len(equal), 10)):
        alone, again = closure(known.explain(a, b))
        assert again == terms
        assert alone.find(a) == alone.find(b)
