"""Discovery of libraries, in the package and in other installed distributions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xrl_jax.graph.graph import Node
from xrl_jax.graph.view import view_of
from xrl_jax.libraries import registry
from xrl_jax.libraries.base import CustomCall, Facts, Library, Lowering

ROOT = Path(__file__).parents[2]
# The complete module of a distribution that adds a library with one lowering.
MODULE = """
import jax.numpy as jnp
from xrl_jax.libraries.base import Library, Lowering


class Mine(Library):
    name = "mine"

    def version(self):
        return "mine 1"

    def lowerings(self):
        def by_exponentials(node, x):
            return 1 - 2 / (jnp.exp(2 * x) + 1)

        return {"tanh": (Lowering("exponentials", by_exponentials),)}


LIBRARY = Mine()
"""
USE = """
import jax.numpy as jnp
import xrl_jax
from xrl_jax.libraries.registry import libraries, versions

program = xrl_jax.from_jax(jnp.tanh, jnp.ones(3))
(candidate,) = [c for c in xrl_jax.candidates(program) if c.rule == "tanh-as-exponentials"]
rewritten = xrl_jax.apply(program, candidate)
assert [lib.name for lib in libraries()][-1] == "mine", libraries()
assert "mine 1" in versions()
print(float(jnp.max(jnp.abs(rewritten(jnp.ones(3)) - jnp.tanh(1.0)))))
"""


def installed(folder: Path, module: str) -> dict[str, str]:
    """Install a distribution with this module in `folder`; return an environment that finds it."""
    (folder / "my_library.py").write_text(module)
    info = folder / "my_library-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-library\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[xrl_jax.libraries]\nmine = my_library:LIBRARY\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def test_another_distribution_adds_a_library(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", USE],
        env=installed(tmp_path, MODULE),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-6


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from xrl_jax.libraries.registry import libraries; libraries()"],
        env=installed(tmp_path, "raise ImportError('no such chip')"),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    expected = "the library 'mine' (my_library:LIBRARY) cannot be loaded: ImportError: no such chip"
    assert expected in done.stderr


def test_xla_comes_first_and_has_every_operator() -> None:
    assert registry.libraries()[0].name == "xla"


def test_conditions_must_be_a_tuple() -> None:
    with pytest.raises(TypeError, match="lowering 'fast': `when` must be a tuple of conditions"):
        Lowering("fast", lambda node, x: x, when="nonempty")  # type: ignore[arg-type]


@pytest.mark.parametrize("condition", ["is_single", "is_sinlge"])
def test_a_condition_must_be_a_property_of_facts(condition: str) -> None:
    node = Node("tanh", (0,), shape=(3,), dtype="float32")
    facts = Facts(np, view_of(node, [node]), "tanh")
    with pytest.raises(TypeError, match=f"{condition!r} is not a property of Facts: name one, or"):
        facts.holds(condition)


def test_an_unknown_library_is_refused() -> None:
    with pytest.raises(registry.LibraryError, match="there is no library 'cutlass' here"):
        registry.by_name("cutlass")


def test_targets_of_a_missing_library_say_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Absent(Library):
        name, install = "absent", "pip install absent"

    monkeypatch.setattr(registry, "libraries", lambda: (Absent(),))
    with pytest.raises(
        registry.LibraryError, match="absent is not installed here: pip install absent"
    ):
        registry.register_calls([CustomCall("absent", ())])
