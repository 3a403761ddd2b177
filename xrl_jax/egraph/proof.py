"""Proofs of what an e-graph of tensors found equal, as lists of rewrites.

A saturation keeps the e-graph before each iteration. To explain an equality, all applications of
rules are listed again, as equations between two terms, and told to a congruence closure that can
explain itself; the applications that the explanation uses are the proof. `check` repeats these
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.congruence import Congruence
from xrl_jax.egraph.tensor_graph import COMMUTATIVE, features_of
from xrl_jax.egraph.tensor_saturation import WINDOW, Before, TensorRules
from xrl_jax.egraph.tensor_step import Applications, applications_now
from xrl_jax.graph import ops
from xrl_jax.language.table import P

BY_VALUE = "equal-by-value"  # two constants
_LEAST_ROOM = 4096
_MOST_TRIES = 1000


class Rewrite(NamedTuple):
    """An application of a rule: the terms of its left-hand sides equal those that replace them; or
    two constants that are equal by value.

    Attributes:
      places: the operators replaced, as text.
      equations: pairs of numbers of terms.
    """

    rule: str
    places: tuple[str, ...]
    equations: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"{self.rule} at {' and '.join(self.places)}"


class Proof(NamedTuple):
    """A proof that pairs of terms are equal.

    Attributes:
      operators, args: of all terms, arguments first.
      goals: the pairs.
    """

    rewrites: tuple[Rewrite, ...]
    operators: tuple[tuple[int, ...], ...]
    args: tuple[tuple[int, ...], ...]
    goals: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        lines = [f"{i + 1:4}. {rewrite}" for i, rewrite in enumerate(self.rewrites)]
        return "\n".join(lines) or "no rewrite is needed"


def prove(rules: TensorRules, history: Sequence[Before], goals: Sequence[tuple[int, int]]) -> Proof:
    """Return a proof.

    Args:
      history: the e-graphs before each iteration, from `saturate_graph(remember=True)`.
      goals: pairs of classes of the first e-graph.

    Raises:
      ValueError: the iterations do not show that they are equal.
    """
    known = Congruence(_commutative())
    rewrites: list[Rewrite] = []
    first: dict[int, int] = {}
    pairs: list[tuple[int, int]] = []
    for n, before in enumerate(history):
        host = _Host(before.graph)
        term_of = _terms(known, host, new=n == 0)
        first = first or term_of
        pairs = pairs or [(first[a], first[b]) for a, b in goals]
        if all(known.find(a) == known.find(b) for a, b in pairs):
            break
        for a, b in before.equal:
            rewrites.append(
                Rewrite(BY_VALUE, (host.text(a), host.text(b)), ((term_of[a], term_of[b]),))
            )
            known.unite(term_of[a], term_of[b], len(rewrites) - 1)
        if before.active.any():
            _apply(rules, before, host, term_of, known, rewrites)
    used = sorted(set().union(*(known.explain(a, b) for a, b in pairs)))
    all_used = tuple(rewrites[i] for i in used)
    return shortened(Proof(all_used, tuple(known.operator), tuple(known.args), tuple(pairs)))


def _with_used_terms(proof: Proof) -> Proof:
    """Return the proof without terms that neither its rewrites nor its goals need."""
    wanted = {t for r in proof.rewrites for e in r.equations for t in e}
    waiting = [*wanted, *(t for goal in proof.goals for t in goal)]
    wanted.update(waiting)
    while waiting:
        new = set(proof.args[waiting.pop()]) - wanted
        wanted |= new
        waiting += new
    kept = sorted(wanted)
    number = {old: new for new, old in enumerate(kept)}

    def pairs(given: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((number[a], number[b]) for a, b in given)

    return Proof(
        tuple(r._replace(equations=pairs(r.equations)) for r in proof.rewrites),
        tuple(proof.operators[t] for t in kept),
        tuple(tuple(number[a] for a in proof.args[t]) for t in kept),
        pairs(proof.goals),
    )


def shortened(proof: Proof) -> Proof:
    """Return the proof without rewrites that it does not need, each tried on its own and in runs
    (Zeller, Hildebrandt 2002).
    """
    proof = _with_used_terms(proof)
    size = len(proof.rewrites)
    tries = _MOST_TRIES
    while size:
        at = len(proof.rewrites)
        while at > 0 and tries > 0:
            at = max(at - size, 0)
            tries -= 1
            fewer = proof.rewrites[:at] + proof.rewrites[at + size :]
            if check(proof._replace(rewrites=fewer)):
                proof = proof._replace(rewrites=fewer)
        size //= 2
    return _with_used_terms(proof)


def check(proof: Proof) -> bool:
    """Return whether the rewrites of a proof alone make its goals equal, where a term equals any
    other with the same operator and equal arguments.
    """
    known = Congruence(_commutative())
    number: list[int] = []
    for operator, args in zip(proof.operators, proof.args, strict=True):
        number.append(known.term(operator, [number[a] for a in args]))
    for n, rewrite in enumerate(proof.rewrites):
        for a, b in rewrite.equations:
            known.unite(number[a], number[b], n)
    return all(known.find(number[a]) == known.find(number[b]) for a, b in proof.goals)


def _commutative() -> frozenset[int]:
    return frozenset(code for code, flag in enumerate(COMMUTATIVE) if flag)


class _Host:
    """An e-graph on the host."""

    def __init__(self, graph: EGraph) -> None:
        self.op, self.parent = np.asarray(graph.op), np.asarray(graph.parent).tolist()
        self.args = [[a for a in row if a] for row in np.asarray(graph.args).tolist()]
        self.operator = [
            (op, *data)
            for op, data in zip(self.op.tolist(), np.asarray(graph.data).tolist(), strict=True)
        ]
        features = jax.tree.map(np.asarray, features_of(graph))
        self.shape, self.rank = features.shape, features.rank
        self.live = np.flatnonzero(self.op != HOLE).tolist()

    def text(self, slot: int) -> str:
        dims = ",".join(map(str, self.shape[slot][: self.rank[slot]]))
        return f"{ops.OP_NAMES[int(self.op[slot])]}[{dims}]"


def _terms(known: Congruence, host: _Host, *, new: bool) -> dict[int, int]:
    """Return a term for each e-node, by slot.

    Args:
      new: whether terms are added; otherwise they are those known already.
    """
    found: dict[int, int] = {}
    of_class: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    missing = {slot: len(set(host.args[slot])) for slot in host.live}
    for slot in host.live:
        for a in set(host.args[slot]):
            readers.setdefault(a, []).append(slot)
    ready = [slot for slot in host.live if not missing[slot]]
    while ready:
        slot = ready.pop()
        args = [of_class[a] for a in host.args[slot]]
        term: int | None
        if new:
            term = known.term(host.operator[slot], args)
        else:
            term = known.known(host.operator[slot], [known.find(a) for a in args])
        if term is None:
            raise ValueError(f"{host.text(slot)} is in no term that rules made")
        found[slot] = term
        name = host.parent[slot]
        if name not in of_class:
            of_class[name] = term
            for reader in readers.get(name, []):
                missing[reader] -= 1
                if not missing[reader]:
                    ready.append(reader)
    return found


def _apply(
    rules: TensorRules,
    before: Before,
    host: _Host,
    term_of: dict[int, int],
    known: Congruence,
    rewrites: list[Rewrite],
) -> None:
    """Tell all applications of an iteration, and append them to the rewrites."""
    table = rules.table
    trees, to = np.asarray(table.variant_trees), np.asarray(table.root_to)
    pos_op, pos_parent, pos_slot = (
        np.asarray(x) for x in (table.pos_op, table.pos_parent, table.pos_slot)
    )
    found = _applications(rules, before)
    variants = np.asarray(found.variant)
    bound, op, codes, data = (
        np.asarray(x).tolist() for x in (found.bound, found.op, found.args, found.data)
    )
    for row in range(int(found.n)):
        variant = int(variants[row])
        terms: dict[int, int] = {}
        roots = []
        for which, tree in enumerate(trees[variant].tolist()):
            if tree < 0:
                continue
            base = which * P
            used = [p for p in range(P) if pos_op[tree, p] >= 0]
            for p in reversed(used):  # arguments have larger numbers
                slot = bound[row][base + p]
                args = [term_of[a] for a in host.args[slot]]
                for q in used:
                    if q and pos_parent[tree, q] == p:
                        args[pos_slot[tree, q]] = terms[base + q]
                is_variable = pos_op[tree, p] == 0
                terms[base + p] = (
                    term_of[slot] if is_variable else known.term(host.operator[slot], args)
                )
            roots.append((base, bound[row][base]))
        for q, code in enumerate(op[row]):
            if code != HOLE:
                args = [terms[c] for c in codes[row][q] if c >= 0]
                terms[2 * P + q] = known.term((code, *data[row][q]), args)
        equations = [
            (terms[base], terms[int(to[variant, n])])
            for n, (base, _) in enumerate(roots)
            if to[variant, n] >= 0
        ]
        number = len(rewrites)
        name = rules.rules[int(rules.rule_of[variant])].name
        places = tuple(host.text(slot) for _, slot in roots)
        rewrites.append(Rewrite(name, places, tuple(equations)))
        for a, b in equations:
            known.unite(a, b, number)


def _applications(rules: TensorRules, before: Before) -> Applications:
    """Return all applications of an iteration."""
    room = _LEAST_ROOM
    while True:
        found = applications_now(
            rules.table,
            rules.patterns,
            jnp.asarray(before.active),
            before.graph,
            window=WINDOW,
            n_halves=4 * before.graph.bucket,
            room=room,
        )
        if int(found.n) <= room:
            return found
        room *= 4
