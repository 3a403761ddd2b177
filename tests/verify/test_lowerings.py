"""Verdicts on lowerings: correct ones, wrong ones, and those that lose special values."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from xrl_jax.libraries.base import Facts, Lowering
from xrl_jax.verify.lowerings import verify_lowering


def is_single(facts: Facts) -> Any:
    return facts.is_single(facts.view.dtype)


def test_a_correct_lowering_keeps_special_values_too() -> None:
    by_tanh = Lowering("tanh", lambda node, x: 0.5 * jnp.tanh(0.5 * x) + 0.5, (is_single,))
    verdict = verify_lowering("logistic", by_tanh)
    assert (verdict.rule, verdict.ok, verdict.samples) == ("logistic-as-tanh", True, 8)
    assert verdict.breaks == ""


def test_a_wrong_lowering_is_refused_with_a_value_and_the_node() -> None:
    verdict = verify_lowering(
        "logistic", Lowering("half", lambda node, x: 0.5 + 0 * x, (is_single,))
    )
    assert not verdict.ok
    assert verdict.counterexample.startswith("0.5 instead of ")
    assert "for Node(op='logistic'" in verdict.counterexample


def test_the_largest_error_is_reported_and_limited_by_the_stated_one() -> None:
    def rounded(node: Any, x: Any) -> Any:
        return jnp.tanh(x).astype("bfloat16").astype("float32")

    refused = verify_lowering("tanh", Lowering("rounded", rounded, (is_single,)))
    assert not refused.ok and 1e-4 < refused.bound < 2.0**-8
    stated = Lowering("rounded", rounded, (is_single,), error={"float32": 2.0**-8})
    verdict = verify_lowering("tanh", stated)
    assert verdict.ok and 1e-4 < verdict.bound < 2.0**-8


def test_another_dtype_is_refused() -> None:
    wide = Lowering("wide", lambda node, x: jnp.float64(jnp.tanh(x)), (is_single,))
    assert verify_lowering("tanh", wide).counterexample.startswith("float64[")


def test_lost_special_values_are_reported() -> None:
    """For infinity this lowering computes inf / inf."""
    ratio = Lowering("ratio", lambda node, x: jnp.exp(x) / (1 + jnp.exp(x)), (is_single,))
    verdict = verify_lowering("logistic", ratio)
    assert verdict.ok
    assert verdict.breaks.startswith("with infinities among the inputs, nan instead of 1 for Node(")


def test_a_lowering_whose_conditions_never_hold_is_not_verified() -> None:
    verdict = verify_lowering(
        "tanh", Lowering("never", lambda node, x: x, (lambda _: False,)), samples=1
    )
    assert not verdict.ok
    assert verdict.counterexample == "its conditions held for none of 60 random nodes"


def test_an_unknown_operator_is_named() -> None:
    with pytest.raises(KeyError, match="there is no operator 'tahn'"):
        verify_lowering("tahn", Lowering("fast", lambda node, x: x))
