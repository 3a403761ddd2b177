"""The suite of third-party networks: which are run, and how results are judged and reported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from experiments import wild
from experiments.side_by_side import Entry, SideBySide
from experiments.targets import ConfigError, from_attribute
from experiments.wild_networks import NETWORKS
from experiments.wild_networks.onnx_files import File


def parsed(*words: str) -> wild.Config:
    values = flags.FlagValues()
    wild.define_flags(values)
    values(["wild", *words])
    return wild.config_of(values)


def result(speedup: float, low: float, high: float, noise: tuple[float, float]) -> SideBySide:
    entry = Entry(1.0, speedup, low, high, "jit", 1e-7, 4e-7)
    return SideBySide("mine", {"jit": speedup}, noise, {"taso": entry}, {}, {})


def test_all_networks_are_run_unless_some_are_named() -> None:
    assert parsed().networks == tuple(NETWORKS)
    assert parsed("--networks=bert,keras").networks == (
        *("bert", "convnext_tiny", "efficientnet_b0", "mobilenet_v3_small"),
    )


def test_unknown_networks_and_searches_are_refused() -> None:
    with pytest.raises(ConfigError, match="--networks: there is no berd"):
        parsed("--networks=berd")
    with pytest.raises(ConfigError, match="--search: there is no tasso"):
        parsed("--search=tasso")


def test_a_search_is_a_repeatable_command() -> None:
    config = parsed("--networks=bert", "--budget_seconds=30")
    assert config.search_command("bert")[1:] == [
        *("-m", "experiments.optimize", "--fn=experiments.wild_networks:bert"),
        *("--search=taso", "--budget_seconds=30", "--seed=0"),
    ]


def test_a_comparison_runs_in_a_separate_process() -> None:
    config = parsed("--networks=bert,vit", "--runtimes=", "--out=mine")
    assert config.compare_command("vit")[1:] == [
        *("-m", "experiments.wild", "--here", "--networks=vit", "--search=taso"),
        *("--compare_seconds=30", "--seed=0", "--runtimes=", "--out=mine"),
    ]


@pytest.mark.parametrize(
    ("interval", "noise", "slower"),
    [
        ((1.2, 1.1, 1.3), (0.95, 1.05), False),
        ((0.97, 0.95, 0.99), (0.90, 1.05), False),  # within the noise of a function beside itself
        ((0.80, 0.75, 0.85), (0.95, 1.05), True),
    ],
)
def test_slower_means_slower_beyond_noise(
    interval: tuple[float, float, float], noise: tuple[float, float], slower: bool
) -> None:
    assert wild.is_slower(result(*interval, noise), "taso") == slower


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="'no_such_package' is not installed"):
        File("no_such_package", "model.onnx").find()


@pytest.mark.skipif(importlib.util.find_spec("onnx") is None, reason="onnx is not installed")
def test_a_packaged_onnx_file_becomes_a_function_of_weights_and_image() -> None:
    target = from_attribute("experiments.wild_networks:light_squeezenet")
    assert target.weights == (0,)
    (image,) = target.args[1:]
    assert image.shape == (1, 3, 224, 224) and np.abs(np.asarray(image)).max() > 0.5
