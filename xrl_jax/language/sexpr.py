"""S-expressions with positions: the reader behind the rule files."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<space>[\s]+)|(?P<comment>;[^\n]*)|(?P<open>\()|(?P<close>\))"""
    r"""|(?P<string>"[^"\n]*")|(?P<atom>[^\s();"]+)"""
)


class RuleError(ValueError):
    """A rule that cannot be used; the message gives line and column of the culprit."""

    def __init__(self, message: str, place: Place | None = None):
        self.place = place
        super().__init__(f"{place}: {message}" if place else message)


@dataclass(frozen=True)
class Place:
    """A position in a rule file; lines and columns count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Atom:
    """A symbol, a number or a quoted string."""

    text: str
    place: Place
    quoted: bool = False


@dataclass(frozen=True)
class SList:
    """A parenthesised list."""

    items: tuple[Atom | SList, ...]
    place: Place

    @property
    def head(self) -> str:
        """The leading symbol; "" where the list starts with something else."""
        first = self.items[0] if self.items else None
        return first.text if isinstance(first, Atom) else ""


SExpr = Atom | SList


def integer(text: str) -> int | None:
    """Return the integer that a symbol denotes; None for other symbols."""
    try:
        return int(text)
    except ValueError:
        return None


def number(e: SExpr) -> float | None:
    """Return the finite number that an expression denotes; None for others: nan is a symbol."""
    try:
        value = float(e.text) if isinstance(e, Atom) and not e.quoted else math.inf
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def symbol(e: SExpr) -> str:
    """Return the text of a symbol.

    Raises:
      RuleError: the expression is a list or a string.
    """
    if not isinstance(e, Atom) or e.quoted:
        raise RuleError("expected a name", e.place)
    return e.text


def read(text: str, file: str = "<rules>") -> list[SExpr]:
    """Return all top-level expressions of a text.

    Raises:
      RuleError: a parenthesis is unbalanced or a string unfinished; gives its line and column.
    """
    stack: list[tuple[list[SExpr], Place]] = []
    top: list[SExpr] = []
    line, line_start, at = 1, 0, 0
    while at < len(text):
        place = Place(file, line, at - line_start + 1)
        token = _TOKEN.match(text, at)
        if token is None:
            raise RuleError("a string is not closed on its line", place)
        body = token.group()
        out = stack[-1][0] if stack else top
        match token.lastgroup:
            case "open":
                stack.append(([], place))
            case "close":
                if not stack:
                    raise RuleError("')' without '('", place)
                items, opened = stack.pop()
                (stack[-1][0] if stack else top).append(SList(tuple(items), opened))
            case "string":
                out.append(Atom(body[1:-1], place, quoted=True))
            case "atom":
                out.append(Atom(body, place))
        newlines = body.count("\n")
        if newlines:
            line += newlines
            line_start = at + body.rindex("\n") + 1
        at = token.end()
    if stack:
        raise RuleError("'(' is never closed", stack[-1][1])
    return top
