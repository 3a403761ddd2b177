"""The domain of a program: the inputs that it was checked on, if it is not right for all.

Some lowerings are right for ordinary values only: a convolution by tiles spreads an infinity, and
the rounding errors of a large value, over a tile; a dense lowering of a grouped convolution
multiplies NaN by zeros. A program with such a lowering has a domain: arguments that are finite and
no larger than a bound. A call with arguments outside of it runs the original.

Inside the domain such a lowering must read finite values. So its operands may depend on arguments,
weights and only those operators that map finite values to finite ones, except for overflow, which
the check on inputs as large as the bound detects. Where that holds for all operands of a program,
rules that assume finite operands are right, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph.bindings import Call, Equation, binding_of
from xrl_jax.graph.graph import Node, build, nodes_of
from xrl_jax.graph.operands import flat_operands
from xrl_jax.language.rule import Rule
from xrl_jax.language.rule_files import standard_rules
from xrl_jax.lower.table import LOWERINGS, applicable, number_of
from xrl_jax.program.program import Program

MARGIN = 4.0  # ratio of the domain's bound to the largest example value
_LEAST = 1.0
Bounds = tuple[float | None, ...]  # of the flat arguments; None where there is none

_FINITE = frozenset(
    "input weight array const iota pack proj cast neg add sub mul square max min clamp select abs "
    "sign floor ceil round tanh logistic erf erfc sin cos copy transpose reshape broadcast concat "
    "slice pad rev reduce_sum reduce_max reduce_min window_sum window_max window_min softmax dot "
    "conv cumsum cummax cummin".split()
)
# Equations that move values and compute no new ones.
_MOVING = frozenset(
    "gather dynamic_slice dynamic_update_slice sort copy stop_gradient squeeze expand_dims".split()
)


def bounds_of(program: Program, leaves: Sequence[Any]) -> Bounds:
    """Return the domain that extends to `MARGIN` times the largest value of each flat argument."""
    found: list[float | None] = []
    for x, is_weight in zip(leaves, program.weights, strict=True):
        if is_weight or not jnp.issubdtype(x.dtype, jnp.inexact) or not x.size:
            found.append(None)
            continue
        size = np.abs(np.asarray(x).astype(np.complex128))
        largest = float(np.max(size, initial=0.0, where=np.isfinite(size)))
        limit = float(jnp.finfo(x.dtype).max)
        found.append(min(max(MARGIN * largest, _LEAST), limit))
    return tuple(found)


def inside(bounds: Bounds, leaves: Sequence[Any]) -> Any:
    """Return whether flat arguments are in the domain (traceable)."""
    parts = [jnp.all(jnp.abs(x) <= b) for x, b in zip(leaves, bounds, strict=True) if b is not None]
    return jnp.all(jnp.stack(parts)) if parts else jnp.asarray(True)


def outside(bounds: Sequence[float | None], leaves: Sequence[Any]) -> int | None:
    """Return the index of the first array that is outside of the domain, or None if none is."""
    for i, (x, bound) in enumerate(zip(leaves, bounds, strict=True)):
        if bound is not None and not _is_within(x, bound):
            return i
    return None


def _is_within(x: Any, bound: float) -> bool:
    here = not isinstance(x, jax.Array) or next(iter(x.devices())).platform == "cpu"
    if not here or x.dtype not in (np.float32, np.float64):
        return bool(_ALL_WITHIN(x, bound))
    host = np.asarray(x)  # two passes without a copy; comparisons with NaN are false
    return not host.size or bool(-bound <= host.min() and host.max() <= bound)


_ALL_WITHIN = jax.jit(lambda x, bound: jnp.all(jnp.abs(x) <= bound))


def are_finite(weights: Sequence[Any]) -> bool:
    """Return whether no weight has NaN or infinity."""
    floats = [w for w in weights if jnp.issubdtype(w.dtype, jnp.inexact)]
    return all(bool(np.isfinite(np.asarray(w)).all()) for w in floats)


def is_bounded(node: Node) -> bool:
    """Return whether the node's lowering is right only on a domain."""
    return any(row.bounded for row in LOWERINGS[node.op][node.lowering : node.lowering + 1])


def needs_domain(program: Program) -> bool:
    """Return whether some lowering of the program is right only on a domain."""
    return any(is_bounded(n) for g in program.graphs for n in nodes_of(g)[0])


