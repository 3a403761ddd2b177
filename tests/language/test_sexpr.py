"""The reader of rule files."""

from __future__ import annotations

import pytest

from xrl_jax.language.sexpr import Atom, RuleError, SList, read


def test_lists_atoms_and_strings_are_read_with_their_places() -> None:
    (form,) = read('(rule a\n  (source "two words"))', "x.rules")
    assert isinstance(form, SList) and form.head == "rule"
    clause = form.items[2]
    assert isinstance(clause, SList)
    text = clause.items[1]
    assert isinstance(text, Atom) and text.quoted and text.text == "two words"
    assert str(text.place) == "x.rules:2:11"


def test_comments_end_with_their_line() -> None:
    forms = read("; nothing (here\n(a) ; and (here\n(b)")
    assert [f.head for f in forms if isinstance(f, SList)] == ["a", "b"]


def test_a_list_that_begins_with_a_list_has_no_head() -> None:
    (form,) = read("((a) b)")
    assert isinstance(form, SList) and form.head == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(a (b)", "x:1:1: '(' is never closed"),
        ("(a)\n )", "x:2:2: ')' without '('"),
        ('(a "b\n")', "x:1:4: a string is not closed on its line"),
    ],
)
def test_unbalanced_text_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(RuleError) as error:
        read(text, "x")
    assert str(error.value) == message
