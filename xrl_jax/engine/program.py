"""Rewriting a program by hand: listing the candidates, and applying one of them.

for candidate in xrl_jax.candidates(program, ["fold"]):
    print(candidate)
program = xrl_jax.apply(program, candidate)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.engine import apply as apply_lib
from xrl_jax.engine import match as match_lib
from xrl_jax.engine.bind import bind
from xrl_jax.engine.delta import NO_PRICE, deltas
from xrl_jax.engine.match import Candidates
from xrl_jax.graph import graph as graph_lib
from xrl_jax.graph import ops, passes
from xrl_jax.graph.graph import GraphError, Nodes, TensorGraph
from xrl_jax.language.rule import Rule
from xrl_jax.language.rule_files import select_rules, standard_rules
from xrl_jax.language.table import CompiledRules, P, RuleTable, compile_rules
from xrl_jax.program.program import Program
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.runtime.settings import own_settings

_SIZES = (256, 1024, 4096, 16384)  # room for candidates


@dataclass(frozen=True)
class Candidate:
    """A rule and a place where it applies; `str` is readable.

    Attributes:
      rule: name of the rule.
      graph: index into `Program.graphs` (0: the main graph, i + 1: body i).
      root: slot of the node that is replaced.
      partner: slot of the second node, for rules that replace two; else 0.
      place: the replaced nodes in text, numbered by slot.
      variant: commutative variant of the rule, an index into the table.
      rules: the table that the candidate was found with.
    """

    rule: str
    graph: int
    root: int
    partner: int
    place: str
    variant: int = field(repr=False)
    rules: CompiledRules = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.rule} at {self.place}"


@own_settings()
def candidates(
    program: Program,
    rules: Iterable[str | Rule] | str | Rule | None = None,
    *,
    assume: Sequence[str] = (),
) -> tuple[Candidate, ...]:
    """Return every rewrite that the rules allow, in all graphs of the program, each once.

    Args:
      rules: None for every verified rule; else names, families or Rule objects, "-name" to switch
        one off.
      assume: assumptions about values that rules may rely on, as for `xrl_jax.optimize`.

    Raises:
      ValueError: a rule name is unknown, or a named rule needs an assumption that is not given.

    >>> program = xrl_jax.from_jax(lambda x: jnp.tanh(x) + 0.0, jnp.ones(3))
    >>> for candidate in xrl_jax.candidates(program, ["add-zero"]):
    ...     print(candidate.rule, candidate.place)
    add-zero %4 add[3]
    """
    chosen = select_rules(
        standard_rules(tuple(assume)), [rules] if isinstance(rules, Rule) else rules
    )
    compiled = _compiled(chosen)
    return tuple(
        candidate
        for index, graph in enumerate(program.graphs)
        for candidate in _in_graph(compiled, index, graph)
    )


@own_settings()
def apply(program: Program, candidate: Candidate) -> Program:
    """Return the program after one rewrite; a graph without enough free slots is grown.

    Raises:
      ValueError: the candidate does not apply to this program (any more).

    >>> program = xrl_jax.from_jax(lambda x: jnp.tanh(x) + 0.0, jnp.ones(3))
    >>> (candidate,) = xrl_jax.candidates(program, ["add-zero"])
    >>> print(xrl_jax.apply(program, candidate))
    graph main {
      %1: float32[3] = input() ref=@0  # argument 0
      %2: float32[3] = tanh(%1)
      return %2
    }
    """
    graphs = list(program.graphs)
    if candidate.graph < len(graphs):
        graph, root, partner = graphs[candidate.graph], candidate.root, candidate.partner
        done = _apply(candidate, graph, root, partner)
        while bool(done.full):
            _, _, slots = graph_lib.nodes_of(graph)
            place = {slot: i + 1 for i, slot in enumerate(slots)}  # as `grow` compacts them
            graph, root, partner = graph_lib.grow(graph), place[root], place.get(partner, 0)
            done = _apply(candidate, graph, root, partner)
        if bool(done.ok):
            graphs[candidate.graph] = done.graph
            return program.with_graphs(graphs)
    raise ValueError(
        f"{candidate} does not apply to this program: find its candidates with "
        "xrl_jax.candidates(program) after every rewrite"
    )


def _apply(candidate: Candidate, graph: TensorGraph, root: int, partner: int) -> apply_lib.Applied:
    return _applied(
        candidate.rules.table,
        graph,
        jnp.int32(candidate.variant),
        jnp.int32(root),
        jnp.int32(partner),
    )


@functools.lru_cache(maxsize=8)
def _compiled(rules: tuple[Rule, ...]) -> CompiledRules:
    return compile_rules(rules)


@engine_jit
def _applied(
    table: RuleTable, graph: TensorGraph, variant: jax.Array, root: jax.Array, partner: jax.Array
) -> apply_lib.Applied:
    return apply_lib.apply(table, graph, variant, root, partner)


@functools.partial(engine_jit, static_argnames="size")
def _find(table: RuleTable, graph: TensorGraph, *, size: int) -> tuple[Candidates, jax.Array]:
    """Return the candidates, and as [M, K] the nodes that each would put in place of its roots."""
    graph = passes.remove_dead(graph)
    found = match_lib.candidates(table, graph, match_lib.match(table, graph), size=size)
    made = deltas(table, graph, found, NO_PRICE, keep=lambda new: new).kept
    variant = jnp.maximum(found.variant, 0)
    bound = jax.vmap(lambda e, r, p: bind(table, e, r, p, graph)[0])(
        variant, found.root, found.partner
    )

    def node(codes: jax.Array) -> jax.Array:
        """Return the slots of bound nodes; new nodes get numbers below -1."""
        at = jnp.clip(codes, 0, 2 * P - 1).reshape(size, -1)
        slots = jnp.take_along_axis(bound, at, axis=1).reshape(codes.shape)
        return jnp.where(codes < 0, -1, jnp.where(codes < 2 * P, slots, -2 - codes))

    value = jax.lax.bitcast_convert_type(made.nodes.value, jnp.int32)
    parts = [made.nodes.op, made.nodes.attrs, made.nodes.lowering, made.nodes.dtype, value]
    parts += [node(made.args), node(table.root_to[variant])]
    return found, jnp.concatenate([p.reshape(size, -1) for p in parts], axis=1)


def _in_graph(compiled: CompiledRules, index: int, graph: TensorGraph) -> list[Candidate]:
    for size in _SIZES:
        found, made = _find(compiled.table, graph, size=size)
        if int(found.count) <= size:
            break
    else:
        raise GraphError(f"more than {_SIZES[-1]} candidates in one graph: use fewer rules")
    variants, roots, partners = (np.asarray(a) for a in found[:3])
    nodes = jax.tree.map(np.asarray, graph.nodes)  # one copy: device reads are slow
    rule_of, results = np.asarray(compiled.table.variant_rule), np.asarray(made)
    seen: set[tuple[int, int, int, bytes]] = set()
    places: set[tuple[int, int, int]] = set()
    listed = []
    for i in np.flatnonzero(variants >= 0):
        variant, root, partner = int(variants[i]), int(roots[i]), int(partners[i])
        key = (int(rule_of[variant]), root, partner, results[i].tobytes())
        if key in seen:  # two commutative variants of a pattern that create the same nodes
            continue
        exchanged = key[:3] in places
        seen.add(key)
        places.add(key[:3])
        place = _place(nodes, root) + (f" and {_place(nodes, partner)}" if partner else "")
        if exchanged:
            place += " (operands exchanged)"
        if index:
            place = f"{place} of body {index - 1}"
        name = compiled.rules[int(rule_of[variant])].name
        listed.append(Candidate(name, index, root, partner, place, variant, compiled))
    return listed


def _place(f: Nodes, slot: int) -> str:
    """Return a node in text, such as `%7 dot[2,4]`."""
    shape = ",".join(str(int(d)) for d in f.shape[slot][: int(f.rank[slot])])
    return f"%{slot} {ops.OP_NAMES[int(f.op[slot])]}[{shape}]"
