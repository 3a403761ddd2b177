"""The compilation cache of a search is in its folder, and removed from the configuration
afterwards.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from xrl_jax.runtime.compile_cache import persistent_cache


@pytest.fixture(autouse=True)
def no_cache() -> Iterator[None]:
    """Unset the cache and use JAX's default settings; restore those of the tests afterwards."""
    as_it_comes = {
        "jax_compilation_cache_dir": None,
        "jax_persistent_cache_min_compile_time_secs": 1.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in as_it_comes}
    for name, value in as_it_comes.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def setting():
    return getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009 (unknown to type checkers)


def compile_something(number: float) -> float:
    return float(jax.jit(lambda x: jnp.sin(x) * number)(1.0))


def test_functions_compiled_inside_are_cached_in_the_folder(tmp_path: Path):
    with persistent_cache(tmp_path / "compiled"):
        compile_something(2.0)
    assert any((tmp_path / "compiled").iterdir())
    assert setting() is None


def test_cache_entries_do_not_depend_on_the_folders_path(tmp_path: Path):
    first, moved, link = (tmp_path / name for name in ("first", "moved", "link"))
    with persistent_cache(first):
        compile_something(6.0)
    kept = {p.name for p in first.iterdir()}
    assert kept
    first.rename(moved)
    link.symlink_to(moved, target_is_directory=True)
    for folder in (moved, link):
        with persistent_cache(folder):
            compile_something(6.0)
    assert {p.name for p in moved.iterdir()} == kept


def test_functions_compiled_outside_are_not_cached(tmp_path: Path):
    with persistent_cache(tmp_path):
        pass
    compile_something(3.0)
    assert not any(tmp_path.iterdir())


def test_a_cache_set_by_the_user_is_kept(tmp_path: Path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    with persistent_cache(tmp_path / "ours"):
        assert setting() == str(tmp_path / "theirs")
    assert setting() == str(tmp_path / "theirs")


def test_an_error_inside_restores_the_configuration(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), persistent_cache(tmp_path):
        raise ZeroDivisionError
    assert setting() is None
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 1.0


def test_the_last_of_several_users_restores_the_configuration(tmp_path: Path):
    with persistent_cache(tmp_path):
        inside, leave = threading.Event(), threading.Event()

        def other() -> None:
            with persistent_cache(tmp_path):
                inside.set()
                leave.wait(10)

        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(10)
    assert setting() == str(tmp_path)
    leave.set()
    thread.join()
    assert setting() is None


def test_a_folder_that_cannot_be_created_only_disables_the_cache(tmp_path: Path):
    (tmp_path / "file").touch()
    with warnings.catch_warnings(record=True), persistent_cache(tmp_path / "file" / "compiled"):
        warnings.simplefilter("always")
        assert compile_something(4.0) == pytest.approx(4 * 0.841471)
    assert setting() is None


def test_a_full_disk_only_disables_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with warnings.catch_warnings(record=True), persistent_cache(tmp_path):
        warnings.simplefilter("always")
        assert compile_something(5.0) == pytest.approx(5 * 0.841471)
