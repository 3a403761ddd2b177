"""Verification of rewrite rules: the engine rewrites random graphs, and both sides are computed in
an exact domain.

For every commutative variant of a rule, random graphs that hold the left-hand
side are drawn (`instances`) and handed to the jitted engine, which binds, evaluates the conditions
and rewrites; so what is verified is the compiled rule. Where it fires, the graphs before and after
are compared (`compare`).

Then graphs whose sizes are all equal are drawn. A rule that takes one axis for another has a
right-hand side of the wrong type wherever the two differ in size, and such a rewrite is no
candidate; so ordinary graphs, whose sizes are rarely equal, rarely show it.

A rule is refused when one instance differs, is ill-typed or not in normal form, or when no instance
of some variant fires.

What a rule does to special values is found out beside that (`contract`): what it breaks must be
stated in its text, by `(assumes finite)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import numpy as np

from xrl_jax.engine.apply import apply
from xrl_jax.graph import graph as graph_lib
from xrl_jax.graph.graph import TensorGraph, nodes_of
from xrl_jax.language.rule import Pattern, Rule, Term, Var
from xrl_jax.language.sexpr import RuleError, SList
from xrl_jax.language.table import compile_rules, variants
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.runtime.settings import own_settings
from xrl_jax.verify import contract
from xrl_jax.verify.compare import degree, difference, ill_formed
from xrl_jax.verify.domains import Q
from xrl_jax.verify.evaluate import CannotEvaluateError
from xrl_jax.verify.instances import Hints, Instance, hints_of, propose

BUCKET = 64  # nodes of an instance's graph
ROWS, CODE = 256, 128  # room of a table: fixed, so that one compiled engine serves all
BATCH = 128
_SHARES = 3  # samples that share the kinds of special values between them
_TOLERANCE = 1e-9  # of float64, relative to the largest element
_ROUNDS = 60
_DRAWS = 24  # for one variant in one round
# Graphs of equal sizes drawn for a rule beside `samples`: one that computes attributes can
# compute those of another axis, which about one graph in ten shows; where they are copied only, a
# mistake shows in every fourth.
_EQUAL, _EQUAL_COMPUTED = 6, 24


@dataclass(frozen=True)
class Verdict:
    """What is known of a rule.

    Attributes:
      rule: its name.
      evidence: the domain both sides were compared in.
      ok: whether every instance agreed and every variant of the pattern fired.
      samples: how many instances fired.
      bound: in the field, the chance that one instance hides a difference (degree / prime); for
        floats, the largest error.
      counterexample: the instance that differs, or why none could be tried; "" where `ok`.
      breaks: what the rule does to special values, as it must not be used unless values are taken
        to be finite; "" where it keeps them all.
    """

    rule: str
    evidence: str
    ok: bool
    samples: int
    bound: float
    counterexample: str = ""
    breaks: str = ""


@dataclass
class _Tested:
    """A commutative variant of a rule, and what its instances have shown so far."""

    rule: int
    variant: Rule
    hints: Hints
    rng: np.random.Generator
    wanted: int
    equal: int  # graphs of equal sizes to draw
    fired: int = 0
    drawn: int = 0


@dataclass
class _State:
    verdict: Verdict
    tested: list[_Tested] = field(default_factory=list)


def verify_rule(rule: Rule, *, seed: int = 0, samples: int = 32) -> Verdict:
    """The verdict on one rule; see `verify_rules`.

    >>> (wrong,) = xrl_jax.load_rules('''
    ...     (rule sub-is-add (family mine) (source "a slip")
    ...       (lhs (sub ?x ?y)) (rhs (add ?x ?y)))''')
    >>> verdict = xrl_jax.verify_rule(wrong)
    >>> verdict.ok
    False
    """
    return verify_rules((rule,), seed=seed, samples=samples)[0]


@own_settings()
def verify_rules(
    rules: Sequence[Rule],
    *,
    seed: int = 0,
    samples: int = 32,
    evidence: str | None = None,
    rounds: int = _ROUNDS,
) -> tuple[Verdict, ...]:
    """A verdict for each rule.

    Args:
      rules: any rules, names distinct.
      seed: the same seed draws the same instances.
      samples: instances that must fire, over all variants of a rule; at least two of each variant.
        More than as many again are drawn with equal sizes, whether they fire or not.
      evidence: compare in this domain instead of the rules' own.
      rounds: how often new instances are drawn for a variant that has not fired enough.

    Raises:
      RuleError: a rule is too large for the table.
    """
    verdicts: list[Verdict] = []
    for chunk in _chunks(rules):
        verdicts += _verify_chunk(
            chunk, seed=seed, samples=samples, evidence=evidence, rounds=rounds
        )
    return tuple(verdicts)


def _chunks(rules: Sequence[Rule]) -> Iterable[list[Rule]]:
    """Runs of rules that fit one table."""
    chunk: list[Rule] = []
    rows = 0
    for rule in rules:
        needed = len(rule.lhs) * len(variants(rule))
        if rows + needed > ROWS and chunk:
            yield chunk
            chunk, rows = [], 0
        chunk.append(rule)
        rows += needed
    if chunk:
        yield chunk


def _rewrite(table: Any, graph: TensorGraph, variant: Any, root: Any, partner: Any) -> Any:
    done = apply(table, graph, variant, root, partner)
    return done.graph, done.ok


_ENGINE = engine_jit(jax.vmap(_rewrite, in_axes=(None, 0, 0, 0, 0)))


def _verify_chunk(
    rules: Sequence[Rule], *, seed: int, samples: int, evidence: str | None, rounds: int
) -> list[Verdict]:
    table = compile_rules(rules, min_trees=ROWS, min_code=CODE).table
    states: list[_State] = []
    tested: list[_Tested] = []
    for i, rule in enumerate(rules):
        tried = variants(rule)
        equal = samples + (_EQUAL_COMPUTED if _computes(rule) else _EQUAL)
        own = [
            _Tested(
                i,
                v,
                hints_of(rule.conditions),
                np.random.default_rng([seed, len(tested) + k, len(rule.name)]),
                max(2, -(-samples // len(tried))),
                -(-equal // len(tried)),
            )
            for k, v in enumerate(tried)
        ]
        tested += own
        states.append(_State(Verdict(rule.name, evidence or rule.evidence, True, 0, 0.0), own))
    for _ in range(rounds):
        open_ = [t.fired < t.wanted and states[t.rule].verdict.ok for t in tested]
        if not any(open_):
            break
        batch: list[tuple[int, Instance]] = []
        for e, t in enumerate(tested):
            if open_[e]:
                draws = _DRAWS if t.drawn > 4 * _DRAWS else 2 * t.wanted
                batch += [(e, i) for i in _drawn(t, draws)]
        for e, instance, after in _fired(table, batch):
            t = tested[e]
            if states[t.rule].verdict.ok and t.fired < t.wanted:
                t.fired += 1
                _compare(states[t.rule], instance, after, t.rng, seed)
    batch = []
    for e, t in enumerate(tested):
        if states[t.rule].verdict.ok and t.fired:
            batch += [(e, i) for i in _drawn(t, t.equal, equal=True)]
    for e, instance, after in _fired(table, batch):
        t = tested[e]
        if states[t.rule].verdict.ok:
            _compare(states[t.rule], instance, after, t.rng, seed)
    return [_closed(s) for s in states]


def _computes(rule: Rule) -> bool:
    """Whether the rule computes attributes, and does not only copy them."""

    def term(t: Term | Var) -> bool:
        return isinstance(t, Term) and (
            any(isinstance(e, SList) for _, e in t.attrs) or any(map(term, t.args))
        )

    return bool(rule.lets) or any(map(term, (*rule.rhs, *(t for _, t in rule.nodes))))


def _drawn(tested: _Tested, wanted: int, *, equal: bool = False) -> Iterator[Instance]:
    """Up to this many instances that fit the engine."""
    for _ in range(4 * wanted):
        if wanted == 0:
            return
        instance = propose(tested.variant, tested.hints, tested.rng, equal=equal)
        tested.drawn += 1
        if instance is not None and len(instance.nodes) + 12 < BUCKET:
            wanted -= 1
            yield instance


def _fired(
    table: Any, batch: Sequence[tuple[int, Instance]]
) -> Iterator[tuple[int, Instance, TensorGraph]]:
    """The instances where the rule fires, with their variant and what the engine makes of them."""
    for start in range(0, len(batch), BATCH):
        part = batch[start : start + BATCH]
        for (e, instance), after in zip(part, _rewritten(table, part), strict=True):
            if after is not None:
                yield e, instance, after


def _closed(state: _State) -> Verdict:
    verdict = state.verdict
    silent = [t for t in state.tested if t.fired == 0]
    if verdict.ok and silent:
        patterns = " , ".join(show(p) for p in silent[0].variant.lhs)
        why = f"no instance fired in {silent[0].drawn} draws of {patterns}"
        return replace(verdict, ok=False, counterexample=why)
    return verdict


def show(p: Pattern | Var) -> str:
    """A pattern as it stands in a rule file, attributes left out."""
    return p.name if isinstance(p, Var) else f"({' '.join([p.op, *map(show, p.args)])})"


def _rewritten(table: Any, part: Sequence[tuple[int, Instance]]) -> list[TensorGraph | None]:
    """What the engine makes of each instance; None where the rule does not fire."""
    filled = [*part, *[part[-1]] * (BATCH - len(part))]
    graphs = [graph_lib.build_on_host(i.nodes, i.roots, bucket=BUCKET) for _, i in part]
    graphs += graphs[-1:] * (BATCH - len(part))
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *graphs)
    variant = np.array([e for e, _ in filled], np.int32)
    root = np.array([i.roots[0] + 1 for _, i in filled], np.int32)
    partner = np.array([i.roots[1] + 1 if len(i.roots) > 1 else 0 for _, i in filled], np.int32)
    graph, ok = jax.device_get(_ENGINE(table, stacked, variant, root, partner))
    return [jax.tree.map(lambda a, i=i: a[i], graph) if ok[i] else None for i in range(len(part))]


def _compare(
    state: _State, before: Instance, after: TensorGraph, rng: np.random.Generator, seed: int
) -> None:
    """Take one more sample into the verdict."""
    verdict = state.verdict
    samples = verdict.samples + 1
    nodes, outputs, _ = nodes_of(after)
    # A root that was replaced by an argument of it keeps its place among the outputs.
    outputs = outputs[: len(before.roots)]
    problem = ill_formed(nodes)
    error = 0.0
    if not problem:
        try:
            error = difference(verdict.evidence, before, nodes, outputs, rng, seed)
        except ValueError as reason:  # no meaning in the domain, or an axis beyond the rank
            problem = str(reason)
    limit = _TOLERANCE if verdict.evidence == "float64" else 0.0
    if not problem and error > limit:
        problem = f"the sides differ (error {error:.3g}){_hint(verdict.evidence)}"
    breaks = verdict.breaks
    if not problem and not breaks and not any(n.lowering for n in (*before.nodes, *nodes)):
        kinds = [k for i, k in enumerate(contract.KINDS) if (i - samples) % _SHARES == 0]
        with contextlib.suppress(CannotEvaluateError):
            breaks = contract.broken(before, nodes, outputs, rng, kinds)
    bound = max(verdict.bound, error)
    if verdict.evidence in ("field", "exp"):
        bound = max(verdict.bound, max(degree(before.nodes), degree(nodes)) / Q)
    if problem:
        text = f"{problem}\nbefore:\n{before}\nafter:\n{Instance(tuple(nodes), tuple(outputs))}"
        state.verdict = replace(
            verdict, ok=False, samples=samples, bound=bound, counterexample=text
        )
    else:
        state.verdict = replace(verdict, samples=samples, bound=bound, breaks=breaks)


def _hint(evidence: str) -> str:
    """What a difference in this domain may come from, other than a wrong rule."""
    if evidence == "float64":
        return ""
    return (
        f" by evidence {evidence}, where nothing is assumed of functions other than its own: "
        "(evidence float64) compares numbers"
    )


@cache
def _own_verdict(rule: Rule) -> Verdict:
    return verify_rule(rule)


def verified(rules: Iterable[Rule], trusted: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules, verified where they are not among the trusted ones (the library's, which the tests
    verify); each once in a process. One that breaks special values says so in its `assumes`.

    Raises:
      RuleError: a rule is refused; the message has the counterexample.
    """
    known = set(trusted)

    def checked(rule: Rule) -> Rule:
        if rule in known:
            return rule
        verdict = _own_verdict(rule)
        require(verdict)
        return replace(rule, assumes=("finite",)) if verdict.breaks else rule

    return tuple(map(checked, rules))


def require(verdict: Verdict) -> None:
    """Raise where a rule is not verified.

    Raises:
      RuleError: with the counterexample.
    """
    if not verdict.ok:
        raise RuleError(f"rule {verdict.rule} is not verified: {verdict.counterexample}")
