"""Names of dtypes in rules, which stand for dtype codes.

A name is replaced by its code in a comparison with `(dtype ?x)` or `(attr d dtype)`, and as the
attribute `:dtype` of a node; nowhere else, so that a dtype is not taken for a number by mistake.
Dtypes are ordered as in `ops.DTYPES`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from xrl_jax.graph import ops
from xrl_jax.language.sexpr import Atom, RuleError, SExpr, SList, integer

FIELD = "dtype"  # the attribute that is a dtype
CODES = {name: code for name, code in ops.DTYPE_CODE.items() if code}
_COMPARISONS = ("=", "/=", "<", "<=", ">", ">=")


def with_codes(e: SExpr, numbers: Container[str]) -> SExpr:
    """Return the expression with dtype names replaced by their codes.

    Args:
      numbers: names bound to numbers, with which a dtype may be compared, too.

    Raises:
      RuleError: a dtype is compared with a name that is neither a dtype nor in `numbers`.
    """
    if isinstance(e, Atom):
        return e
    items = tuple(with_codes(i, numbers) for i in e.items)
    if e.head in _COMPARISONS and any(_is_dtype(i) for i in items[1:]):
        items = (items[0], *(code_of(i, numbers) for i in items[1:]))
    return SList(items, e.place)


def code_of(e: SExpr, numbers: Container[str]) -> SExpr:
    """Return the code of a dtype that is given by name; an integer, a name in `numbers` or a longer
    expression is returned unchanged.

    Raises:
      RuleError: as for `with_codes`.
    """
    if not isinstance(e, Atom):
        return e
    if e.text in CODES:
        return replace(e, text=str(CODES[e.text]))
    if e.text in numbers or integer(e.text) is not None:
        return e
    raise RuleError(f"unknown dtype {e.text!r} (known: {', '.join(CODES)})", e.place)


def _is_dtype(e: SExpr) -> bool:
    if not isinstance(e, SList):
        return False
    last = e.items[-1] if e.items else None
    of_node = e.head == "attr" and isinstance(last, Atom) and last.text == FIELD
    return e.head == "dtype" or of_node
