"""Folding: equal repeated regions become a body that is called; and unfolding, its inverse.

The twelve layers of a transformer are the same graph twelve times. Once folded, matching, policy,
cost model and timing process it once, and a rewrite of the body rewrites all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from xrl_jax.graph import ops
from xrl_jax.graph.bindings import Array, Call, Input, call_of, position_of
from xrl_jax.graph.graph import Node
from xrl_jax.graph.operands import flat_operands
from xrl_jax.program.host import (
    Bindings,
    HostGraph,
    HostProgram,
    append_call,
    disassemble,
    live,
    reassemble,
    source_key,
    struct,
)
from xrl_jax.program.program import Program
from xrl_jax.transform.repeats import Run, find_runs, results_of

_SHARED_SOURCES = ("const", "iota", "array")  # moved into the body if all copies use the same one


def fold(program: Program) -> Program:
    """Return the program with equal repeated regions of its main graph as bodies with a count.

    Only consecutive repeats of at least `MIN_REGION` nodes without effects are folded. Values that
    differ between the copies become inputs of the body; values used outside a copy become outputs.

    >>> def layers(x):
    ...     for _ in range(8):
    ...         x = jnp.tanh(jnp.sin(jnp.exp(x)) * jnp.cos(x) + 1.0) - jnp.sqrt(x)
    ...     return x
    >>> program = xrl_jax.from_jax(layers, jnp.ones(3), fold=False)
    >>> xrl_jax.fold(program).counts
    (1.0, 8.0)
    """
    host = disassemble(program)
    folded = fold_host(host)
    return program if folded is host else reassemble(program, folded)


def fold_host(host: HostProgram) -> HostProgram:
    """Fold a host program, as `fold` does.

    A graph that is too large for any bucket may fit once it is folded.
    """
    main = live(host.main)
    runs = find_runs(main)
    return _replace_runs(replace(host, main=main), runs) if runs else host


def unfold(program: Program) -> Program:
    """Return the program with every "inline" call replaced by its body's nodes, in all graphs.

    >>> def layers(x):
    ...     for _ in range(8):
    ...         x = jnp.tanh(jnp.sin(jnp.exp(x)) * jnp.cos(x) + 1.0) - jnp.sqrt(x)
    ...     return x
    >>> program = xrl_jax.from_jax(layers, jnp.ones(3))
    >>> len(program.bodies), len(xrl_jax.unfold(program).bodies)
    (1, 0)
    """
    host = disassemble(program)
    done: list[HostGraph] = []
    for body in host.bodies:
        done.append(_inline(body, done, host))
    return reassemble(
        program, HostProgram(_inline(host.main, done, host), tuple(done), host.bindings)
    )


def _replace_runs(host: HostProgram, runs: Sequence[Run]) -> HostProgram:
    """Return the program with the runs replaced by calls of new bodies."""
    bindings = Bindings(host.bindings)
    bodies = list(host.bodies)
    calls: dict[int, tuple[list[int], list[int], int]] = {}  # by the last member of a copy
    inside: set[int] = set()
    for run in runs:
        body, operands, results = _body(host, run, bindings)
        bodies.append(body)
        ref = bindings.add(Call("inline", (len(bodies) - 1,)))
        for c in range(run.copies):
            members = run.members(c)
            inside.update(members)
            outs = [members[r] for r in results]
            calls[members[-1]] = ([o[c] for o in operands], outs, ref)
    nodes: list[Node] = []
    new: dict[int, int] = {}
    for i, node in enumerate(host.main.nodes):
        if i in calls:
            operands, outs, ref = calls[i]
            made = [host.main.nodes[o] for o in outs]
            new.update(
                zip(outs, append_call(nodes, ref, [new[o] for o in operands], made), strict=True)
            )
        elif i not in inside:
            new[i] = len(nodes)
            nodes.append(replace(node, args=tuple(new[a] for a in node.args)))
    outputs = tuple(new[o] for o in host.main.outputs)
    main = replace(host.main, nodes=tuple(nodes), outputs=outputs)
    return HostProgram(main, tuple(bodies), tuple(bindings.rows))


def _body(
    host: HostProgram, run: Run, bindings: Bindings
) -> tuple[HostGraph, list[tuple[int, ...]], list[int]]:
    """Return a run's body, each input's operands (one per copy), and which members are results."""
    graph = host.main
    copies = [run.members(c) for c in range(run.copies)]
    at = {n: i for i, n in enumerate(copies[0])}
    inputs: dict[tuple[int, ...], int] = {}
    operands: list[tuple[int, ...]] = []
    nodes: list[Node] = []
    new: list[int] = []  # index in the body of each member
    for j, member in enumerate(copies[0]):
        args = []
        for slot, arg in enumerate(graph.nodes[member].args):
            if arg in at:
                args.append(new[at[arg]])
                continue
            each = tuple(graph.nodes[c[j]].args[slot] for c in copies)
            if each not in inputs:
                source = graph.nodes[arg]
                inputs[each] = len(nodes)
                if source.op not in _SHARED_SOURCES or len(set(each)) > 1:
                    ref = bindings.add(Input(len(operands)))
                    operands.append(each)
                    source = Node("input", shape=source.shape, dtype=source.dtype, ref=ref)
                nodes.append(source)
            args.append(inputs[each])
        new.append(len(nodes))
        nodes.append(replace(graph.nodes[member], args=tuple(args)))
    results = sorted(set().union(*(results_of(run, c) for c in range(run.copies))))
    in_avals = tuple(_aval(host, graph, each[0]) for each in operands)
    name = f"repeat of {run.period}"
    return (
        HostGraph(tuple(nodes), tuple(new[j] for j in results), in_avals, name),
        operands,
        results,
    )


def _aval(host: HostProgram, graph: HostGraph, index: int) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a node.

    If the dtype is "extended", they are taken from the bindings.
    """
    node = graph.nodes[index]
    if node.dtype != "extended":
        return jax.ShapeDtypeStruct(node.shape, node.dtype)
    result = 0
    if node.op == "proj":
        result, node = node.scalar_attr("index"), graph.nodes[node.args[0]]
    binding = host.bindings[node.ref]
    if isinstance(binding, Input):
        return graph.in_avals[binding.position]
    if isinstance(binding, Array):
        return struct(binding.value)
    if isinstance(binding, Call) and binding.equation is None:
        body = host.bodies[binding.bodies[0]]
        return _aval(host, body, body.outputs[result])
    equation = binding.equation if isinstance(binding, Call) else binding
    assert equation is not None
    return struct(equation.avals[result])


