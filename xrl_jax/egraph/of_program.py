"""Equality saturation for users: all forms of a program that rules reach.

egraph = xrl_jax.saturate(program)
print(egraph)
smallest = egraph.extract()
Path("egraph.dot").write_text(egraph.graphviz())
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.extraction.extract import extract
from xrl_jax.egraph.extraction.of_egraph import enodes_of, instance_of_egraph
from xrl_jax.egraph.limits import Iteration, Limits, Stop
from xrl_jax.egraph.tensor_graph import egraph_of, extracted, features_of
from xrl_jax.egraph.tensor_saturation import (
    Saturation,
    TensorRules,
    saturate_graph,
    tensor_rules,
)
from xrl_jax.graph.graph import Node, Nodes, node_at
from xrl_jax.language.rule import Rule
from xrl_jax.language.rule_files import select_rules, standard_rules
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.program.program import Program
from xrl_jax.runtime.settings import own_settings

Cost = Callable[[Node, Sequence[Node]], float]
_SOURCES = ("input", "weight", "array", "const")
_MOST_RULES = 8  # that are listed


def number_of_operators(node: Node, args: Sequence[Node]) -> float:
    """Return 1 for an operator, 0 for an argument or constant: the default cost."""
    return 0.0 if node.op in _SOURCES else 1.0


@dataclass(frozen=True)
class ProgramEGraph:
    """An e-graph for each graph of a program: main graph, then bodies."""

    program: Program = field(repr=False)
    rules: TensorRules = field(repr=False)
    graphs: tuple[Saturation, ...]

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of e-nodes and of classes, of all graphs together."""
        nodes, classes = zip(*(s.counts for s in self.graphs), strict=True)
        return sum(nodes), sum(classes)

    @property
    def saturated(self) -> bool:
        """Whether no rule adds anything, so that all forms that the rules reach are there."""
        return all(s.stop is Stop.SATURATED for s in self.graphs)

    def __str__(self) -> str:
        names = ["main", *(b.name for b in self.program.bodies)]
        lines = []
        for name, done in zip(names, self.graphs, strict=True):
            nodes, classes = done.counts
            lines.append(
                f"{name}: {nodes:,} e-nodes in {classes:,} classes after {len(done.iterations)} "
                f"iterations; {done.stop.value}"
            )
            used: Counter[str] = Counter()
            for iteration in done.iterations:
                for rule, n in zip(self.rules.rules, iteration.matches, strict=True):
                    used[rule.name] += n
            often = [f"{rule} {n:,}" for rule, n in used.most_common(_MOST_RULES) if n]
            lines += [f"  matches: {', '.join(often)}"] if often else []
            if done.unpaired:
                lines.append(f"  {done.unpaired:,} matches of rules with two roots were not paired")
        return "\n".join(lines)

    def extract(self, cost: Cost = number_of_operators, *, seconds: float = 10.0) -> Program:
        """Return the cheapest program found. Shared nodes are paid once, and work on weights alone,
        which is done once, costs nothing.

        Args:
          cost: of a node with these arguments; not negative. It sees plain lowerings.
          seconds: most seconds for each graph.

        >>> program = xrl_jax.from_jax(lambda x: -(-x) + 0.0, jnp.ones(3))
        >>> print(xrl_jax.saturate(program).extract())
        graph main {
          %1: float32[3] = input() ref=@0  # argument 0
          return %1
        }
        """
        graphs = []
        for done, before in zip(self.graphs, self.program.graphs, strict=True):
            each = _costs(done.graph, cost)
            instance = instance_of_egraph(done.graph, each)
            clock = Stopwatch(seconds)
            found = extract(instance, lambda clock=clock: clock.left)
            n_outputs = int((np.asarray(before.globals.outputs) >= 0).sum())
            node = enodes_of(instance, found.choice.node)
            graphs.append(extracted(done.graph, node, n_outputs))
        return self.program.with_graphs(graphs)

    def graphviz(self, graph: int = 0, *, most: int = 300) -> str:
        """Return a picture of an e-graph in Graphviz's language: a box for each class, arrows from
        e-nodes to the classes that they read.

        Args:
          graph: index into `Program.graphs`.
          most: classes; those nearest to the results are shown.
        """
        egraph = self.graphs[graph].graph
        features = _features(egraph)
        args, parent = np.asarray(egraph.args).tolist(), np.asarray(egraph.parent).tolist()
        members: dict[int, list[int]] = {}
        for slot in np.flatnonzero(np.asarray(egraph.op) != HOLE).tolist():
            members.setdefault(parent[slot], []).append(slot)
        shown = _nearest(members, args, np.asarray(egraph.roots).tolist(), most)
        lines = ["digraph egraph {", "  compound=true; node [shape=box, style=rounded];"]
        for c in shown:
            lines.append(f"  subgraph cluster_{c} {{ style=dotted;")
            for slot in members[c]:
                label = _label(features, slot).replace('"', "'")
                lines.append(f'    n{slot} [label="{label}"];')
            lines.append("  }")
        for c in shown:
            for slot in members[c]:
                for a in filter(None, args[slot]):
                    if a in shown:
                        lines.append(f"  n{slot} -> n{members[a][0]} [lhead=cluster_{a}];")
        return "\n".join([*lines, "}"])


