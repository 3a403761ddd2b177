"""A superoptimiser for tensor graphs in JAX: verified rewrites, measured costs, and search.

The public names are listed in `__all__`. The module of each is imported when the name is first
used, so that `import xrl_jax` is fast.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xrl_jax.accept.measure import measure
    from xrl_jax.backends.archive import LoadError
    from xrl_jax.backends.onnx.model import to_onnx
    from xrl_jax.backends.onnx.values import ExportError
    from xrl_jax.backends.plain_data import SaveError
    from xrl_jax.egraph.equivalence import Equivalence, equivalent
    from xrl_jax.egraph.of_program import ProgramEGraph, saturate
    from xrl_jax.engine.program import Candidate, apply, candidates
    from xrl_jax.frontends.jaxpr import TraceError, from_jax
    from xrl_jax.frontends.onnx import from_onnx
    from xrl_jax.language.rule import Rule
    from xrl_jax.language.rule_files import load_rules
    from xrl_jax.language.sexpr import RuleError
    from xrl_jax.measure.timing import Timing
    from xrl_jax.optimize import optimize
    from xrl_jax.program.program import Program, to_jax
    from xrl_jax.report.saved import load
    from xrl_jax.search.base import Budget
    from xrl_jax.transform.fold import fold, unfold
    from xrl_jax.verify.verify import Verdict, verify_rule

__all__ = [
    "Budget",
    "Candidate",
    "Equivalence",
    "ExportError",
    "LoadError",
    "Program",
    "ProgramEGraph",
    "Rule",
    "RuleError",
    "SaveError",
    "Timing",
    "TraceError",
    "Verdict",
    "apply",
    "candidates",
    "equivalent",
    "fold",
    "from_jax",
    "from_onnx",
    "load",
    "load_rules",
    "measure",
    "optimize",
    "saturate",
    "to_jax",
    "to_onnx",
    "unfold",
    "verify_rule",
]

_MODULES = {
    "Budget": "xrl_jax.search.base",
    "Candidate": "xrl_jax.engine.program",
    "Equivalence": "xrl_jax.egraph.equivalence",
    "ExportError": "xrl_jax.backends.onnx.values",
    "LoadError": "xrl_jax.backends.archive",
    "Program": "xrl_jax.program.program",
    "ProgramEGraph": "xrl_jax.egraph.of_program",
    "Rule": "xrl_jax.language.rule",
    "RuleError": "xrl_jax.language.sexpr",
    "SaveError": "xrl_jax.backends.plain_data",
    "Timing": "xrl_jax.measure.timing",
    "TraceError": "xrl_jax.frontends.jaxpr",
    "Verdict": "xrl_jax.verify.verify",
    "apply": "xrl_jax.engine.program",
    "candidates": "xrl_jax.engine.program",
    "equivalent": "xrl_jax.egraph.equivalence",
    "fold": "xrl_jax.transform.fold",
    "from_jax": "xrl_jax.frontends.jaxpr",
    "from_onnx": "xrl_jax.frontends.onnx",
    "load": "xrl_jax.report.saved",
    "load_rules": "xrl_jax.language.rule_files",
    "measure": "xrl_jax.accept.measure",
    "optimize": "xrl_jax.optimize",
    "saturate": "xrl_jax.egraph.of_program",
    "to_jax": "xrl_jax.program.program",
    "to_onnx": "xrl_jax.backends.onnx.model",
    "unfold": "xrl_jax.transform.fold",
    "verify_rule": "xrl_jax.verify.verify",
}


class _Package(ModuleType):
    """Module type that keeps an imported submodule from hiding the public function of its name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
