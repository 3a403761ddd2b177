"""Every function of the table gives bit-identical results after `from_jax` and `to_jax`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Jaxpr, jaxprs_in_params

import xrl_jax
from tests.program.opaque import opaque_share
from tests.roundtrip_cases import CASES, Case

# Primitives of jax.lax that no row of the table can hold, and why.
UNTESTABLE = {
    "after_all": "takes and gives tokens, not arrays",
    "create_token": "gives a token, not an array",
    "ragged_all_to_all": "has no CPU implementation",
    "rng_uniform": "gives other numbers at each call",
    "select_and_scatter": "no public function or derivative reaches it",
    "stage": "an identity that tracing removes",
}


@functools.cache
def program_of(case: Case) -> Any:
    with jax.enable_x64(case.x64):
        return xrl_jax.from_jax(case.fn, *case.args)


def run(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the result of `fn`, compiled under one name, so that equal modules share a cache
    entry.
    """

    def roundtrip(*args: Any) -> Any:
        return fn(*args)

    return jax.jit(roundtrip)(*args)


def to_bytes(leaf: jax.Array) -> tuple[str, tuple[int, ...], np.ndarray, np.ndarray]:
    """Return dtype, shape, bytes `[size, itemsize]`, and which elements are NaN `[size]`."""
    array = np.asarray(
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    )
    flat = np.ascontiguousarray(array).reshape(-1)
    return (
        str(leaf.dtype),
        leaf.shape,
        flat.view(np.uint8).reshape(flat.size, array.dtype.itemsize),
        flat != flat,
    )


def assert_identical(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, w), g in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True):
        got_dtype, got_shape, got_bytes, got_nan = to_bytes(g)
        dtype, shape, wanted_bytes, wanted_nan = to_bytes(w)
        where = f"output{jax.tree_util.keystr(path)}"
        assert (got_dtype, got_shape) == (dtype, shape), where
        same = (got_bytes == wanted_bytes).all(axis=1) | (got_nan & wanted_nan)
        assert same.all(), (
            f"{where}: {(~same).sum()} of {same.size} elements differ: {g} instead of {w}"
        )


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * c.slow) for c in CASES]
)
def test_round_trips_are_bit_identical(case: Case) -> None:
    program = program_of(case)
    with jax.enable_x64(case.x64):
        assert_identical(run(xrl_jax.to_jax(program), case.args), run(case.fn, case.args))


def primitives(jaxpr: Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            yield from primitives(inner)


def test_the_table_covers_every_primitive_of_lax() -> None:
    covered: set[str] = set()
    for case in CASES:
        with jax.enable_x64(case.x64):
            covered.update(primitives(jax.make_jaxpr(case.fn)(*case.args).jaxpr))
    modules = (lax, lax.linalg)
    every = {getattr(m, name).name for m in modules for name in dir(m) if name.endswith("_p")}
    assert every - covered == every & UNTESTABLE.keys()


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_most_functions_need_no_opaque_node(record_property: Callable[[str, Any], None]) -> None:
    shares = [opaque_share(program_of(case)) for case in CASES]
    without = sum(share == 0 for share in shares)
    record_property(
        "figure",
        f"round trips: {len(CASES)} functions; on average {np.mean(shares):.1%} of the nodes "
        f"are opaque, and {without} functions have none",
    )
    assert without > len(CASES) / 2
