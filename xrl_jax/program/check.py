"""Consistency of the graphs of a program: calls, arguments, weights, numbers of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from xrl_jax.graph.bindings import Call, call_of, position_of
from xrl_jax.graph.check import View, aval_type, check, matches
from xrl_jax.graph.graph import GraphError
from xrl_jax.graph.operands import flat_operands
from xrl_jax.graph.text import format_type
from xrl_jax.program.program import Body, Program


def _n_inputs(program: Program, call: Call) -> int | None:
    """Return how many operands the call takes; None if its bodies' inputs are inconsistent."""
    n_in = [len(program.bodies[b].in_avals) for b in call.bodies]
    params = call.equation.params if call.equation is not None else {}
    if call.kind == "while":
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        n_carry = n_in[1] - n_body
        return n_cond + n_body + n_carry if n_in[0] - n_cond == n_carry else None
    if len(set(n_in)) != 1:
        return None
    return n_in[0] + 1 if call.kind == "cond" else n_in[0]


_N_BODIES: Mapping[str, int | None] = MappingProxyType(
    {"inline": 1, "scan": 1, "while": 2, "cond": None}
)


def _check_calls(view: View, program: Program, callable_bodies: int) -> None:
    """Check the calls of a graph that may call bodies 0 to `callable_bodies - 1`."""
    for slot in view.live:
        node = view.nodes[slot]
        binding = call_of(node, program.bindings)
        if binding is None:
            continue
        if binding.kind not in _N_BODIES:
            view.fail(slot, f"unknown call kind {binding.kind!r} (known: {', '.join(_N_BODIES)})")
        wanted = _N_BODIES[binding.kind]
        if wanted not in (None, len(binding.bodies)) or not binding.bodies:
            view.fail(
                slot, f"a call of kind {binding.kind} cannot have {len(binding.bodies)} bodies"
            )
        for b in binding.bodies:
            if not 0 <= b < callable_bodies:
                view.fail(slot, f"runs body{b}, but may only run bodies 0 to {callable_bodies - 1}")
        n_args, n_in = node.scalar_attr("n_args"), _n_inputs(program, binding)
        if n_in is None:
            view.fail(slot, f"the bodies of this {binding.kind} differ in their inputs")
        if n_args != n_in:
            view.fail(slot, f"has {n_args} operands, but its {binding.kind} takes {n_in}")
        if binding.kind == "inline":
            _check_inline(view, slot, program.bodies[binding.bodies[0]])


def _check_inline(view: View, slot: int, body: Body) -> None:
    """Check that operands and results of an inline call have the types of its body."""
    for i, a in enumerate(flat_operands(view.nodes, view.nodes[slot])):
        if not matches(view.nodes[a], body.in_avals[i]):
            view.fail(
                slot, f"operand {i} is %{a}, but its body takes {aval_type(body.in_avals[i])}"
            )
    inside = View(body.graph, body.name)
    results = [inside.nodes[o] for o in inside.graph.globals.outputs.tolist() if o > 0]
    users = [u for u in view.live if slot in view.nodes[u].args and view.nodes[u].op == "proj"]
    for user, index in [(u, view.nodes[u].scalar_attr("index")) for u in users] or [(slot, 0)]:
        if index >= len(results):
            view.fail(user, f"index {index} is out of range: its body has {len(results)} results")
        if not matches(view.nodes[user], results[index]):
            found = format_type(results[index].shape, results[index].dtype)
            view.fail(user, f"its type differs from result {index} of its body, {found}")


def _check_inputs(
    view: View, program: Program, in_avals: Sequence[Any], weights: Sequence[bool] | None
) -> None:
    for slot in view.live:
        node = view.nodes[slot]
        at = position_of(node, program.bindings)
        if at is None:
            continue
        if not 0 <= at < len(in_avals):
            view.fail(slot, f"is argument {at}, but there are {len(in_avals)} arguments")
        if not matches(node, in_avals[at]):
            view.fail(slot, f"its type differs from argument {at}, {aval_type(in_avals[at])}")
        if weights is not None and weights[at] != (node.op == "weight"):
            wanted = "weight" if weights[at] else "input"
            view.fail(slot, f"argument {at} of the program must be {wanted}, not {node.op}")
        n_results = int(np.sum(view.graph.globals.outputs >= 0)) if weights is None else 0
        if node.op == "input" and not 0 <= node.attrs[0] <= n_results:
            view.fail(slot, f"carried is {node.attrs[0]}, but the body has {n_results} results")


def check_program(program: Program, *, lowerings: Mapping[str, int] | None = None) -> None:
    """Check that all graphs are well formed and fit together.

    Raises:
      GraphError: as for `check`; the message names the graph too.
    """
    if len(program.weights) != len(program.in_avals):
        raise GraphError(
            f"the program has {len(program.in_avals)} arguments, "
            f"but {len(program.weights)} weight flags"
        )
    whole = (program.graph, program.in_avals, program.n_outputs, program.weights)
    parts = [("main", *whole, len(program.bodies))]
    for i, body in enumerate(program.bodies):
        parts.append((f"body{i}", body.graph, body.in_avals, body.n_outputs, None, i))  # type: ignore[arg-type]
    for name, graph, in_avals, n_outputs, weights, callable_bodies in parts:
        check(graph, bindings=program.bindings, lowerings=lowerings, name=name)
        view = View(graph, name)
        _check_inputs(view, program, in_avals, weights)
        _check_calls(view, program, callable_bodies)
        n_found = int(np.sum(view.graph.globals.outputs >= 0))
        if n_found != n_outputs:
            raise GraphError(f"{name}: has {n_found} outputs, should have {n_outputs}")
