"""A superoptimiser for tensor graphs in JAX: verified rewrites, measured costs, and search.

The public names are listed in `__all__` and load their modules when they are first used, so that the import stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xrl_jax.backends.xla import to_jax
    from xrl_jax.frontends.fold import fold, unfold
    from xrl_jax.frontends.jaxpr import TraceError, from_jax
    from xrl_jax.frontends.onnx import from_onnx
    from xrl_jax.graph.program import Program

__all__ = ["Program", "TraceError", "fold", "from_jax", "from_onnx", "to_jax", "unfold"]

_MODULES = {
    "Program": "xrl_jax.graph.program",
    "TraceError": "xrl_jax.frontends.jaxpr",
    "fold": "xrl_jax.frontends.fold",
    "from_jax": "xrl_jax.frontends.jaxpr",
    "from_onnx": "xrl_jax.frontends.onnx",
    "to_jax": "xrl_jax.backends.xla",
    "unfold": "xrl_jax.frontends.fold",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
