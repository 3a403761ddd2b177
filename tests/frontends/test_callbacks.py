"""Callbacks of a function (prints, logs, requests to the host) are not repeated while it is
optimised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from tests import test_optimize
from tests.test_optimize import PARAMS, network
from tests.test_optimize import X as INPUT
from xrl_jax.accept.accept import accept
from xrl_jax.frontends.callbacks import (
    has_callbacks,
    program_without_callbacks,
    with_callbacks,
    without_callbacks,
)
from xrl_jax.frontends.jaxpr import from_jax

optimize, made_up = test_optimize.optimize, test_optimize.made_up  # fixtures

X = jnp.arange(3.0)
Calls = list[float]


def printing(calls: Calls, x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda v: calls.append(float(v)), x[0])
    return x * 2


def formatted(calls: Calls, x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x[0], ordered=True)
    return x * 2


def pure(calls: Calls, x: jax.Array) -> jax.Array:
    def double(v):
        calls.append(float(v[0]))
        return 2 * np.asarray(v)

    return jax.pure_callback(double, x, x)


def reading(calls: Calls, x: jax.Array) -> jax.Array:
    def read(v):
        calls.append(float(v[0]))
        return np.float32(len(calls))

    return x + io_callback(read, jnp.float32(0), x, ordered=True)


def writing(calls: Calls, x: jax.Array) -> jax.Array:
    io_callback(lambda v: calls.append(float(v[0])), None, x)
    return x * 2


def in_loop(calls: Calls, x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, c: printing(calls, c), x)


def in_jit(calls: Calls, x: jax.Array) -> jax.Array:
    return jax.jit(functools.partial(printing, calls))(x)


ALL = [printing, formatted, pure, reading, writing, in_loop, in_jit]


@pytest.mark.parametrize(
    ("fn", "times"),
    [(printing, 0), (pure, 1), (reading, 1), (writing, 0), (in_loop, 0), (in_jit, 0)],
)
def test_callbacks_run_at_most_once_over_many_calls(fn, times) -> None:
    calls: Calls = []
    program = from_jax(functools.partial(fn, calls), X)
    quiet = jax.jit(without_callbacks(functools.partial(fn, calls), program.in_tree))
    for _ in range(5):
        quiet(X)
    jax.effects_barrier()
    assert len(calls) == times


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    fn = functools.partial(formatted, [])
    program = from_jax(fn, X)
    jax.jit(without_callbacks(fn, program.in_tree))(X)
    jax.effects_barrier()
    assert capfd.readouterr().out == ""


def test_a_pure_callback_runs_again_for_other_operands() -> None:
    calls: Calls = []
    fn = functools.partial(pure, calls)
    quiet = jax.jit(without_callbacks(fn, from_jax(fn, X).in_tree))
    for x in (X, X + 1, X):
        np.testing.assert_array_equal(quiet(x), 2 * x)
    assert calls == [0.0, 1.0]


@pytest.mark.parametrize("fn", [pure, reading])
def test_all_traces_of_a_function_get_the_same_callback_results(fn) -> None:
    fn = functools.partial(fn, [])
    quiet = without_callbacks(fn, from_jax(fn, X).in_tree)
    np.testing.assert_array_equal(jax.jit(quiet)(X), jax.jit(lambda x: quiet(x))(X))


@pytest.mark.parametrize("fn", ALL)
def test_callbacks_of_a_program_can_be_restored(fn, capfd: pytest.CaptureFixture[str]) -> None:
    calls: Calls = []
    program = from_jax(functools.partial(fn, calls), X)
    quiet = program_without_callbacks(program)
    assert has_callbacks(program) and not has_callbacks(from_jax(lambda x: x + 1, X))
    jax.jit(quiet)(X)
    back = jax.jit(with_callbacks(quiet))
    calls.clear()
    for _ in range(2):
        back(X)
    jax.effects_barrier()
    expected = 6 if fn is in_loop else 2
    assert len(calls) + len(capfd.readouterr().out.splitlines()) == expected


@pytest.mark.parametrize("fn", [printing, pure])
@pytest.mark.usefixtures("made_up")
def test_callbacks_run_in_the_result_of_optimize_and_hardly_before(
    fn, optimize: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Calls = []

    def called(params, x):
        return network(params, x) + fn(calls, x[0])

    def counted(*args: Any, **options: Any) -> Any:
        accepted = accept(*args, **options)
        jax.effects_barrier()
        calls_then.append(len(calls))
        return accepted

    calls_then: list[int] = []
    monkeypatch.setattr(test_optimize.front, "accept", counted)
    fast = optimize(called, PARAMS, INPUT, weights=0)
    assert calls_then[0] <= 6 and fast.report.used == "optimized"
    calls.clear()
    for _ in range(2):
        fast(PARAMS, INPUT)
    jax.effects_barrier()
    assert len(calls) == 2
