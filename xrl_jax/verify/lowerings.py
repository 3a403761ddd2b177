"""Verification of lowerings by comparison with the plain lowering.

A lowering is compared with the plain one in its own precision and in float64, on random nodes,
dtypes and attributes, and on special values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import kinds, ops
from xrl_jax.graph.attributes import with_kind
from xrl_jax.graph.graph import Node
from xrl_jax.graph.view import view_of
from xrl_jax.libraries.base import Facts, Lowering
from xrl_jax.lower.table import facts_of, lower
from xrl_jax.runtime.settings import own_settings
from xrl_jax.verify.samplers.nodes import Sample, random_node
from xrl_jax.verify.verify import Verdict

ORDINARY, SPECIAL = 16.0, 64.0  # allowed error in units in the last place of the summed magnitudes
_MOST_DRAWS = 60  # of random nodes, per node to compare
# The cheapest compilation, because the code compiled here runs only a few times.
_OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": "0"}

Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]


class Difference(NamedTuple):
    """The difference between the result of a lowering and that of the plain one."""

    error: float  # the largest, relative to the sum of the magnitudes that make up a result
    problem: str = ""  # a description of the failure; "" for none


class Compare(Protocol):
    """The type of the functions that `comparison` returns."""

    def __call__(self, values: Sequence[np.ndarray], units: float = ...) -> list[Difference]: ...


def _at_places(value: float) -> Change:
    def change(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.where(rng.random(x.shape) < 0.1, value, x).astype(x.dtype)

    return change


# Changes to the first argument, by the name used in verdicts.
SPECIAL_VALUES: dict[str, Change] = {
    "NaN": _at_places(np.nan),
    "infinities": _at_places(np.inf),
    "outliers": lambda x, rng: np.where(rng.random(x.shape) < 0.1, 1e6 * x, x).astype(x.dtype),
}


@own_settings()
def verify_lowering(
    op: str,
    lowering: Lowering,
    *,
    facts: type[Facts] | None = None,
    seed: int = 0,
    samples: int = 8,
) -> Verdict:
    """Verify a lowering against the plain lowering of an operator.

    Args:
      op: name of the operator, as in `graph.ops`.
      facts: the facts that the conditions of the lowering read; by default those of the operator's
        other lowerings.
      samples: number of random nodes to compare on.

    Returns:
      The verdict, as for the rule that chooses the lowering. `breaks` says which special values are
      lost; if any are, the lowering has to be `bounded`.

    Raises:
      KeyError: there is no such operator.

    >>> from xrl_jax.libraries.base import Lowering
    >>> from xrl_jax.verify.lowerings import verify_lowering
    >>> wrong = Lowering("twice", lambda node, x: x, when=("nonempty",))
    >>> verify_lowering("tanh", wrong, samples=1).ok
    False
    """
    if op not in ops.OPS:
        raise KeyError(f"there is no operator {op!r}")
    name, compared, largest, breaks = f"{op}-as-{lowering.name}", 0, 0.0, ""
    for example in range(_MOST_DRAWS * samples):
        rng = np.random.default_rng([seed, ops.OPS[op].code, example])
        sample = random_node(op, rng)
        if facts is None:
            node_facts = facts_of(sample.node, sample.args)
        else:
            node_facts = facts(np, view_of(sample.node, sample.args), op)
        if not all(node_facts.holds(test) for test in lowering.when):
            continue
        compare, values, compared = comparison(sample, [lowering]), sample.values(rng), compared + 1
        (found,) = compare(values)
        largest = max(largest, found.error)
        if found.problem:
            return Verdict(name, "float64", False, compared, largest, found.problem)
        breaks = breaks or _lost_special_values(sample, compare, values, rng)
        if compared == samples:
            break
    if not compared:
        why = f"its conditions held for none of {_MOST_DRAWS * samples} random nodes"
        return Verdict(name, "float64", False, 0, 0.0, why)
    return Verdict(name, "float64", True, compared, largest, breaks=breaks)


def _lost_special_values(
    sample: Sample, compare: Compare, values: Sequence[np.ndarray], rng: np.random.Generator
) -> str:
    """Describe which special values the compared lowering loses; "" for none."""
    first, *others = values
    if {sample.node.dtype, first.dtype.name} != {"float32"} or 0 in sample.node.shape:
        return ""
    for name, change in SPECIAL_VALUES.items():
        (found,) = compare([change(first, rng), *others], units=SPECIAL)
        if found.problem:
            return f"with {name} among the inputs, {found.problem}"
    return ""


def comparison(sample: Sample, lowerings: Sequence[Lowering]) -> Compare:
    """Return a function that compares lowerings on a node, compiled once for all values.

    Returns:
      compare(values, units=ORDINARY) -> the difference of each lowering. The allowed error is
      `units` units in the last place, relative to the sum of the magnitudes that make up a result,
      or `Lowering.error` if that is larger; integers and booleans must be equal.
    """
    node, wide = sample.node, _in_float64(sample.node)
    is_float = wide is not node

    def run(narrow: list[Any], doubles: list[Any]) -> Any:
        sizes = doubles
        if is_float:
            sizes = [jnp.where(jnp.isfinite(d), jnp.abs(d), 0.0) for d in doubles]
        reference = lower(node, *narrow), lower(wide, *doubles), lower(wide, *sizes)
        return reference, [lowering.fn(node, *narrow) for lowering in lowerings]

    compiled = jax.jit(run, compiler_options=_OPTIONS)

    def compare(values: Sequence[np.ndarray], units: float = ORDINARY) -> list[Difference]:
        exact = [v.astype(np.float64) for v in values] if is_float else list(values)
        with jax.enable_x64(True):
            references, results = compiled(list(values), exact)
        exactly = tuple(map(np.asarray, references))
        return [
            _difference(node, lowering, exactly, np.asarray(result), units)
            for lowering, result in zip(lowerings, results, strict=True)
        ]

    return compare


def _difference(
    node: Node,
    lowering: Lowering,
    references: Sequence[np.ndarray],
    result: np.ndarray,
    units: float,
) -> Difference:
    plain, reference, size = references
    if (result.shape, result.dtype.name) != (node.shape, node.dtype):
        is_not = f"{result.dtype}{list(result.shape)} instead of {node.dtype}{list(node.shape)}"
        return Difference(np.inf, is_not)
    if node.dtype not in ops.FLOAT_DTYPES:
        same = np.array_equal(result, reference)
        return Difference(0.0) if same else Difference(np.inf, f"another result for {node}")
    info, got, own = jnp.finfo(node.dtype), result.astype(np.float64), plain.astype(np.float64)
    # In float64 XLA turns grouped convolutions into dense ones, in which NaN spreads.
    wanted = np.where(np.isfinite(own) & np.isfinite(reference), reference, own)
    size = np.abs(np.where(np.isfinite(own), own, 0.0)) + np.abs(size) + float(info.tiny)
    if lowering.algorithm == "tiles" and size.size:
        # Sums over a whole tile cancel in each result, so errors scale with the largest size.
        size = np.full_like(size, size.max())
    with np.errstate(invalid="ignore"):
        error = np.where(np.isfinite(wanted), np.abs(got - wanted) / size, np.inf)
    error[(got == wanted) | (np.isnan(got) & np.isnan(wanted))] = 0.0
    allowed = max(units * float(info.eps), lowering.error.get(node.dtype, 0.0))
    if not error.size or (error <= allowed).all():
        return Difference(float(error.max(initial=0.0)))
    at = np.argmin(error <= allowed)
    numbers = f"{got.reshape(-1)[at]:.9g} instead of {wanted.reshape(-1)[at]:.9g}"
    return Difference(float(error.reshape(-1)[at]), f"{numbers} for {node}")


def _in_float64(node: Node) -> Node:
    """Return the node in float64 if its dtype is floating-point, else the node itself."""
    if node.dtype not in ops.FLOAT_DTYPES:
        return node
    attrs = with_kind(node, kinds.DTYPE, ops.DTYPE_CODE["float64"])
    return Node(node.op, node.args, attrs, shape=node.shape, dtype="float64")
