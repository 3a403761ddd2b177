"""Verification of rewrite rules: the engine rewrites random graphs, and both sides are compared in
the domain that the rule names as its evidence.

For every commutative variant of a rule, random graphs that contain the left-hand side are drawn
(`instances`) and passed to the jitted engine, which binds, evaluates the conditions and rewrites.
So the compiled rule is verified. If the rule fires, the graphs before and after are compared
(`compare`).

Then graphs in which all sizes are equal are drawn. If a rule confuses two axes of different sizes,
its right-hand side has the wrong type, and such a rewrite is not a candidate. So the mistake is
rarely detected on ordinary graphs, whose sizes are rarely equal.

A rule is refused if an instance differs, is ill-typed or not in normal form, or if no instance of
some variant fires.

The effect of a rule on special values is tested separately (`contract`). A rule that loses special
values must state `(assumes finite)` in its text.
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

BUCKET = 64  # slots for the nodes of an instance's graph
ROWS, CODE = 256, 128  # capacity of a table, fixed so that one compiled engine serves all
BATCH = 128
_SHARES = 3  # each sample tests one in three kinds of special values
_TOLERANCE = 1e-9  # for float64, relative to the largest element
_ROUNDS = 60
_DRAWS = 24  # per variant and round, once many draws were made
# Graphs of equal sizes drawn for a rule in addition to `samples`. A rule that computes attributes
# may compute them for the wrong axis, which about one graph in ten reveals; if attributes are only
# copied, one in four reveals a mistake.
_EQUAL, _EQUAL_COMPUTED = 6, 24


@dataclass(frozen=True)
class Verdict:
    """The result of verifying a rule or a lowering.

    Attributes:
      rule: name of the rule.
      evidence: the domain in which both sides were compared.
      ok: whether both sides agreed on every instance and every variant of the pattern fired.
      samples: number of instances compared.
      bound: in the field, the probability that one instance hides a difference (degree / prime);
        for floats, the largest error.
      counterexample: the instance that differs, or why none could be tried; "" if `ok`.
      breaks: an example of a special value that the rule loses, in which case it must only be used
        if values are assumed to be finite; "" if none was found. A rule that assumes finite
        operands is tried on finite values only.
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
    """A commutative variant of a rule, and the state of its verification."""

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
    """Verify a rewrite rule on random graphs and return the verdict.

    Args:
      rule: any rule, e.g. from `load_rules`.
      seed: the same seed draws the same instances.
      samples: number of instances to compare, see `verify_rules`.

    Raises:
      RuleError: the rule is too large for the table.

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
    """Verify rules and return a verdict for each.

    Args:
      rules: any rules with distinct names.
      seed: the same seed draws the same instances.
      samples: number of instances to compare, over all variants of a rule; at least two of each
        variant. More than as many again are drawn with equal sizes, whether they fire or not.
      evidence: domain to compare in, instead of that of each rule.
      rounds: how often new instances are drawn for a variant that has not fired often enough.

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
    """Yield consecutive groups of rules, each small enough for one table."""
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
    return [_final_verdict(s) for s in states]


def _computes(rule: Rule) -> bool:
    """Return whether the rule computes attributes, instead of only copying them."""

    def term(t: Term | Var) -> bool:
        return isinstance(t, Term) and (
            any(isinstance(e, SList) for _, e in t.attrs) or any(map(term, t.args))
        )

    return bool(rule.lets) or any(map(term, (*rule.rhs, *(t for _, t in rule.nodes))))


def _drawn(tested: _Tested, wanted: int, *, equal: bool = False) -> Iterator[Instance]:
    """Yield at most `wanted` instances that are small enough for the engine."""
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
    """Yield each instance for which its rule fires, with its variant and the rewritten graph."""
    for start in range(0, len(batch), BATCH):
        part = batch[start : start + BATCH]
        for (e, instance), after in zip(part, _rewritten(table, part), strict=True):
            if after is not None:
                yield e, instance, after


def _final_verdict(state: _State) -> Verdict:
    verdict = state.verdict
    silent = [t for t in state.tested if t.fired == 0]
    if verdict.ok and silent:
        patterns = " , ".join(show(p) for p in silent[0].variant.lhs)
        why = f"it fired on none of {silent[0].drawn} random instances of {patterns}"
        return replace(verdict, ok=False, counterexample=why)
    return verdict


def show(p: Pattern | Var) -> str:
    """Return a pattern as in a rule file, without attributes."""
    return p.name if isinstance(p, Var) else f"({' '.join([p.op, *map(show, p.args)])})"


def _rewritten(table: Any, part: Sequence[tuple[int, Instance]]) -> list[TensorGraph | None]:
    """Return the rewritten graph of each instance; None if the rule does not fire."""
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
    """Compare one instance before and after, and update the verdict."""
    verdict = state.verdict
    samples = verdict.samples + 1
    nodes, outputs, _ = nodes_of(after)
    # A root that is replaced by one of its arguments keeps its position among the outputs.
    outputs = outputs[: len(before.roots)]
    problem = ill_formed(nodes)
    error = 0.0
    if not problem:
        try:
            error = difference(verdict.evidence, before, nodes, outputs, rng, seed)
        except ValueError as reason:  # no meaning in the domain, or an axis out of range
            problem = str(reason)
    limit = _TOLERANCE if verdict.evidence == "float64" else 0.0
    if not problem and error > limit:
        problem = f"the sides differ (error {error:.3g}){_hint(verdict.evidence)}"
    breaks = verdict.breaks
    if not problem and not breaks and not any(n.lowering for n in (*before.nodes, *nodes)):
        kinds = [k for i, k in enumerate(contract.KINDS) if (i - samples) % _SHARES == 0]
        if "finite-operands" in state.tested[0].variant.assumes:
            kinds = [k for k in kinds if k not in contract.NOT_FINITE]
        with contextlib.suppress(CannotEvaluateError):
            breaks = contract.what_breaks(before, nodes, outputs, rng, kinds)
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
    """Return a note on why a right rule may differ in this domain; "" for float64."""
    if evidence == "float64":
        return ""
    return (
        f" by evidence {evidence}, which knows nothing of functions other than its own: use "
        "(evidence float64) to compare floating-point results"
    )


@cache
def _own_verdict(rule: Rule) -> Verdict:
    return verify_rule(rule)


def verified(rules: Iterable[Rule], trusted: Sequence[Rule]) -> tuple[Rule, ...]:
    """Verify the rules that are not trusted, and return all rules.

    The trusted rules are those of the library, which the tests verify. Each rule is verified once
    per process. One that loses special values gets `assumes=("finite",)`.

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
    """Raise an error if a rule is not verified.

    Raises:
      RuleError: the verdict is not `ok`; the message has the counterexample.
    """
    if not verdict.ok:
        raise RuleError(f"rule {verdict.rule} is not verified: {verdict.counterexample}")
