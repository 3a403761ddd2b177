"""Targets of experiments, and the errors for targets that do not exist or do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.targets import ConfigError, from_attribute, from_model, from_onnx_file

HERE = "tests.experiments.example_targets"


def test_a_model_takes_its_weights_first_and_accepts_options() -> None:
    target = from_model("bert", seed=1, tokens=8, layers=1, width=12)
    weights, token_ids, *_ = target.args
    assert (target.name, target.weights) == ("bert", (0,))
    assert token_ids.shape == (1, 8)
    assert weights["embeddings"]["token"].shape == (30522, 12)


def test_a_model_takes_a_width_multiplier() -> None:
    weights, _ = from_model("squeezenet", image_size=32, width=0.25).args
    assert weights["stem"]["kernel"].shape == (16, 3, 3, 3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "squeezenett",
            {},
            r"--model=squeezenett: there is no such network; did you mean squeezenet\? "
            r"\(known: bert, vit, dalle, tt, inceptionv3, squeezenet, resnext50, ",
        ),
        ("bert", {"image_size": 64}, "has no option --image_size .it has: --layers, --tokens"),
        ("bert", {"width": 0.5}, "--width=0.5: --model=bert takes a whole number"),
        ("squeezenet", {"image_size": 8}, "--model=squeezenet: .*image_size 8 is too small"),
        ("bert", {"tokens": (8, 4)}, "--tokens: --model=bert takes one number, not .8, 4."),
    ],
)
def test_a_wrong_model_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_model(name, **options)


@pytest.mark.parametrize(("blocks", "stages"), [((1, 2), [1, 2]), (2, [2])])
def test_an_option_may_have_several_numbers(blocks: int | tuple[int, ...], stages: list) -> None:
    weights, _ = from_model("resnet50", image_size=32, width=0.125, blocks=blocks).args
    assert [len(stage) for stage in weights["stages"]] == stages


@pytest.mark.parametrize(
    ("attribute", "weights"),
    [("with_weights", (0,)), ("with_one_weight", (0,)), ("without_weights", ()), ("ready", ())],
)
def test_a_function_or_attribute_of_a_module(attribute: str, weights: tuple[int, ...]) -> None:
    target = from_attribute(f"{HERE}:{attribute}")
    assert target.name == attribute
    assert target.weights == weights
    assert [a.shape for a in target.args] == [(4, 3), (2, 4)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (HERE, "must be package.module:function"),
        ("no_such_package.net:f", "there is no module 'no_such_package' here"),
        (f"{HERE}:with_weight", "has no 'with_weight'; did you mean with_weights"),
        (f"{HERE}:forward", "forward takes arguments; name a function without arguments"),
        (f"{HERE}:no_tuple", r"must give \(fn, args\) or \(fn, args, weights\)"),
    ],
)
def test_a_wrong_attribute_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_attribute(spec)


def test_a_missing_import_of_the_module_is_not_blamed_on_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_package\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        from_attribute("needs_more:f")


@pytest.fixture
def onnx_file(tmp_path: Path) -> str:
    """Save a model of y = (x w) n with x [batch, 4], w = ones [4, 3] and n [1]; return its path."""
    onnx = pytest.importorskip("onnx")
    float32 = onnx.TensorProto.FLOAT
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("MatMul", ["x", "w"], ["h"]),
            onnx.helper.make_node("Mul", ["h", "n"], ["y"]),
        ],
        "g",
        [value("x", float32, ["batch", 4]), value("n", float32, [1])],
        [value("y", float32, ["batch", 3])],
        [onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w")],
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "net.onnx")
    return str(tmp_path / "net.onnx")


def test_an_onnx_file_gives_a_function_of_its_inputs(onnx_file: str) -> None:
    target = from_onnx_file(onnx_file, {"x": (2, 4)})
    assert (target.name, target.fn.__name__, target.weights) == ("net", "net", ())
    assert [x.shape for x in target.args] == [(2, 4), (1,)]
    np.testing.assert_array_equal(
        target.fn(np.ones((2, 4), np.float32), np.ones(1, np.float32)), [[4, 4, 4]] * 2
    )


def test_an_onnx_file_takes_dimensions_and_constants(onnx_file: str) -> None:
    target = from_onnx_file(onnx_file, dimensions={"batch": 1}, constants={"n": 2})
    assert [x.shape for x in target.args] == [(1, 4)]
    np.testing.assert_array_equal(target.fn(np.ones((1, 4), np.float32)), [[8, 8, 8]])


def test_open_dimensions_of_an_onnx_file_must_be_given_by_flags(onnx_file: str) -> None:
    message = r"input 'x' has shape \[batch, 4\].*use the flags --input_shape, --dim$"
    with pytest.raises(ConfigError, match=message):
        from_onnx_file(onnx_file)


def test_a_missing_onnx_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="--onnx=none.onnx: there is no such file"):
        from_onnx_file("none.onnx")
