"""Search for the shared library, and the warning if it cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from xrl_jax.libraries.onednn import c_api as module
from xrl_jax.libraries.onednn.c_api import library

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")


def find(monkeypatch: pytest.MonkeyPatch, *, packaged: list[str]) -> module.Library | None:
    """Search for the library with these files in the package and none in the system."""
    monkeypatch.setattr(module, "packaged", lambda: packaged)
    monkeypatch.setattr(module.ctypes.util, "find_library", lambda name: None)
    return library.__wrapped__()


def test_without_package_and_system_library_none_is_found(monkeypatch) -> None:
    assert find(monkeypatch, packaged=[]) is None


def test_a_package_that_cannot_be_loaded_causes_a_warning(monkeypatch, tmp_path: Path) -> None:
    broken = tmp_path / "libdnnl.so.3"
    broken.write_text("no library")
    with pytest.warns(RuntimeWarning, match=r"kernels are not used.*onednn-cpu-gomp.*libgomp1"):
        assert find(monkeypatch, packaged=[str(broken)]) is None
