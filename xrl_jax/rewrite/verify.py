"""Verification of rewrite rules: the engine rewrites random graphs, and both sides are computed in
an exact domain.

For every way a rule's commutative operators can be turned, random graphs that hold the left-hand
side are drawn (`instances`) and handed to the jitted engine, which binds, evaluates the conditions
and rewrites; so what is verified is the compiled rule. Where it fires, the graph is computed before
and after (`evaluate`) in the domain of the rule's evidence:

    field, exp   residues modulo a prime of 31 bits, other functions unknown; exp with its law for
    `exp` maxplus      the ordered integers, increasing functions unknown float64      double
    precision, edge values among the inputs; lowerings run as lax code of the backend

A rule is refused when one instance differs, is ill-typed or not in normal form, or when no instance
of some turning fires.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import numpy as np

from xrl_jax.graph import graph as graph_lib
from xrl_jax.graph import ops
from xrl_jax.graph.attributes import used_width
from xrl_jax.graph.graph import Node, TensorGraph, infer, nodes_of, pack_attrs
from xrl_jax.rewrite import instances as instances_lib
from xrl_jax.rewrite.apply import apply
from xrl_jax.rewrite.domains import Field, Floats, Integers, Q
from xrl_jax.rewrite.evaluate import CannotEvaluateError, Domain, evaluate
from xrl_jax.rewrite.instances import Hints, Instance, hints_of, propose
from xrl_jax.rewrite.rule import Pattern, Rule, Var
from xrl_jax.rewrite.sexpr import RuleError
from xrl_jax.rewrite.table import compile_rules, variants

BUCKET = 64  # nodes of an instance's graph
ROWS = (
    256  # pattern trees of a table; with CODE fixed, every table runs in the same compiled engine
)
CODE = 128
BATCH = 128
_TOLERANCE = 1e-9  # of float64, relative to the largest element
_ROUNDS = 60
_DRAWS = 24  # for one turning in one round


@dataclass(frozen=True)
class Verdict:
    """What is known of a rule.

    Attributes:
      rule: its name.
      evidence: the domain both sides were compared in.
      ok: whether every instance agreed and every turning of the pattern fired.
      samples: how many instances fired.
      bound: in the field, the chance that one instance hides a difference (degree / prime); for
        floats, the largest error.
      counterexample: the instance that differs, or why none could be tried; "" where `ok`.
    """

    rule: str
    evidence: str
    ok: bool
    samples: int
    bound: float
    counterexample: str = ""


@dataclass
class _Turning:
    """One entry of a table under test."""

    rule: int
    variant: Rule
    hints: Hints
    rng: np.random.Generator
    wanted: int
    fired: int = 0
    drawn: int = 0


@dataclass
class _State:
    verdict: Verdict
    turnings: list[_Turning] = field(default_factory=list)


def verify_rule(rule: Rule, *, seed: int = 0, samples: int = 32) -> Verdict:
    """The verdict on one rule; see `verify_rules`."""
    return verify_rules((rule,), seed=seed, samples=samples)[0]


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
      samples: instances that must fire, over all turnings of a rule; at least two of each turning.
      evidence: compare in this domain instead of the rules' own.
      rounds: how often new instances are drawn for a turning that has not fired enough.

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


@cache
def _engine() -> Any:
    def rewrite(table: Any, graph: TensorGraph, entry: Any, root: Any, partner: Any) -> Any:
        done = apply(table, graph, entry, root, partner)
        return done.graph, done.ok

    return jax.jit(jax.vmap(rewrite, in_axes=(None, 0, 0, 0, 0)))


def _verify_chunk(
    rules: Sequence[Rule], *, seed: int, samples: int, evidence: str | None, rounds: int
) -> list[Verdict]:
    table = compile_rules(rules, min_rows=ROWS, min_code=CODE).table
    states: list[_State] = []
    turnings: list[_Turning] = []
    for i, rule in enumerate(rules):
        turned = variants(rule)
        own = [
            _Turning(
                i,
                v,
                hints_of(rule.conditions),
                np.random.default_rng([seed, len(turnings) + k, len(rule.name)]),
                max(2, -(-samples // len(turned))),
            )
            for k, v in enumerate(turned)
        ]
        turnings += own
        states.append(_State(Verdict(rule.name, evidence or rule.evidence, True, 0, 0.0), own))
    for _ in range(rounds):
        batch: list[tuple[int, Instance]] = []
        for e, t in enumerate(turnings):
            if t.fired >= t.wanted or not states[t.rule].verdict.ok:
                continue
            draws = _DRAWS if t.drawn > 4 * _DRAWS else 2 * t.wanted
            found = 0
            for _ in range(4 * draws):
                if found >= draws:
                    break
                instance = propose(t.variant, t.hints, t.rng)
                t.drawn += 1
                if instance is not None and len(instance.nodes) + 12 < BUCKET:
                    batch.append((e, instance))
                    found += 1
        if not any(t.fired < t.wanted and states[t.rule].verdict.ok for t in turnings):
            break
        for start in range(0, len(batch), BATCH):
            part = batch[start : start + BATCH]
            for (e, instance), after in zip(part, _rewritten(table, part), strict=True):
                t = turnings[e]
                state = states[t.rule]
                if after is None or not state.verdict.ok or t.fired >= t.wanted:
                    continue
                t.fired += 1
                state.verdict = _compared(state.verdict, instance, after, t.rng, seed)
    return [_closed(s) for s in states]


def _closed(state: _State) -> Verdict:
    verdict = state.verdict
    silent = [t for t in state.turnings if t.fired == 0]
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
    entry = np.array([e for e, _ in filled], np.int32)
    root = np.array([i.roots[0] + 1 for _, i in filled], np.int32)
    partner = np.array([i.roots[1] + 1 if len(i.roots) > 1 else 0 for _, i in filled], np.int32)
    graph, ok = jax.device_get(_engine()(table, stacked, entry, root, partner))
    return [jax.tree.map(lambda a, i=i: a[i], graph) if ok[i] else None for i in range(len(part))]


def _compared(
    verdict: Verdict,
    before: Instance,
    after: TensorGraph,
    rng: np.random.Generator,
    seed: int,
) -> Verdict:
    samples = verdict.samples + 1
    nodes, outputs, _ = nodes_of(after)
    # A root that was replaced by an argument of it keeps its place among the outputs.
    outputs = outputs[: len(before.roots)]
    problem = ill_formed(nodes)
    error = 0.0
    if not problem:
        try:
            error = difference(verdict.evidence, before, nodes, outputs, rng, seed)
        except CannotEvaluateError as reason:
            problem = str(reason)
    limit = _TOLERANCE if verdict.evidence == "float64" else 0.0
    if not problem and error > limit:
        problem = f"the sides differ (error {error:.3g})"
    bound = max(verdict.bound, error)
    if verdict.evidence in ("field", "exp"):
        bound = max(verdict.bound, max(degree(before.nodes), degree(nodes)) / Q)
    if problem:
        text = f"{problem}\nbefore:\n{before}\nafter:\n{Instance(tuple(nodes), tuple(outputs))}"
        return replace(verdict, ok=False, samples=samples, bound=bound, counterexample=text)
    return replace(verdict, samples=samples, bound=bound)


def difference(
    evidence: str,
    before: Instance,
    nodes: Sequence[Node],
    outputs: Sequence[int],
    rng: np.random.Generator,
    seed: int,
) -> float:
    """How far the sides are apart on random inputs: 0 for equal; relative to the largest element
    for float64.

    Raises:
      CannotEvaluateError: the domain of this evidence has no meaning for some operator.
    """
    if evidence == "float64" and any(n.lowering for n in (*before.nodes, *nodes)):
        return _lowered_difference(before, nodes, outputs, rng)
    domain = domain_of(evidence, seed)
    sources = {n.ref: domain.variable(n.shape, n.dtype, rng) for n in before.nodes if n.ref >= 0}
    old = evaluate(before.nodes, before.roots, sources, domain)
    new = evaluate(nodes, outputs, sources, domain)
    return max((domain.agree(a, b) for a, b in zip(old, new, strict=True)), default=0.0)


def domain_of(evidence: str, seed: int) -> Domain:
    """The domain that goes by this name in rule files."""
    match evidence:
        case "field":
            return Field(seed, exponential=False)
        case "exp":
            return Field(seed)
        case "maxplus":
            return Integers(seed)
        case _:
            return Floats(seed)


def degree(nodes: Sequence[Node]) -> int:
    """Degree of the polynomials that the nodes compute (a quotient counts both parts, an unknown
    function one).
    """
    degrees: list[int] = []
    for n in nodes:
        inner = [degrees[a] for a in n.args]
        if n.op in ("mul", "div", "dot", "conv"):
            degrees.append(sum(inner))
        elif n.op == "square":
            degrees.append(2 * inner[0])
        elif n.op == "integer_pow":
            exponent = n.attr("exponent")
            assert isinstance(exponent, int)
            degrees.append(abs(exponent) * inner[0])
        elif n.op == "const":
            degrees.append(0)
        else:
            degrees.append(max(inner, default=1))
    return max(degrees, default=0)


def ill_formed(nodes: Sequence[Node]) -> str:
    """What is wrong with a rewritten graph, in words: types, dtypes, or attributes not filled up as
    `pack_attrs` does; else "".
    """
    for i, node in enumerate(nodes):
        if node.spec.shape == "given":
            continue
        args = [nodes[a] for a in node.args]
        typed = infer(node.op, node.attrs, args)
        if typed is None:
            return f"%{i} ({node.op}) does not fit its arguments"
        if typed != (node.shape, node.dtype):
            return (
                f"%{i} ({node.op}) should be {typed[1]}{list(typed[0])}, "
                f"the engine says {node.dtype}{list(node.shape)}"
            )
        if not instances_lib.dtypes_agree(node.op, [a.dtype for a in args]):
            return f"%{i} ({node.op}) mixes dtypes {[a.dtype for a in args]}"
        named: dict[str, Any] = {}
        for f in node.spec.fields:
            value = node.attr(f.name)
            rank = len(args[0].shape)
            named[f.name] = (
                value[: used_width(node.op, f, len(node.shape), rank)]
                if isinstance(value, tuple)
                else value
            )
        normal = pack_attrs(node.op, named)
        if normal != node.attrs:
            return f"%{i} ({node.op}) has attributes {node.attrs}, in normal form {normal}"
    return ""


def _lowered_difference(
    before: Instance, nodes: Sequence[Node], outputs: Sequence[int], rng: np.random.Generator
) -> float:
    """As `difference`, by the lax code of the backend in double precision."""
    # The way out; rules are matched without it.
    from xrl_jax.backends.lowerings import applicable, lower

    for n in nodes:
        if n.lowering not in applicable(n, tuple(nodes[a] for a in n.args)):
            raise CannotEvaluateError(
                f"lowering {n.spec.lowerings[n.lowering]} of {n.op} does not apply here"
            )
    domain = Floats()
    sources = {
        n.ref: domain.variable(n.shape, n.dtype, rng).astype(
            np.float64 if "float" in n.dtype else np.dtype(n.dtype)
        )
        for n in before.nodes
        if n.ref >= 0
    }

    def run(graph: Sequence[Node], roots: Sequence[int], given: Mapping[int, Any]) -> list[Any]:
        known: list[Any] = []
        for n in graph:
            known.append(given[n.ref] if n.ref >= 0 else lower(n, *(known[a] for a in n.args)))
        return [known[r] for r in roots]

    with jax.enable_x64(True):
        both = jax.jit(
            lambda given: (
                run(_in_double(before.nodes), before.roots, given),
                run(_in_double(nodes), outputs, given),
            )
        )
        old, new = jax.device_get(both(sources))
    return max((domain.agree(a, b) for a, b in zip(old, new, strict=True)), default=0.0)


def _in_double(nodes: Sequence[Node]) -> list[Node]:
    double = ops.DTYPE_CODE["float64"]
    out = []
    for n in nodes:
        attrs = list(n.attrs)
        for f in n.spec.fields:
            if f.name == "dtype":
                attrs[f.offset] = double
        out.append(
            replace(n, dtype="float64" if "float" in n.dtype else n.dtype, attrs=tuple(attrs))
        )
    return out


@cache
def _own_verdict(rule: Rule) -> Verdict:
    return verify_rule(rule)


def require_verified(rules: Iterable[Rule], trusted: Sequence[Rule]) -> None:
    """Verify the rules that are not among the trusted ones (the library's, which the tests verify).

    A rule is verified once in a process.

    Raises:
      RuleError: a rule is refused; the message has the counterexample.
    """
    known = set(trusted)
    for rule in rules:
        if rule not in known:
            require(_own_verdict(rule))


def require(verdict: Verdict) -> None:
    """Raise where a rule is not verified.

    Raises:
      RuleError: with the counterexample.
    """
    if not verdict.ok:
        raise RuleError(f"rule {verdict.rule} is not verified: {verdict.counterexample}")
