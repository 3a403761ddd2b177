"""Traces of the engine's functions are kept for later processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from xrl_jax.runtime.kept_trace import kept_trace


class Pair(NamedTuple):
    sum: Any
    product: Any


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Use a temporary folder as JAX's cache; return it."""
    before = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009 (unknown to type checkers)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def of_a_process(traced: list[str], by: float = 2.0) -> Callable[..., Any]:
    """Return the function as a process would make it; each trace of it appends to `traced`."""

    def fn(x: jax.Array, pair: Pair) -> Pair:
        traced.append(str(x.dtype))
        return Pair(x + pair.sum, by * x * pair.product)

    return kept_trace(fn, settings=f"by {by}", like=lambda _, pair: pair)


def check(made: Pair, by: float = 2.0) -> None:
    assert isinstance(made, Pair)
    np.testing.assert_array_equal(made.sum, [4.0, 5.0])
    np.testing.assert_array_equal(made.product, [by * 3.0, by * 8.0])


ARGS = jnp.array([1.0, 2.0]), Pair(3, jnp.array([3.0, 4.0]))


def test_a_second_process_does_not_trace(folder: Path) -> None:
    first: list[str] = []
    second: list[str] = []
    one, other = of_a_process(first), of_a_process(second)
    for _ in range(2):
        check(one(*ARGS))
        check(other(*ARGS))
    assert (first, second) == (["float32"], [])


def test_results_passed_as_arguments_cause_no_recompilation(folder: Path) -> None:
    fn = of_a_process([])
    made = fn(jnp.ones(2), Pair(jnp.ones(2), jnp.ones(2)))
    kept = sorted(folder.glob("jit_*"))
    assert kept
    fn(made.sum, made)
    assert sorted(folder.glob("jit_*")) == kept


def test_other_settings_and_other_types_are_traced_separately(folder: Path) -> None:
    traced: list[str] = []
    check(of_a_process(traced)(*ARGS))
    check(of_a_process(traced, by=5.0)(*ARGS), by=5.0)
    of_a_process(traced)(jnp.array([1, 2]), ARGS[1])
    assert traced == ["float32", "float32", "int32"]


def test_a_damaged_trace_is_replaced(folder: Path) -> None:
    traced: list[str] = []
    check(of_a_process(traced)(*ARGS))
    (kept,) = folder.glob("traced-*")
    kept.write_bytes(kept.read_bytes()[:100])
    check(of_a_process(traced)(*ARGS))
    check(of_a_process(traced)(*ARGS))
    assert traced == ["float32", "float32"]


def test_without_a_folder_nothing_is_kept(folder: Path) -> None:
    traced: list[str] = []
    for nowhere in (None, str(folder / "missing")):
        jax.config.update("jax_compilation_cache_dir", nowhere)
        check(of_a_process(traced)(*ARGS))
    assert len(traced) == 2 and not list(folder.rglob("traced-*"))


def test_a_full_disk_only_prevents_keeping_the_trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("xrl_jax.runtime.kept_trace.atomic_write", full)
    check(of_a_process([])(*ARGS))
    assert not list(folder.glob("traced-*"))


def test_random_keys_are_arguments_like_others(folder: Path) -> None:
    def fn(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key)

    key = jax.random.key(3)
    processes = [kept_trace(fn, settings="", like=lambda key: 0) for _ in range(2)]
    assert [float(each(key)) for each in processes] == [float(jax.random.uniform(key))] * 2
