"""Priors of lowerings, relative to the plain one: from timings to lines of a library's source."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import xrl_jax
from experiments.priors import Multiple, as_source, lowered, medians, multiples, regions_of
from xrl_jax.lower.table import LOWERINGS


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ w


def regions():
    args = jnp.ones((4, 4)), jnp.ones((4, 4))
    return regions_of([xrl_jax.from_jax(product, *args, weights=(1,))])


def test_regions_are_distinct_operators_with_several_lowerings() -> None:
    assert [r.node.op for r in regions()] == ["dot"]


def test_xlas_lowering_comes_first() -> None:
    found = lowered(regions()[0])
    assert found[0].node.lowering == 0 and len(found) > 1
    assert len({f.node.lowering for f in found}) == len(found)


def test_multiples_are_relative_to_xlas_lowering_unless_it_is_too_short() -> None:
    plain, first, second, *_ = lowered(regions()[0])
    timed = {plain: 2e-3, first: 1e-3, second: float("inf")}
    name = LOWERINGS["dot"][first.node.lowering].name
    assert list(multiples(timed, least=1e-3)) == [Multiple("dot", 0, name, 0.5)]
    assert list(multiples(timed, least=3e-3)) == []
    assert list(multiples(timed | {plain: float("inf")}, least=1e-3)) == []


def test_medians_by_operator_and_kind_are_sorted_fastest_first() -> None:
    found = [Multiple("conv", 1, "a", m) for m in (0.9, 1.0, 5.0)]
    found += [Multiple("conv", 1, "b", 0.5), Multiple("conv", 0, "a", 2.0)]
    table = medians(found)
    assert table == {("conv", 0): {"a": 2.0}, ("conv", 1): {"b": 0.5, "a": 1.0}}
    assert as_source(table) == '    ("conv", 0): "a 2",\n    ("conv", 1): "b 0.5 a 1",'
