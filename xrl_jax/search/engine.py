"""Compilation of the engine before a search, and a check for one that is cached on disk."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp

from xrl_jax.cost.roofline import CostTable
from xrl_jax.language.table import CompiledRules
from xrl_jax.program.program import Program
from xrl_jax.runtime.compile_cache import cache_folder
from xrl_jax.runtime.engine_jit import platform
from xrl_jax.search.states import Space, in_one_bucket

COLD_SECONDS = 45.0  # compile time on two cores with nothing of it on disk


def compile_engine(program: Program, rules: CompiledRules, costs: CostTable) -> None:
    """Compile all functions that a search of the program calls, or read them from JAX's persistent
    cache. Compiling takes long for any program, and a search should spend its time on searching.
    """
    space = Space(rules, jnp.asarray(program.digests()))
    nothing = (-1, 0, 0)
    for graph in in_one_bucket(program):
        state = space.matched(space.start(graph, costs))
        space.candidates(state, costs)
        space.steps(state, costs, [nothing])
    mark = _mark(program, rules)
    if mark is not None and mark.parent.is_dir():
        mark.touch()


def is_compiled(program: Program, rules: CompiledRules) -> bool:
    """Return whether JAX's persistent cache holds the engine for such programs; it is then ready in
    seconds.
    """
    mark = _mark(program, rules)
    return mark is not None and mark.exists()


def _mark(program: Program, rules: CompiledRules) -> Path | None:
    """Return the path of the empty file that marks the engine for such programs as compiled; None
    where there is no persistent cache.
    """
    folder = cache_folder()
    if folder is None:
        return None
    graphs = in_one_bucket(program)
    shapes = [(x.shape, str(x.dtype)) for x in jax.tree.leaves((graphs[0], rules.table))]
    about = (shapes, len(graphs[0]), platform(), version("jaxlib"), version("xrl_jax"))
    return Path(folder, f"engine-{hashlib.sha256(repr(about).encode()).hexdigest()[:24]}")
