"""`optimize` with a tolerance: weights are narrowed within it, and checked on unseen inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xrl_jax
from tests import test_optimize
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.measure.timing import Timing
from xrl_jax.precision import narrow
from xrl_jax.precision.budget import error_budget
from xrl_jax.report.text import Report
from xrl_jax.search.base import FrontierPoint, frontier
from xrl_jax.transform.narrow import OPERANDS, STORAGE, Site

needs_library = pytest.mark.skipif(library() is None, reason="no library reads narrow weights")

RNG = np.random.default_rng(0)
PARAMS = {name: jnp.asarray(RNG.normal(size=(256, 256)) / 16, jnp.float32) for name in "vw"}
X = RNG.normal(size=(1, 256)).astype(np.float32)


def network(params: dict[str, Any], x: Any) -> jax.Array:
    return jnp.tanh(x @ params["v"]) @ params["w"]


made_up = test_optimize.made_up  # a fixture


@pytest.fixture
def optimize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_up: type[test_optimize.MadeUpWorker]
) -> Callable[..., Any]:
    """Return `optimize` with made-up timings: int8 saves most time, then float16; of the whole
    programs, the first with narrow weights is the fastest.
    """
    relatives = itertools.repeat(0.5)

    def submit(self: Any, jobs: Any, *, reference: Any = None, **_: Any) -> list[Timing]:
        relative = None if reference is None else next(relatives)
        return [Timing(1e-3, 0.9e-3, 1.1e-3, repeats=9, relative=relative) for _ in jobs]

    def seconds_saved(_: Any, __: Any, places: Any, *___: Any) -> dict[Site, Any]:
        nonlocal relatives  # from now on, programs of lower precision are timed
        relatives = itertools.count(0.2, 0.02)
        seconds = dict(
            zip((*STORAGE, *OPERANDS), (2e-3, 1e-3, 3e-3, 1e-3, 2e-3, 3e-3, 3e-3), strict=True)
        )
        return {site: {p: seconds[p] for p in own} for site, own in places.items()}

    monkeypatch.setattr(made_up, "submit", submit)
    monkeypatch.setattr(narrow, "seconds_saved", seconds_saved)

    def run(fn: Any, *args: Any, **more: Any) -> Any:
        budget = xrl_jax.Budget(seconds=60.0)
        more = {"weights": 0, "search": "greedy", "budget": budget, **more}
        return xrl_jax.optimize(fn, *args, cache_dir=tmp_path / "cache", progress=False, **more)

    return run


def types(report: Any) -> list[str]:
    return [s.rule.removeprefix("weight-in-") for s in report.steps if s.rule.startswith("weight")]


@needs_library
@pytest.mark.parametrize(
    ("tolerance", "chosen"),
    [(1e-1, ["int8", "int8"]), (1e-3, ["float16", "float16"]), (1e-6, []), (None, [])],
)
def test_the_most_that_a_tolerance_allows_is_chosen(
    optimize: Callable[..., Any], tolerance: float | None, chosen: list[str]
) -> None:
    fast = optimize(network, PARAMS, X, tolerance=tolerance)
    report = fast.report
    assert sorted(types(report)) == chosen
    if tolerance is not None:
        assert report.tolerance == tolerance
        assert report.max_error <= tolerance
    exact = np.asarray(network(PARAMS, X), np.float64)
    error = np.abs(np.asarray(fast(PARAMS, X)) - exact).max() / np.abs(exact).max()
    assert error <= (tolerance or 1e-5)


@needs_library
def test_the_report_shows_errors_and_the_frontier(optimize: Callable[..., Any]) -> None:
    report = optimize(network, PARAMS, X, tolerance=1e-1).report
    first, *_, last = report.frontier
    assert first == FrontierPoint(0.5, 0.0)
    assert last.types == "2 x weight in int8" and 1e-3 < last.error <= 0.7e-1
    narrow = [s for s in report.steps if s.rule.startswith("weight")]
    assert all(0 < s.error < 0.1 and s.gain == pytest.approx(3e-3) for s in narrow)
    assert "chosen on 16 inputs and checked on 16 others; 0 were given, 32 drawn" in report.note
    assert "2 x weight in int8" in str(report)
    assert Report.from_dict(report.as_dict()).frontier == report.frontier


@needs_library
def test_products_of_many_rows_multiply_in_integers(
    optimize: Callable[..., Any], tmp_path: Path
) -> None:
    lib = library()
    if lib is None or "int8" not in lib.operand_types:
        pytest.skip("the processor has no instructions for int8")
    x = jnp.asarray(RNG.normal(size=(40, 256)), jnp.float32)
    fast = optimize(network, PARAMS, x, tolerance=1e-1)
    assert [s.rule for s in fast.report.steps if "-in-" in s.rule] == ["operands-in-int8"] * 2
    exact = np.asarray(network(PARAMS, x), np.float64)
    y = np.asarray(fast(PARAMS, x))
    assert np.abs(y - exact).max() <= 1e-1 * np.abs(exact).max()
    fast.save(tmp_path / "fast.xrl")
    np.testing.assert_array_equal(xrl_jax.load(tmp_path / "fast.xrl")(PARAMS, x), y)
    slope, expected = (jax.grad(lambda x, f=f: f(PARAMS, x).sum())(x) for f in (fast, network))
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(
        np.isnan(fast(PARAMS, x.at[3].set(jnp.nan))).all(axis=1), np.arange(40) == 3
    )


@needs_library
def test_a_later_strict_search_does_not_recall_narrow_weights(
    optimize: Callable[..., Any],
) -> None:
    assert types(optimize(network, PARAMS, X, tolerance=1e-1).report)
    assert not types(optimize(network, PARAMS, X).report)


@needs_library
@pytest.mark.parametrize(
    ("rows", "seconds", "reason"),
    [
        (17, 60.0, "the processor has no instructions that multiply in one"),
        (1, 1.0, "no time is left for that"),
    ],
)
def test_a_report_says_why_nothing_is_narrowed(
    optimize: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    seconds: float,
    reason: str,
) -> None:
    lib = library()
    assert lib is not None
    monkeypatch.setattr(lib, "operand_types", ())
    x, budget = jnp.tile(X, (rows, 1)), xrl_jax.Budget(seconds=seconds)
    report = optimize(network, PARAMS, x, tolerance=1e-2, budget=budget).report
    assert f"nothing is in narrower types: {reason}" in str(report)


@needs_library
def test_without_a_library_results_are_strict(
    optimize: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow, "calling", lambda _: None)
    report = optimize(network, PARAMS, X, tolerance=1e-2).report
    assert "no library here has kernels for them" in report.note


@needs_library
def test_unseen_inputs_decide(
    optimize: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is chosen on the calibration input alone is wrong elsewhere, and is not returned."""

    def gated(params: dict[str, Any], x: Any) -> jax.Array:
        return jnp.where(x[0, 0] > 100.0, network(params, x), 1.0)

    seen = np.where(np.arange(256) == 0, 0.0, X).astype(np.float32)
    unseen = [(np.where(np.arange(256) == 0, 200.0, X).astype(np.float32),)] * 3
    inputs = [(seen,)] * 4 + unseen
    report = optimize(gated, PARAMS, seen, tolerance=1e-3, calibration=inputs).report
    assert report.frontier[-1].error == 0.0 and report.frontier[-1].types == "2 x weight in int8"
    assert types(report) == [] and report.max_error <= 1e-6
    assert (
        "a program that was faster earlier was refused: the result's error against" in report.reason
    )


