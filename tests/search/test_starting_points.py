"""Starting points: the whole network with features last, or with features first and weights on the
left of products; transposes are left at the network's boundaries only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.transform.test_layout import traced as with_a_body
from xrl_jax.cost.fusion import sharing
from xrl_jax.cost.rates import DEFAULT_RATES
from xrl_jax.cost.roofline import cost_table
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import nodes_of
from xrl_jax.graph.ops import OPS
from xrl_jax.language.rule_files import available_rules, load_rules, select_rules, standard_rules
from xrl_jax.language.table import CompiledRules, compile_rules
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.lower.table import LOWERINGS, name_of, number_of
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.program.program import Program
from xrl_jax.search.starting_points import StartingPoint, starting_points

W = jax.random.normal(jax.random.key(0), (3, 3, 1, 1))
B, S = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 2.0, 4.0])
X = jax.random.normal(jax.random.key(1), (1, 3, 4, 4))
ROWS = 512  # of all tables here, because each size is compiled
IMAGE = ("transpose", "conv", "add", "max", "mul", "window_max", "concat")


def conv(w: jax.Array, x: jax.Array) -> jax.Array:
    names = ("NCHW", "OIHW", "NCHW")
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=names)


def plain(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    """Apply convolution, bias and ReLU; concatenate two branches of convolutions; max-pool."""
    x = jax.nn.relu(conv(w, x) + b[None, :, None, None])
    left, right = jax.nn.relu(conv(w, x) + b[None, :, None, None]), conv(w, x)
    x = jnp.concatenate([left, right], axis=1)
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


@cache
def rules() -> CompiledRules:
    families = ("layout", "movement", "identity", "fold")
    return compile_rules(select_rules(standard_rules(), families), min_trees=ROWS)


def points(program: Program, table: CompiledRules, seconds: float = 600.0) -> list[StartingPoint]:
    return starting_points(program, table, cost_table({}), Stopwatch(seconds))


def on_activations(
    program: Program, kinds: tuple[str, ...]
) -> Counter[tuple[str, tuple[int, ...]]]:
    """Count operators of these kinds on activations, by the shapes of their results."""
    nodes, _, slots = nodes_of(program.graph)
    weights = np.asarray(program.graph.nodes.weight_only)
    return Counter(
        (n.op, n.shape)
        for n, s in zip(nodes, slots, strict=True)
        if n.op in kinds and not weights[s]
    )


def on_images(program: Program) -> Counter[tuple[str, tuple[int, ...]]]:
    return on_activations(program, IMAGE)


def test_only_the_transposes_at_the_boundaries_are_left() -> None:
    program = from_jax(plain, W, B, X, weights=(0, 1))
    last, folded = points(program, rules())
    assert on_images(last.program) == {
        ("transpose", (1, 4, 4, 3)): 1,
        ("conv", (1, 4, 4, 3)): 3,
        ("add", (1, 4, 4, 3)): 2,
        ("max", (1, 4, 4, 3)): 2,
        ("concat", (1, 4, 4, 6)): 1,
        ("window_max", (1, 2, 2, 6)): 1,
        ("transpose", (1, 6, 2, 2)): 1,
    }
    assert ("transpose", (1, 4, 4, 3)) not in on_images(folded.program)
    np.testing.assert_allclose(last.program(W, B, X), plain(W, B, X), rtol=1e-5, atol=1e-5)


def test_the_steps_are_reported() -> None:
    program = from_jax(plain, W, B, X, weights=(0, 1))
    last, _ = points(program, rules())
    assert Counter(s.rule for s in last.steps)["conv-to-nhwc"] == 3


def test_a_users_rule_is_used_according_to_its_role() -> None:
    def waves(w: jax.Array, x: jax.Array) -> jax.Array:
        return conv(w, jnp.sin(conv(w, x)))

    own = load_rules(
        '(rule sin-down (role sink-transpose) (source "ours") (evidence field)'
        " (lhs (sin (transpose ?x :as t))) (rhs (transpose (sin ?x) :like t)))"
    )
    table = compile_rules((*rules().rules, *own), min_trees=ROWS)
    program = from_jax(waves, W, X, weights=(0,))
    # Without the rule the transposes of each convolution stay on both sides of the sine.
    for known, transposes in ((rules(), 4), (table, 2)):
        last, _ = points(program, known)
        found = on_activations(last.program, ("transpose",))
        assert found.total() == transposes
    np.testing.assert_allclose(last.program(W, X), waves(W, X), rtol=1e-5, atol=1e-5)


def test_transposes_at_body_boundaries_are_reported_first() -> None:
    last, *_ = points(with_a_body(), rules())
    assert last.steps[0].rule == "laid-out-features-last"
    assert "conv-to-nhwc" in {s.rule for s in last.steps}
    flat = from_jax(plain, W, B, X, weights=(0, 1))  # has no body, so no boundary
    assert "laid-out-features-last" not in {s.rule for s in points(flat, rules())[0].steps}


def test_on_a_gpu_convolutions_of_one_image_are_merged_and_what_follows_is_joined() -> None:
    narrow = jax.random.normal(jax.random.key(2), (4, 3, 1, 1))
    wide = jax.random.normal(jax.random.key(3), (5, 3, 3, 3))
    image = jax.random.normal(jax.random.key(4), (1, 3, 4, 4))

    def fire(v: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        names = ("NCHW", "OIHW", "NCHW")
        of = [
            lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=names) for k in (v, w)
        ]
        return jnp.concatenate([jax.nn.relu(y) for y in of], axis=1)

    program = from_jax(fire, narrow, wide, image, weights=(0, 1))
    families = ("movement", "merge", "enlarge", "identity")
    table = compile_rules(select_rules(standard_rules(bounded=True), families), min_trees=ROWS)
    here, gpu = (sharing(platform) for platform in ("cpu", "gpu"))
    (plain_point,) = starting_points(program, table, cost_table({}, sharing=here), Stopwatch(600.0))
    merged, unmerged = starting_points(
        program, table, cost_table({}, sharing=gpu), Stopwatch(600.0)
    )
    kinds = ("conv", "max", "concat", "slice")
    one = {("conv", (1, 9, 4, 4)): 1, ("max", (1, 9, 4, 4)): 1}
    assert on_activations(merged.program, kinds) == one
    for point in (plain_point, unmerged):
        assert on_activations(point.program, ("conv",)).total() == 2
    args = narrow, wide, image
    np.testing.assert_allclose(merged.program(*args), fire(*args), rtol=1e-5, atol=1e-5)


def test_a_batch_norm_is_folded_into_kernel_and_bias() -> None:
    def normed(w: jax.Array, b: jax.Array, s: jax.Array, x: jax.Array) -> jax.Array:
        mean, scale, bias = (v[None, :, None, None] for v in (b, s, b))
        return (conv(w, x) - mean) * lax.rsqrt(scale + 1e-5) * scale + bias

    program = from_jax(normed, W, B, S, X, weights=(0, 1, 2))
    last, folded = points(program, rules())
    assert on_images(folded.program) == {("conv", (1, 3, 4, 4)): 1, ("add", (1, 3, 4, 4)): 1}
    assert on_images(last.program)["add", (1, 4, 4, 3)] == 1
    np.testing.assert_allclose(last.program(W, B, S, X), normed(W, B, S, X), rtol=1e-4, atol=1e-5)


def test_without_convolutions_nothing_is_transposed() -> None:
    program = from_jax(lambda x: jnp.tanh(x) * 2.0, X)
    (only,) = points(program, rules())
    assert str(only.program) == str(program)


def test_a_network_that_is_already_features_last_is_unchanged() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        names = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=names)

    program = from_jax(fn, W.reshape(1, 1, 3, 3), X.reshape(1, 4, 4, 3), weights=(0,))
    assert len(points(program, rules())) == 1


@pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
def test_all_kernels_are_in_the_library_regardless_of_predictions() -> None:
    def fn(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(conv(w, x)).reshape(3, 16).T @ v

    program = from_jax(fn, W, V, X, weights=(0, 1))
    families = ("layout", "movement", "identity", "fold", "lowering_conv", "lowering_dot")
    table = compile_rules(
        available_rules(select_rules(standard_rules(), families), "cpu"), min_trees=ROWS
    )
    dear = cost_table({}, replace(DEFAULT_RATES, multiple=dict.fromkeys(_library_lowerings(), 1e3)))
    first, *_ = starting_points(program, table, dear, Stopwatch(600.0))
    assert _kernels(first.program) == {("conv", "onednn"): 1, ("dot", "onednn"): 1}
    assert Counter(s.rule for s in first.steps) == {"conv-as-onednn": 1, "dot-as-onednn": 1}
    np.testing.assert_allclose(first.program(W, V, X), fn(W, V, X), rtol=1e-5, atol=1e-5)


def _library_lowerings() -> list[tuple[int, int, int]]:
    """Return the library's lowerings of convolutions and products, as in `lowering_kind_of`."""
    specs = [OPS[op] for op in ("conv", "dot")]
    return [(s.code, kind, number_of(s.name, "onednn")) for s in specs for kind in range(3)]


