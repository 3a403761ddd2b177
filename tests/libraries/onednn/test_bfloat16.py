"""Convolutions in bfloat16, by the library's reference kernels, which need no instructions."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.libraries.onednn.reference_bfloat16 import NETWORKS
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.installed import packaged

# Other builds of oneDNN may not have the function that is overwritten.
IS_THERE = library() is not None and bool(packaged())


@pytest.mark.skipif(not IS_THERE, reason="oneDNN's package is not installed")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_call_rounds_as_lax_does(name: str) -> None:
    command = [sys.executable, "-m", "tests.libraries.onednn.reference_bfloat16", name]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    # Where sums differ in the last digit, a result may be rounded to the next number in bfloat16.
    assert float(found.stdout) < 1e-3
