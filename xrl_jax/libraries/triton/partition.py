"""Puts kernels of this library in place of the equations of a jaxpr that they compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
from jax import lax

from xrl_jax.graph import equations
from xrl_jax.graph.equations import read, variables
from xrl_jax.libraries.triton.attend import attend
from xrl_jax.libraries.triton.attention import Attention, find
from xrl_jax.libraries.triton.epilogue import ProductAndEpilogue, find_epilogue
from xrl_jax.libraries.triton.multiply import multiply
from xrl_jax.libraries.triton.operands import Jaxpr
from xrl_jax.libraries.triton.product import product_p

Kernel = Attention | ProductAndEpilogue
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
    """Return the closed jaxpr with every attention, and every marked product of matrices, as one
    kernel.
    """
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


def _kernels(jaxpr: Any) -> tuple[dict[int, Kernel], set[int]]:
    """Return the kernels by the equation in whose place they are, and all equations that they
    replace, by identity.
    """
    marked = [e for e in jaxpr.eqns if e.primitive is product_p]
    kernels: dict[int, Kernel] = {}
    replaced: set[int] = set()
    if not marked:
        return kernels, replaced
    indexed = Jaxpr(jaxpr)

    def take(kernel: Kernel | None, place: Any) -> None:
        if kernel is not None and replaced.isdisjoint(map(id, kernel.replaced)):
            kernels[id(place)] = kernel
            replaced.update(map(id, kernel.replaced))
            indexed.give(kernel.result)
            indexed.keep(kernel.arguments)

    for e in marked:
        take(find(indexed, e), e)
    for e in marked:
        if id(e) not in replaced:
            product = find_epilogue(indexed, e)
            take(product, None if product is None else product.replaced[-1])
    return kernels, replaced


def _run(kernel: Kernel, env: Mapping[Any, Any], interpret: bool) -> jax.Array:
    """Return the kernel's result; where the code is then compiled for another platform, that of
    the equations.
    """
    compute = partial(attend if isinstance(kernel, Attention) else multiply, kernel)
    arrays = [env[v] for v in kernel.arguments]
    if interpret:
        return compute(*arrays, interpret=True)
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
        cuda=lambda arrays, _: compute(*arrays),
        default=by_equations,
    )
