"""Kernels that are merged into calls, and checks of these calls, for the tests of this folder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.backends.hoist import Hoisted, split
from xrl_jax.graph.equations import bind, read
from xrl_jax.libraries.onednn.kernels import kernel_p
from xrl_jax.libraries.onednn.spec import Conv

RNG = np.random.default_rng(0)
IMAGE = jnp.asarray(RNG.standard_normal((1, 8, 8, 16)), jnp.float32)
POINTWISE = jnp.asarray(RNG.standard_normal((1, 1, 16, 16)) / 4, jnp.float32)
KERNEL = jnp.asarray(RNG.standard_normal((3, 3, 16, 16)) / 12, jnp.float32)
SAME = Conv((1, 1), ((1, 1), (1, 1)), (1, 1), 1)
VALID = Conv((1, 1), ((0, 0), (0, 0)), (1, 1), 1)


def conv(x, w):
    return kernel_p.bind(x, w, op=SAME if w.shape[0] == 3 else VALID)


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")


def average(x):
    """Return averages of 3x3 windows, in which padding counts as zeros."""
    edges = ((0, 0), (1, 1), (1, 1), (0, 0))
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), edges) / 9


def hoisted(fn, *args, weights: int) -> Hoisted:
    """Split `fn` into the preparation of weights and the call; the first `weights` arguments are
    weights.
    """
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    return split(lambda *a: jax.tree.leaves(fn(*a)), avals, [i < weights for i in range(len(args))])


def equations(parts: Hoisted, *inputs) -> list[str]:
    """Return the names of the call's equations; for a partition, the names of its operators."""
    jaxpr = jax.make_jaxpr(parts.call)(parts.avals, list(inputs))
    return [
        "+".join(type(i.op).__name__ for i in e.params["part"].code)
        if e.primitive.name == "onednn_partition"
        else e.primitive.name
        for e in jaxpr.eqns
    ]


def assert_computes(fn, *args, weights: int) -> None:
    """Assert that the call equals `fn` with lax in place of the library, up to rounding."""
    parts = hoisted(fn, *args, weights=weights)
    got = jax.jit(parts.call)(parts.prepare(args[:weights]), list(args[weights:]))
    for g, e in zip(got, in_lax(fn, *args), strict=True):
        np.testing.assert_allclose(g, e, rtol=0, atol=1e-5 * max(1.0, float(np.abs(e).max())))


def in_lax(fn, *args):
    """Evaluate `fn` with every kernel as lax code."""
    closed = jax.make_jaxpr(fn)(*args)
    env = dict(zip(closed.jaxpr.invars, args, strict=True))
    env |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for e in closed.jaxpr.eqns:
        values = [read(env, v) for v in e.invars]
        is_kernel = e.primitive is kernel_p
        results = [e.params["op"](*values)] if is_kernel else bind(e, values)
        env |= dict(zip(e.outvars, results, strict=True))
    return [env[v] for v in closed.jaxpr.outvars]
