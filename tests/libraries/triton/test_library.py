"""Kernels of Triton as a lowering of products: on GPUs only, found from any program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.libraries.triton.spellings import SPELLINGS
from xrl_jax import from_jax
from xrl_jax.backends.hoist import split
from xrl_jax.cost.programs import WITHOUT_TRYING, program_job
from xrl_jax.graph.graph import Node, build, nodes_of
from xrl_jax.language.rule_files import available_rules, standard_rules
from xrl_jax.libraries.base import CustomCall
from xrl_jax.libraries.triton.library import CALLS, LIBRARY
from xrl_jax.libraries.triton.product import product
from xrl_jax.lower.table import LOWERINGS, applicable, is_available, number_of
from xrl_jax.measure.gpu.compiler import COMPILER_FOLDER
from xrl_jax.measure.gpu.predictor import Predictor
from xrl_jax.program.program import Program, evaluate
from xrl_jax.runtime.target_platform import making_for
from xrl_jax.search.in_library import in_library

TRITON, MATRICES = (number_of("dot", name) for name in ("triton", "triton_matrices"))
SHAPES = [(1, 24, 4, 16)] * 3


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def in_triton(program: Program) -> Program:
    rules = available_rules(standard_rules(()), "gpu")
    found, steps = in_library(program, rules, LIBRARY)
    assert {s.rule for s in steps} == {"dot-as-triton"}
    return found


def jaxpr_for_gpu(program: Program) -> str:
    hoisted = split(lambda *flat: evaluate(program, 0, flat), program.in_avals, program.weights)
    return str(jax.make_jaxpr(hoisted.call)(hoisted.avals, program.in_avals))


def dot_of(program: Program) -> Node:
    (graph,) = program.graphs
    nodes, _, _ = nodes_of(graph)
    (found,) = (n for n in nodes if n.op == "dot")
    return found


@pytest.fixture(scope="module")
def h200() -> Iterator[Predictor]:
    with Predictor("h200") as predictor:
        yield predictor


def test_products_may_be_in_triton_on_a_gpu() -> None:
    batch, matrices = ((2, 3, 4), (2, 4, 5)), ((3, 4), (4, 5))
    for shapes, expected in ((batch, {TRITON}), (matrices, {MATRICES})):
        program = from_jax(lambda x, y: x @ y, *map(jnp.ones, shapes))
        args = tuple(Node("input", shape=s, ref=i) for i, s in enumerate(shapes))
        assert {TRITON, MATRICES} & set(applicable(dot_of(program), args)) == expected
    for lowering in (TRITON, MATRICES):
        assert is_available("dot", lowering, "gpu") and not is_available("dot", lowering, "cpu")


def test_they_are_the_last_lowerings_of_products() -> None:
    assert [r.name for r in LOWERINGS["dot"]][-2:] == ["triton", "triton_matrices"]


def test_a_program_for_gpus_has_the_kernel_and_one_for_cpus_does_not() -> None:
    program = in_triton(from_jax(attention, *map(jnp.ones, SHAPES)))
    assert "pallas_call" not in jaxpr_for_gpu(program)
    with making_for("gpu"):
        assert jaxpr_for_gpu(program).count("pallas_call") == 1


def test_a_program_with_the_lowering_computes_the_same_on_a_cpu() -> None:
    args = [jax.random.normal(jax.random.key(i), s) for i, s in enumerate(SHAPES)]
    program = in_triton(from_jax(attention, *args))
    np.testing.assert_allclose(program(*args), attention(*args), rtol=1e-5, atol=1e-6)


def test_products_that_no_kernel_takes_in_are_differentiable_and_map() -> None:
    x, y = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4)
    how = dict(
        dimension_numbers=(((1,), (0,)), ((), ())), precision=None, preferred_element_type=None
    )

    def f(x: jax.Array) -> jax.Array:
        return product(x, y, **how)

    np.testing.assert_array_equal(jax.jit(f)(x), x @ y)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(x), jnp.ones((2, 4)) @ y.T)
    np.testing.assert_array_equal(jax.vmap(f)(x[None]), (x @ y)[None])


def test_the_kernel_maps_over_a_further_axis() -> None:
    program = in_triton(from_jax(attention, *map(jnp.ones, SHAPES)))
    with making_for("gpu"):
        hoisted = split(lambda *f: evaluate(program, 0, f), program.in_avals, program.weights)
    args = [jax.random.normal(jax.random.key(i), (3, *s)) for i, s in enumerate(SHAPES)]
    prepared = hoisted.prepare([])
    (found,) = jax.vmap(lambda *a: hoisted.call(prepared, a))(*args)
    np.testing.assert_allclose(found, jax.vmap(attention)(*args), rtol=1e-5, atol=1e-6)


def test_a_kernel_is_timed_together_with_one_on_its_result() -> None:
    x, y = jnp.ones((2, 4, 8)), jnp.ones((2, 8, 16))
    dot = dot_of(from_jax(lambda x, y: x @ y, x, y))
    pair = CALLS.pair(dot, jnp.matmul, x, y)
    assert pair is not None and pair.shape == x.shape


def test_a_product_of_matrices_is_timed_alone() -> None:
    x, y = jnp.ones((4, 8)), jnp.ones((8, 16))
    dot = dot_of(from_jax(lambda x, y: x @ y, x, y))
    assert CALLS.pair(dot, jnp.matmul, x, y) is None


NO_SPILLS = ("xla_gpu_fail_ptx_compilation_on_register_spilling", "true")


@pytest.mark.skipif(not COMPILER_FOLDER.is_dir(), reason="JAX's plugin for CUDA is not installed")
@pytest.mark.parametrize("name", ["packed", "causal", "grouped", "long rows"])
def test_it_compiles_for_a_gpu(h200: Predictor, name: str) -> None:
    spelling = SPELLINGS[name]
    program = in_triton(from_jax(spelling.fn, *map(jnp.ones, spelling.shapes)))
    with making_for("gpu"):
        job = program_job(program, (*WITHOUT_TRYING, NO_SPILLS))
    assert job.custom_calls == (CustomCall("triton", ("__gpu$xla.gpu.triton",)),)
    (timing,) = h200.submit([job])
    assert timing.status == "ok", timing.error
    assert timing.kernels["attention"] == 1
    assert timing.kernels["graphs"] == 1 and not timing.kernels["outside graphs"]


@pytest.mark.skipif(not COMPILER_FOLDER.is_dir(), reason="JAX's plugin for CUDA is not installed")
@pytest.mark.parametrize(
    ("rows", "columns", "features", "dtype"),
    [
        (128, 128, 64, "float32"),
        (256, 256, 64, "float32"),
        (1024, 1024, 64, "float32"),
        (512, 512, 64, "bfloat16"),
        (577, 577, 80, "float16"),
        (4096, 4096, 128, "bfloat16"),
        (1, 4096, 256, "float32"),
        (521, 521, 37, "float32"),
    ],
)
def test_no_register_is_spilled(
    h200: Predictor, rows: int, columns: int, features: int, dtype: str
) -> None:
    shapes = [(1, n, 12, features) for n in (rows, columns, columns)]
    program = in_triton(from_jax(attention, *(jnp.ones(s, dtype) for s in shapes)))
    with making_for("gpu"):
        job = program_job(program, (*WITHOUT_TRYING, NO_SPILLS))
    (timing,) = h200.submit([job])
    assert timing.status == "ok", timing.error
    assert timing.kernels["attention"] == 1


def layer(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ w + b, approximate=False)


def all_in_triton(program: Program) -> Program:
    (graph,) = program.graphs
    nodes, outputs, _ = nodes_of(graph)
    new = [replace(n, lowering=MATRICES) if n.op == "dot" else n for n in nodes]
    return program.with_graphs([build(new, outputs)])


def test_a_layer_computes_the_same_on_a_cpu() -> None:
    args = [jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(32, 8), (8, 9), (9,)])]
    program = all_in_triton(from_jax(layer, *args))
    with making_for("gpu"):
        assert "pallas_call" in jaxpr_for_gpu(program)
        (found,) = jax.jit(lambda *a: evaluate(program, 0, a))(*args)
    np.testing.assert_allclose(found, layer(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not COMPILER_FOLDER.is_dir(), reason="JAX's plugin for CUDA is not installed")
@pytest.mark.parametrize(
    ("rows", "columns", "summed", "dtype"),
    [(128, 3072, 768, "float32"), (577, 200, 77, "float16"), (4096, 4096, 4096, "bfloat16")],
)
def test_a_layer_is_one_kernel_on_a_gpu(
    h200: Predictor, rows: int, columns: int, summed: int, dtype: str
) -> None:
    shapes = (rows, summed), (summed, columns), (columns,)
    program = all_in_triton(from_jax(layer, *(jnp.ones(s, dtype) for s in shapes)))
    with making_for("gpu"):
        job = program_job(program, (*WITHOUT_TRYING, NO_SPILLS))
    (timing,) = h200.submit([job])
    assert timing.status == "ok", timing.error
    assert timing.kernels == {"product": 1, "all": 1, "graphs": 1, "outside graphs": 0}
