"""A new rule needs only its text. It is verified, matched and applied like the others."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import xrl_jax

TEXT = """
(rule double-is-sum (family mine) (source "school algebra")
  (lhs (mul ?x ?c)) (when (is-value ?c 2))
  (rhs (add ?x ?x)))
"""


def double(x: jax.Array) -> jax.Array:
    return jnp.tanh(x) * 2.0


def test_from_a_file_to_a_rewritten_program(tmp_path: Path) -> None:
    file = tmp_path / "mine.rules"
    file.write_text(TEXT, encoding="utf-8")
    (rule,) = xrl_jax.load_rules(file)
    assert xrl_jax.verify_rule(rule).ok
    x = jnp.arange(3.0)
    program = xrl_jax.from_jax(double, x)
    (candidate,) = xrl_jax.candidates(program, [rule])
    rewritten = xrl_jax.apply(program, candidate)
    assert str(rewritten) == (
        "graph main {\n"
        "  %1: float32[3] = input() ref=@0  # argument 0\n"
        "  %2: float32[3] = tanh(%1)\n"
        "  %3: float32[3] = add(%2, %2)\n"
        "  return %3\n"
        "}"
    )
    np.testing.assert_array_equal(rewritten(x), double(x))