def _kernels(program: Program) -> Counter[tuple[str, str]]:
    """Count the convolutions and products by their lowerings."""
    nodes = [n for n in nodes_of(program.graph)[0] if n.op in ("conv", "dot")]
    return Counter((n.op, LOWERINGS[n.op][n.lowering].name) for n in nodes)


def test_without_time_the_program_is_unchanged() -> None:
    program = from_jax(plain, W, B, X, weights=(0, 1))
    (only,) = points(program, rules(), 0.0)
    assert str(only.program) == str(program)


V, U = (jax.random.normal(jax.random.key(i), (3, 3)) for i in (2, 3))
TOKENS = jax.random.normal(jax.random.key(4), (2, 3))


def perceptron(v: jax.Array, u: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    """Compute two products with weights, a bias and a residual; subtract the mean."""
    y = jnp.tanh(x @ v + b) @ u + x
    return y - jnp.mean(y, axis=-1, keepdims=True)


def test_products_with_weights_have_features_first_between_the_boundaries() -> None:
    program = from_jax(perceptron, V, U, B, TOKENS, weights=(0, 1, 2))
    first, folded = points(program, rules())
    kinds = ("transpose", "dot", "add", "tanh", "sub", "reduce_sum")
    assert on_activations(first.program, kinds) == {
        ("transpose", (3, 2)): 1,
        ("dot", (3, 2)): 2,
        ("add", (3, 2)): 2,
        ("tanh", (3, 2)): 1,
        ("reduce_sum", (2,)): 1,
        ("sub", (3, 2)): 1,
        ("transpose", (2, 3)): 1,
    }
    assert on_activations(folded.program, ("transpose",)) == {}
    np.testing.assert_allclose(
        first.program(V, U, B, TOKENS), perceptron(V, U, B, TOKENS), rtol=1e-5, atol=1e-5
    )


def test_weights_on_the_left_are_stored_by_output() -> None:
    families = ("layout", "movement", "identity", "fold", "lowering_dot")
    table = compile_rules(select_rules(standard_rules(), families), min_trees=ROWS)
    *_, first, _ = points(from_jax(perceptron, V, U, B, TOKENS, weights=(0, 1, 2)), table)
    nodes, _, _ = nodes_of(first.program.graph)
    lowerings = [name_of(n) for n in nodes if n.op == "dot"]
    assert lowerings == ["flat", "flat"]


def test_heads_are_split_and_joined_under_features_first() -> None:
    def attention(v: jax.Array, u: jax.Array, x: jax.Array) -> jax.Array:
        heads = (x @ v).reshape(2, 1, 3)
        mixed = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", heads, heads))
        return jnp.einsum("hqk,khd->qhd", mixed, heads).reshape(2, 3) @ u

    program = from_jax(attention, V, U, TOKENS, weights=(0, 1))
    first, _ = points(program, rules())
    steps = Counter(s.rule for s in first.steps)
    assert (steps["split-of-transpose"], steps["join-of-transpose"]) == (1, 1)
    np.testing.assert_allclose(
        first.program(V, U, TOKENS), attention(V, U, TOKENS), rtol=1e-5, atol=1e-5
    )


def test_a_cheap_product_does_not_transpose_the_network() -> None:
    def classifier(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(20):
            x = jnp.tanh(conv(w, x))
        return jnp.mean(x, axis=(2, 3)) @ v

    program = from_jax(classifier, W, V, X, weights=(0, 1))
    assert ["dot-swap-operands" in {s.rule for s in o.steps} for o in points(program, rules())] == [
        False, False,
    ]  # fmt: skip
