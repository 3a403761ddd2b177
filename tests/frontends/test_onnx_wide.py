"""Without x64, loading warns of models whose 64-bit arithmetic may matter, and of no others."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import TensorProto
from onnx.helper import make_node

from tests.frontends.onnx_models import FLOAT, INT64, array, model, tensor
from xrl_jax.frontends.onnx import load_onnx

DOUBLE, INT32, BOOL = TensorProto.DOUBLE, TensorProto.INT32, TensorProto.BOOL


def warned(nodes, inputs, constants=(), kind: int = INT64) -> str:
    """Return the warning that loading a model gives, or an empty string. The last node computes the
    output.
    """
    proto = model(nodes, inputs, [tensor(nodes[-1].output[0], None, kind)], constants)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_onnx(proto)
    assert len(caught) <= 1
    return str(caught[0].message) if caught else ""


def int64(name: str, values: Any):
    return array(name, values, np.int64)


IDS = tensor("ids", [4], INT64)
X = tensor("x", [4])


def hashed(multiplier: int):
    """Return nodes, inputs and constants of a multiplicative hash of rounded floats. The last node
    is named hash.
    """
    nodes = [
        make_node("Cast", ["x"], ["i"], to=INT64),
        make_node("Mul", ["i", "factor"], ["h"], name="hash"),
    ]
    return nodes, [X], [int64("factor", multiplier)]


def test_a_constant_beyond_32_bits_is_reported() -> None:
    message = warned(*hashed(2654435761))
    assert "'factor' of node 'hash' (ai.onnx.Mul, opset 17) holds 2654435761" in message
    assert "JAX_ENABLE_X64" in message


def test_products_that_may_overflow_32_bits_are_reported() -> None:
    message = warned(*hashed(1103515245))
    assert "node 'hash' (ai.onnx.Mul, opset 17) may exceed 32 bits" in message


def test_with_x64_there_is_no_warning_and_results_are_right() -> None:
    with jax.enable_x64(True):
        assert warned(*hashed(2654435761)) == ""
        nodes, inputs, constants = hashed(2654435761)
        loaded = load_onnx(model(nodes, inputs, [tensor("h", [4], INT64)], constants))
        x = jnp.array([1, 2, 3, 4], jnp.float32)
        expected = [2654435761, 5308871522, 7963307283, 10617743044]
        np.testing.assert_array_equal(loaded.fn({}, x), expected)


def test_repeated_products_are_followed_to_where_they_may_overflow() -> None:
    nodes = [make_node("Mul", ["ids", "p"], ["h0"], name="0")]
    nodes += [make_node("Mul", [f"h{i}", "p"], [f"h{i + 1}"], name=f"{i + 1}") for i in range(5)]
    message = warned(nodes, [IDS], [int64("p", 31)])
    assert "node '3'" in message and "node '2'" not in message


def test_only_the_first_problems_are_named() -> None:
    nodes = [make_node("Mul", ["ids", "p"], [f"h{i}"], name=f"{i}") for i in range(5)]
    nodes.append(make_node("Sum", ["x", "x"], ["y"]))
    message = warned(nodes, [IDS, X], [int64("p", 10**9)], FLOAT)
    assert "'0'" in message and "'2'" in message and "'3'" not in message and "2 more" in message


def test_computations_on_doubles_are_reported() -> None:
    nodes = [make_node("Cast", ["x"], ["d"], to=DOUBLE), make_node("Exp", ["d"], ["y"], name="e")]
    assert "node 'e' (ai.onnx.Exp, opset 17) computes on doubles" in warned(nodes, [X], (), DOUBLE)


def test_computations_on_double_inputs_and_initialisers_are_reported() -> None:
    nodes = [make_node("Reshape", ["x", "s"], ["r"]), make_node("Add", ["r", "w"], ["y"], name="a")]
    constants = [int64("s", [2, 2]), array("w", [[1, 2], [3, 4]], np.float64)]
    assert "node 'a'" in warned(nodes, [tensor("x", [4], DOUBLE)], constants, DOUBLE)


HARMLESS = {
    "the end of a slice": (
        [make_node("Slice", ["x", "first", "last"], ["y"])],
        [X],
        [int64("first", [1]), int64("last", [2**63 - 1])],
        FLOAT,
    ),
    "shapes": (
        [
            make_node("Shape", ["x"], ["s"]),
            make_node("Mul", ["s", "big"], ["b"]),
            make_node("Div", ["b", "big"], ["t"]),
            make_node("Reshape", ["x", "t"], ["y"]),
        ],
        [X],
        [int64("big", 2**40)],
        FLOAT,
    ),
    "ids shifted and gathered": (
        [
            make_node("Add", ["ids", "two"], ["moved"]),
            make_node("Gather", ["table", "moved"], ["y"]),
        ],
        [IDS],
        [int64("two", 2), array("table", np.ones((9, 3)))],
        FLOAT,
    ),
    "positions by a mask": (
        [
            make_node("Equal", ["ids", "padding"], ["is_padding"]),
            make_node("Not", ["is_padding"], ["kept"]),
            make_node("Cast", ["kept"], ["mask"], to=INT64),
            make_node("CumSum", ["mask", "axis"], ["count"]),
            make_node("Mul", ["count", "mask"], ["y"]),
        ],
        [IDS],
        [int64("padding", 1), int64("axis", 0)],
        INT64,
    ),
    "masks by each other": (
        [make_node("Mul", ["ids", "mask"], ["y"])],
        [IDS, tensor("mask", [4], INT64)],
        [],
        INT64,
    ),
    "places in a table of rows": (
        [
            make_node("ArgMax", ["x"], ["row"], axis=0),
            make_node("Mul", ["row", "width"], ["start"]),
            make_node("Add", ["start", "ids"], ["y"]),
        ],
        [X, IDS],
        [int64("width", 1000)],
        INT64,
    ),
    "rounded floats within limits": (
        [
            make_node("Floor", ["x"], ["f"]),
            make_node("Cast", ["f"], ["i"], to=INT64),
            make_node("Max", ["i", "low"], ["j"]),
            make_node("Min", ["j", "high"], ["k"]),
            make_node("Mul", ["k", "width"], ["y"]),
        ],
        [X],
        [int64("low", 0), int64("high", 99), int64("width", 10**7)],
        INT64,
    ),
    "32 bits that wrap in ONNX, too": (
        [make_node("Mul", ["i", "p"], ["y"])],
        [tensor("i", [4], INT32)],
        [array("p", 2**30, np.int32)],
        INT32,
    ),
    "doubles on the way to floats": (
        [make_node("Cast", ["w"], ["f"], to=FLOAT), make_node("Add", ["x", "f"], ["y"])],
        [X],
        [array("w", [0.1, 0.2, 0.3, 0.4], np.float64)],
        FLOAT,
    ),
    "doubles that are compared": (
        [make_node("Cast", ["x"], ["d"], to=DOUBLE), make_node("Greater", ["d", "half"], ["y"])],
        [X],
        [array("half", 0.5, np.float64)],
        BOOL,
    ),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_harmless_models_cause_no_warning(case: str) -> None:
    assert warned(*HARMLESS[case]) == ""


LIMITS = {
    "Add": ((-3, 5), (-2, 7)),
    "Sub": ((-3, 5), (-2, 7)),
    "Mul": ((-3, 5), (-2, 7)),
    "Div": ((-9, 5), (2, 7)),
    "Mod": ((-9, 5), (2, 7)),
    "Max": ((-3, 5), (1, 7)),
    "Min": ((-3, 5), (1, 7)),
    "Pow": ((-3, 5), (0, 4)),
}


@pytest.mark.parametrize("op", LIMITS)
def test_bounds_of_operations_include_their_extremes(op: str) -> None:
    """A factor that takes the largest possible result just beyond 32 bits causes a warning."""
    (a0, a1), (b0, b1) = LIMITS[op]
    constants = [int64("a0", a0), int64("a1", a1), int64("b0", b0), int64("b1", b1)]
    nodes = [
        make_node("Clip", ["x", "a0", "a1"], ["a"]),
        make_node("Clip", ["z", "b0", "b1"], ["b"]),
        make_node(op, ["a", "b"], ["c"]),
        make_node("Mul", ["c", "factor"], ["y"]),
    ]
    compute = {
        "Add": np.add,
        "Sub": np.subtract,
        "Mul": np.multiply,
        "Div": lambda x, y: np.trunc(x / y),
        "Mod": np.mod,
        "Max": np.maximum,
        "Min": np.minimum,
        "Pow": np.power,
    }[op]
    results = compute(np.arange(a0, a1 + 1)[:, None], np.arange(b0, b1 + 1)[None])
    most = int(np.abs(results).max())
    inputs = [tensor("x", [4], INT64), tensor("z", [4], INT64)]
    too_large = int64("factor", (2**31 + 1) // most + 1)
    assert "may exceed 32 bits" in warned(nodes, inputs, [*constants, too_large])
