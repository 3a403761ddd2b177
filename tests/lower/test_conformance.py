"""Every operator of the table agrees with its shape rule, its dtype rule and its lowerings.

The tests go through the table, so they cover a new operator or lowering without a change. A shape
rule without a sampler fails.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.graph import ops
from xrl_jax.graph.graph import GraphError, Node, pack_attrs
from xrl_jax.graph.shapes import SHAPE_RULES
from xrl_jax.libraries.base import Epilogue
from xrl_jax.lower.table import LOWERINGS, absorbs, applicable, is_available, lower, narrow
from xrl_jax.runtime.target_platform import making_for
from xrl_jax.verify.lowerings import comparison
from xrl_jax.verify.samplers.nodes import Sample, random_node
from xrl_jax.verify.samplers.table import SAMPLERS

BOUND = ("hole", "input", "weight", "array", "opaque", "call")
STRUCTURE = ("pack", "proj")
COMPUTED = [name for name in ops.OPS if name not in BOUND + STRUCTURE]
CHOSEN = [name for name in COMPUTED if len(LOWERINGS[name]) > 1]
ROUNDING = {op: [r for r in LOWERINGS[op] if r.rounds is not None] for op in ("dot", "conv")}


def rng_for(op: str, example: int) -> np.random.Generator:
    return np.random.default_rng([ops.OPS[op].code, example])


def specs(sample: Sample) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.shape, jnp.dtype(a.dtype)) for a in sample.args]


def check_lowerings(sample: Sample, rng: np.random.Generator, *, done: frozenset[str]) -> set[str]:
    """Compare the applicable lowerings, except for `done`, with float64; return their names."""
    found = [LOWERINGS[sample.node.op][i] for i in applicable(sample.node, sample.args)]
    lowerings = [lowering for lowering in found if lowering.name not in done]
    if lowerings:
        found = comparison(sample, lowerings)(sample.values(rng))
        wrong = {w.name: f.problem for w, f in zip(lowerings, found, strict=True) if f.problem}
        assert not wrong
    return {lowering.name for lowering in lowerings}


def check_rules(op: str, example: int) -> None:
    made = random_node(op, rng_for(op, example))
    with jax.enable_x64(True):
        out = jax.eval_shape(lambda *a: lower(made.node, *a), *specs(made))
    assert (out.shape, out.dtype.name) == (made.node.shape, made.node.dtype), made


def test_every_shape_rule_has_a_sampler() -> None:
    assert {*SAMPLERS, "given"} == set(SHAPE_RULES)


@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")  # of casts
@pytest.mark.parametrize("op", COMPUTED)
def test_shape_and_dtype_rules_agree_with_jax(op: str) -> None:
    for example in range(12):
        check_rules(op, example)


@pytest.mark.parametrize("op", CHOSEN)
def test_every_lowering_equals_the_plain_one(op: str) -> None:
    met: set[str] = set()
    for example in range(160):  # each lowering is tried on the first node it applies to
        rng = rng_for(op, example)
        met |= check_lowerings(random_node(op, rng), rng, done=frozenset(met))
    assert met == {row.name for row in LOWERINGS[op] if row.rounds is None}


def check_rounding(sample: Sample, values: list[np.ndarray], *, done: set[str]) -> set[str]:
    """Compare lowerings that round, except for `done`, with the plain one on rounded operands;
    return their names.
    """
    x, w = jnp.asarray(values[0]), values[1]
    found = [LOWERINGS[sample.node.op][i] for i in narrow(sample.node, sample.args)]
    for row in (row for row in found if row.name not in done):
        assert row.rounds is not None
        x = jnp.abs(x) if row.rounds.dtype == "uint8" else x
        y = np.asarray(jax.jit(partial(row.fn, sample.node))(x, w))
        rounded = row.rounds.left(sample.node, x), jnp.asarray(row.rounds.right(sample.node, w))
        exact = np.asarray(lower(sample.node, *rounded))
        np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
        finite = np.isfinite(exact)
        size = np.abs(exact[finite]).max(initial=0.0)
        np.testing.assert_allclose(y[finite], exact[finite], atol=1e-5 * size, rtol=1e-5)
    return {row.name for row in found}


@pytest.mark.parametrize("op", ROUNDING)
def test_a_lowering_that_rounds_equals_the_plain_one_on_rounded_operands(op: str) -> None:
    met: set[str] = set()
    for example in range(160):
        rng = rng_for(op, example)
        sample = random_node(op, rng)
        if {sample.node.dtype, *(a.dtype for a in sample.args)} == {"float32"}:
            met |= check_rounding(sample, sample.values(rng), done=met)
    assert met == {row.name for row in ROUNDING[op]}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("op", ROUNDING)
def test_a_lowering_that_rounds_keeps_special_values(op: str, value: float) -> None:
    met: set[str] = set()
    for example in range(160):
        rng = rng_for(op, example)
        sample = random_node(op, rng)
        if {sample.node.dtype, *(a.dtype for a in sample.args)} == {"float32"}:
            x, w = sample.values(rng)
            x = np.where(np.arange(x.size).reshape(x.shape) == x.size // 2, value, x)
            met |= check_special_values(sample, x.astype(np.float32), w, done=met)
    assert met == {row.name for row in ROUNDING[op]}


def check_special_values(
    sample: Sample, x: np.ndarray, w: np.ndarray, *, done: set[str]
) -> set[str]:
    """Compare lowerings that round, except for `done`, with the plain one; return their names.

    A library may compute a call with special values in float32, so the operands are not rounded
    here.
    """
    found = [LOWERINGS[sample.node.op][i] for i in narrow(sample.node, sample.args)]
    for row in (row for row in found if row.name not in done):
        image = jnp.asarray(np.abs(x) if row.rounds and row.rounds.dtype == "uint8" else x)
        y = np.asarray(jax.jit(partial(row.fn, sample.node))(image, w))
        exact = np.asarray(lower(sample.node, image, jnp.asarray(w)))
        np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(y[np.isinf(exact)], exact[np.isinf(exact)])
        products = np.asarray(lower(sample.node, jnp.abs(image), jnp.abs(w)))[finite]
        largest = products[np.isfinite(products)].max(initial=0.0)
        np.testing.assert_allclose(
            y[finite], exact[finite], atol=row.error["float32"] * largest, rtol=1e-5
        )
    return {row.name for row in found}


@pytest.mark.parametrize("op", ["conv", "dot"])
def test_absorbed_epilogues_equal_separate_operators(op: str) -> None:
    absorbing = {i for i, row in enumerate(LOWERINGS[op]) if row.absorbs is not None}
    met: set[int] = set()
    for example in range(5000):
        rng = rng_for(op, example)
        made = random_node(op, rng)
        fit = {*applicable(made.node, made.args), *narrow(made.node, made.args)}
        for i in (absorbing - met) & fit:
            if absorbs(replace(made.node, lowering=i), made.args):
                check_epilogues(replace(made.node, lowering=i), made.values(rng), rng)
                met.add(i)
        if met == absorbing:
            break
    assert met == absorbing


def check_epilogues(node: Node, values: list[np.ndarray], rng: np.random.Generator) -> None:
    """Check all parts of an epilogue together, and each on its own."""
    alone = np.asarray(jax.jit(partial(lower, node))(*values))
    bias = jnp.asarray(rng.integers(-9, 9, node.shape[-1:]), "float32")
    addend = jnp.asarray(rng.integers(-9, 9, node.shape), "float32")
    for epilogue, expected in (
        (Epilogue(bias, addend, relu=True), np.maximum(alone + bias + addend, 0)),
        (Epilogue(bias=bias), alone + bias),
        (Epilogue(addend=addend), alone + addend),
        (Epilogue(relu=True), np.maximum(alone, 0)),
    ):
        got = jax.jit(partial(lower, node, epilogue=epilogue))(*values)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4, err_msg=f"{node}")


@pytest.mark.slow
@pytest.mark.parametrize("op", CHOSEN)
def test_every_lowering_equals_the_plain_one_on_many_nodes(op: str) -> None:
    for example in range(100, 300):
        rng = rng_for(op, example)
        check_lowerings(random_node(op, rng), rng, done=frozenset())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")  # of casts
@pytest.mark.parametrize("op", COMPUTED)
def test_shape_and_dtype_rules_agree_with_jax_on_many_nodes(op: str) -> None:
    for example in range(100, 400):
        check_rules(op, example)


@pytest.mark.parametrize("op", BOUND)
def test_nodes_with_bindings_are_refused(op: str) -> None:
    with pytest.raises(GraphError, match=f"'{op}' node needs its bindings: evaluate it"):
        lower(Node(op))


def test_pack_and_proj_handle_tuples() -> None:
    assert lower(Node("pack"), 1, 2) == (1, 2)  # type: ignore[arg-type]
    second = Node("proj", (0,), pack_attrs("proj", {"index": 1}))
    assert lower(second, (5, 6)) == 6  # type: ignore[arg-type]


def test_an_unknown_lowering_is_refused() -> None:
    with pytest.raises(GraphError, match="'add' has 1 lowerings, but a node asks for number 3"):
        lower(Node("add", (0, 1), lowering=3), 1, 2)  # type: ignore[arg-type]


def test_lowering_zero_is_the_traced_primitive() -> None:
    assert {rows[0].name for rows in LOWERINGS.values()} == {"plain"}


def test_precisions_are_decoded_as_they_were_encoded() -> None:
    precision = (jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT)
    assert ops.encode_precision(precision) == 7
    assert ops.decode_precision(7) == precision
    preset = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3
    assert ops.decode_precision(ops.encode_precision(preset) or 0) == preset
    assert ops.encode_precision(None) == 0
    assert ops.encode_precision("other") is None


@pytest.mark.parametrize("op", ["conv", "dot"])
def test_code_for_a_gpu_calls_no_kernel_of_the_host(op: str) -> None:
    met: set[str] = set()
    for example in range(160):
        made = random_node(op, rng_for(op, example))
        if {made.node.dtype, *(a.dtype for a in made.args)} != {"float32"}:
            continue
        for i in applicable(made.node, made.args):
            row = LOWERINGS[op][i]
            if row.name not in met and is_available(op, i, "gpu"):
                met.add(row.name)
                with making_for("gpu"):
                    values = made.values(rng_for(op, example))
                    code = jax.make_jaxpr(partial(row.fn, replace(made.node, lowering=i)))(*values)
                assert "onednn" not in str(code), row.name
    assert {"plain", "winograd4" if op == "conv" else "transposed"} <= met
