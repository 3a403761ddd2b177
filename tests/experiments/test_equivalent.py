"""The command that compares two ONNX networks."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest
from absl import flags

import xrl_jax
from experiments import equivalent

X, W = jnp.ones((4, 8)), jnp.arange(64.0).reshape(8, 8) / 64


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Return ONNX files: a product; the same on a transpose of a transpose; another one."""
    functions = {
        "plain": lambda x: jnp.tanh(x) @ W,
        "twice": lambda x: jnp.tanh(x.T).T @ W,
        "other": lambda x: jnp.tanh(x) @ (W + 1),
        "small": lambda x: jnp.tanh(x[:2]) @ W,
    }
    for name, fn in functions.items():
        xrl_jax.to_onnx(xrl_jax.from_jax(fn, X), str(tmp_path / f"{name}.onnx"))
    return {name: str(tmp_path / f"{name}.onnx") for name in functions}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    values = flags.FlagValues()
    equivalent.define_flags(values)
    monkeypatch.setattr(flags, "FLAGS", values)
    return equivalent.main(values(["equivalent", *arguments]))


def test_equal_networks_are_proven_equal(files, monkeypatch, capsys, tmp_path):
    proof = tmp_path / "proof.txt"
    assert run(monkeypatch, files["plain"], files["twice"], f"--proof={proof}") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("proven equal (")
    assert "on random inputs they differ by" in printed.out
    assert "e-nodes in" in printed.err
    assert "1. " in proof.read_text() and "proven equal" in proof.read_text()


def test_other_networks_are_not(files, monkeypatch, capsys):
    assert run(monkeypatch, files["plain"], files["other"]) == 1
    assert capsys.readouterr().out.startswith("not proven equal: 0 of 1 results are (")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["plain"], "give two ONNX files"),
        (["plain", "missing.onnx"], "missing.onnx: there is no such file"),
        (["plain", "small"], "result 0 of the programs differs"),
    ],
)
def test_bad_input_is_named(files, monkeypatch, capsys, names, message):
    assert run(monkeypatch, *(files.get(n, n) for n in names)) == 2
    assert message in capsys.readouterr().err
