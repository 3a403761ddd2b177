"""Loops of ONNX whose number of rounds the body decides."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.frontends.onnx_models import FLOAT, INT64, array, model, tensor
from xrl_jax.frontends.onnx import UnsupportedOnnxError, from_onnx

BOOL = TensorProto.BOOL


def counting(condition, trips, *, collect=False):
    """Return a model of y = x + number of rounds, the body's condition being computed by these
    nodes, from the round i, as go_on.
    """
    nodes = [*condition, helper.make_node("Add", ["v", "one"], ["w"])]
    outputs = [tensor("go_on", [], BOOL), tensor("w", [])]
    if collect:
        nodes.append(helper.make_node("Identity", ["w"], ["each"]))
        outputs.append(tensor("each", []))
    inputs = [tensor("i", [], INT64), tensor("before", [], BOOL), tensor("v", [])]
    body = helper.make_graph(nodes, "body", inputs, outputs)
    results = ["y", "all"] if collect else ["y"]
    loop = helper.make_node("Loop", ["trips" if trips else "", "", "x"], results, body=body)
    weights = [array("one", 1), array("last", 39, np.int64)]
    if trips:
        weights.append(array("trips", trips, np.int64))
    graph_outputs = [tensor("y", [])] + ([tensor("all", [None])] if collect else [])
    return model([loop], [tensor("x", [], FLOAT)], graph_outputs, weights)


UNTIL_40 = [helper.make_node("Less", ["i", "last"], ["go_on"])]  # false in round 39, the fortieth
ALWAYS = [helper.make_node("Equal", ["i", "i"], ["go_on"])]
UNTIL_SMALL = [helper.make_node("Less", ["v", "one"], ["go_on"])]
FOREVER = [helper.make_node("Constant", [], ["go_on"], value=array("true", True, np.bool_))]


@pytest.mark.parametrize(("trips", "rounds"), [(10, 10), (100, 40), (None, 40)])
def test_a_condition_that_depends_on_the_iteration_ends_a_loop(trips, rounds) -> None:
    """Up to 32 rounds are unrolled; the condition also holds for those after them."""
    assert from_onnx(counting(UNTIL_40, trips))(np.float32(0.5)) == rounds + 0.5


@pytest.mark.parametrize("condition", [ALWAYS, FOREVER])
def test_a_loop_whose_condition_stays_true_runs_all_trips(condition) -> None:
    assert from_onnx(counting(condition, 100))(np.float32(0.5)) == 100.5


def test_a_loop_of_many_iterations_collects_its_results() -> None:
    y, each = from_onnx(counting(FOREVER, 100, collect=True))(np.float32(0.5))
    assert y == 100.5
    np.testing.assert_array_equal(each, np.arange(1, 101) + 0.5)


@pytest.mark.parametrize(("trips", "rounds"), [(36, 36), (100, 40), (None, 40)])
def test_results_are_collected_up_to_the_round_that_ends_the_loop(trips, rounds) -> None:
    y, each = from_onnx(counting(UNTIL_40, trips, collect=True))(np.float32(0.5))
    assert y == rounds + 0.5
    np.testing.assert_array_equal(each, np.arange(1, rounds + 1) + 0.5)


def test_results_of_a_number_of_rounds_that_depends_on_data_are_refused() -> None:
    with pytest.raises(UnsupportedOnnxError, match="collecting outputs"):
        from_onnx(counting(UNTIL_SMALL, 100, collect=True))


def test_an_endless_loop_is_refused() -> None:
    with pytest.raises(UnsupportedOnnxError, match="an endless loop"):
        from_onnx(counting(FOREVER, None))
