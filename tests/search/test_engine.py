"""Whether the engine's compiled code is on disk already, as known before a search."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.language.rule_files import select_rules, standard_rules
from xrl_jax.language.table import compile_rules
from xrl_jax.search import engine


def test_a_marker_file_records_for_which_sizes_the_engine_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = compile_rules(select_rules(standard_rules(), ["add-zero"]))

    def deep(n: int):
        def fn(x):
            for _ in range(n):
                x = jnp.sin(x)
            return x

        return from_jax(fn, jnp.ones(3))

    monkeypatch.setattr(engine, "cache_folder", lambda: None)
    assert not engine.is_compiled(deep(2), rules)
    monkeypatch.setattr(engine, "cache_folder", lambda: str(tmp_path))
    assert not engine.is_compiled(deep(2), rules)
    mark = engine._mark(deep(2), rules)
    assert mark is not None
    mark.touch()
    assert engine.is_compiled(deep(3), rules)  # in the same bucket
    assert not engine.is_compiled(deep(600), rules)
