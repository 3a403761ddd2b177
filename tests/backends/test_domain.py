"""A result that is right only on ordinary values checks the arguments of its calls."""

from __future__ import annotations

import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.backends.domain import (
    bounded_rules,
    bounds_of,
    needs_domain,
    outside,
    right_everywhere,
    right_inside,
    rules_for,
)
from xrl_jax.backends.fast import Fast
from xrl_jax.backends.loading import load
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import build, nodes_of
from xrl_jax.language.rule_files import standard_rules
from xrl_jax.lower.table import name_of, number_of
from xrl_jax.program.program import Program
from xrl_jax.runtime.target_platform import making_for

W, X = jnp.full((8, 8, 3, 3), 0.1), jnp.ones((1, 8, 6, 6))
NAN = X.at[0, 0, 5, 5].set(jnp.nan)


def conv(w, x):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")


def by_winograd(fn, *args) -> Program:
    program = from_jax(fn, *args, weights=(0,))
    nodes, outputs, _ = nodes_of(program.graph)
    new = [
        replace(n, lowering=number_of(n.op, "winograd2")) if n.op == "conv" else n for n in nodes
    ]
    return program.with_graphs([build(new, outputs)])


def lowerings(program: Program) -> list[str]:
    return [name_of(n) for n in nodes_of(program.graph)[0] if n.op == "conv"]


@pytest.fixture(scope="module")
def fast() -> Fast:
    return Fast(by_winograd(conv, W, X), conv, domain=(None, 4.0))


def test_the_domain_is_four_times_the_range_of_the_example():
    program = from_jax(lambda x, n, w: x, X, jnp.arange(3), W, weights=(2,))
    leaves = [jnp.asarray([-2.0, jnp.nan, 1.0]), jnp.arange(3), W]
    assert bounds_of(program, leaves) == (8.0, None, None)


@pytest.mark.parametrize("x", [5.0, -5.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_large_and_special_values_are_outside_the_domain(x, dtype):
    assert outside((None, 4.0), [jnp.arange(9), jnp.asarray([0.0, x], dtype)]) == 1
    assert outside((None, 4.0), [jnp.arange(9), jnp.asarray([0.0, 4.0], dtype)]) is None


def test_outside_of_the_domain_the_original_runs(fast):
    with pytest.warns(
        UserWarning, match="is not finite, or exceeds the bound 4 of the checked inputs"
    ):
        result = fast(W, NAN)
    np.testing.assert_array_equal(result, jax.jit(conv)(W, NAN))
    with warnings.catch_warnings():  # the warning comes only once
        warnings.simplefilter("error")
        assert int(jnp.isnan(fast(W, NAN)).sum()) == 8 * 4
        np.testing.assert_allclose(fast(W, X), conv(W, X), rtol=1e-5)


@pytest.mark.parametrize("weights", ["held", "traced"])
def test_under_jit_the_domain_is_checked_inside_the_computation(fast, weights):
    run = jax.jit(fast) if weights == "traced" else jax.jit(lambda _, x: fast(W, x))
    np.testing.assert_allclose(run(W, NAN), jax.jit(conv)(W, NAN), rtol=1e-5)
    np.testing.assert_allclose(run(W, X), conv(W, X), rtol=1e-5)
    both = jax.vmap(lambda x: fast(W, x))(jnp.stack([X, NAN]))
    assert int(jnp.isnan(both).sum()) == 8 * 4
    slope = jax.grad(lambda x: fast(W, x).sum())(X)
    np.testing.assert_allclose(slope, jax.grad(lambda x: conv(W, x).sum())(X), rtol=1e-5)


def test_non_finite_weights_run_the_original(fast):
    w = W.at[0, 0, 0, 0].set(jnp.inf)
    np.testing.assert_array_equal(fast(w, X), jax.jit(conv)(w, X))


def test_a_saved_function_includes_its_original(fast, tmp_path):
    fast.save(tmp_path / "conv.xrl")
    loaded = load(tmp_path / "conv.xrl")
    np.testing.assert_allclose(loaded(W, X), conv(W, X), rtol=1e-5)
    with pytest.warns(UserWarning, match="runs the original here"):
        np.testing.assert_array_equal(loaded(W, NAN), jax.jit(conv)(W, NAN))


def test_a_saved_function_keeps_nan_outside_of_its_domain(tmp_path):
    """XLA's fused kernel for clipping and a sum turns NaN into a number."""

    def pooled(w, x):
        return jnp.maximum(conv(w, x), 0).sum((2, 3))

    w, x = jnp.full((256, 8, 3, 3), 0.1), jnp.ones((1, 8, 24, 24))
    Fast(by_winograd(pooled, w, x), pooled, domain=(None, 4.0)).save(tmp_path / "f.xrl")
    with pytest.warns(UserWarning, match="runs the original here"):
        assert np.isnan(load(tmp_path / "f.xrl")(w, x.at[0, 0, 5, 5].set(jnp.nan))).all()


def test_a_lowering_for_ordinary_numbers_needs_finite_operands():
    def fine(w, x):
        return conv(w, jax.nn.relu(conv(w, jnp.tanh(x)))) / 3

    def log(w, x):
        return conv(w, jnp.log(conv(w, x)))

    assert lowerings(right_inside(by_winograd(fine, W, X))) == ["winograd2", "winograd2"]
    first, second = lowerings(right_inside(by_winograd(log, W, X)))
    assert first == "winograd2" and second in ("onednn", "plain")
    assert not needs_domain(right_everywhere(by_winograd(fine, W, X)))


def test_a_program_that_needs_no_changes_stays_the_same_object():
    program = from_jax(conv, W, X, weights=(0,))
    assert right_inside(program) is program and right_everywhere(program) is program


def test_on_a_gpu_the_program_tests_its_arguments_itself():
    """The host does not wait for the test, so it cannot warn."""
    with making_for("gpu"), warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = Fast(by_winograd(conv, W, X), conv, domain=(None, 4.0))
        prepared = fast.prepare(W)
        for run in (fast, lambda w, x: fast.call(prepared, x)):
            np.testing.assert_allclose(run(W, X), conv(W, X), rtol=1e-5)
            np.testing.assert_allclose(run(W, X), conv(W, X), rtol=1e-5)  # by the fast path
            np.testing.assert_allclose(run(W, NAN), conv(W, NAN), rtol=1e-5)


def test_rules_for_finite_operands_are_for_programs_that_keep_values_finite_on_gpus():
    def names(fn, platform: str, assume: tuple[str, ...] = ()) -> set[str]:
        return {r.name for r in rules_for(from_jax(fn, W, X, weights=(0,)), assume, platform)}

    def fine(w, x):
        return jax.nn.relu(conv(w, x))

    def logs(w, x):
        return conv(w, jnp.log(x))  # -inf for 0

    assert "merge-convs-enlarged" in names(fine, "gpu")
    assert "merge-convs-enlarged" not in names(fine, "cpu")
    assert "merge-convs-enlarged" not in names(logs, "gpu")
    assert "merge-convs-enlarged" in names(logs, "gpu", ("finite",))


def test_results_of_rules_for_finite_operands_need_a_domain_unless_all_is_finite():
    library = standard_rules(bounded=True)
    bounded = {"merge-convs-enlarged", "enlarge-pointwise", "shrink-kernel", "merge-two-groups"}
    assert bounded_rules(library, ()) == bounded
    assert bounded_rules(library, ("finite",)) == set()