def right_everywhere(program: Program) -> Program:
    """Return the program with only lowerings that are right for all floats."""
    return _with_right_lowerings(program, [set() for _ in program.graphs])


def right_inside(program: Program) -> Program:
    """Return the program with bounded lowerings only where a domain keeps their operands finite."""
    return _with_right_lowerings(program, _reading_finite(program))


def rules_for(program: Program, assume: tuple[str, ...], platform: str) -> tuple[Rule, ...]:
    """Return the rules of the library for a program on a JAX platform.

    On GPUs these include the rules that assume finite operands, if the program has no others inside
    of a domain: such rules pad kernels with zeros, and there a launch costs more than that.
    """
    return standard_rules(assume, bounded=platform == "gpu" and keeps_finite(program))


def keeps_finite(program: Program) -> bool:
    """Return whether all operands of a program are finite inside of a domain."""
    n_nodes = [len(nodes_of(g)[0]) for g in program.graphs]
    return [len(reading) for reading in _reading_finite(program)] == n_nodes


def bounded_rules(rules: Sequence[Rule], assume: tuple[str, ...]) -> frozenset[str]:
    """Return the names of the rules whose results need a domain under these assumptions."""
    bounded = () if "finite" in assume else rules
    return frozenset(r.name for r in bounded if "finite-operands" in r.assumes)


def _with_right_lowerings(program: Program, keep: Sequence[set[int]]) -> Program:
    graphs, changed = list(program.graphs), False
    for g, graph in enumerate(graphs):
        nodes, outputs, _ = nodes_of(graph)
        new = [
            _right_lowering(n, [nodes[a] for a in n.args])
            if is_bounded(n) and i not in keep[g]
            else n
            for i, n in enumerate(nodes)
        ]
        if new != nodes:
            graphs[g], changed = build(new, outputs), True
    return program.with_graphs(graphs) if changed else program


def _right_lowering(node: Node, args: Sequence[Node]) -> Node:
    """Return the node with the lowering that its row names as `instead`, if that is applicable,
    else with the plain one.
    """
    instead = number_of(node.op, LOWERINGS[node.op][node.lowering].instead)
    fits = instead in applicable(node, tuple(args))
    return replace(node, lowering=instead if fits else 0)


def _reading_finite(program: Program) -> list[set[int]]:
    """Return for each graph the nodes whose operands are all finite for finite arguments."""
    n_graphs = len(program.graphs)
    entering: list[bool] = [True] * n_graphs  # whether a graph's inputs are finite
    found: list[set[int]] = [set() for _ in range(n_graphs)]
    for g in (0, *range(n_graphs - 1, 0, -1)):  # callers before callees
        nodes, _, slots = nodes_of(program.graphs[g])
        fixed = np.asarray(program.graphs[g].nodes.weight_only)[slots]
        finite: list[bool] = []
        for i, node in enumerate(nodes):
            binding = binding_of(node, program.bindings)
            is_bound = isinstance(binding, Equation | Call)
            args = flat_operands(nodes, node) if is_bound else node.args
            reads = all(finite[a] for a in args)
            if reads:
                found[g].add(i)
            if isinstance(binding, Call):
                for body in binding.bodies:
                    entering[body + 1] &= reads and binding.equation is None
                finite.append(reads and all(_makes_finite(program, b + 1) for b in binding.bodies))
            elif isinstance(binding, Equation):
                finite.append(reads and binding.name in _MOVING)
            elif node.op == "input":
                finite.append(entering[g])
            else:
                finite.append(bool(fixed[i]) or (reads and _is_finite(node, fixed)))
    return found


def _is_finite(node: Node, fixed: np.ndarray) -> bool:
    """Return whether a node maps finite values to finite ones; a divisor must be weight-only."""
    if node.op == "div":
        return bool(fixed[node.args[1]])
    if node.op == "integer_pow":
        return node.scalar_attr("exponent") >= 0
    return node.op in _FINITE


def _makes_finite(program: Program, g: int) -> bool:
    """Return whether all operators of a body map finite values to finite ones."""
    nodes, _, slots = nodes_of(program.graphs[g])
    fixed = np.asarray(program.graphs[g].nodes.weight_only)[slots]
    return all(fixed[i] or _is_finite(n, fixed) for i, n in enumerate(nodes))
