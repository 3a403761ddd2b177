"""Batching: products with the same weights in every step are computed once for all steps.

A product of few rows takes as long as reading its weights, and a recurrent network reads them again
in every step. Products in a step that do not depend on the previous step can be computed for all
steps at once, before the first (Appleyard, Kočiský, Blunsom 2016, arXiv:1604.01946).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from xrl_jax.graph import ops
from xrl_jax.graph.bindings import Binding, Call, Input, call_of, position_of
from xrl_jax.graph.graph import Node, pack_attrs
from xrl_jax.graph.operands import attach, flat_operands
from xrl_jax.program.host import (
    Bindings,
    HostGraph,
    HostProgram,
    disassemble,
    reassemble,
    source_key,
    weight_only,
)
from xrl_jax.program.program import Program
from xrl_jax.transform.rows import append_concat, append_reshape, append_slice

MOST_ROWS = 16  # of one step; with more rows, reading the weights does not dominate
# Operators allowed between an input of a step and its product.
_VIEWS = ("reshape", "slice", "transpose", "broadcast", "cast", "copy")


def batched(program: Program) -> Program:
    """Return the program with products in its bodies computed once for all calls of the body.

    A product qualifies if it multiplies a value that depends on no call of the body by weights that
    all calls share. Returns `program` itself if no product qualifies.
    """
    host = start = disassemble(program)
    for body in range(len(host.bodies)):
        host = _of_body(host, body, program.weights)
    return program if host is start else reassemble(program, host)


def _of_body(host: HostProgram, body: int, weights: Sequence[bool]) -> HostProgram:
    calls = _calls(host, body)
    if len(calls) < 2:
        return host
    main = host.main
    later = _depend_on_calls(main, set(calls))
    operands = [flat_operands(main.nodes, main.nodes[c]) for c in calls]
    fixed = weight_only(main, weights, host.bindings)
    # Inputs that are the same weight in all calls, and inputs that are available before the first.
    each = list(zip(*operands, strict=True))
    shared = [len(set(of)) == 1 and fixed[of[0]] for of in each]
    early = [not any(later[x] for x in of) for of in each]
    found = _products(host.bodies[body], host.bindings, shared, early)
    if not found:
        return host
    bindings = Bindings(host.bindings)
    inner = _without_products(found, host.bodies[body], bindings)
    # Nodes that depend on no call come first, then the products, which all calls read.
    order = sorted(range(len(main.nodes)), key=lambda i: later[i])
    first_later = len(main.nodes) - sum(later)
    nodes: list[Node] = []
    new: dict[int, int] = {}
    made: list[list[int]] = []  # indices of the results, by product, then by call
    for n, i in enumerate(order):
        if n == first_later:
            early_ones = [[new.get(o, -1) for o in of] for of in operands]
            made = _append_products(nodes, host.bodies[body], found, early_ones, host.bindings)
        node = main.nodes[i]
        if i in calls:
            call = calls.index(i)
            given = [*(new[o] for o in operands[call]), *(m[call] for m in made)]
            new[i] = attach(nodes, node, given)
        else:
            nodes.append(replace(node, args=tuple(new[a] for a in node.args)))
            new[i] = len(nodes) - 1
    outputs = tuple(new[o] for o in main.outputs)
    bodies = [*host.bodies[:body], inner, *host.bodies[body + 1 :]]
    main = replace(main, nodes=tuple(nodes), outputs=outputs)
    return HostProgram(main, tuple(bodies), tuple(bindings.rows))


def _calls(host: HostProgram, body: int) -> list[int]:
    """Return where the main graph calls the body.

    Empty if the body is also called from elsewhere, or if its calls have effects or are not inline.
    """

    def calls(graph: HostGraph) -> list[tuple[int, Call]]:
        each = ((i, call_of(n, host.bindings)) for i, n in enumerate(graph.nodes))
        return [(i, call) for i, call in each if call is not None and body in call.bodies]

    here = calls(host.main)
    nodes = host.main.nodes
    plain = all(c.kind == "inline" and not nodes[i].scalar_attr("pinned") for i, c in here)
    return [i for i, _ in here] if plain and not any(map(calls, host.bodies)) else []


def _depend_on_calls(main: HostGraph, calls: set[int]) -> list[bool]:
    """Return, for each node, whether it is one of `calls` or depends on one."""
    later: list[bool] = []
    for i, node in enumerate(main.nodes):
        later.append(i in calls or any(later[a] for a in node.args))
    return later


def _products(
    body: HostGraph, bindings: Sequence[Binding], shared: Sequence[bool], early: Sequence[bool]
) -> list[int]:
    """Return the products of a body that can be batched: few rows by a matrix.

    The left operand is available before all calls (`early`), the right one depends only on weights
    that all calls share (`shared`).
    """
    by_shared = weight_only(body, shared, bindings)
    from_early: list[bool] = []
    for node in body.nodes:
        place = position_of(node, bindings)
        is_view = node.op in _VIEWS and all(from_early[a] for a in node.args)
        from_early.append(is_view if place is None else early[place])
    found = []
    for i, node in enumerate(body.nodes):
        if node.op != "dot" or node.scalar_attr("lhs_batch") or node.scalar_attr("rhs_batch"):
            continue
        left, right = (body.nodes[a] for a in node.args)
        rows, columns = left.shape[:-1], right.shape[-1:]
        is_matrix = len(left.shape) in (1, 2) and len(right.shape) == 2
        contracts = (node.scalar_attr("lhs_contract"), node.scalar_attr("rhs_contract"))
        plain = (ops.pack_dims((len(left.shape) - 1,)), ops.pack_dims((0,)))
        at, by = node.args
        fits = from_early[at] and not by_shared[at] and by_shared[by]
        if not fits or not is_matrix or contracts != plain:
            continue
        if node.shape == (*rows, *columns) and (rows or (1,))[0] <= MOST_ROWS:
            found.append(i)
    return found


def _without_products(products: Sequence[int], body: HostGraph, bindings: Bindings) -> HostGraph:
    """Return the body with these products replaced by additional inputs."""
    nodes, avals = list(body.nodes), list(body.in_avals)
    for i in products:
        made = nodes[i]
        ref = bindings.add(Input(len(avals)))
        nodes[i] = Node("input", shape=made.shape, dtype=made.dtype, ref=ref)
        avals.append(jax.ShapeDtypeStruct(made.shape, made.dtype))
    return replace(body, nodes=tuple(nodes), in_avals=tuple(avals))


def _append_products(
    nodes: list[Node],
    body: HostGraph,
    products: Sequence[int],
    operands: Sequence[Sequence[int]],
    bindings: Sequence[Binding],
) -> list[list[int]]:
    """Append the products of a body for all calls; return their indices by product and call.

    Args:
      operands: of each call; those that the products do not need may be missing (-1).
    """
    there: list[dict[int, int]] = [{} for _ in operands]  # by call: where each body node is
    sources = {source_key(n): i for i, n in enumerate(nodes) if n.op in ops.SOURCES}

    def copied(i: int, call: int) -> int:
        """Return where the value of a body node is for a call, appending it if necessary."""
        node = body.nodes[i]
        place = position_of(node, bindings)
        if place is not None:
            return operands[call][place]
        if i not in there[call]:
            args = tuple(copied(a, call) for a in node.args)
            known = sources.get(source_key(node)) if node.op in ops.SOURCES else None
            if known is None:
                nodes.append(replace(node, args=args))
            there[call][i] = len(nodes) - 1 if known is None else known
        return there[call][i]

    made = []
    for i in products:
        product = body.nodes[i]
        left, right = product.args
        rows = product.shape[0] if len(product.shape) == 2 else 1
        width = body.nodes[left].shape[-1]
        parts = [
            append_reshape(nodes, copied(left, c), (rows, width)) for c in range(len(operands))
        ]
        all_rows, kernel = append_concat(nodes, parts), copied(right, 0)
        attrs: dict[str, int | Sequence[int]] = {
            f.name: product.attr(f.name) for f in product.spec.fields
        }
        attrs["lhs_contract"] = ops.pack_dims((1,))
        shape = (rows * len(parts), product.shape[-1])
        whole = Node("dot", (all_rows, kernel), pack_attrs("dot", attrs), shape=shape)
        nodes.append(replace(whole, dtype=product.dtype))
        at = len(nodes) - 1
        row = [append_slice(nodes, at, c * rows, (c + 1) * rows) for c in range(len(parts))]
        made.append([append_reshape(nodes, r, product.shape) for r in row])
    return made
