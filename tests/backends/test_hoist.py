"""Weight-only work is moved out of the call to the preparation of weights, if that pays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xrl_jax.backends.hoist import split

W = jnp.arange(12.0).reshape(3, 4) / 7
X = jnp.arange(6.0).reshape(2, 3)


def primitives(hoisted, *inputs) -> list[str]:
    """Return the names of the primitives of the call."""
    jaxpr = jax.make_jaxpr(hoisted.call)(hoisted.avals, inputs)
    return [e.primitive.name for e in jaxpr.eqns]


def test_work_on_weights_alone_is_hoisted_out_of_the_call() -> None:
    hoisted = split(lambda w, x: [x @ jnp.tanh(w * 2)], [W, X], [True, False])
    prepared = hoisted.prepare([W])
    assert primitives(hoisted, X) == ["dot_general"]
    assert hoisted.n_hoisted == 2
    assert hoisted.bytes_added == 3 * 4 * 4
    np.testing.assert_allclose(hoisted.call(prepared, [X])[0], X @ jnp.tanh(W * 2), rtol=1e-6)


def test_a_weight_that_is_used_unchanged_adds_no_bytes() -> None:
    hoisted = split(lambda w, x: [x @ w], [W, X], [True, False])
    assert hoisted.bytes_added == 0
    assert hoisted.prepare([W])[0] is W


def test_broadcasts_widening_casts_and_reshapes_stay_in_the_call() -> None:
    def fn(w, x):
        scaled = jnp.broadcast_to(w[0] * 3, (64, 4)).astype(jnp.float32)
        return [x * scaled.reshape(8, 8, 4)]

    hoisted = split(fn, [W.astype(jnp.bfloat16), jnp.ones((8, 8, 4))], [True, False])
    assert hoisted.bytes_added == 4 * 2
    assert "broadcast_in_dim" in primitives(hoisted, jnp.ones((8, 8, 4)))


def test_weights_are_widened_once() -> None:
    hoisted = split(
        lambda w, x: [x @ w.astype(jnp.float32)], [W.astype(jnp.bfloat16), X], [True, False]
    )
    assert hoisted.bytes_added == 4 * W.size


def test_masks_made_of_literals_stay_in_the_call() -> None:
    def fn(w, x):
        mask = lax.broadcasted_iota(jnp.int32, (4, 4), 0) >= lax.broadcasted_iota(
            jnp.int32, (4, 4), 1
        )
        return [jnp.where(mask, x, 0.0) + w]

    hoisted = split(fn, [jnp.ones((4, 4)), jnp.ones((4, 4))], [True, False])
    assert hoisted.bytes_added == 0
    assert hoisted.n_hoisted == 0


def test_a_mask_that_weights_are_selected_by_is_hoisted_with_them() -> None:
    def fn(w, x):
        return [x @ jnp.where(jnp.eye(3) > 0, w, 0.0)]

    hoisted = split(fn, [jnp.ones((3, 3)), X], [True, False])
    assert primitives(hoisted, X) == ["dot_general"]
    np.testing.assert_array_equal(
        hoisted.call(hoisted.prepare([jnp.full((3, 3), 2.0)]), [X])[0], 2 * X
    )


def test_closed_over_arrays_count_as_weights() -> None:
    constant = jnp.ones((3, 300))
    hoisted = split(lambda x: [x @ jnp.exp(constant)], [X], [False])
    assert hoisted.bytes_added == 3 * 300 * 4
    np.testing.assert_allclose(
        hoisted.call(hoisted.prepare([]), [X])[0], X @ jnp.exp(constant), rtol=1e-6
    )


def test_the_largest_enlargements_are_not_hoisted_under_a_memory_bound() -> None:
    def fn(w, x):
        merged = jnp.kron(jnp.eye(8), w)  # 64 times as large
        return [x @ merged, x[:, :3] @ jnp.tanh(w)]

    x = jnp.ones((2, 24))
    free = split(fn, [W, x], [True, False])
    bounded = split(fn, [W, x], [True, False], max_bytes=100)
    assert free.bytes_added == 24 * 32 * 4 + 48
    assert bounded.bytes_added == 48
    for a, b in zip(
        free.call(free.prepare([W]), [x]), bounded.call(bounded.prepare([W]), [x]), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_effects_are_never_hoisted(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(w, x):
        jax.debug.print("w is {}", w[0])
        return [x + w]

    hoisted = split(fn, [jnp.ones(3), jnp.ones(3)], [True, False])
    prepared = hoisted.prepare([jnp.ones(3)])
    jax.effects_barrier()
    assert capfd.readouterr().out == ""
    hoisted.call(prepared, [jnp.ones(3)])
    jax.effects_barrier()
    assert capfd.readouterr().out == "w is 1.0\n"


def test_dead_work_on_weights_is_dropped() -> None:
    def fn(w, x):
        jnp.linalg.inv(w @ w.T)
        return [x + 1]

    hoisted = split(fn, [W, X], [True, False])
    assert (hoisted.n_hoisted, hoisted.avals) == (0, ())


def test_results_that_depend_on_weights_alone_are_prepared() -> None:
    hoisted = split(lambda w, x: [w * 2, x, w, jnp.float32(3)], [W, X], [True, False])
    results = hoisted.call(hoisted.prepare([W]), [X])
    np.testing.assert_array_equal(results[0], W * 2)
    np.testing.assert_array_equal(results[2], W)
    assert float(results[3]) == 3.0
    assert primitives(hoisted, X) == []


def test_work_inside_jits_is_hoisted() -> None:
    @jax.jit
    def layer(w, x):
        return x @ jnp.tanh(w)

    hoisted = split(lambda w, x: [layer(w, x)], [W, X], [True, False])
    assert primitives(hoisted, X) == ["dot_general"]


@pytest.mark.parametrize("reverse", [False, True])
def test_work_on_weights_is_hoisted_out_of_a_scan(reverse: bool) -> None:
    def fn(weights, bias, x):
        def step(c, w):
            w, y = w
            return c @ jnp.tanh(w) * y + jnp.exp(bias), c.sum()

        ys = jnp.arange(4.0) * x.sum()
        return jax.tree.leaves(lax.scan(step, x, (weights, ys), reverse=reverse))

    weights = jnp.linspace(-1, 1, 4 * 9).reshape(4, 3, 3)
    bias = jnp.ones(3)
    hoisted = split(fn, [weights, bias, X], [True, True, False])
    jaxpr = jax.make_jaxpr(hoisted.call)(hoisted.avals, [X])
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    body = {e.primitive.name for e in scan.params["jaxpr"].jaxpr.eqns}
    assert "tanh" not in body and "exp" not in body and "dot_general" in body
    assert "tanh" not in {e.primitive.name for e in jaxpr.eqns}
    for a, b in zip(
        hoisted.call(hoisted.prepare([weights, bias]), [X]), fn(weights, bias, X), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_scan_over_inputs_keeps_weights_as_constants() -> None:
    def fn(w, xs):
        return jax.tree.leaves(lax.scan(lambda c, x: (c + x @ (w * 2), c), jnp.zeros(4), xs))

    hoisted = split(fn, [W, X], [True, False])
    jaxpr = jax.make_jaxpr(hoisted.call)(hoisted.avals, [X])
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    assert [e.primitive.name for e in scan.params["jaxpr"].jaxpr.eqns] == ["dot_general", "add"]
    for a, b in zip(hoisted.call(hoisted.prepare([W]), [X]), fn(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_work_on_weights_is_hoisted_out_of_nested_scans() -> None:
    def fn(weights, x):
        def inner(c, w):
            return c @ jnp.tanh(w), ()

        def outer(c, ws):
            return lax.scan(inner, c, ws)[0], ()

        return [lax.scan(outer, x, weights)[0]]

    weights = jnp.linspace(-1, 1, 2 * 2 * 9).reshape(2, 2, 3, 3)
    hoisted = split(fn, [weights, X], [True, False])
    assert "tanh" not in str(jax.make_jaxpr(hoisted.call)(hoisted.avals, [X]))
    np.testing.assert_allclose(
        hoisted.call(hoisted.prepare([weights]), [X])[0], fn(weights, X)[0], rtol=1e-5
    )


def test_a_mask_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 arguments, but weights_mask has 1 items"):
        split(lambda w, x: [w], [W, X], [True])


def test_a_broadcast_needed_before_and_in_the_call_is_made_in_both() -> None:
    def fn(w, x):
        wide = jnp.broadcast_to(w, (5, 3, 4))
        return [x + wide, x * jnp.tanh(wide)]

    x = jnp.ones((5, 3, 4))
    hoisted = split(fn, [W, x], [True, False])
    plus, times = hoisted.call(hoisted.prepare([W]), [x])
    np.testing.assert_allclose(plus, x + W, rtol=1e-6)
    np.testing.assert_allclose(times, jnp.tanh(W) * x, rtol=1e-6)
