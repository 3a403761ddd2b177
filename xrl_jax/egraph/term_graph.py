"""E-graphs of terms: from expressions, and back to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.egraph.arrays import EGraph
from xrl_jax.egraph.patterns import bits_of
from xrl_jax.egraph.term_step import NUMBER, SYMBOL
from xrl_jax.language.terms import MAX_ARITY, Expression, Language


class Terms(NamedTuple):
    """E-nodes of expressions on the host: equal subterms once, arguments before their readers."""

    nodes: tuple[tuple[int, tuple[int, ...], int], ...]  # operator, arguments, data
    roots: tuple[int, ...]  # the e-node of each expression
    symbols: tuple[str, ...]  # symbols by number


def terms_of(expressions: Sequence[Expression], language: Language) -> Terms:
    """Return the e-nodes of expressions; the first one has number 1.

    Raises:
      ValueError: an expression is nested too deeply.
    """
    numbers: dict[str, int] = {}
    seen: dict[tuple[int, tuple[int, ...], int], int] = {}

    def visit(e: Expression) -> int:
        if isinstance(e, str):
            key = SYMBOL, (), numbers.setdefault(e, len(numbers))
        elif isinstance(e, tuple):
            args = tuple(visit(a) for a in e[1:])
            key = language.vocabulary.operators[str(e[0])].code, args, 0
        else:
            key = NUMBER, (), bits_of(e)
        return seen.setdefault(key, len(seen) + 1)

    try:
        roots = tuple(visit(e) for e in expressions)
    except RecursionError:
        raise ValueError("an expression is nested too deeply") from None
    return Terms(tuple(seen), roots, tuple(numbers))


def egraph_of(terms: Terms, bucket: int) -> EGraph:
    """Return the e-graph of terms, each e-node in a class of its own."""
    op = np.zeros(bucket, np.int32)
    args = np.zeros((bucket, MAX_ARITY), np.int32)
    data = np.zeros((bucket, 1), np.int32)
    for slot, (code, given, value) in enumerate(terms.nodes, start=1):
        op[slot], data[slot] = code, value
        args[slot, : len(given)] = given
    return EGraph(
        jnp.asarray(op),
        jnp.asarray(args),
        jnp.asarray(data),
        jnp.zeros((bucket, 0), jnp.int32),
        jnp.arange(bucket, dtype=jnp.int32),
        jnp.int32(len(terms.nodes) + 1),
        jnp.asarray(terms.roots, jnp.int32),
    )


def class_of(
    graph: EGraph, expression: Expression, language: Language, symbols: Sequence[str]
) -> int:
    """Return the class of an expression in a rebuilt e-graph; 0 if it is not there."""
    host = jax.tree.map(np.asarray, graph)
    keys = np.concatenate([host.op[:, None], host.args, host.data], axis=1)
    classes = {tuple(key): int(c) for key, c in zip(keys.tolist(), host.parent, strict=True)}
    names = {name: i for i, name in enumerate(symbols)}

    def visit(e: Expression) -> int:
        if isinstance(e, str):
            return classes.get((SYMBOL, 0, 0, names.get(e, -1)), 0)
        if not isinstance(e, tuple):
            return classes.get((NUMBER, 0, 0, bits_of(e)), 0)
        args = [visit(a) for a in e[1:]]
        if 0 in args:
            return 0
        padded = args + [0] * (MAX_ARITY - len(args))
        return classes.get((language.vocabulary.operators[str(e[0])].code, *padded, 0), 0)

    return visit(expression)
