"""Searches for a GPU that is not here, by predicted costs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import jax.numpy as jnp
import pytest

from experiments import predicted
from experiments.predicted import Prediction, Variant, over, table
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.measure.gpu.compiler import COMPILER_FOLDER
from xrl_jax.measure.timing import Timing
from xrl_jax.search.base import Budget, Found

needs_compiler = pytest.mark.skipif(
    not COMPILER_FOLDER.is_dir(), reason="JAX's plugin for CUDA is not installed"
)


def variant(us: float, kernels: int, outside: int = 0, graphs: int = 1) -> Variant:
    return Variant(1e-6 * us, {"all": kernels, "graphs": graphs, "outside graphs": outside})


NET = Prediction(
    "net",
    default=variant(188, 47, outside=47, graphs=0),
    strongest=variant(100, 38),
    found=variant(80, 30),
    error=1.5e-7,
)


def test_a_row_has_kernels_times_and_ratios() -> None:
    row = table("Predicted.", [NET]).splitlines()[4]
    assert row == "| net | 47 * | 188 | 38 | 100 | 30 | 80.0 | 2.35 | 1.25 | 1.5e-07 |"


def test_kernels_outside_of_one_graph_are_marked() -> None:
    counts = [variant(1, 5, *at).count for at in ((0, 1), (2, 1), (0, 2), (5, 0))]
    assert counts == ["5", "5 *", "5 *", "5 *"]


def test_a_prediction_is_read_as_it_was_written() -> None:
    values = json.loads(json.dumps(asdict(NET)))
    assert over(Prediction.from_dict(values), "strongest") == 1.25


def test_without_time_to_compile_a_program_the_original_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = from_jax(jnp.tanh, jnp.ones(3))
    strongest = variant(100, 38)
    late = Found(program, 1e-6, (), timing=Timing.without("failed", "out of time"))
    assert predicted.best_of("net", strongest, late) is strongest
    assert "net: no program was compiled as a whole (out of time)" in capsys.readouterr().err
    faster = Found(program, 1e-6, (), timing=Timing(5e-5, 5e-5, 5e-5, kernels={"all": 9}))
    assert predicted.best_of("net", strongest, faster).kernels["all"] == 9


def command(*more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.benchmark", *more],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--target=h300", "--predicted"], "h300"),
        (["--target=h100"], "add --predicted"),
        (["--predicted"], "--predicted needs --target"),
    ],
)
def test_bad_flags_are_refused(given: list[str], message: str) -> None:
    ended = command("--networks=squeezenet", *given)
    assert (ended.returncode, message in ended.stderr) == (2, True)


@pytest.mark.slow
@needs_compiler
def test_a_search_by_predicted_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        budget = Budget(20.0)
        return predicted.run("h200", ["squeezenet"], "greedy", budget, tmp_path, seed=0)

    assert run() == 0
    values = json.loads((tmp_path / "squeezenet" / "predicted.json").read_text())
    found = Prediction.from_dict(values["prediction"])
    assert (found.default.count, found.strongest.count) == ("47 *", "38")
    assert found.found.seconds <= found.strongest.seconds
    assert found.error < 1e-5
    first = capsys.readouterr().out
    assert run() == 0  # nothing is searched again
    assert capsys.readouterr().out == first
