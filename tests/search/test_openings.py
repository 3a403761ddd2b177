"""Openings: the whole network features last, with transposes left at its borders only."""

from __future__ import annotations

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.cost.roofline import cost_table
from xrl_jax.cost.timing import Stopwatch
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import nodes_of
from xrl_jax.graph.program import Program
from xrl_jax.rewrite.library import select_rules, standard_rules
from xrl_jax.rewrite.table import CompiledRules, compile_rules
from xrl_jax.search.openings import Opening, openings

W = jax.random.normal(jax.random.key(0), (3, 3, 1, 1))
B, S = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 2.0, 4.0])
X = jax.random.normal(jax.random.key(1), (1, 3, 4, 4))
IMAGE = ("transpose", "conv", "add", "max", "mul", "window_max", "concat")


def conv(w: jax.Array, x: jax.Array) -> jax.Array:
    names = ("NCHW", "OIHW", "NCHW")
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=names)


def plain(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    """Convolution, bias, relu; twice, side by side, and pooled."""
    x = jax.nn.relu(conv(w, x) + b[None, :, None, None])
    left, right = jax.nn.relu(conv(w, x) + b[None, :, None, None]), conv(w, x)
    x = jnp.concatenate([left, right], axis=1)
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


@cache
def rules() -> CompiledRules:
    families = ("layout", "movement", "identity", "fold")
    return compile_rules(select_rules(standard_rules(), families))


def opened(program: Program, table: CompiledRules, seconds: float = 600.0) -> list[Opening]:
    return openings(program, table, cost_table({}), Stopwatch(seconds))


def on_images(program: Program) -> Counter[tuple[str, tuple[int, ...]]]:
    """Operators on images with the shapes of their results."""
    nodes, _, _ = nodes_of(program.graph)
    weights = np.asarray(program.graph.nodes.weight_only)
    _, _, slots = nodes_of(program.graph)
    return Counter(
        (n.op, n.shape)
        for n, s in zip(nodes, slots, strict=True)
        if n.op in IMAGE and not weights[s]
    )


def test_only_the_transposes_at_the_borders_are_left() -> None:
    program = from_jax(plain, W, B, X, weights=(0, 1))
    last, folded = opened(program, rules())
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


def test_the_steps_are_told() -> None:
    program = from_jax(plain, W, B, X, weights=(0, 1))
    last, _ = opened(program, rules())
    assert Counter(s.rule for s in last.steps)["conv-to-nhwc"] == 3


def test_a_batch_norm_becomes_a_kernel_and_a_bias() -> None:
    def normed(w: jax.Array, b: jax.Array, s: jax.Array, x: jax.Array) -> jax.Array:
        mean, scale, bias = (v[None, :, None, None] for v in (b, s, b))
        return (conv(w, x) - mean) * lax.rsqrt(scale + 1e-5) * scale + bias

    program = from_jax(normed, W, B, S, X, weights=(0, 1, 2))
    last, folded = opened(program, rules())
    assert on_images(folded.program) == {("conv", (1, 3, 4, 4)): 1, ("add", (1, 3, 4, 4)): 1}
    assert on_images(last.program)["add", (1, 4, 4, 3)] == 1
    np.testing.assert_allclose(last.program(W, B, S, X), normed(W, B, S, X), rtol=1e-4, atol=1e-5)


def test_without_convolutions_there_is_nothing_to_turn() -> None:
    program = from_jax(lambda x: jnp.tanh(x) * 2.0, X)
    (only,) = opened(program, rules())
    assert str(only.program) == str(program)


def test_a_network_that_is_features_last_stays() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        names = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=names)

    program = from_jax(fn, W.reshape(1, 1, 3, 3), X.reshape(1, 4, 4, 3), weights=(0,))
    assert len(opened(program, rules())) == 1


def test_without_time_the_program_is_as_it_was() -> None:
    program = from_jax(plain, W, B, X, weights=(0, 1))
    (only,) = opened(program, rules(), 0.0)
    assert str(only.program) == str(program)
