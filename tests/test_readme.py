"""The README is right: its Python runs, its commands exist, its files are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from experiments import optimize as cli
from experiments import train_flags
from experiments.environments import parsed
from experiments.readme_table import filled

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def small_onnx_file(path: Path) -> None:
    import onnx

    float32 = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "net",
        [onnx.helper.make_tensor_value_info("x", float32, [2, 4])],
        [onnx.helper.make_tensor_value_info("y", float32, [2, 3])],
        [onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w")],
    )
    onnx.save(onnx.helper.make_model(graph), path)


def test_the_python_blocks_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx")
    small_onnx_file(tmp_path / "net.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XRL_JAX_CACHE", str(tmp_path / "cache"))
    code = "".join(blocks("python"))
    # A minute is for readers, two seconds and small matrices are enough to see that it runs.
    code, budgets = re.subn(r"seconds=60\)", "seconds=2)", code)
    code, sizes = re.subn(r"\b(256|512)\b", lambda size: str(int(size[0]) // 8), code)
    assert (budgets, sizes) == (2, 7)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.count("errors against") == 2


def commands_of(module: str) -> list[list[str]]:
    """The words of each command that runs the module, from the module's name on."""
    lines = "".join(blocks("sh")).replace("\\\n", "").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [given[2:] for given in words if given[:3] == ["python", "-m", module]]


def test_the_commands_have_flags_that_exist() -> None:
    commands = [words for words in commands_of("experiments.optimize") if "--help" not in words]
    assert len(commands) == 6
    for words in commands:
        values = flags.FlagValues()
        cli.define_flags(values)
        values(words)  # the module in place of the program
        cli.config_of(values)


def test_the_trainings_have_networks_and_flags_that_exist() -> None:
    (shipped,) = [words for words in commands_of("experiments.train") if len(words) > 1]
    values = flags.FlagValues()
    train_flags.define_flags(values)
    config = train_flags.chosen(values(shipped), values)
    networks = {parsed(network)[0] for network in config.networks}
    assert networks == {"squeezenet", "bert", "vit", "vgg19", "resnet50"}


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"^make ([\w-]+)", "".join(blocks("sh")), re.MULTILINE))
    assert named == {"demo", "test", "test-all", "lint"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_files_it_names_exist() -> None:
    named = re.findall(r"`((?:xrl_jax|rules)/[\w./*]+)`", README)
    assert len(named) >= 8
    assert [name for name in named if not list(ROOT.glob(name))] == []


def test_the_results_can_be_filled_in() -> None:
    assert filled(README, "| a row |").count("| a row |") == 1
