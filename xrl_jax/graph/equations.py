"""Evaluation of the equations of a jaxpr one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

JITS = ("jit", "pjit")  # primitives
_PLACEMENT = ("in_shardings", "out_shardings", "in_layouts", "out_layouts", "compiler_options_kvs")


def is_plain(params: Mapping[str, Any]) -> bool:
    """Whether a call leaves shardings, layouts and compile options unspecified, so that it may be
    inlined.
    """
    values = (v for key in _PLACEMENT for v in params.get(key) or ())
    return all(v is None or type(v).__name__ == "UnspecifiedValue" for v in values)


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Return the atoms that are not literals."""
    return [a for a in atoms if not isinstance(a, Literal)]


def read(env: dict[Any, Any], atom: Any) -> Any:
    """Return the value of an atom."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def bind(e: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluate an equation of a jaxpr or of a program and return its results."""
    results = e.primitive.bind(*operands, **e.primitive.get_bind_params(e.params))
    return list(results) if e.primitive.multiple_results else [results]


def run(equations: Sequence[Any], env: dict[Any, Any]) -> None:
    """Evaluate the equations in order and add their results to `env`."""
    for e in equations:
        env.update(zip(e.outvars, bind(e, [read(env, v) for v in e.invars]), strict=True))
