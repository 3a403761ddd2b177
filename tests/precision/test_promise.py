"""A tolerance holds on inputs without a part in the choice, and on unusual ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.accept.coarse import coarse_error, coarse_results
from xrl_jax.accept.reference import reference
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.libraries.registry import by_name
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.precision.budget import ErrorBudget, error_budget
from xrl_jax.precision.narrow import LowerPrecision
from xrl_jax.program.program import Program
from xrl_jax.transform.narrow import STORAGE, narrowed, sites

LIBRARY = by_name("xla")
ACTIVATIONS: tuple[Callable[[Any], Any], ...] = (
    jnp.tanh,
    jax.nn.relu,
    jax.nn.gelu,
    jax.nn.softmax,
    jnp.sin,
    lambda x: x,
    lambda x: x / (1e-3 + jnp.abs(x).max(axis=-1, keepdims=True)),
)


def random_network(rng: np.random.Generator) -> tuple[Callable[..., Any], list[Any], Any]:
    """Return a function of weights and an input, weights with a few large elements, an input."""
    depth = int(rng.integers(1, 5))
    sizes = rng.integers(8, 65, depth + 1)
    kinds = [ACTIVATIONS[i] for i in rng.integers(len(ACTIVATIONS), size=depth)]
    weights = []
    for k, n in itertools.pairwise(sizes):
        w = rng.normal(size=(k, n)) * 10.0 ** rng.uniform(-2, 1) / np.sqrt(k)
        w = np.where(rng.random(w.shape) < 0.01, 20 * w, w)
        weights.append(jnp.asarray(w, jnp.float32))
    residual = bool(rng.integers(2))

    def fn(weights: list[Any], x: Any) -> Any:
        for w, kind in zip(weights, kinds, strict=True):
            y = kind(x @ w)
            x = x + y if residual and x.shape == y.shape else y
        return x

    x = rng.normal(size=(int(rng.integers(1, 5)), sizes[0])) * 10.0 ** rng.uniform(-1, 1)
    return fn, weights, jnp.asarray(x, jnp.float32)


def inputs_with_limits(
    program: Program, budget: ErrorBudget
) -> Iterator[tuple[Sequence[Any], float]]:
    """Yield inputs without a part in the choice and unusual ones, with the error allowed there."""
    for flat in budget.checked_on:
        yield flat, budget.tolerance
    exact, in_bfloat16 = reference(program, errors=False), coarse_results(program, "bf16")
    for flat in budget.unusual:
        yield flat, max(budget.tolerance, coarse_error(in_bfloat16(flat), exact(flat)))


def exceeds(seed: int) -> bool:
    """Return whether a choice for a random tolerance exceeds what is allowed on another input."""
    rng = np.random.default_rng(seed)
    fn, weights, x = random_network(rng)
    program = from_jax(fn, weights, x, weights=0)
    tolerance = 10.0 ** rng.uniform(-4, -1)
    budget = error_budget(program, [*weights, x], tolerance)
    gains = {s: {t: float(rng.uniform(0, 1)) for t in STORAGE} for s in sites(program, LIBRARY)}
    stage = LowerPrecision(budget.tolerance, budget.chosen_on, budget.unusual)
    for choice in stage.choices(program, gains, Stopwatch(60.0)):
        narrow = jax.jit(narrowed(program, choice.types, LIBRARY))
        for (*_, other), allowed in inputs_with_limits(program, budget):
            exact = np.asarray(fn(weights, other), np.float64)
            error = np.abs(np.asarray(narrow(weights, other), np.float64) - exact).max()
            if error > allowed * np.abs(exact).max():
                return True
    return False


def test_random_networks_keep_their_tolerance() -> None:
    """Even before the check, which refuses a choice that exceeds it."""
    assert [seed for seed in range(8) if exceeds(seed)] == []


@pytest.mark.slow
def test_two_hundred_random_networks_keep_their_tolerance(record_property: Any) -> None:
    wrong = [seed for seed in range(200) if exceeds(seed)]
    record_property("figure", f"200 random networks: {len(wrong)} choices refused by the check")
    assert len(wrong) <= 4
