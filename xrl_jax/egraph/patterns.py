"""Left- and right-hand sides of rules as arrays, for matching in e-graphs.

Letters: V variants of rules, T pattern trees, E operators of a tree, P positions of a tree, Q new
e-nodes, A arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph.ops import OpSpec
from xrl_jax.language.rule import Pattern, Rule, Term, Var
from xrl_jax.language.sexpr import RuleError, SList, symbol
from xrl_jax.language.terms import MAX_ARITY, Language
from xrl_jax.language.vocabulary import ANY, GUARDS, NUMBER

NO_VALUE = 0x7FC00001  # bits of a float that no number has
P, Q, E, N_GUARDS = 10, 10, 6, 4  # the most of each
_BUCKETS = (8, 16, 32, 64, 128)


class Patterns(NamedTuple):
    """Pattern trees. A variant with one root has one tree.

    The operators of a tree are numbered from the root downwards; its positions are operators and
    variables.
    """

    variant: jax.Array  # [T] int32
    op: jax.Array  # [T, E] int32; of the root, 0 for a variable; -1 for none
    arity: jax.Array  # [T, E] int32, number of arguments
    value: jax.Array  # [T, E] int32, bits of the number that it must be; NO_VALUE for none
    under: jax.Array  # [T, E] int32, the operator that reads it
    slot: jax.Array  # [T, E] int32, as which argument
    at: jax.Array  # [T, P] int32, the operator at a position, or which reads the variable there; -1
    at_slot: jax.Array  # [T, P] int32, as which argument; -1 for an operator
    same: jax.Array  # [T, P] int32, an earlier position with the same variable; -1 for none


class TermTable(NamedTuple):
    """Rules of a language of terms."""

    patterns: Patterns  # T = V
    rule: jax.Array  # [V] int32, index into the rules; -1 for unused
    guards: jax.Array  # [V, N_GUARDS, 3] int32: which of GUARDS, two positions; -1 for none
    new_op: jax.Array  # [V, Q] int32; 0 for unused
    new_args: jax.Array  # [V, Q, A] int32: position, P + new e-node, or -1
    new_data: jax.Array  # [V, Q] int32, bits of a number
    root_to: jax.Array  # [V] int32, code (as in new_args) of what equals the root


def bits_of(value: float) -> int:
    """Return the bits of a number, as an e-node's data holds them; -0.0 is 0.0.

    Raises:
      ValueError: float32 holds another number, so that two numbers would be one.
    """
    with np.errstate(over="ignore"):
        held = np.float32(value + 0.0)
    if float(str(held)) != value:
        raise ValueError(f"numbers have the precision of float32: {value!r} would be {held}")
    return int(held.view(np.int32))


def compile_terms(rules: Sequence[Rule], language: Language) -> TermTable:
    """Compile rules of a language into arrays. Rules are added without compiling XLA's code again
    as long as they fit into the same bucket.

    Raises:
      RuleError: a rule is too large; the message names it.
    """
    size = next((b for b in _BUCKETS if len(rules) <= b), None)
    if size is None:
        raise RuleError(f"{len(rules)} rules exceed the largest table, {_BUCKETS[-1]}")
    a = {
        "variant": np.arange(size, dtype=np.int32),
        "op": np.full((size, E), -1, np.int32),
        "arity": np.zeros((size, E), np.int32),
        "value": np.full((size, E), NO_VALUE, np.int32),
        "under": np.zeros((size, E), np.int32),
        "slot": np.zeros((size, E), np.int32),
        "at": np.full((size, P), -1, np.int32),
        "at_slot": np.full((size, P), -1, np.int32),
        "same": np.full((size, P), -1, np.int32),
        "rule": np.full(size, -1, np.int32),
        "guards": np.full((size, N_GUARDS, 3), -1, np.int32),
        "new_op": np.zeros((size, Q), np.int32),
        "new_args": np.full((size, Q, MAX_ARITY), -1, np.int32),
        "new_data": np.zeros((size, Q), np.int32),
        "root_to": np.full(size, -1, np.int32),
    }
    for v, rule in enumerate(rules):
        a["rule"][v] = v
        _put(a, v, rule, language.vocabulary.operators)
    used = max(1, int((a["op"] >= 0).sum(1).max()))  # a level of matching less for each that is not
    arrays = {
        name: jnp.asarray(values[:, :used] if values.shape[1:] == (E,) else values)
        for name, values in a.items()
    }
    patterns = Patterns(**{name: arrays.pop(name) for name in Patterns._fields})
    return TermTable(patterns, **arrays)


def _put(a: Mapping[str, np.ndarray], v: int, rule: Rule, operators: Mapping[str, OpSpec]) -> None:
    """Put a rule into row `v` of the arrays."""
    names = _put_pattern(a, v, rule, operators)
    for g, guard in enumerate(rule.conditions):
        if g >= N_GUARDS or not isinstance(guard, SList):
            raise RuleError(f"rule {rule.name}: at most {N_GUARDS} guards", rule.place)
        at = [names[symbol(e)] for e in guard.items[1:]]
        a["guards"][v, g] = (list(GUARDS).index(guard.head), at[0], at[-1])
    made: list[tuple[int, tuple[int, ...], int]] = []

    def code(term: Term | Var) -> int:
        if isinstance(term, Var):
            return names[term.name]
        bits = bits_of(term.value) if term.op == NUMBER else 0
        new = (operators[term.op].code, tuple(code(t) for t in term.args), bits)
        if new not in made:
            made.append(new)
        return P + made.index(new)

    for name, term in rule.nodes:
        names[name] = code(term)
    a["root_to"][v] = code(rule.rhs[0])
    if len(made) > Q:
        raise RuleError(f"rule {rule.name} makes {len(made)} e-nodes, at most {Q}", rule.place)
    for q, (op, args, bits) in enumerate(made):
        a["new_op"][v, q], a["new_data"][v, q] = op, bits
        a["new_args"][v, q, : len(args)] = args


def _put_pattern(
    a: Mapping[str, np.ndarray], v: int, rule: Rule, operators: Mapping[str, OpSpec]
) -> dict[str, int]:
    """Put the left-hand side into row `v`; return the positions of names."""
    names: dict[str, int] = {}
    queue: list[tuple[Pattern | Var, int, int]] = [(rule.lhs[0], 0, -1)]
    n_ops = 0
    for at, (node, under, slot) in enumerate(queue):
        if at >= P:
            raise RuleError(f"rule {rule.name}: a pattern has more than {P} positions", rule.place)
        a["same"][v, at] = names.get(node.name, -1)
        if node.name:
            names.setdefault(node.name, at)
        if isinstance(node, Var):
            a["at"][v, at], a["at_slot"][v, at] = under, slot
            continue
        if n_ops >= E:
            raise RuleError(f"rule {rule.name}: a pattern has more than {E} operators", rule.place)
        a["at"][v, at], a["op"][v, n_ops] = n_ops, 0 if node.op == ANY else operators[node.op].code
        a["under"][v, n_ops], a["slot"][v, n_ops] = under, max(slot, 0)
        a["arity"][v, n_ops] = len(node.args)
        a["value"][v, n_ops] = NO_VALUE if node.value is None else bits_of(node.value)
        queue += [(arg, n_ops, i) for i, arg in enumerate(node.args)]
        n_ops += 1
    return names
