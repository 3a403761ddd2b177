"""States of a search: a program's graphs get arrays of equal shape, so the engine compiles once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.search.states import in_one_bucket


def nine_sums(x: jax.Array) -> jax.Array:
    def step(carry, _):
        return tuple(c + i for i, c in enumerate(carry)), None

    return jnp.stack(lax.scan(step, (x,) * 9, length=3)[0])


def test_a_program_and_a_body_with_more_outputs_get_equal_shapes():
    program = from_jax(nine_sums, jnp.ones(2))
    before = [g.globals.outputs.tolist() for g in program.graphs]
    assert [len(o) for o in before] == [8, 16]
    whole, body = in_one_bucket(program)
    assert jax.tree.map(jnp.shape, whole) == jax.tree.map(jnp.shape, body)
    assert whole.globals.outputs.tolist() == [*before[0], *[-1] * 8]
    assert body.globals.outputs.tolist() == before[1]
