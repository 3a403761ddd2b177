"""The optimised function behaves as the original: calls, weights, derivatives."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from xrl_jax.backends.fast import Fast
from xrl_jax.backends.loading import load
from xrl_jax.backends.prepared import PreparedWeights
from xrl_jax.frontends.jaxpr import from_jax

W = jnp.linspace(-1, 1, 12).reshape(3, 4)
X = jnp.linspace(0, 2, 6).reshape(2, 3)


def dense(w, x, *, scale=1.0):
    """A layer."""
    return {"out": jnp.tanh(x @ (w * 2)) * scale}


def make(fn, *args, weights=(), **options) -> Fast:
    return Fast(from_jax(fn, *args, weights=weights), fn, **options)


@pytest.fixture(scope="module")
def fast() -> Fast:
    return make(dense, W, X, weights=(0,))


def same(a, b, rtol=1e-6) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6)


# --- calls ---


def test_it_has_the_signature_name_and_result_of_the_original(fast: Fast) -> None:
    assert inspect.signature(fast) == inspect.signature(dense)
    assert vars(fast)["__name__"] == "dense" and fast.__doc__ == "A layer."
    assert fast.baseline is dense
    same(fast(W, X), dense(W, X))


def test_arguments_may_be_passed_by_name(fast: Fast) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(fast(W, x=X), dense(W, X))
        same(fast(x=X, w=W), dense(W, X))


def test_static_arguments_are_part_of_the_structure() -> None:
    def fn(x, mode):
        return x + 1 if mode == "up" else x - 1

    fast = make(fn, X, "up")
    same(fast(X, "up"), X + 1)
    with pytest.warns(UserWarning, match="runs the original here"):
        same(fast(X, "down"), X - 1)


def test_weights_are_prepared_once_while_they_are_the_same_arrays() -> None:
    fast = make(dense, W, X, weights=(0,))
    fast(W, X)
    kept = fast._last_weights
    fast(W, X + 1)
    assert fast._last_weights is kept
    other = W + 1
    same(fast(other, X), dense(other, X))
    assert fast._last_weights is not kept


def test_weights_are_prepared_again_after_forget() -> None:
    fast = make(dense, W, X, weights=(0,))
    fast(W, X)
    fast.forget()
    assert fast._last_weights is None
    same(fast(W, X), dense(W, X))
    assert fast._last_weights is not None


def test_numpy_weights_may_change_in_place_and_are_prepared_in_every_call(fast: Fast) -> None:
    w = np.array(W)
    with pytest.warns(UserWarning, match="prepared in every call: pass JAX arrays") as said:
        same(fast(w, X), dense(w, X))
    assert said[0].filename == __file__
    w += 1
    same(fast(w, X), dense(w, X))


@pytest.mark.filterwarnings("ignore:weights that are NumPy arrays")
@pytest.mark.parametrize("close_over", [False, True])
def test_weights_as_arguments_or_constants(close_over: bool) -> None:
    fast = make(dense, W, X, weights=(0,), close_over=close_over)
    for w in (W, W + 1, np.array(W)):
        same(fast(w, X), dense(w, X))


def test_other_shapes_and_dtypes_run_the_original_with_one_warning() -> None:
    fast = make(dense, W, X, weights=(0,))
    with pytest.warns(
        UserWarning, match=r"made for an argument float32\[2, 3\], got float32\[5, 3\]"
    ):
        same(fast(W, jnp.ones((5, 3))), dense(W, jnp.ones((5, 3))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(fast(W, jnp.ones((2, 3), jnp.int32)), dense(W, jnp.ones((2, 3), jnp.int32)))


@pytest.mark.parametrize("number", [2.0, 3, True, 1j, np.float32(2), np.float64(2), np.int64(3)])
def test_python_numbers_are_accepted_like_arrays(number) -> None:
    def fn(x, s):
        return x * s

    fast = make(fn, X, number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fast(X, number)
    same(result, fn(X, number))
    assert result.dtype == fn(X, number).dtype


def test_the_warning_says_where_only_weak_types_differ() -> None:
    fast = make(lambda x, s: x * s, X, 2.0)
    with pytest.warns(UserWarning, match=r"made for an argument weak float32\[\], got float32\[\]"):
        fast(X, jnp.float32(2.0))


def firsts(x, n):
    return x[:n] * 2


@pytest.mark.parametrize("fn", [firsts, jax.jit(firsts, static_argnums=1)])
def test_a_number_that_tracing_needs_is_static(fn) -> None:
    fast = make(fn, X, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(fast(X, 1), X[:1] * 2)
        same(fast(x=X, n=1), X[:1] * 2)
        same(jax.jit(lambda x: fast(x, 1))(X), X[:1] * 2)
        same(jax.grad(lambda x: fast(x, 1).sum())(X), jax.grad(lambda x: firsts(x, 1).sum())(X))
    with pytest.warns(UserWarning, match="runs the original here"):
        same(fast(X, 2), X * 2)


def test_numbers_among_weights_may_be_static_too() -> None:
    def fn(params, x, scale):
        return firsts(x @ params["w"], params["n"]) * scale

    params = {"n": 1, "w": W}
    fast = make(fn, params, X, 3.0, weights=(0,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(fast(params, X, 4.0), fn(params, X, 4.0))
        same(fast.call(fast.prepare(params), X, 4.0), fn(params, X, 4.0))
        same(fast.program(params, X, 4.0), fn(params, X, 4.0))


def test_default_arguments_may_be_passed_or_omitted() -> None:
    def fn(x, s=2.0, mode="up"):
        return x * s + (mode == "up")

    calls: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
        ((X,), (X, 2.0, "up")),
        ((X, 2.0, "up"), (X,)),
        ((X, 3.0), (X, 2.0)),
    ]
    for example, call in calls:
        fast = make(fn, *example)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            same(fast(*call), fn(*call))


def test_under_settings_that_change_the_function_the_original_runs() -> None:
    fast = make(lambda x: x + jnp.zeros(()), X)
    assert fast(X).dtype == "float32"
    with jax.enable_x64(True), pytest.warns(UserWarning, match="jax_enable_x64=False"):
        assert fast(X).dtype == "float64"


def test_copies_have_separate_state(fast: Fast) -> None:
    for copied in (copy.copy(fast), copy.deepcopy(fast)):
        same(copied(W, X), dense(W, X))
        copied.forget()
        assert copied.report is fast.report and copied._lock is not fast._lock


def test_pickling_says_what_to_do_instead(fast: Fast) -> None:
    with pytest.raises(TypeError, match=r"fast\.save\(path\) .* xrl_jax\.load\(path\)"):
        pickle.dumps(fast)


def test_static_numbers_are_saved(tmp_path) -> None:
    make(firsts, X, 1).save(tmp_path / "saved")
    same(load(tmp_path / "saved")(X, 1), X[:1] * 2)


def test_compile_options_apply_to_direct_calls_only() -> None:
    fast = make(dense, W, X, options={"xla_cpu_enable_fast_math": True})
    same(fast(W, X), dense(W, X), rtol=1e-5)
    same(jax.jit(fast)(W, X), dense(W, X))
    wrong = make(dense, W, X, options=[("xla_no_such_option", 1)])
    with pytest.raises(Exception, match="xla_no_such_option"):
        wrong(W, X)


def test_a_loaded_program_has_no_original_to_fall_back_on() -> None:
    fast = Fast(from_jax(dense, W, X, weights=(0,)), None)
    same(fast(W, X), dense(W, X))
    with pytest.raises(TypeError, match="a loaded program runs on the arguments it was made for"):
        fast(W, jnp.ones((5, 3)))


def test_two_threads_may_call_it() -> None:
    fast = make(dense, W, X, weights=(0,))
    weights = [W + i for i in range(4)]
    failures: list[AssertionError] = []

    def work(w) -> None:
        try:
            for _ in range(20):
                same(fast(w, X), dense(w, X))
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(w,)) for w in weights]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


def test_effects_happen_once_per_call(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(w, x):
        jax.debug.print("sum {}", w.sum())
        return w + x

    fast = make(fn, jnp.ones(3), jnp.ones(3), weights=(0,))
    for _ in range(2):
        fast(jnp.ones(3), jnp.ones(3))
    jax.effects_barrier()
    assert capfd.readouterr().out == "sum 3.0\nsum 3.0\n"


# --- prepared weights ---


def test_prepared_weights_are_a_pytree_that_replaces_the_weights(fast: Fast) -> None:
    prepared = fast.prepare(W)
    assert isinstance(prepared, PreparedWeights)
    same(fast.call(prepared, X), dense(W, X))
    same(jax.jit(fast.call)(jax.tree.map(jnp.asarray, prepared), X), dense(W, X))
    same(
        jax.grad(lambda x: fast.call(prepared, x)["out"].sum())(X),
        jax.grad(lambda x: dense(W, x)["out"].sum())(X),
    )


def test_prepare_and_call_refuse_other_arguments(fast: Fast) -> None:
    with pytest.raises(TypeError, match="prepare takes 1 weight arguments, got 2"):
        fast.prepare(W, W)
    with pytest.raises(TypeError, match=r"made for a weight float32\[3, 4\], got float32\[2, 3\]"):
        fast.prepare(X)
    with pytest.raises(TypeError, match="call takes 1 arguments beside the weights, got 0"):
        fast.call(fast.prepare(W))
    with pytest.raises(TypeError, match="fast.call runs the optimised program only"):
        fast.call(fast.prepare(W), jnp.ones((5, 3)))


# --- transformations ---


def loss(f):
    return lambda w, x: (f(w, x)["out"] ** 2).sum()


def test_jit_vmap_and_concrete_arguments_inside_a_trace(fast: Fast) -> None:
    same(jax.jit(fast)(W, X), dense(W, X))
    batch = jnp.stack([X, X + 1])
    same(jax.vmap(fast, in_axes=(None, 0))(W, batch), jax.vmap(dense, in_axes=(None, 0))(W, batch))
    same(jax.jit(lambda x: fast(W, x))(X), dense(W, X))
    same(jax.jit(lambda x: x + fast(W, X)["out"].sum())(X), X + dense(W, X)["out"].sum())


def test_traced_weights_may_select_another_program() -> None:
    def other(w, x):
        return {"out": dense(w, x)["out"] + 10.0}

    fast = make(dense, W, X, weights=(0,), traced_program=from_jax(other, W, X, weights=(0,)))
    same(fast(W, X), dense(W, X))
    same(jax.jit(lambda x: fast(W, x))(X), dense(W, X))
    same(jax.jit(fast)(W, X), other(W, X))


def test_gradients_by_inputs_weights_and_both(fast: Fast) -> None:
    for argnums in (0, 1, (0, 1)):
        same(jax.grad(loss(fast), argnums)(W, X), jax.grad(loss(dense), argnums)(W, X))
        same(jax.jit(jax.grad(loss(fast), argnums))(W, X), jax.grad(loss(dense), argnums)(W, X))


def test_jvp_linearize_and_hessian(fast: Fast) -> None:
    same(jax.jvp(loss(fast), (W, X), (W, X)), jax.jvp(loss(dense), (W, X), (W, X)))
    value, linear = jax.linearize(lambda x: loss(fast)(W, x), X)
    same((value, linear(X)), jax.jvp(lambda x: loss(dense)(W, x), (X,), (X,)))
    same(jax.hessian(loss(fast), 1)(W, X), jax.hessian(loss(dense), 1)(W, X), rtol=1e-4)


def test_vmap_of_grad(fast: Fast) -> None:
    batch = jnp.stack([X, X + 1])
    by = jax.vmap(jax.grad(loss(fast), 1), in_axes=(None, 0))
    same(by(W, batch), jax.vmap(jax.grad(loss(dense), 1), in_axes=(None, 0))(W, batch))


def test_export(fast: Fast) -> None:
    exported = export.export(jax.jit(fast))(W, X)
    same(export.deserialize(exported.serialize()).call(W, X), dense(W, X))


def test_custom_derivative_rules_of_the_original_are_kept() -> None:
    @jax.custom_vjp
    def clipped(x):
        return x * x

    clipped.defvjp(lambda x: (x * x, x), lambda x, g: (jnp.clip(2 * x * g, -1, 1),))

    @jax.custom_jvp
    def odd(x):
        return jnp.sin(x)

    odd.defjvp(lambda p, t: (jnp.sin(p[0]), 100.0 * t[0]))
    x = jnp.array([0.1, 3.0])
    np.testing.assert_allclose(
        jax.grad(lambda x: make(clipped, x)(x).sum())(x), [0.2, 1.0], rtol=1e-6
    )
    np.testing.assert_allclose(jax.grad(lambda x: make(odd, x)(x).sum())(x), [100.0, 100.0])


def test_straight_through_estimators_and_ties() -> None:
    def rounded(x):
        return x + lax.stop_gradient(jnp.round(x) - x)

    def tied(x):
        return jnp.maximum(x, 0.0) + jnp.max(x)

    x = jnp.array([0.0, 1.6, 1.6])
    for fn in (rounded, tied):
        fast = make(fn, x)
        same(jax.grad(lambda x, f=fast: f(x).sum())(x), jax.grad(lambda x, f=fn: f(x).sum())(x))


def test_integer_inputs_and_outputs_have_no_derivative() -> None:
    def fn(table, i):
        return table[i] * 2, i + 1

    table, i = jnp.arange(12.0).reshape(4, 3), jnp.array([1, 3])
    fast = make(fn, table, i, weights=(0,))
    same(fast(table, i), fn(table, i))
    same(
        jax.grad(lambda t: fast(t, i)[0].sum())(table), jax.grad(lambda t: fn(t, i)[0].sum())(table)
    )
    tangent = np.zeros(2, jax.dtypes.float0)
    out = jax.jvp(fast, (table, i), (table, tangent))[1]
    np.testing.assert_array_equal(out[0], 2 * table[i])
    assert out[1].dtype == jax.dtypes.float0


def test_a_loaded_program_is_differentiable() -> None:
    fast = Fast(from_jax(dense, W, X, weights=(0,)), None)
    same(jax.grad(loss(fast), 1)(W, X), jax.grad(loss(dense), 1)(W, X))


def test_a_memory_bound_of_zero_leaves_weights_unchanged() -> None:
    fast = make(dense, W, X, weights=(0,), max_bytes=0)
    assert fast.weight_bytes_added == 0
    assert make(dense, W, X, weights=(0,)).weight_bytes_added == 48
    same(fast(W, X), dense(W, X))


def test_boolean_arguments_are_accepted_in_a_function_without_weights() -> None:
    def fn(x, flag):
        return jnp.where(flag, x + jnp.arange(3.0), -x)

    fast = make(fn, X, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(fast(X, True), fn(X, True))
        same(fast(X, False), fn(X, False))


def test_collectives_inside_shard_map_find_their_axis() -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def fn(x):
        spec = jax.sharding.PartitionSpec("d")
        return jax.shard_map(
            lambda v: v + lax.axis_index("d"), mesh=mesh, in_specs=spec, out_specs=spec
        )(x)

    same(make(fn, X)(X), fn(X))
