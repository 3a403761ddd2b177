"""A program may end while a call is still running."""

from __future__ import annotations

import subprocess
import sys

import pytest

from xrl_jax.libraries.onednn.c_api import library

ENDS_EARLY = """
import jax, jax.numpy as jnp
from xrl_jax.backends.hoist import split
from xrl_jax.libraries.onednn import calls

def fn(w, x):
    for _ in range(100):
        x = calls.dot_general(x, w, (((1,), (0,)), ((), ())))
    return [x @ x.T]  # XLA waits for a function without work of its own

x, w = jnp.ones((512, 1024)), jnp.ones((1024, 1024)) / 1024
parts = split(fn, [w, x], [True, False])
call, prepared = jax.jit(parts.call), parts.prepare([w])
jax.block_until_ready(call(prepared, [x]))
call(prepared, [x])  # takes half a second
"""


@pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
def test_a_process_ends_while_calls_run() -> None:
    subprocess.run([sys.executable, "-c", ENDS_EARLY], check=True)
