"""The ONNX operators of exported models, and that ONNX Runtime computes with them what JAX does."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax import lax

import xrl_jax
from experiments import models
from experiments.runtimes import check_agreement, error_of, onnx_model, onnx_runtime
from tests.experiments.test_models import SMALL
from tests.quick import QUICK
from xrl_jax.backends.onnx.model import model_proto
from xrl_jax.backends.onnx.values import ExportError

pytest.importorskip("onnxruntime")


def array(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def model_of(fn: Callable[..., Any], *inputs: Any) -> onnx.ModelProto:
    """Return the model of a function, after checking that ONNX Runtime and JAX agree on its
    results.
    """
    model = model_proto(xrl_jax.from_jax(fn, *inputs), name="test")
    onnx.checker.check_model(model, full_check=True)
    wanted = [np.asarray(a) for a in jax.tree.leaves(jax.jit(fn)(*inputs))]
    got = onnx_runtime(model, 1)(*map(np.asarray, jax.tree.leaves(inputs)))
    assert [a.dtype for a in got] == [a.dtype for a in wanted]
    assert error_of(got, wanted) < 1e-5
    return model


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def written(fn: Callable[..., Any], *inputs: Any) -> list[str]:
    """Return the operators of a function's model, in order."""
    return operators(model_of(fn, *inputs))


def attributes(model: onnx.ModelProto, op_type: str) -> dict[str, Any]:
    (node,) = [n for n in model.graph.node if n.op_type == op_type]
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def constants(model: onnx.ModelProto) -> list[tuple[int, ...]]:
    """Return the shapes of the float constants."""
    arrays = map(onnx.numpy_helper.to_array, model.graph.initializer)
    return [a.shape for a in arrays if a.dtype == np.float32]


# --- functions that become one operator ---

X = array(2, 3, 8)
SCALE, BIAS = array(8, seed=1), array(8, seed=2)


def normalised(x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True) + 1e-5)


