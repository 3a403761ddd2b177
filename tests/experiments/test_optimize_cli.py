"""`python -m experiments.optimize`: flags, files, errors, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from absl import flags

import xrl_jax
from experiments import optimize as cli
from experiments.optimize import Config
from experiments.targets import ConfigError
from tests.report.reports import small_report
from xrl_jax.report.text import Report
from xrl_jax.search.chain import alone, pipeline
from xrl_jax.search.greedy import Greedy

ROOT = Path(__file__).parents[2]
EXAMPLE = "tests.experiments.example_targets:with_weights"


def parsed(*words: str) -> Config:
    values = flags.FlagValues()
    cli.define_flags(values)
    values(["optimize", *words])
    return cli.config_of(values)


class FakeFast:
    """The parts of the result of `optimize` that the command uses."""

    report = small_report(name="forward", seed=None)
    program = "a program"

    def save(self, path: Path) -> None:
        path.write_bytes(b"saved")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Replace `xrl_jax.optimize` by a function that does nothing; return the list of its calls."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def fake(*args: Any, **kwargs: Any) -> FakeFast:
        seen.append((args, kwargs))
        return FakeFast()

    monkeypatch.setattr(xrl_jax, "optimize", fake)
    return seen


# Flags -------------------------------------------------------------------------------------------


def test_defaults() -> None:
    assert parsed("--model=bert") == Config(model="bert", out="out/bert")


def test_results_go_to_a_folder_named_after_the_function_or_file() -> None:
    assert parsed("--onnx=nets/small.onnx").out == "out/small"
    assert parsed("--fn=package.module:example").out == "out/package.module.example"


def test_every_flag_reaches_the_configuration() -> None:
    config = parsed(
        *("--model=bert", "--layers=2", "--tokens=16", "--search=greedy", "--seed=7"),
        *("--budget_seconds=12.5", "--budget_measurements=40", "--rules=merge,-add-assoc"),
        *("--out=o", "--cache_dir=c", "--nofold", "--noprogress"),
    )
    assert config == Config(
        model="bert",
        shape=(("layers", 2), ("tokens", 16)),
        search="greedy",
        seed=7,
        budget_seconds=12.5,
        budget_measurements=40,
        rules=("merge", "-add-assoc"),
        out="o",
        cache_dir="c",
        fold=False,
        progress=False,
    )


def test_input_shapes() -> None:
    config = parsed("--onnx=n.onnx", "--input_shape=a:1,3,8,8", "--input_shape=ns:b:")
    assert config.input_shapes == (("a", (1, 3, 8, 8)), ("ns:b", ()))


def test_dimensions_and_constants() -> None:
    config = parsed(
        *("--onnx=n.onnx", "--dim=batch:1", "--dim=seq:64"),
        *("--constant=sr:16000", "--constant=ns:pads:0,-1", "--constant=ratio:0.5"),
    )
    assert config.dimensions == (("batch", 1), ("seq", 64))
    assert config.constants == (("sr", 16000), ("ns:pads", (0, -1)), ("ratio", 0.5))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "exactly one of --model, --onnx and --fn, not none of them"),
        (["--model=bert", "--onnx=n"], "not --model and --onnx"),
        (["--fn=a:b", "--layers=2"], "--layers is for --model only"),
        (["--model=bert", "--input_shape=x:1"], "--input_shape is for --onnx only"),
        (["--model=bert", "--finetune"], "--finetune is for --search=xrlflow only"),
        (["--onnx=n", "--input_shape=x:1,b"], "--input_shape=x:1,b must be a name and its sizes"),
        (["--model=bert", "--dim=batch:1"], "--dim is for --onnx only"),
        (["--fn=a:b", "--constant=sr:1"], "--constant is for --onnx only"),
        (["--onnx=n", "--dim=batch"], "--dim=batch must be a name and its size"),
        (["--onnx=n", "--constant=sr:fast"], "--constant=sr:fast must be a name and numbers"),
        (["--onnx=n", "--constant=16000"], "--constant=16000 must be a name and numbers"),
        (["--onnx=n", "--input_shape=1,3"], "--input_shape=1,3 must be a name and its sizes"),
    ],
)
def test_conflicting_flags_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(*words)


def test_the_command_repeats_the_run() -> None:
    words = ("--model=bert", "--layers=2", "--search=greedy", "--rules=merge,-dot", "--nofold")
    command = parsed(*words, "--out=somewhere", "--cache_dir=elsewhere").command()
    assert command == (
        "python -m experiments.optimize --model=bert --layers=2 --search=greedy "
        "--rules=merge,-dot --nofold"
    )
    assert parsed(*command.split()[3:]) == parsed(*words)


def test_the_command_of_an_onnx_file() -> None:
    words = ("--input_shape=x:1,3", "--dim=b:1", "--constant=k:2,3", "--constant=n:5", "--seed=4")
    config = parsed("--onnx=a net.onnx", *words)
    assert config.command() == (
        f"python -m experiments.optimize '--onnx=a net.onnx' {' '.join(words)}"
    )


# Arguments of optimize ---------------------------------------------------------------------------


def test_flags_are_passed_to_optimize(calls: list[Any]) -> None:
    cli.run(Config(fn=EXAMPLE, search="greedy", budget_seconds=3.0, budget_measurements=9, seed=5))
    (fn, *args), kwargs = calls[0]
    assert fn.__name__ == "forward"
    assert [a.shape for a in args] == [(4, 3), (2, 4)]
    assert (kwargs["weights"], kwargs["rules"]) == ((0,), None)
    assert kwargs["search"] == pipeline(Greedy())
    assert kwargs["budget"] == xrl_jax.Budget(seconds=3.0, measurements=9)
    assert (jax.random.key_data(kwargs["key"]) == jax.random.key_data(jax.random.key(5))).all()
    assert (kwargs["cache_dir"], kwargs["progress"]) == (None, True)


def test_a_search_can_be_judged_by_its_results_alone(calls: list[Any]) -> None:
    cli.run(Config(fn=EXAMPLE, search="greedy", alone=True))
    assert calls[0][1]["search"] == alone(Greedy())


def test_without_folding_optimize_gets_a_program(calls: list[Any]) -> None:
    cli.run(Config(fn=EXAMPLE, fold=False))
    assert isinstance(calls[0][0][0], xrl_jax.Program)


def test_rules_may_come_from_a_file(calls: list[Any], tmp_path: Path) -> None:
    text = """
        (rule neg-neg (family mine) (source "test") (evidence field)
          (lhs (neg (neg ?x)))
          (rhs ?x))
    """
    (tmp_path / "mine.rules").write_text(text, encoding="utf-8")
    cli.run(Config(fn=EXAMPLE, rules=("merge", str(tmp_path / "mine.rules"))))
    name, rule = calls[0][1]["rules"]
    assert (name, rule.name) == ("merge", "neg-neg")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search": "tasso"}, "there is no search 'tasso'.*taso"),
        ({"budget_seconds": -1.0}, "Budget.seconds must be positive, got -1.0"),
        ({"rules": ("none.rules",)}, "none.rules"),
        ({"policy": "p"}, "--policy is for --search=xrlflow only"),
        ({"policy": "none.msgpack", "search": "xrlflow"}, "none.msgpack"),
    ],
)
def test_bad_values_are_refused_before_any_work(
    calls: list[Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        cli.run(Config(**{"fn": EXAMPLE, **changes}))
    assert calls == []


# Results -----------------------------------------------------------------------------------------


def test_results_are_written(calls: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "folder"
    report = cli.run(Config(fn=EXAMPLE, out=str(out), seed=5))
    assert (report.name, report.seed) == ("with_weights", 5)
    values = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert values["command"] == f"python -m experiments.optimize --fn={EXAMPLE} --seed=5"
    assert Report.from_dict(values) == report
    assert (out / "report.txt").read_text(encoding="utf-8") == f"{report}\n"
    assert (out / "program.txt").read_text(encoding="utf-8") == "a program\n"
    assert (out / "optimized.xrl").read_bytes() == b"saved"
    assert (out / "history.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_everything_but_the_picture_is_written(
    calls: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    cli.run(Config(fn=EXAMPLE, out=str(tmp_path)))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "optimized.xrl",
        "program.txt",
        "report.json",
        "report.txt",
    ]
    assert "no plots are written: plots need matplotlib" in capsys.readouterr().err


def test_a_folder_that_cannot_be_created_is_reported_at_once(
    calls: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OSError, match="file"):
        cli.run(Config(fn=EXAMPLE, out=str(tmp_path / "file" / "out")))
    assert calls == []


# The command itself ------------------------------------------------------------------------------


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "experiments.optimize", *words]


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_wrong_model_ends_with_one_line_and_status_two() -> None:
    done = run_command("--model=bart")
    assert done.returncode == 2
    message = (
        "error: --model=bart: there is no such network; did you mean bert? (known: bert, vit, "
    )
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_help_has_examples_and_flags() -> None:
    done = run_command("--help")
    assert "python -m experiments.optimize --model=squeezenet" in done.stdout
    for flag in ("--model", "--onnx", "--fn", "--search", "--budget_seconds", "--[no]fold"):
        assert f"{flag}:" in done.stdout


@pytest.mark.slow
def test_a_small_function_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_command(
        f"--fn={EXAMPLE}",
        "--search=greedy",
        "--budget_seconds=5",
        f"--out={out}",
        f"--cache_dir={tmp_path / 'cache'}",
    )
    assert done.returncode == 0, done.stderr
    report = Report.from_dict(json.loads((out / "report.json").read_text(encoding="utf-8")))
    assert done.stdout == f"{report}\n\nresults are in {out}\n"
    assert report.name == "with_weights"
    assert report.max_error <= report.tolerance
    assert (out / "optimized.xrl").stat().st_size > 0


@pytest.mark.slow
def test_an_optimised_onnx_file_takes_the_inputs_of_the_model(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [value("x", onnx.TensorProto.FLOAT, ["batch", 4])],
        [value("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w")],
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "net.onnx")
    done = run_command(
        *(f"--onnx={tmp_path / 'net.onnx'}", "--dim=batch:2", "--search=greedy"),
        *("--budget_seconds=3", f"--out={tmp_path}", f"--cache_dir={tmp_path / 'cache'}"),
    )
    assert done.returncode == 0, done.stderr
    fn = xrl_jax.load(tmp_path / "optimized.xrl")
    np.testing.assert_array_equal(fn(np.ones((2, 4), np.float32)), [[4, 4, 4]] * 2)


# Processes that a shell runs in the background, such as these tests perhaps, ignore Ctrl-C.
WITH_CTRL_C = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_found_and_reports_it(tmp_path: Path) -> None:
    words = ("--model=squeezenet", "--image_size=64", "--budget_seconds=600")
    with subprocess.Popen(
        [
            *(sys.executable, "-c", WITH_CTRL_C),
            *command(*words, f"--cache_dir={tmp_path}", f"--out={tmp_path / 'out'}"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        try:
            first = process.stderr.readline()  # the search is running when it shows its first line
            os.killpg(process.pid, signal.SIGINT)  # to all processes, as a terminal does
            text, errors = process.communicate(timeout=300)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert "predicted" in first
    assert process.returncode == 0, errors
    assert ": interrupted; " in text
