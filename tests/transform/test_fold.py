"""`fold` finds equal repeated regions; `unfold` is its inverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import experiments.models as models
from tests.program.opaque import opaque_share
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph import graph as graph_lib
from xrl_jax.graph.bindings import Call
from xrl_jax.graph.graph import Node, TensorGraph, nodes_of
from xrl_jax.graph.hash import identity
from xrl_jax.program.program import Program, to_jax
from xrl_jax.transform.fold import fold, unfold

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
LAYERS = [np.random.default_rng(i).normal(size=(3, 3)).astype(np.float32) for i in range(4)]


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """Apply a layer of ten equations; those of `scale` depend on the weight only."""
    scale = lax.rsqrt(lax.reduce_sum(w * w, (0,)) + 1.0)
    return lax.tanh(x @ w) * lax.broadcast_in_dim(scale, (2, 3), (1,)) - x * 0.5


def deep(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    x = lax.exp(x)
    for w in weights:
        x = layer(x, w)
    return lax.cos(x)


def main(program: Program) -> list[Node]:
    return nodes_of(program.graph)[0]


def counts(program: Program) -> list[float]:
    return [b.count for b in program.bodies]


def count(graph: TensorGraph, op: str) -> int:
    return sum(n.op == op for n in nodes_of(graph)[0])


def digest(program: Program) -> list[int]:
    return np.asarray(identity(program.graph, jnp.asarray(program.digests()))).tolist()


def assert_equal_results(program: Program, fn: Callable[..., Any], *args: Any) -> None:
    got, want = jax.jit(to_jax(program))(*args), jax.jit(fn)(*args)
    jax.tree.map(lambda g, w: np.testing.assert_array_equal(g, w), got, want)


def test_layers_become_one_body() -> None:
    program = from_jax(deep, X, LAYERS, weights=(1,))
    assert counts(program) == [4.0]
    assert sum(n.op == "call" for n in main(program)) == 4
    body = program.bodies[0]
    assert (body.n_outputs, count(body.graph, "input"), count(body.graph, "weight")) == (1, 1, 1)
    assert_equal_results(program, deep, X, LAYERS)


def test_work_on_weights_alone_belongs_to_the_body() -> None:
    program = from_jax(deep, X, LAYERS, weights=(1,))
    nodes, _, slots = nodes_of(program.bodies[0].graph)
    flags = np.asarray(program.bodies[0].graph.nodes.weight_only)
    weight_only = {n.op for n, s in zip(nodes, slots, strict=True) if flags[s]}
    assert {"weight", "mul", "reduce_sum", "rsqrt", "broadcast"} <= weight_only
    assert {"dot", "tanh", "sub"}.isdisjoint(weight_only)


def test_unfold_is_the_inverse() -> None:
    flat = from_jax(deep, X, LAYERS, weights=(1,), fold=False)
    folded = fold(flat)
    assert flat.bodies == () and len(folded.bodies) == 1
    assert digest(unfold(folded)) == digest(flat) != digest(folded)
    assert unfold(folded).bodies == ()


def test_a_graph_larger_than_any_bucket_fits_if_folding_makes_it_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fn(x: jax.Array) -> jax.Array:
        for _ in range(200):
            x = lax.sin(lax.cos(x))
        return x

    monkeypatch.setattr(graph_lib, "BUCKETS", (64, 128))
    program = from_jax(fn, X)
    assert sum(counts(program)) * 8 == 400
    assert program.graph.nodes.op.shape == (128,)


def test_a_program_without_repeats_is_returned_unchanged() -> None:
    program = from_jax(layer, X, LAYERS[0], fold=False)
    assert fold(program) is program


def test_short_regions_are_left_alone() -> None:
    def fn(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        return lax.tanh(lax.tanh(lax.tanh(x @ ws[0]) @ ws[1]) @ ws[2])

    assert from_jax(fn, X, LAYERS).bodies == ()


def test_a_short_period_is_folded_in_multiples() -> None:
    def fn(x: jax.Array) -> jax.Array:
        for _ in range(12):
            x = lax.sin(x) * 2.0
        return x

    program = from_jax(fn, X)
    assert counts(program) == [3.0]  # each of four times two equations
    assert len(main(program)) == 4
    assert_equal_results(program, fn, X)


def test_values_passed_from_repeat_to_repeat_are_results() -> None:
    def fn(x: jax.Array, ws: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        kept = []
        for w in ws:
            hidden = lax.tanh(x @ w)
            x = layer(hidden, w)
            kept.append(hidden)
        return x, kept

    program = from_jax(fn, X, LAYERS, weights=(1,))
    assert counts(program) == [4.0]
    assert program.bodies[0].n_outputs == 2
    assert sum(n.op == "proj" for n in main(program)) == 8
    assert_equal_results(program, fn, X, LAYERS)


def test_a_shared_operand_is_one_input_and_a_shared_array_stays_inside() -> None:
    table = np.full((2, 3), 0.25, np.float32)

    def fn(x: jax.Array, mask: jax.Array, ws: list[jax.Array]) -> jax.Array:
        for w in ws:
            x = layer(x + mask * table, w) * mask
        return x

    program = from_jax(fn, X, X, LAYERS)
    body = program.bodies[0]
    assert counts(program) == [4.0]
    assert (count(body.graph, "input"), count(body.graph, "array")) == (3, 1)
    assert not any(n.op == "array" for n in main(program))
    assert_equal_results(program, fn, X, X, LAYERS)


def test_steps_of_an_unrolled_loop_fold_although_each_reads_another_row() -> None:
    def fn(xs: jax.Array, w: jax.Array) -> jax.Array:
        h = xs[0]
        for t in range(4):
            h = layer(h + lax.squeeze(lax.slice_in_dim(xs, t, t + 1), (0,)), w)
        return h

    xs = np.stack([X, X + 1, X * 2, X - 1])
    program = from_jax(fn, xs, LAYERS[0])
    assert counts(program) == [4.0]
    assert sum(n.op == "slice" for n in main(program)) == 5
    assert_equal_results(program, fn, xs, LAYERS[0])


@pytest.mark.parametrize("change", ["constant", "dtype", "dataflow"])
def test_repeats_that_differ_inside_are_not_folded(change: str) -> None:
    def fn(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        for i, w in enumerate(ws[:2]):
            y = layer(x, w)
            if change == "constant":
                x = y * (1.5 + i)
            elif change == "dtype":
                x = lax.convert_element_type(
                    lax.convert_element_type(y, ["f2", "bfloat16"][i]), "f4"
                )
            else:
                x = lax.sin(y) - lax.cos([x, y][i]) - lax.tan([y, x][i])
            x = layer(x, w)
        return x

    program = from_jax(fn, X, LAYERS)
    assert_equal_results(program, fn, X, LAYERS)
    inside = {n.op for b in program.bodies for n in nodes_of(b.graph)[0]}
    assert inside.isdisjoint({"cast", "cos"})
    values = [n.value for b in program.bodies for n in nodes_of(b.graph)[0] if n.op == "const"]
    assert 1.5 not in values and 2.5 not in values


def test_equations_with_effects_are_not_folded() -> None:
    def fn(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        for w in ws:
            x = layer(x, w)
            jax.debug.callback(lambda v: None, x)
        return x

    program = from_jax(fn, X, LAYERS)
    assert sum(n.op == "opaque" for n in main(program)) == 4
    assert all(count(b.graph, "opaque") == 0 for b in program.bodies)


def test_opaque_equations_with_several_results_stay_whole() -> None:
    def fn(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        for w in ws:
            values, indices = lax.top_k(layer(x, w), 3)
            x = values + lax.convert_element_type(indices, "float32")
        return x

    program = from_jax(fn, X, LAYERS, weights=(1,))
    assert counts(program) == [4.0]
    assert not any(n.op == "opaque" for n in main(program))
    assert all(a.dtype != "tuple" for a in program.bodies[0].in_avals)
    assert_equal_results(program, fn, X, LAYERS)


def test_random_keys_may_be_passed_from_repeat_to_repeat() -> None:
    def fn(key: jax.Array, x: jax.Array, ws: list[jax.Array]) -> Any:
        for w in ws:
            key, used = jax.random.split(key)
            x = layer(x, w) + jax.random.uniform(used, (2, 3))
        return x, jax.random.key_data(key)

    program = from_jax(fn, jax.random.key(0), X, LAYERS)
    assert counts(program) == [4.0]
    assert [a.dtype for a in program.bodies[0].in_avals].count(jax.random.key(0).dtype) == 1
    assert_equal_results(program, fn, jax.random.key(1), X, LAYERS)


def test_run_counts_of_nested_bodies_are_multiplied() -> None:
    def fn(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        for w in ws:
            x = lax.fori_loop(0, 5, lambda _, v: lax.sin(v) + 1, layer(x, w))
        return x

    program = from_jax(fn, X, LAYERS)
    by_kind = {
        b.kind: [program.bodies[i].count for i in b.bodies]
        for b in program.bindings
        if isinstance(b, Call)
    }
    assert by_kind == {"inline": [4.0], "scan": [20.0]}
    assert_equal_results(program, fn, X, LAYERS)


def test_repeats_at_two_places_are_two_bodies() -> None:
    def fn(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        for w in ws[:2]:
            x = layer(x, w)
        x = lax.reduce_max(x, (0,)) + x
        for w in ws:
            x = lax.exp(layer(x, w))
        return x

    program = from_jax(fn, X, LAYERS)
    assert sorted(counts(program)) == [2.0, 4.0]
    assert_equal_results(program, fn, X, LAYERS)


# --- the networks of the experiments

NETWORKS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "bert": (dict(layers=4, width=32, heads=2, tokens=16, vocabulary=50), [4.0]),
    # All blocks of each stage but the first, which changes the number of channels.
    "resnext50": (dict(width=0.25, groups=8, image_size=32, classes=10), [2.0, 3.0, 5.0, 2.0]),
    "squeezenet": (dict(width=0.25, image_size=32, classes=10), []),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_fold_into_the_expected_bodies(
    name: str, record_property: Callable[[str, Any], None]
) -> None:
    options, expected = NETWORKS[name]
    model = models.get(name, **options)
    flat = from_jax(model.fn, model.weights, *model.inputs, weights=(0,), fold=False)
    folded = fold(flat)
    assert counts(folded) == expected
    assert digest(unfold(folded)) == digest(flat)
    share = opaque_share(flat)
    record_property("figure", f"{name}: {share:.1%} of the nodes are opaque")
    assert share < 0.05 and opaque_share(folded) < 0.05
