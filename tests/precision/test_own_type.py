"""A network in bfloat16 may multiply in bfloat16 without a tolerance, where that is faster."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.precision import test_tolerance
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.library import OneDnn
from xrl_jax.precision.narrow import lower_precision
from xrl_jax.transform.widen import operand_type, widened

made_up, optimize = test_tolerance.made_up, test_tolerance.optimize  # fixtures
RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(256, 256)) / 16, jnp.bfloat16)
X = jnp.asarray(RNG.normal(size=(32, 256)), jnp.bfloat16)


def network(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ w


@pytest.fixture
def multiplies_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with instructions for bfloat16; XLA stands in for the library's kernels."""

    def is_fast(_: Any, row: Any, node: Any, __: Any) -> bool:
        return node.op == "dot" and row.name == "onednn_bfloat16"

    monkeypatch.setattr(OneDnn, "is_fast", is_fast)


def test_the_type_of_operands_is_that_of_all_products() -> None:
    assert operand_type(from_jax(network, W, X, weights=0)) == "bfloat16"
    wide = W.astype(jnp.float32)
    assert operand_type(from_jax(network, wide, X.astype(jnp.float32), weights=0)) is None
    mixed = from_jax(lambda w, x: (x @ w).astype(jnp.float32) @ wide, W, X, weights=0)
    assert operand_type(mixed) is None


@test_tolerance.needs_library
@pytest.mark.usefixtures("multiplies_bfloat16")
def test_products_stay_in_bfloat16_without_a_tolerance(optimize: Any) -> None:
    fast = optimize(network, W, X)
    rules = [s.rule for s in fast.report.steps]
    assert rules.count("operands-in-bfloat16") == 2
    assert fast.report.frontier == () and fast.report.used == "optimized"
    exact = np.asarray(network(W.astype(jnp.float32), X.astype(jnp.float32)))
    ours, own = (np.std(np.asarray(y, np.float32) - exact) for y in (fast(W, X), network(W, X)))
    assert ours <= own


@test_tolerance.needs_library
@pytest.mark.usefixtures("multiplies_bfloat16")
def test_a_network_in_float32_stays_in_float32(optimize: Any) -> None:
    fast = optimize(network, W.astype(jnp.float32), X.astype(jnp.float32))
    assert not any("bfloat16" in s.rule for s in fast.report.steps)


def test_a_network_in_float16_is_not_in_int16() -> None:
    """Its 11 bits relative to each element err less than 12 relative to the largest."""
    program = from_jax(network, W.astype(jnp.float16), X.astype(jnp.float16), weights=0)
    assert lower_precision(program, widened(program), None, "cpu") is None


@test_tolerance.needs_library
def test_a_network_in_bfloat16_may_be_in_int16(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = library()
    assert lib is not None
    program = from_jax(network, W, X, weights=0)
    for types, found in ((("int16", "int8"), True), (("int8",), False)):
        monkeypatch.setattr(lib, "operand_types", types)
        assert (lower_precision(program, widened(program), None, "cpu") is not None) == found


def test_a_processor_without_instructions_changes_nothing() -> None:
    program = from_jax(network, W, X, weights=0)
    assert lower_precision(program, widened(program), None, "gpu") is None