@own_settings()
def saturate(
    program: Program,
    rules: Iterable[str | Rule] | str | Rule | None = None,
    *,
    assume: Sequence[str] = (),
    nodes: int = 10_000,
    iterations: int = 15,
    seconds: float = 60.0,
    merging: int = 1,
    tell: Callable[[Iteration], None] = lambda _: None,
) -> ProgramEGraph:
    """Return the e-graphs of a program, grown by rules until nothing changes or a limit is reached.
    Ctrl-C keeps what was found.

    Args:
      rules, assume: as for `xrl_jax.candidates`; rules for lowerings are left out.
      nodes: most e-nodes of each graph.
      iterations, seconds: most for each graph; seconds include compiling.
      merging: iterations in which rules are used that merge two operators: each may square the
        number of products.
      tell: called after each iteration.

    Raises:
      ValueError: a rule name is unknown, or a named rule needs an assumption that is not given.

    >>> program = xrl_jax.from_jax(lambda x: jnp.tanh(x) + 0.0, jnp.ones(3))
    >>> print(xrl_jax.saturate(program))
    main: 7 e-nodes in 4 classes after 4 iterations; no rule adds anything
      matches: add-zero 7, add-join-weights 5, add-self 2
    """
    library = standard_rules(tuple(assume))
    table = tensor_rules(select_rules(library, [rules] if isinstance(rules, Rule) else rules))
    limits = Limits(iterations, nodes, seconds)
    done: list[Saturation] = []
    for graph in program.graphs:
        start = egraph_of([graph])
        if done and done[-1].stop is Stop.INTERRUPTED:
            done.append(Saturation(start, (), Stop.INTERRUPTED))
        else:
            done.append(saturate_graph(table, start, limits=limits, merging=merging, tell=tell))
    return ProgramEGraph(program, table, tuple(done))


def _features(graph: EGraph) -> Nodes:
    return jax.tree.map(np.asarray, features_of(graph))


def _costs(graph: EGraph, cost: Cost) -> np.ndarray:
    """Return the cost [N] of each e-node."""
    features, args = _features(graph), np.asarray(graph.args).tolist()
    found = np.full(graph.bucket, np.inf)
    for slot in np.flatnonzero(np.asarray(graph.op) != HOLE).tolist():
        node = node_at(features, slot, ())
        operands = [node_at(features, a, ()) for a in args[slot] if a]
        found[slot] = 0.0 if features.weight_only[slot] else cost(node, operands)
    return found


def _label(features: Nodes, slot: int) -> str:
    node = node_at(features, slot, ())
    if node.op == "const":
        return f"{node.value:g}"
    ref = f" @{node.ref}" if node.ref >= 0 else ""
    return f"{node.op}{list(node.shape)}{ref}"


def _nearest(
    members: dict[int, list[int]], args: list[list[int]], roots: Sequence[int], most: int
) -> dict[int, None]:
    """Return the classes nearest to the roots, in breadth-first order."""
    shown: dict[int, None] = {}
    waiting = deque(roots)
    while waiting and len(shown) < most:
        c = waiting.popleft()
        if c not in shown:
            shown[c] = None
            waiting.extend(a for slot in members[c] for a in args[slot] if a)
    return shown
