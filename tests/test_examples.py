"""The examples in docstrings run as written; every public function has one."""

from __future__ import annotations

import doctest
import inspect
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import xrl_jax

ROOT = Path(__file__).parent.parent
FUNCTIONS = [n for n in xrl_jax.__all__ if not inspect.isclass(getattr(xrl_jax, n))]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "xrl_jax").rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_has_an_example(name: str) -> None:
    assert ">>> " in (inspect.getdoc(getattr(xrl_jax, name)) or "")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where examples write files
    monkeypatch.setenv("XRL_JAX_CACHE", str(tmp_path / "cache"))
    given = {"jax": jax, "jnp": jnp, "xrl_jax": xrl_jax}
    found = doctest.testmod(import_module(name), extraglobs=given)
    assert found.attempted > 0 and found.failed == 0
