"""A saved function comes back with its report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from tests.report.reports import small_report
from xrl_jax.backends.archive import LoadError
from xrl_jax.backends.fast import Fast
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.report.saved import load

X = jnp.arange(3.0)


def test_the_report_is_restored(tmp_path: Path) -> None:
    Fast(from_jax(jnp.sin, X), jnp.sin, report=small_report()).save(tmp_path / "f.xrl")
    assert load(tmp_path / "f.xrl").report == small_report()


def test_a_function_without_report_has_none(tmp_path: Path) -> None:
    Fast(from_jax(jnp.sin, X), jnp.sin).save(tmp_path / "f.xrl")
    assert load(tmp_path / "f.xrl").report is None


def test_a_newer_report_is_refused(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Newer:
        def as_dict(self) -> dict[str, Any]:
            return {**small_report().as_dict(), "format": 99}

    Fast(from_jax(jnp.sin, X), jnp.sin, report=Newer()).save(tmp_path / "f.xrl")
    with pytest.raises(LoadError, match="report has format 99"):
        load(tmp_path / "f.xrl")
