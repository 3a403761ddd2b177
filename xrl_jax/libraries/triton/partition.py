"""Puts kernels of this library in place of the equations of a jaxpr that they compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax

from xrl_jax.graph import equations
from xrl_jax.graph.equations import read, variables
from xrl_jax.libraries.triton.attention import Attention, Jaxpr, find
from xrl_jax.libraries.triton.kernel import arguments_of, attend
from xrl_jax.libraries.triton.product import product_p

_INTERPRETED: ContextVar[bool] = ContextVar("interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Make kernels that run as JAX, on any platform, inside this context: to check them."""
    token = _INTERPRETED.set(True)
    try:
        yield
    finally:
        _INTERPRETED.reset(token)


def partitioned(closed: Any) -> Any:
    """Return the closed jaxpr with every attention as one kernel."""
    jaxpr, interpret = closed.jaxpr, _INTERPRETED.get()
    kernels, replaced = _kernels(jaxpr)
    if not kernels:
        return closed

    def run(*args: Any) -> list[Any]:
        env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for e in jaxpr.eqns:
            if id(e) in kernels:
                kernel = kernels[id(e)]
                env[kernel.result] = _run(kernel, env, interpret)
            elif id(e) not in replaced:
                equations.run([e], env)
        return [read(env, v) for v in jaxpr.outvars]

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    return jax.make_jaxpr(run)(*avals)


def _kernels(jaxpr: Any) -> tuple[dict[int, Attention], set[int]]:
    """Return the kernels by the equation in whose place they are, and all equations that they
    replace, by identity.
    """
    marked = [e for e in jaxpr.eqns if e.primitive is product_p]
    kernels: dict[int, Attention] = {}
    replaced: set[int] = set()
    if len(marked) < 2:
        return kernels, replaced
    indexed = Jaxpr(jaxpr)
    for e in marked:
        kernel = find(indexed, e)
        if kernel is not None and replaced.isdisjoint(map(id, kernel.replaced)):
            kernels[id(e)] = kernel
            replaced.update(map(id, kernel.replaced))
            indexed.give(kernel.result)
    return kernels, replaced


def _run(kernel: Attention, env: Mapping[Any, Any], interpret: bool) -> jax.Array:
    """Return the kernel's result; where the code is then compiled for another platform, that of
    the equations.
    """
    arrays = [env[v] for v in arguments_of(kernel)]
    if interpret:
        return attend(kernel, *arrays, interpret=True)
    made = {v for e in kernel.replaced for v in e.outvars}
    read_by = dict.fromkeys(v for e in kernel.replaced for v in variables(e.invars))
    outer = [v for v in read_by if v not in made]

    def by_equations(arrays: Sequence[jax.Array], values: Sequence[jax.Array]) -> jax.Array:
        inner = dict(zip(outer, values, strict=True))
        equations.run(kernel.replaced, inner)
        return inner[kernel.result]

    return lax.platform_dependent(
        arrays,
        [env[v] for v in outer],
        cuda=lambda arrays, _: attend(kernel, *arrays),
        default=by_equations,
    )