# --- unfolding -----------------------------------------------------------------------------------


def _inline(graph: HostGraph, bodies: Sequence[HostGraph], host: HostProgram) -> HostGraph:
    """Return the graph with its calls inlined; `bodies` must hold no inline calls."""
    nodes: list[Node] = []
    sources: dict[Any, int] = {}

    def append(node: Node, args: Sequence[int]) -> int:
        if node.op in ops.SOURCES:
            if source_key(node) in sources:
                return sources[source_key(node)]
            sources[source_key(node)] = len(nodes)
        nodes.append(replace(node, args=tuple(args)))
        return len(nodes) - 1

    def inlined(body: HostGraph, operands: Sequence[int]) -> list[int]:
        new: list[int] = []
        for node in body.nodes:
            position = position_of(node, host.bindings)
            if position is not None:
                new.append(operands[position])
            else:
                new.append(append(node, [new[a] for a in node.args]))
        return [new[o] for o in body.outputs]

    new: list[int] = []
    results: dict[int, list[int]] = {}  # of inlined calls with several results
    for i, node in enumerate(graph.nodes):
        call = call_of(node, host.bindings, "inline")
        if call is not None:
            operands = [new[a] for a in flat_operands(graph.nodes, node)]
            results[i] = inlined(bodies[call.bodies[0]], operands)
            # The tuple itself has no node: only its projections refer to it.
            new.append(results[i][0] if results[i] else -1)
        elif node.op == "proj" and node.args[0] in results:
            new.append(results[node.args[0]][node.scalar_attr("index")])
        else:
            new.append(append(node, [new[a] for a in node.args]))
    outputs = tuple(new[o] for o in graph.outputs)
    return live(replace(graph, nodes=tuple(nodes), outputs=outputs))
