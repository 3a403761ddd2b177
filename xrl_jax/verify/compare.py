"""Comparison of both sides of a rewrite: the types of the rewritten graph and the root values.

Values are computed in the domain that the rule names as its evidence:

    field     residues modulo a prime of 31 bits; functions other than arithmetic are random
    exp       the same, with exp(a + b) = exp(a) exp(b)
    maxplus   the ordered integers; increasing functions are random increasing functions
    float64   double precision, edge values among the inputs; lowerings run as lax code
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from xrl_jax.graph import attributes, kinds, ops
from xrl_jax.graph.graph import Node, infer
from xrl_jax.lower.table import applicable, lower, name_of
from xrl_jax.verify.domains import Field, Floats, Integers
from xrl_jax.verify.evaluate import CannotEvaluateError, Domain, evaluate
from xrl_jax.verify.instances import Instance


def difference(
    evidence: str,
    before: Instance,
    nodes: Sequence[Node],
    outputs: Sequence[int],
    rng: np.random.Generator,
    seed: int,
) -> float:
    """Return the difference of both sides on random inputs: 0 if they are equal.

    For float64 it is relative to the largest element; in exact domains any difference is 1.

    Raises:
      CannotEvaluateError: an operator has no meaning in the domain of this evidence.
      ValueError: an attribute that no shape rule checks is out of range, e.g. the axes of a
        softmax.
    """
    if evidence == "float64" and any(n.lowering for n in (*before.nodes, *nodes)):
        return _lowered_difference(before, nodes, outputs, rng)
    domain = domain_of(evidence, seed)
    sources = {n.ref: domain.variable(n.shape, n.dtype, rng) for n in before.nodes if n.ref >= 0}
    old = evaluate(before.nodes, before.roots, sources, domain)
    new = evaluate(nodes, outputs, sources, domain)
    return max((domain.disagreement(a, b) for a, b in zip(old, new, strict=True)), default=0.0)


def domain_of(evidence: str, seed: int) -> Domain:
    """Return the domain that has this name in rule files."""
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
    """Return the degree of the polynomials that the nodes compute.

    For a quotient the degrees of both parts are added; an unknown function has the degree of its
    argument.
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
    """Describe what is wrong with the types, dtypes or attributes of a rewritten graph; "" if
    nothing is. Attributes must be in the normal form that `pack_attrs` produces.
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
                f"but the engine gives {node.dtype}{list(node.shape)}"
            )
        if not node.spec.takes_dtypes([a.dtype for a in args]):
            return f"%{i} ({node.op}) mixes dtypes {[a.dtype for a in args]}"
        normal = attributes.normal(node, len(args[0].shape))
        if normal != node.attrs:
            return (
                f"%{i} ({node.op}) has attributes {node.attrs}, but their normal form is {normal}"
            )
    return ""


def _lowered_difference(
    before: Instance, nodes: Sequence[Node], outputs: Sequence[int], rng: np.random.Generator
) -> float:
    """Return `difference` computed by the lowerings' lax code in double precision."""
    for n in nodes:
        if n.lowering not in applicable(n, tuple(nodes[a] for a in n.args)):
            raise CannotEvaluateError(f"lowering {name_of(n)} of {n.op} does not apply here")
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
    return max((domain.disagreement(a, b) for a, b in zip(old, new, strict=True)), default=0.0)


def _in_double(nodes: Sequence[Node]) -> list[Node]:
    double = ops.DTYPE_CODE["float64"]
    return [
        replace(
            n,
            dtype="float64" if "float" in n.dtype else n.dtype,
            attrs=attributes.with_kind(n, kinds.DTYPE, double),
        )
        for n in nodes
    ]
