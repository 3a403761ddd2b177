"""The rule library: reading rule files, and choosing rules by name or family.

Rule files are `rules/*.rules` of the checkout, shipped in the wheel as `xrl_jax/_rules`.
`prelude.rules` holds the macros and is read first; every other file, and every rule text that a
user passes, may use them.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from xrl_jax.language.lowering_rules import lowering_rules
from xrl_jax.language.macros import Macros
from xrl_jax.language.rule import ASSUMPTIONS, Rule
from xrl_jax.language.rule_parser import parse_rules
from xrl_jax.language.sexpr import RuleError
from xrl_jax.language.terms import Language, parse_language
from xrl_jax.lower.table import is_available, number_of

_PACKAGE = Path(__file__).resolve().parents[1]
_PRELUDE = "prelude.rules"
_SUFFIX = ".rules"
_LANGUAGES = "languages"
_PROOFS = "proofs"


def rules_folder() -> Path:
    """Return the folder of the standard rules: in the package, or beside it in a checkout.

    Raises:
      FileNotFoundError: the installation has no rules.
    """
    for folder in (_PACKAGE / "_rules", _PACKAGE.parent / "rules"):
        if (folder / _PRELUDE).is_file():
            return folder
    raise FileNotFoundError(
        "the rule files are missing from this installation: install xrl_jax again"
    )


@cache
def _prelude() -> Macros:
    path = rules_folder() / _PRELUDE
    return parse_rules(path.read_text(encoding="utf-8"), path.name)[1]


def load_rules(path_or_text: str | os.PathLike[str]) -> tuple[Rule, ...]:
    """Load rules from a file, a folder of `*.rules` files (in order of their names), or rule text.

    Args:
      path_or_text: a string with a parenthesis or line break is text, any other is a path.

    Raises:
      RuleError: a rule is refused; the message has file, line and column of the culprit.
      FileNotFoundError: there is no such file or folder.

    >>> (rule,) = xrl_jax.load_rules('''
    ...     (rule add-twice (family mine) (source "school algebra")
    ...       (lhs (add ?x ?x)) (rhs (mul ?x (const 2 :dtype-of ?x))))''')
    >>> rule.name
    'add-twice'
    """
    if isinstance(path_or_text, str) and any(c in path_or_text for c in "(\n"):
        return tuple(parse_rules(path_or_text, "<text>", _prelude())[0])
    path = Path(path_or_text)
    if path.is_dir():
        files = sorted(p for p in path.glob(f"*{_SUFFIX}") if p.name != _PRELUDE)
        if not files:
            raise FileNotFoundError(f"no {_SUFFIX} files in {path}")
    elif path.is_file():
        files = [path]
    else:
        raise FileNotFoundError(f"no rule file or folder {path}")
    rules: list[Rule] = []
    for file in files:
        rules += parse_rules(file.read_text(encoding="utf-8"), file.name, _prelude())[0]
    _distinct(rules)
    return tuple(rules)


def load_language(name_or_path: str | os.PathLike[str]) -> Language:
    """Load a language of terms: one that comes with the project, "math" or "prop", or a file.

    Raises:
      RuleError: a form is refused; the message has file, line and column of the culprit.
      FileNotFoundError: there is no such language or file.
    """
    folder = rules_folder() / _LANGUAGES
    path = Path(name_or_path)
    if not path.is_file():
        path = folder / f"{name_or_path}{_SUFFIX}"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob(f"*{_SUFFIX}")))
        raise FileNotFoundError(f"no language file {name_or_path} (languages: {known})")
    return parse_language(path.read_text(encoding="utf-8"), path.name)


def _distinct(rules: Sequence[Rule]) -> None:
    seen: dict[str, Rule] = {}
    for rule in rules:
        if rule.name in seen:
            raise RuleError(
                f"two rules have the name {rule.name!r} (the first: {seen[rule.name].place})",
                rule.place,
            )
        seen[rule.name] = rule


@cache
def all_rules() -> tuple[Rule, ...]:
    """Return all rules that come with the project, those that choose lowerings last; each is
    verified by the tests (see `verify`).
    """
    return (*load_rules(rules_folder()), *lowering_rules())


@cache
def standard_rules(assume: tuple[str, ...] = (), *, bounded: bool = False) -> tuple[Rule, ...]:
    """Return the project's rules that keep NaN, infinities and the range of floats, and those that
    need no more than the given assumptions.

    Args:
      assume: assumptions about values and calls, from `rule.ASSUMPTIONS`.
      bounded: whether to return those that assume finite operands as well: for a program whose
        domain keeps all of its values finite (`backends.domain`).

    Raises:
      ValueError: an assumption is unknown.
    """
    known = _granted(assume) | ({"finite-operands"} if bounded else set())
    return tuple(r for r in all_rules() if known.issuperset(r.assumes))


@cache
def proof_rules(assume: tuple[str, ...] = ()) -> tuple[Rule, ...]:
    """Return the rules that only proofs of equality use, beside the standard ones.

    Args:
      assume: see `standard_rules`.

    Raises:
      ValueError: an assumption is unknown.
    """
    known = _granted(assume)
    return tuple(r for r in load_rules(rules_folder() / _PROOFS) if known.issuperset(r.assumes))


def _granted(assume: Sequence[str]) -> set[str]:
    """Return what rules may assume."""
    for name in assume:
        if name not in ASSUMPTIONS:
            raise ValueError(
                f"assume={assume!r}: unknown assumption {name!r} "
                f"(known: {', '.join(map(repr, ASSUMPTIONS))})"
            )
    return {"finite", "finite-operands"} if "finite" in assume else set()


def available_rules(rules: Iterable[Rule], platform: str) -> list[Rule]:
    """Return the rules whose lowerings, if any, are worth a trial on a platform of JAX."""
    chosen = [(r, r.lowering) for r in rules]
    return [r for r, at in chosen if at is None or is_available(at[0], number_of(*at), platform)]


def _hint(name: str, known: Iterable[str]) -> str:
    """Suggest what may have been meant by an unknown name."""
    if name.endswith(".rules"):
        return f": give the rules of a file as rules=xrl_jax.load_rules({name!r})"
    names = {*known, *(r.name for r in all_rules())}
    near = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.4)
    return f"; similar names: {', '.join(near)}" if near else ""


def select_rules(
    rules: Sequence[Rule], spec: Iterable[str | Rule] | str | None
) -> tuple[Rule, ...]:
    """Return the rules that a caller asks for, in the library's order, then given `Rule` objects.

    Args:
      rules: the library.
      spec: None for all of `rules`; else names, families and `Rule` objects. A leading "-" excludes
        a name or family; if there are only exclusions, all other rules are selected.

    Raises:
      ValueError: a name is unknown; the message has the nearest ones.
    """
    if spec is None:
        return tuple(rules)
    entries = [spec] if isinstance(spec, (str, Rule)) else list(spec)
    given = [e for e in entries if isinstance(e, Rule)]
    wanted = [e for e in entries if isinstance(e, str) and not e.startswith("-")]
    unwanted = [e[1:] for e in entries if isinstance(e, str) and e.startswith("-")]
    known = {r.name for r in rules} | {r.family for r in rules} | {r.name for r in given}
    for name in (*wanted, *unwanted):
        held_back = {r.name: r for r in all_rules()}.get(name)
        if name not in known and held_back is not None:
            raise ValueError(
                f"rule {name!r} assumes that all values are finite: allow this with "
                "assume=('finite',)"
            )
        if name not in known:
            raise ValueError(f"there is no rule or family {name!r}{_hint(name, known)}")

    def named(rule: Rule, names: Sequence[str]) -> bool:
        return rule.name in names or rule.family in names

    everything = not wanted and not given
    taken = {r.name for r in given}
    chosen = [r for r in rules if (everything or named(r, wanted)) and r.name not in taken]
    return tuple(r for r in (*chosen, *given) if not named(r, unwanted))
