"""Proofs that two programs compute the same, by equality saturation of both in one e-graph.

Inputs are the same by position, arrays by content. Once no rule adds anything, and every few
iterations, constants that have the same value up to rounding become equal as well. Rules hold for
real numbers, too: programs that are proven equal may differ in rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from xrl_jax.egraph.arrays import EGraph
from xrl_jax.egraph.limits import Iteration, Limits, Stop
from xrl_jax.egraph.proof import Proof, prove
from xrl_jax.egraph.tensor_graph import egraph_of, with_equal
from xrl_jax.egraph.tensor_saturation import (
    Before,
    Saturation,
    TensorRules,
    saturate_graph,
    tensor_rules,
)
from xrl_jax.egraph.values import equal_constants
from xrl_jax.graph.bindings import Array, Binding, Call, Equation, Input, digest
from xrl_jax.graph.graph import Node, TensorGraph, build
from xrl_jax.graph.operands import is_pinned
from xrl_jax.language.rule import Rule
from xrl_jax.language.rule_files import proof_rules, select_rules, standard_rules
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.program.host import HostProgram, disassemble
from xrl_jax.program.program import Program
from xrl_jax.runtime.settings import own_settings
from xrl_jax.transform.fold import unfold
from xrl_jax.transform.start import start_of

_PLATFORM = "gpu"  # no types are widened
_STAGE = 8  # iterations before constants are compared


@dataclass(frozen=True)
class Equivalence:
    """How far two programs were proven equal.

    Attributes:
      outputs: for each result whether the two programs' are proven equal.
      proof: for those that are.
      saturation: of the e-graph that holds both.
    """

    outputs: tuple[bool, ...]
    proof: Proof
    saturation: Saturation

    def __bool__(self) -> bool:
        """Whether all results are proven equal."""
        return all(self.outputs)

    def __str__(self) -> str:
        nodes, classes = self.saturation.counts
        many = len(self.saturation.iterations)
        found = f"{nodes:,} e-nodes in {classes:,} classes after {many} iterations"
        if self:
            return f"proven equal ({found}), by {len(self.proof.rewrites)} rewrites"
        there = sum(self.outputs)
        stop = self.saturation.stop
        more = "" if stop is Stop.SATURATED else "; a higher limit may show more"
        return (
            f"not proven equal: {there} of {len(self.outputs)} results are "
            f"({found}; {stop.value}{more})"
        )


@own_settings()
def equivalent(
    one: Program,
    other: Program,
    rules: Iterable[str | Rule] | str | Rule | None = None,
    *,
    assume: Sequence[str] = (),
    nodes: int = 20_000,
    iterations: int = 30,
    seconds: float = 60.0,
    merging: int = 1,
    tell: Callable[[Iteration], None] = lambda _: None,
) -> Equivalence:
    """Look for a proof that two programs compute the same. Ctrl-C keeps what was proven.

    Args:
      one, other: with arguments and results of the same shapes and types. Which arguments are
        weights need not be the same.
      rules, assume: as for `xrl_jax.candidates`; `rules/proofs` are used as well.
      nodes, iterations, seconds: limits of the e-graph, after which no more is proven.
      merging: iterations in which rules are used that merge two operators.
      tell: called after each iteration.

    Raises:
      ValueError: the programs have other arguments or results, or effects; the message names the
        first difference.

    >>> one = xrl_jax.from_jax(lambda x, y: jnp.exp(x) * jnp.exp(y), jnp.ones(3), jnp.ones(3))
    >>> other = xrl_jax.from_jax(lambda x, y: jnp.exp(y + x), jnp.ones(3), jnp.ones(3))
    >>> bool(xrl_jax.equivalent(one, one)), bool(xrl_jax.equivalent(one, other))
    (True, False)
    """
    _check_alike(one, other)
    library = (*standard_rules(tuple(assume)), *proof_rules(tuple(assume)))
    chosen = select_rules(library, [rules] if isinstance(rules, Rule) else rules)
    table = tensor_rules(chosen)
    both = _both(one, other)
    n_outputs = both.n_outputs
    clock = Stopwatch(seconds)
    graph = start = egraph_of([both.graph])
    nothing = table.variants(lambda r: False)
    history: tuple[Before, ...] = ()
    done: list[Iteration] = []
    merges = merging
    while True:
        found = saturate_graph(
            table,
            graph,
            limits=Limits(min(_STAGE, iterations - len(done)), nodes, clock.left),
            merging=merges,
            remember=True,
            proven=lambda g: all(_equal(g, n_outputs)),
            tell=tell,
        )
        done += found.iterations
        history += found.history
        graph = found.graph
        if found.stop in (Stop.PROVEN, Stop.SECONDS, Stop.INTERRUPTED) or clock.done:
            break
        pairs = tuple(equal_constants(graph, both.arrays))
        if pairs:
            history += (Before(graph, nothing, pairs),)
            graph = with_equal(graph, pairs)
        staged = found.stop is Stop.ITERATIONS
        if len(done) >= iterations or not (pairs or staged) or all(_equal(graph, n_outputs)):
            break
        merges = 0 if staged else merging
    early = found.stop is Stop.ITERATIONS and len(done) < iterations  # between two stages
    stop = Stop.SECONDS if early else found.stop
    found = replace(found, graph=graph, iterations=tuple(done), stop=stop, history=history)
    outputs = _equal(found.graph, n_outputs)
    return Equivalence(outputs, _proof(table, start, found, outputs), found)


def _proof(table: TensorRules, egraph: EGraph, done: Saturation, outputs: Sequence[bool]) -> Proof:
    """Return the proof for the results that are equal."""
    roots = np.asarray(egraph.roots).tolist()
    pairs = zip(roots, roots[len(outputs) :], outputs, strict=False)
    last = Before(done.graph, table.variants(lambda r: False))
    return prove(table, (*done.history, last), [(a, b) for a, b, equal in pairs if equal])


def _equal(graph: EGraph, n_outputs: int) -> tuple[bool, ...]:
    """Return which results are equal; the roots are those of one program, then of the other."""
    roots = np.asarray(graph.roots).tolist()
    return tuple(
        a == b for a, b in zip(roots[:n_outputs], roots[n_outputs : 2 * n_outputs], strict=True)
    )


def _check_alike(one: Program, other: Program) -> None:
    for what, ours, theirs in (
        ("argument", one.in_avals, other.in_avals),
        ("result", _results(one), _results(other)),
    ):
        if len(ours) != len(theirs):
            raise ValueError(f"the programs have {len(ours)} and {len(theirs)} {what}s")
        for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                texts = [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in (a, b)]
                raise ValueError(f"{what} {n} of the programs differs: {texts[0]}, {texts[1]}")


def _results(program: Program) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and types of the results."""
    main = disassemble(program).main
    nodes = [main.nodes[o] for o in main.outputs]
    return [jax.ShapeDtypeStruct(n.shape, n.dtype) for n in nodes]


