"""The baselines of a result: the original, compiled in the ways in which a user would run it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

from xrl_jax.accept.baselines import AS_ARGUMENTS, CLOSED_OVER, baselines, compiled, flat_original
from xrl_jax.frontends.jaxpr import from_jax

W = jnp.full((3, 2), 2.0)
X = jnp.ones((4, 3))


def dense(params, x):
    return {"y": jnp.tanh(x @ params["w"])}


def test_the_original_takes_and_returns_flat_leaves():
    program = from_jax(dense, {"w": W}, X, weights=(0,))
    (out,) = flat_original(program)(W, X)
    np.testing.assert_array_equal(out, jnp.tanh(X @ W))


def test_without_a_function_the_program_is_the_original():
    program = replace(from_jax(dense, {"w": W}, X, weights=(0,)), fn=None)
    (out,) = flat_original(program)(W, X)
    np.testing.assert_array_equal(out, jnp.tanh(X @ W))


@pytest.mark.parametrize("options", [(), (("xla_cpu_experimental_ynn_fusion_type", ""),)])
def test_both_baselines_compute_the_same_as_the_original(options):
    program = from_jax(dense, {"w": W}, X, weights=(0,))
    calls = baselines(program, [W, X], options)
    suffix = " + options" if options else ""
    assert list(calls) == [AS_ARGUMENTS + suffix, CLOSED_OVER + suffix]
    for run in calls.values():
        np.testing.assert_allclose(run()[0], jnp.tanh(X @ W), rtol=1e-6)


def test_closed_over_arrays_become_arguments_in_the_first_baseline():
    program = from_jax(lambda x: x @ W, X)
    calls = baselines(program, [X])
    assert list(calls) == [AS_ARGUMENTS, CLOSED_OVER]
    np.testing.assert_array_equal(calls[AS_ARGUMENTS]()[0], X @ W)


def test_without_weights_there_is_one_baseline():
    assert list(baselines(from_jax(lambda x: x + 1, X), [X])) == [AS_ARGUMENTS]


def test_closed_over_weights_are_constants_of_the_compiled_code():
    program = from_jax(dense, {"w": W}, X, weights=(0,))
    traced = []

    def fn(*leaves):
        traced.append([isinstance(x, Tracer) for x in leaves])
        return flat_original(program)(*leaves)

    spied = replace(program, fn=lambda p, x: fn(p["w"], x)[0])
    baselines(spied, [W, X])[CLOSED_OVER]()
    assert traced[-1] == [False, True]


def test_keys_may_be_weights():
    def fn(key, x):
        return x + jax.random.normal(key, (3,))

    key = jax.random.key(0)
    calls = baselines(from_jax(fn, key, X, weights=(0,)), [key, X])
    np.testing.assert_allclose(calls[CLOSED_OVER]()[0], fn(key, X), rtol=1e-6)


def test_host_arrays_are_put_on_the_device_once():
    seen = []

    def fn(x):
        return x

    run = compiled(fn, [np.ones(3)])
    seen.append(run())
    assert isinstance(seen[0], jax.Array)
