"""Tests of a rewrite on special values: NaN, infinities, large, small and shifted numbers.

A rule that is right for real numbers may be wrong for floats. Both sides are computed in float32 on
inputs drawn from several kinds of edge values. Weights are checked before a program is used, so
they are finite here, and large in one kind only. A rewrite keeps the contract if results are NaN or
infinite exactly where they were before, and finite results agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from xrl_jax.graph.graph import Node
from xrl_jax.verify.domains import Floats
from xrl_jax.verify.evaluate import evaluate
from xrl_jax.verify.instances import Instance

_SPECIAL_SHARE = 0.3  # share of the elements that become special
_SMALLEST = 1e-30  # smaller elements are not compared on their own
_AGREE = 1e-3  # relative to the largest element, or to each element if nothing is summed
_DTYPES = ("float32", "bool", "int32")

Draw = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def _put(value: float) -> Draw:
    return lambda x, rng: np.where(rng.random(x.shape) < _SPECIAL_SHARE, value, x)


def _scaled(factor: float, share: float = 1.0, shift: float = 0.0) -> Draw:
    return lambda x, rng: np.where(rng.random(x.shape) < share, x * factor + shift, x)


WEIGHTS_TOO = "numbers near 100, in weights too,"
KINDS: dict[str, Draw] = {
    "NaN": _put(np.nan),
    "inf": _put(np.inf),
    "-inf": _put(-np.inf),
    "numbers near 1e30": _scaled(1e30, 0.5),
    "numbers near 100": _scaled(100.0, 0.5),
    WEIGHTS_TOO: _scaled(100.0, 0.5),
    "numbers near 1e-12": _scaled(1e-12),
    "a mean of 1e3": _scaled(0.01, shift=1e3),
    "zeros": _scaled(0.0),
    "negative numbers": lambda x, rng: -np.abs(x),
}
NOT_FINITE = frozenset({"NaN", "inf", "-inf"})
# Operators whose results may be much smaller than their operands.
_SUMS = frozenset(
    "add sub reduce_sum window_sum cumsum dot conv softmax log log1p expm1 rem sin cos tan floor "
    "ceil round".split()
)


def what_breaks(
    before: Instance,
    nodes: Sequence[Node],
    outputs: Sequence[int],
    rng: np.random.Generator,
    kinds: Sequence[str] = tuple(KINDS),
) -> str:
    """Describe what a rewrite changes on these kinds of inputs.

    Returns "" if nothing changes, or if the graph has no float32 input or has dtypes other than
    float32, bool and int32.
    """
    sources = [n for n in before.nodes if n.ref >= 0]
    if any(n.dtype not in _DTYPES for n in before.nodes):
        return ""
    if not any(n.dtype == "float32" and n.op == "input" for n in sources):
        return ""
    summed = any(n.op in _SUMS for n in before.nodes)
    domain = Floats(single=True)
    for kind in kinds:
        drawn = {n.ref: domain.variable(n.shape, n.dtype, rng) for n in sources}
        for n in sources:
            if n.dtype == "float32":
                x = rng.standard_normal(n.shape)
                special = n.op == "input" or kind == WEIGHTS_TOO
                drawn[n.ref] = np.float32(KINDS[kind](x, rng) if special else x)
        old = evaluate(before.nodes, before.roots, drawn, domain)
        new = evaluate(nodes, outputs, drawn, domain)
        for i, pair in enumerate(zip(old, new, strict=True)):
            a, b = (np.asarray(x, np.float64) for x in pair)
            found = _difference(a, b, summed)
            if found:
                exact = evaluate(before.nodes, before.roots, drawn, Floats())[i]
                found = _difference(a, b, summed, np.asarray(exact, np.float64))
            if found:
                return f"with {kind} among the inputs, {found}"
    return ""


def _difference(a: np.ndarray, b: np.ndarray, summed: bool, exact: np.ndarray | None = None) -> str:
    """Describe how a result `b` differs from the former one `a`; not where it is nearer to `exact`,
    if that is given.
    """
    special = ~(np.isfinite(a) & np.isfinite(b))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if (special & ~same).any():
        at = np.argmax((special & ~same).reshape(-1))
        return f"{a.reshape(-1)[at]} became {b.reshape(-1)[at]}"
    exact = None if exact is None else exact[~special]
    a, b = a[~special], b[~special]
    if not a.size:
        return ""
    size = np.abs(a)
    scale = np.full(a.shape, size.max()) if summed else np.where(size < _SMALLEST, np.inf, size)
    wrong = np.abs(a - b) > _AGREE * scale
    if exact is not None:
        wrong &= np.abs(b - exact) > np.abs(a - exact)
    at = int(np.argmax(wrong))
    return f"{a[at]:.6g} became {b[at]:.6g}" if wrong.any() else ""