def test_the_example_is_drawn_from_where_no_inputs_are_given() -> None:
    program = from_jax(network, PARAMS, X, weights=0)
    budget = error_budget(program, [*jax.tree.leaves(PARAMS), X], 1e-2)
    assert (len(budget.chosen_on), len(budget.checked_on), budget.given) == (16, 16, 0)
    assert budget.tolerance == 1e-2


def test_given_inputs_are_divided_between_choice_and_check() -> None:
    program = from_jax(network, PARAMS, X, weights=0)
    batches = [[*jax.tree.leaves(PARAMS), (n + 1) * X] for n in range(40)]
    budget = error_budget(program, batches[0], 1e-2, batches)
    given = [*budget.chosen_on[:16], *budget.checked_on]
    firsts = [float(b[-1][0, 0] / X[0, 0]) for b in given]
    np.testing.assert_allclose(firsts, np.arange(1, 41), rtol=1e-6)
    assert (len(budget.chosen_on), len(budget.checked_on), budget.given) == (17, 24, 40)


def test_unusual_inputs_are_as_large_as_the_domain_allows() -> None:
    program = from_jax(network, PARAMS, X, weights=0)
    budget = error_budget(program, [*jax.tree.leaves(PARAMS), X], 1e-2)
    sizes = [float(jnp.abs(x).max() / np.abs(X).max()) for *_, x in budget.unusual]
    np.testing.assert_allclose(sizes, [2.0, 4.0], rtol=1e-3)  # none with NaN or infinities


def test_bf16_stands_for_the_error_in_that_type() -> None:
    program = from_jax(network, PARAMS, X, weights=0)
    leaves = [*jax.tree.leaves(PARAMS), X]
    bf16, f16 = (error_budget(program, leaves, kind).tolerance for kind in ("bf16", "f16"))
    assert 1e-3 < bf16 < 1e-2
    assert bf16 / 16 < f16 < bf16 / 4  # three bits more


def test_a_function_that_overflows_in_float16_is_named() -> None:
    program = from_jax(network, PARAMS, 1e6 * X, weights=0)
    with pytest.raises(ValueError, match="tolerance='f16': the function overflows in that type"):
        error_budget(program, [*jax.tree.leaves(PARAMS), 1e6 * X], "f16")


@pytest.mark.parametrize("tolerance", [0.0, -1e-2, float("nan"), float("inf"), "f8", True])
def test_an_impossible_tolerance_is_refused(tolerance: Any) -> None:
    with pytest.raises(ValueError, match=r"tolerance is .*: give a positive relative error"):
        xrl_jax.optimize(network, PARAMS, X, weights=0, tolerance=tolerance)


def test_inputs_without_a_tolerance_are_refused() -> None:
    with pytest.raises(ValueError, match="calibration is for a tolerance"):
        xrl_jax.optimize(network, PARAMS, X, weights=0, calibration=[(X,)])


def test_a_frontier_has_no_point_that_another_one_beats() -> None:
    points = [
        FrontierPoint(0.9, 0.0),
        FrontierPoint(0.5, 1e-3, "fast"),
        FrontierPoint(0.5, 2e-3, "as fast, less exact"),
        FrontierPoint(0.7, 5e-3, "slower, less exact"),
        FrontierPoint(0.4, 1e-2, "faster"),
    ]
    assert [p.types for p in frontier(points)] == ["", "fast", "faster"]