def fast_layer_norm(x: jax.Array) -> jax.Array:
    """Compute the variance from the mean of squares, and multiply the scale into the factor."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean))
    return (x - mean) * (lax.rsqrt(variance + 1e-6) * SCALE) + BIAS


def reordered_layer_norm(x: jax.Array) -> jax.Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return BIAS + SCALE * (lax.rsqrt(1e-6 + variance) * (x - mean))


def layer_norm_of_var(x: jax.Array) -> jax.Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-6) * SCALE + BIAS


WHOLE = {
    "softmax": (jax.nn.softmax, "Softmax"),
    "softmax of an inner axis": (lambda x: jax.nn.softmax(x, axis=1), "Softmax"),
    "softmax by hand": (lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True), "Softmax"),
    "log softmax": (jax.nn.log_softmax, "LogSoftmax"),
    "layer norm": (lambda x: normalised(x) * SCALE + BIAS, "LayerNormalization"),
    "layer norm, scale only": (lambda x: normalised(x) * SCALE, "LayerNormalization"),
    "layer norm, no weights": (normalised, "LayerNormalization"),
    "layer norm of squares": (fast_layer_norm, "LayerNormalization"),
    "layer norm of jnp.var": (layer_norm_of_var, "LayerNormalization"),
    "layer norm, transposed round": (reordered_layer_norm, "LayerNormalization"),
    "standardize": (jax.nn.standardize, "LayerNormalization"),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), "Gelu"),
    "gelu by erf": (lambda x: x * 0.5 * (1.0 + lax.erf(x / np.sqrt(2.0))), "Gelu"),
    "gelu by tanh": (jax.nn.gelu, "Gelu"),
    "relu": (jax.nn.relu, "Relu"),
    "relu6": (jax.nn.relu6, "Clip"),
    "clip": (lambda x: jnp.clip(x, -0.5, 0.5), "Clip"),
    "sigmoid": (jax.nn.sigmoid, "Sigmoid"),
    "mean": (lambda x: x.mean(-1), "ReduceMean"),
    "mean, axis kept": (lambda x: x.mean((0, 2), keepdims=True), "ReduceMean"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_known_patterns_become_one_operator(name: str) -> None:
    fn, op_type = WHOLE[name]
    assert written(fn, X) == [op_type]


def test_attributes_say_axis_epsilon_and_approximation() -> None:
    assert attributes(model_of(lambda x: jax.nn.softmax(x, axis=1), X), "Softmax") == {"axis": 1}
    norm = attributes(model_of(layer_norm_of_var, X), "LayerNormalization")
    assert norm == {"axis": -1, "epsilon": pytest.approx(1e-6)}
    assert attributes(model_of(jax.nn.gelu, X), "Gelu") == {"approximate": b"tanh"}


SIMILAR = {
    "sum over another axis": (lambda x: jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True).mean()),
    "mean of something else": (lambda x: (x - jnp.mean(x * x, -1, keepdims=True)) / x.std()),
    "scale of the tokens": (lambda x: normalised(x) * array(3, 1) + BIAS),
    "another constant": (lambda x: x * 0.5 * (1.0 + lax.erf(x / 1.5))),
    "another factor": (lambda x: x * (1.0 + lax.erf(x / np.sqrt(2.0)))),
    "gate of another array": (lambda x: x[:1] * 0.5 * (1.0 + lax.erf(x[1:] / np.sqrt(2.0)))),
    "sum by another number": (lambda x: x.sum(-1) / 7.0),
}


@pytest.mark.parametrize("name", SIMILAR)
def test_similar_patterns_stay_decomposed(name: str) -> None:
    found = set(written(SIMILAR[name], X))
    assert not found & {"Softmax", "Gelu"}
    assert name != "sum by another number" or "ReduceMean" not in found
    # Without the scale of the tokens, the normalisation is a layer norm.
    assert ("LayerNormalization" in found) == (name == "scale of the tokens")


# --- convolutions and pooling ---

IMAGE = array(1, 8, 7, 7)
NCHW, NHWC = ("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")


def conv(x: Any, kernel: Any, layout: Any = NCHW, **options: Any) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout, **options)


def batch_norm(y: Any, channels: int, axis: int = 1) -> jax.Array:
    shape = [channels if d == axis else 1 for d in range(4)]
    scale, bias, mean = (array(channels, seed=s).reshape(shape) for s in (1, 2, 3))
    variance = np.abs(array(channels, seed=4)).reshape(shape) + 0.5
    return (y - mean) * lax.rsqrt(variance + 1e-5) * scale + bias


def test_grouped_convolution() -> None:
    kernel = array(8, 2, 3, 3)
    model = model_of(lambda x: conv(x, kernel, feature_group_count=4), IMAGE)
    assert operators(model) == ["Conv"]
    assert attributes(model, "Conv") == {
        "group": 4,
        "kernel_shape": [3, 3],
        "strides": [1, 1],
        "dilations": [1, 1],
        "pads": [1, 1, 1, 1],
    }


def test_stride_padding_and_dilation_become_attributes() -> None:
    def fn(x: jax.Array) -> jax.Array:
        padding = [(0, 1), (2, 3)]
        return lax.conv_general_dilated(x, array(4, 8, 2, 3), (2, 1), padding, (1, 1), (1, 2))

    found = attributes(model_of(fn, IMAGE), "Conv")
    assert (found["strides"], found["dilations"]) == ([2, 1], [1, 2])
    assert found["pads"] == [0, 2, 1, 3]  # first the padding before, then that after


def test_features_last_get_transposes() -> None:
    kernel = array(3, 3, 8, 4)
    model = model_of(lambda x: conv(x, kernel, NHWC), array(1, 7, 7, 8))
    assert operators(model) == ["Transpose", "Conv", "Transpose"]
    assert constants(model) == [(4, 8, 3, 3)]


def test_bias_is_merged_into_its_convolution() -> None:
    bias = array(4)
    model = model_of(lambda x: conv(x, array(4, 8, 3, 3)) + bias[:, None, None], IMAGE)
    assert operators(model) == ["Conv"]
    assert constants(model) == [(4, 8, 3, 3), (4,)]


def test_bias_stays_separate_where_the_convolution_is_used_twice() -> None:
    def fn(x: jax.Array) -> jax.Array:
        y = conv(x, array(4, 8, 3, 3))
        return jnp.tanh(y + array(4)[:, None, None]) * y

    assert written(fn, IMAGE) == ["Conv", "Add", "Tanh", "Mul"]


def test_one_dimensional_convolution() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, array(4, 8, 3), (1,), "SAME")

    assert written(fn, array(1, 8, 9)) == ["Conv"]


def test_batch_norm_is_one_operator_that_the_runtime_folds(tmp_path: Path) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jax.nn.relu(batch_norm(conv(x, array(4, 8, 3, 3)), 4))

    model = model_of(fn, IMAGE)
    assert operators(model) == ["Conv", "BatchNormalization", "Relu"]
    onnx_runtime(model, 1, optimized_to=str(tmp_path / "optimised.onnx"))
    # It depends on the machine whether convolutions are plain or work on blocks of channels.
    convolutions = {"Conv", "FusedConv", "ReorderInput", "ReorderOutput"}
    assert set(operators(onnx.load(tmp_path / "optimised.onnx"))) <= convolutions


def test_batch_norm_with_features_last_is_adjacent_to_its_convolution() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return batch_norm(conv(x, array(3, 3, 8, 4), NHWC), 4, axis=3)

    assert written(fn, array(1, 7, 7, 8)) == [
        "Transpose",
        "Conv",
        "BatchNormalization",
        "Transpose",
    ]


def window_sum(x: Any, padding: str = "SAME") -> Any:
    return lax.reduce_window(x, 0.0, lax.add, (1, 1, 3, 3), (1, 1, 2, 2), padding)


def test_pooling() -> None:
    def maximum(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "SAME")

    assert written(maximum, IMAGE) == ["MaxPool"]
    assert attributes(model_of(maximum, IMAGE), "MaxPool")["pads"] == [1, 1, 1, 1]
    assert written(window_sum, IMAGE) == ["AveragePool", "Mul"]
    assert written(lambda x: x.mean((2, 3)), IMAGE) == ["GlobalAveragePool", "Reshape"]


def test_average_pool_counts_the_padding_or_not() -> None:
    def over_all(x: jax.Array) -> jax.Array:
        return window_sum(x) / 9.0

    def over_what_is_there(x: jax.Array) -> jax.Array:
        return window_sum(x) / window_sum(jnp.ones((1, 1, 7, 7)))

    for fn, counted in ((over_all, 1), (over_what_is_there, 0)):
        model = model_of(fn, IMAGE)
        assert operators(model) == ["AveragePool"]
        assert attributes(model, "AveragePool")["count_include_pad"] == counted


def test_pooling_with_features_last() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")

    assert written(fn, array(1, 7, 7, 8)) == ["Transpose", "MaxPool", "Transpose"]


# --- products ---


def test_dense_layer_is_a_product_and_a_sum_with_a_vector() -> None:
    kernel, bias = array(8, 5), array(5, seed=1)
    model = model_of(lambda x: x @ kernel + bias, X)
    assert operators(model) == ["MatMul", "Add"]
    assert constants(model) == [(8, 5), (5,)]


def test_constants_are_transposed_beforehand() -> None:
    kernel = array(5, 8)
    model = model_of(lambda x: x @ kernel.T, X)
    assert operators(model) == ["MatMul"]
    assert constants(model) == [(8, 5)]


def test_attention_transposes_its_heads_and_not_its_scores() -> None:
    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    model = model_of(fn, *(array(2, 6, 4, 3, seed=s) for s in range(3)))
    moves = [list(n.attribute[0].ints) for n in model.graph.node if n.op_type == "Transpose"]
    assert Counter(operators(model)) == {"Transpose": 4, "MatMul": 2, "Softmax": 1}
    assert moves == [[0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3], [0, 2, 1, 3]]


@pytest.mark.parametrize(
    "spec", ["i,i->", "ij,j->i", "ij,kj->ki", "bij,bjk->bik", "bijc,dbc->bdij", "ij,jkl->ikl"]
)
def test_products_of_any_axes(spec: str) -> None:
    size = dict(zip("bcdijkl", range(2, 9), strict=True))
    left, right = (tuple(size[c] for c in s) for s in spec.split("->")[0].split(","))
    assert "MatMul" in written(lambda x, y: jnp.einsum(spec, x, y), array(*left), array(*right))


# --- everything else, one to one ---

POSITIVE, COUNTS = np.abs(X) + 0.1, np.arange(-4, 4, dtype=np.int32)
_LAX = (
    "exp Exp tanh Tanh erf Erf erfc Erf sin Sin abs Abs sign Sign floor Floor ceil Ceil neg Neg "
    "square Mul expm1 Exp is_finite IsNaN exp2 Pow"
).split()
ONE_TO_ONE: dict[str, tuple[Callable[..., Any], list[Any], str]] = {
    **{name: (getattr(lax, name), [X], op) for name, op in zip(_LAX[::2], _LAX[1::2], strict=True)},
    "log1p": (lax.log1p, [POSITIVE], "Log"),
    "rsqrt": (lax.rsqrt, [POSITIVE], "Sqrt"),
    "power": (lambda x: x**3, [X], "Pow"),
    "power of floats": (lax.pow, [POSITIVE, X], "Pow"),
    "minimum": (jnp.minimum, [X, -X], "Min"),
    "remainder": (lax.rem, [X, POSITIVE], "Mod"),
    "not equal": (lambda x: x != 0, [COUNTS], "Equal"),
    "and": (lambda x: (x > 0) & (x < 2), [COUNTS], "And"),
    "bits": (lambda x: x & 3, [COUNTS], "BitwiseAnd"),
    "division towards zero": (lambda x: lax.div(x, np.int32(3)), [COUNTS], "Div"),
    "where": (lambda x: jnp.where(x > 0, x, 2 * x), [X], "Where"),
    "clamp by arrays": (lambda x, y: lax.clamp(-y, x, y), [X, POSITIVE], "Min"),
    "cast": (lambda x: x.astype(jnp.int32), [4 * X], "Cast"),
    "round": (jnp.round, [4 * X], "Round"),
    "reshape": (lambda x: x.reshape(6, 8), [X], "Reshape"),
    "transpose": (lambda x: x.transpose(2, 0, 1), [X], "Transpose"),
    "slice": (lambda x: x[:, 1:, 1:7:2], [X], "Slice"),
    "reverse": (lambda x: x[:, ::-1], [X], "Slice"),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0)), constant_values=7), [X], "Pad"),
    "sum": (lambda x: x.sum((0, 2)), [X], "ReduceSum"),
    "product": (lambda x: x.prod(-1), [X], "ReduceProd"),
    "all": (lambda x: (x > -1).all(-1), [X], "ReduceMin"),
    "any": (lambda x: (x > 1).any(-1), [X], "ReduceMax"),
    "argmax": (lambda x: x.argmax(-1), [X], "ArgMax"),
    "cumulative sum": (lambda x: jnp.cumsum(x, 1), [X], "CumSum"),
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None], (2, 5, 8)), [array(2, 8)], "Expand"),
}


@pytest.mark.parametrize("name", ONE_TO_ONE)
def test_operator_is_written_and_agrees(name: str) -> None:
    fn, inputs, op_type = ONE_TO_ONE[name]
    assert op_type in written(fn, *inputs)


def test_broadcasts_are_left_to_the_operators() -> None:
    assert written(lambda x, y: x[:, None] + y[None], array(3, 8), array(5, 8)) == [
        "Reshape",
        "Add",
    ]


def test_chain_of_concatenations_becomes_one() -> None:
    parts = [array(2, n) for n in range(1, 10)]
    assert written(lambda *xs: jnp.concatenate(xs, 1), *parts) == ["Concat"]


def test_embedding_is_a_gather() -> None:
    table, rows = array(10, 4), np.array([[0, 9, -1], [3, -10, 5]], np.int32)
    assert written(lambda i: jnp.take(table, i, axis=0), rows) == ["Gather"]
    assert written(lambda x: x[:, rows[0]], array(2, 10, 3)) == ["Gather"]
    clipped = written(lambda i: jnp.take(table, i, axis=0, mode="clip"), rows * 2)
    assert clipped == ["Clip", "Gather"]


def test_negative_indices_count_from_the_end_before_they_are_clipped() -> None:
    table, rows = array(10, 4), np.array([-1, 3, 12], np.int32)
    found = written(lambda t, i: t.at[i].get(mode="clip"), table, rows)
    assert found[-2:] == ["Clip", "Gather"] and "Where" in found


@pytest.mark.parametrize("position", [-9, -1, 0, 2, 5, 9])
def test_start_indices_of_dynamic_slices_are_clamped(position: int) -> None:
    def fn(x: jax.Array, row: jax.Array, at: jax.Array) -> Any:
        cache = lax.dynamic_update_slice_in_dim(x, row, at, axis=1)
        return cache, lax.dynamic_slice_in_dim(cache, at, 3, axis=1)

    found = written(fn, array(2, 6, 4), array(2, 2, 4, seed=1), np.int32(position))
    assert {"ScatterElements", "Slice"} <= set(found)


# --- programs ---


def test_weights_are_constants_and_work_on_them_alone_is_precomputed() -> None:
    def fn(weights: dict[str, Any], x: jax.Array) -> jax.Array:
        return x @ (weights["kernel"] * weights["gain"]).T + weights["bias"]

    weights = {"kernel": array(5, 8), "gain": array(8, seed=1), "bias": array(5, seed=2)}
    model = onnx_model(fn, weights, X, name="dense")
    assert operators(model) == ["MatMul", "Add"]
    assert constants(model) == [(8, 5), (5,)]
    assert model.graph.name == "dense"
    assert [i.name for i in model.graph.input] == ["input_0"]
    assert check_agreement(onnx_runtime(model, 1), fn, weights, [X]) < 1e-5


def test_broadcast_constants_are_stored_without_their_repetitions() -> None:
    model = model_of(lambda x: x * jnp.broadcast_to(BIAS[:, None], (8, 2000)), array(8, 2000))
    assert constants(model) == [(8, 1)]


def test_loops_are_unrolled() -> None:
    kernels, rows = array(3, 8, 8), array(3, 2, 8)

    def fn(x: jax.Array, rows: jax.Array) -> Any:
        def step(h: jax.Array, at: Any) -> Any:
            kernel, row = at
            h = h @ kernel + row
            return h, h.sum(-1)

        return lax.scan(step, x, (kernels, rows), reverse=True)

    assert Counter(written(fn, array(2, 8), rows))["MatMul"] == 3


def test_calls_are_inlined() -> None:
    @jax.jit
    def layer(x: jax.Array) -> jax.Array:
        for _ in range(9):
            x = jnp.tanh(x) + jnp.cos(x)
        return x

    def fn(x: jax.Array) -> jax.Array:
        return layer(layer(layer(x)))

    assert xrl_jax.from_jax(fn, X).bodies
    assert Counter(written(fn, X)) == {"Tanh": 27, "Cos": 27, "Add": 27}


def test_known_branch_is_inlined() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return lax.cond(jnp.asarray(True), jnp.tanh, jnp.exp, x)

    assert written(fn, X) == ["Tanh"]


def test_results_may_be_inputs_constants_or_duplicates() -> None:
    def fn(x: jax.Array, unused: jax.Array) -> Any:
        y = jnp.tanh(x)
        return y, y, x, jnp.ones((2, 2)), x[0, 0, 0]

    model = model_of(fn, X, array(3))
    assert Counter(operators(model))["Identity"] == 3
    assert [o.name for o in model.graph.output] == [f"output_{k}" for k in range(5)]
    assert len(model.graph.input) == 2


def test_round_trip_through_from_onnx() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(layer_norm_of_var(jax.nn.gelu(x, approximate=False)))

    program = xrl_jax.from_onnx(model_of(fn, X))
    np.testing.assert_allclose(program(X), fn(X), rtol=1e-5, atol=1e-6)


# --- what ONNX cannot express ---

UNSAYABLE = {
    "erf_inv": lambda x: lax.erf_inv(x / 10),
    "sort": jnp.sort,
    "while": lambda x: lax.while_loop(lambda y: y.sum() < 100, lambda y: y * 2, x),
    "of a dilated input": lambda x: lax.conv_general_dilated(
        x, array(4, 3, 3), (1,), [(1, 1)], lhs_dilation=(2,)
    ),
    "of anything but rows": lambda x: x[jnp.array([0, 1]), jnp.array([2, 1])],
}


@pytest.mark.parametrize("name", UNSAYABLE)
def test_operator_that_onnx_lacks_is_named(name: str) -> None:
    program = xrl_jax.from_jax(UNSAYABLE[name], jax.ShapeDtypeStruct(X.shape, X.dtype))
    with pytest.raises(ExportError, match=f"ONNX cannot express .*{name}"):
        model_proto(program, name="test")


def test_weights_must_be_those_of_the_program() -> None:
    program = xrl_jax.from_jax(lambda w, x: w * x, array(8), X, weights=(0,))
    with pytest.raises(ValueError, match="the program has 1 weights, got 0"):
        model_proto(program, weights=())
    with pytest.raises(
        ValueError, match=r"weight 0 of the program is float32\[8\], got float32\[3\]"
    ):
        model_proto(program, weights=(array(3),))


def test_weights_are_inputs_where_none_are_given() -> None:
    program = xrl_jax.from_jax(lambda w, x: w * x, array(8), X, weights=(0,))
    model = model_proto(program)
    assert [i.name for i in model.graph.input] == ["input_0", "input_1"]
    (got,) = onnx_runtime(model, 1)(BIAS, X)
    assert error_of([got], [BIAS * X]) < 1e-6


def test_a_file_holds_the_model(tmp_path: Path) -> None:
    path = tmp_path / "tanh.onnx"
    xrl_jax.to_onnx(xrl_jax.from_jax(jnp.tanh, X), path, name="tanh")
    model = onnx.load(path)
    assert (model.graph.name, operators(model)) == ("tanh", ["Tanh"])


def test_many_constants_are_in_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xrl_jax.backends.onnx.model._LARGEST", 1000)
    kernel = array(64, 64)
    program = xrl_jax.from_jax(lambda x: x @ kernel, array(2, 64))
    xrl_jax.to_onnx(program, tmp_path / "dense.onnx")
    assert {p.name for p in tmp_path.iterdir()} == {"dense.onnx", "dense.onnx.data"}
    again = xrl_jax.from_onnx(tmp_path / "dense.onnx")
    x = array(2, 64, seed=1)
    np.testing.assert_allclose(jax.tree.leaves(again(x))[0], x @ kernel, rtol=1e-4, atol=1e-4)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match="pip install onnx"):
        model_proto(xrl_jax.from_jax(jnp.tanh, X), name="test")


# --- the networks ---

NETWORK_OPERATORS = {
    "squeezenet": {"Conv": 26, "Relu": 26, "MaxPool": 3, "Concat": 8},
    "resnext50": {"Conv": 20, "BatchNormalization": 20, "Relu": 16, "Add": 6, "MatMul": 1},
    "bert": {"Softmax": 2, "LayerNormalization": 5, "Gelu": 2, "Gather": 2, "MatMul": 17},
    "inceptionv3": {
        "Conv": 94,
        "BatchNormalization": 94,
        "Relu": 94,
        "AveragePool": 9,
        "Concat": 11,
    },
}


@pytest.mark.parametrize("name", sorted(NETWORK_OPERATORS))
def test_networks_export_to_the_expected_operators(name: str) -> None:
    model = models.get(name, seed=3, **SMALL[name])
    out = onnx_model(model.fn, model.weights, *model.inputs, name=name)
    counts = Counter(operators(out))
    assert {op: counts[op] for op in NETWORK_OPERATORS[name]} == NETWORK_OPERATORS[name]
    assert check_agreement(onnx_runtime(out, 1), model.fn, model.weights, model.inputs) < 1e-5
    again = jax.jit(xrl_jax.from_onnx(out), compiler_options=QUICK)
    back = jax.tree.leaves(again(*model.inputs))
    wanted = jax.tree.leaves(jax.jit(model.fn)(model.weights, *model.inputs))
    assert error_of([np.asarray(a) for a in back], [np.asarray(a) for a in wanted]) < 1e-5


def test_scanned_layers_export_like_unrolled_ones() -> None:
    plain, scanned = (
        models.get("bert", seed=3, scan=scan, **SMALL["bert"]) for scan in (False, True)
    )
    first, second = (
        Counter(operators(onnx_model(m.fn, m.weights, *m.inputs))) for m in (plain, scanned)
    )
    assert first == second
