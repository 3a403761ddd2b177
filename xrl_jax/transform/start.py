"""The program that a search starts from."""

from __future__ import annotations

from xrl_jax.program.program import Program
from xrl_jax.transform.batch import batched
from xrl_jax.transform.canonical import canonical
from xrl_jax.transform.unroll import unrolled
from xrl_jax.transform.widen import WIDE_PLATFORMS, widened


def start_of(original: Program, platform: str) -> Program:
    """Return the program that a search starts from: in canonical form and, where bfloat16 and
    float16 have no fast arithmetic on the platform (JAX's name), in float32.
    """
    program = batched(unrolled(original))
    if platform in WIDE_PLATFORMS:
        program = widened(program)
    return canonical(program)
