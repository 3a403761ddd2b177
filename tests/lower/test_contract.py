"""What forms of operators do to special values: one that is right on all arguments has NaN and
infinities where the plain form has them, and an element that is large disturbs no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lower.generators import random_node
from tests.lower.test_conformance import CHOSEN, arrays, in_float64, rng_for
from tests.quick import QUICK
from xrl_jax.graph.graph import Node
from xrl_jax.lower.table import LOWERINGS, applicable, lower

_EXAMPLES, _TIMES = 160, 2  # nodes of an operator; how many of them each form is tried on
_Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def _at_places(value: float) -> _Change:
    def change(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.where(rng.random(x.shape) < 0.1, value, x).astype(x.dtype)

    return change


KINDS: dict[str, _Change] = {
    "nan": _at_places(np.nan),
    "infinite": _at_places(np.inf),
    "outliers": lambda x, rng: np.where(rng.random(x.shape) < 0.1, 1e6 * x, x).astype(x.dtype),
}


def broken(op: str, kind: str) -> tuple[set[str], set[str]]:
    """Names of the forms that were tried, and of those that break the contract on such values."""
    tried: Counter[str] = Counter()
    wrong: set[str] = set()
    for example in range(_EXAMPLES):
        rng = rng_for(op, example)
        sample = random_node(op, rng)
        node = sample.node
        if node.dtype != "float32" or 0 in node.shape:
            continue
        first, *others = arrays(sample, rng)
        values = [KINDS[kind](first, rng), *others]
        numbers = [i for i in applicable(node, sample.args) if i]
        forms = [LOWERINGS[op][i] for i in numbers if tried[LOWERINGS[op][i].name] < _TIMES]
        if not forms:
            continue
        plain, reference, size, results = _all(node, in_float64(sample), forms, values)
        tried.update(form.name for form in forms)
        for form, result in zip(forms, results, strict=True):
            # In float64 XLA makes dense convolutions of grouped ones, in which NaN spreads.
            expected = np.where(np.isfinite(plain) & np.isfinite(reference), reference, plain)
            finite = np.isfinite(expected)
            same = (result == expected) | (np.isnan(result) & np.isnan(expected))
            bound = 64 * np.finfo(np.float32).eps * size + np.finfo(np.float32).tiny
            with np.errstate(invalid="ignore"):
                close = finite & (np.abs(result - expected) <= bound)
            if not np.all(same | close):
                wrong.add(form.name)
    return set(tried), wrong


def _all(node: Node, wide: Node, forms: Any, values: Any) -> tuple[Any, Any, Any, list[Any]]:
    """The plain form's result, that in float64, the sizes of what was summed, and the forms'."""

    def run(*args: Any) -> Any:
        narrow, doubles = args[: len(values)], args[len(values) :]
        finite = [jnp.where(jnp.isfinite(d), jnp.abs(d), 0.0) for d in doubles]
        own = lower(node, *narrow), lower(wide, *doubles), lower(wide, *finite)
        return *own, [form.fn(node, *narrow) for form in forms]

    with jax.enable_x64(True):
        args = (*values, *(v.astype(np.float64) for v in values))
        found = jax.jit(run).lower(*args).compile(compiler_options=QUICK)(*args)
    plain, reference, size, results = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
    return plain, reference, np.abs(np.where(np.isfinite(plain), plain, 0)) + size, results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", CHOSEN)
def test_a_form_that_is_not_bounded_keeps_special_values(op: str, kind: str) -> None:
    tried, wrong = broken(op, kind)
    assert tried == {form.name for form in LOWERINGS[op][1:]}
    undeclared = wrong - {form.name for form in LOWERINGS[op] if form.bounded}
    assert not undeclared, f"{undeclared} lose special values: mend them, or say bounded=True"


def test_every_bounded_form_of_a_convolution_breaks_something() -> None:
    wrong = set().union(*(broken("conv", kind)[1] for kind in KINDS))
    assert wrong == {form.name for form in LOWERINGS["conv"] if form.bounded}