class _Both(NamedTuple):
    """A graph with the results of both programs.

    Attributes:
      n_outputs: how many results each has.
      arrays: by the number that nodes refer to them by.
    """

    graph: TensorGraph
    n_outputs: int
    arrays: dict[int, Any]


def _both(one: Program, other: Program) -> _Both:
    """Return both programs as one; nodes of both refer to the same binding by the same number."""
    numbers: dict[tuple, int] = {}
    arrays: dict[int, Any] = {}
    weights = [a or b for a, b in zip(one.weights, other.weights, strict=True)]
    nodes: list[Node] = []
    outputs: list[int] = []
    for program in (one, other):
        host = disassemble(unfold(start_of(program, _PLATFORM)))
        keys = _keys(host)
        first = len(nodes)
        for node in host.main.nodes:
            if is_pinned(node):
                raise ValueError("programs with effects cannot be compared")
            args = tuple(a + first for a in node.args)
            op, ref = node.op, node.ref
            if ref >= 0:
                binding = host.bindings[ref]
                if isinstance(binding, Input):
                    op = "weight" if weights[binding.position] else "input"
                ref = numbers.setdefault(keys[ref], len(numbers))
                if isinstance(binding, Array):
                    arrays[ref] = binding.value
            nodes.append(replace(node, op=op, args=args, ref=ref))
        outputs += [o + first for o in host.main.outputs]
    return _Both(build(nodes, outputs), len(outputs) // 2, arrays)


def _keys(host: HostProgram) -> list[tuple]:
    """Return a key for each binding: equal keys mean equal bindings."""
    keys: dict[int, tuple] = {}
    bodies: list[str] = []

    def key(ref: int) -> tuple:
        if ref not in keys:
            keys[ref] = _key(host.bindings[ref], bodies)
        return keys[ref]

    for body in host.bodies:  # callees come before callers
        rows = [
            replace(node, ref=-1) if node.ref < 0 else (replace(node, ref=-1), key(node.ref))
            for node in body.nodes
        ]
        bodies.append(str((rows, body.outputs)))
    return [key(ref) for ref in range(len(host.bindings))]


def _key(binding: Binding, bodies: Sequence[str]) -> tuple:
    if isinstance(binding, Call):
        called = tuple(bodies[b] for b in binding.bodies)
        equation = None if binding.equation is None else _key(binding.equation, bodies)
        return ("call", binding.kind, called, equation)
    kind = {Input: "input", Array: "array", Equation: "equation"}[type(binding)]
    # The text of an equation does not show the arrays that its functions close over.
    inside = _closed_over(binding.params) if isinstance(binding, Equation) else ()
    return (kind, *digest(binding).tolist(), *(tuple(digest(Array(x)).tolist()) for x in inside))


def _closed_over(value: Any) -> Iterator[Any]:
    """Yield the arrays in the jaxprs among the parameters of an equation."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _closed_over(each)
    elif hasattr(value, "eqns"):
        yield from getattr(value, "consts", ())
        for equation in value.eqns:
            yield from _closed_over(equation.params)
    elif isinstance(value, jax.Array | np.ndarray):
        yield value
