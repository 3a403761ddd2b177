"""Running the equations of a jaxpr one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal


def variables(atoms: Sequence[Any]) -> list[Any]:
    """The atoms without literals."""
    return [a for a in atoms if not isinstance(a, Literal)]


def read(env: dict[Any, Any], atom: Any) -> Any:
    """The value of an atom."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def bind(e: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation of a jaxpr or of a program."""
    results = e.primitive.bind(*operands, **e.primitive.get_bind_params(e.params))
    return list(results) if e.primitive.multiple_results else [results]


def run(equations: Sequence[Any], env: dict[Any, Any]) -> None:
    """Add the equations' results to the values."""
    for e in equations:
        env.update(zip(e.outvars, bind(e, [read(env, v) for v in e.invars]), strict=True))
