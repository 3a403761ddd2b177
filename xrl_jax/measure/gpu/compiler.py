"""Compilation of exported functions for a GPU that this machine need not have.

XLA compiles for a described device (JAX's ahead-of-time topologies). Beside the executable it
writes texts about it into a folder, from which the kernels are read. JAX's plugin for CUDA has to
be installed; a driver is not needed.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout

from xrl_jax.measure.base import EVERYTHING, any_of
from xrl_jax.measure.gpu.devices import Gpu, gpu_of, target_config
from xrl_jax.measure.gpu.hlo import read_module
from xrl_jax.measure.gpu.kernels import Kernel, read_kernels
from xrl_jax.measure.inputs import hlo_hash, random_input

# Plugins, and the version of CUDA's runtime that each brings code for.
_PLUGINS = {"xla_cuda12": "12.9.0", "xla_cuda13": "13.0.0"}
# Where the plugin may be installed without JAX seeing it; see `install`.
COMPILER_FOLDER = Path(sys.prefix) / "share" / "xrl_jax" / "gpu_compiler"
INSTALL = "python -m xrl_jax.measure.gpu.install"


class NoCompilerError(RuntimeError):
    """JAX's plugin for CUDA is not installed."""


@dataclass(frozen=True)
class Compiled:
    """A program compiled for a GPU.

    Attributes:
      kernels: in the order of their launches.
      compile_seconds: that the compiler took.
      hlo_hash: see `inputs.hlo_hash`.
    """

    kernels: tuple[Kernel, ...]
    compile_seconds: float
    hlo_hash: str


@functools.cache
def place(kind: str) -> jax.sharding.Sharding:
    """Return the placement of arrays on one GPU of this kind.

    Raises:
      NoCompilerError: JAX's plugin for CUDA is not installed; says how to install it.
    """
    if importlib.util.find_spec("jax_plugins") is not None:
        for plugin, cuda in _PLUGINS.items():
            if importlib.util.find_spec(f"jax_plugins.{plugin}") is not None:
                config = target_config(gpu_of(kind), cuda)
                topology = topologies.get_topology_desc(
                    platform="cuda", target_config=config, topology="1x1x1"
                )
                return jax.sharding.SingleDeviceSharding(topology.devices[0])
    raise NoCompilerError(
        f"compiling for {gpu_of(kind).name} needs JAX's plugin for CUDA (no GPU): {INSTALL}"
    )


def compile_for(
    gpu: Gpu,
    fn: Any,
    avals: Sequence[Any],
    options: Mapping[str, Any],
    *,
    constants: int = 0,
    any_layout: int = 0,
) -> Compiled:
    """Compile a function for a GPU and read its kernels.

    Args:
      fn: takes flat arguments.
      avals: shapes of the arguments.
      options: compile options of XLA.
      constants: this many leading arguments are constants of the compiled code.
      any_layout: see `Job.any_layout`.

    Raises what JAX raises.
    """
    at = place(gpu.kind)
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at) for a in avals[constants:]]
    # Not zeros or ones, of which XLA would make scalars.
    fixed = [np.asarray(random_input(a, seed=n)) for n, a in enumerate(avals[:constants])]
    free = Format(Layout.AUTO, at)
    jitted = jax.jit(
        lambda *rest: fn(*fixed, *rest),
        in_shardings=tuple(free if is_free else at for is_free in any_of(any_layout, len(given))),
        out_shardings=free if any_layout == EVERYTHING else at,
    )
    traced = jitted.trace(*given)
    with tempfile.TemporaryDirectory(prefix="xrl_jax-") as folder:
        begin = time.perf_counter()
        compiled = traced.lower(lowering_platforms=("cuda",)).compile(
            compiler_options={
                **options,
                "xla_dump_to": folder,
                "xla_gpu_collect_cost_model_stats": True,
            }
        )
        seconds = time.perf_counter() - begin
        # XLA writes the sequence again after its passes over thunks, if they changed anything.
        thunks = _text(folder, "thunk_sequence_after_thunk_passes", "thunk_sequence")
        metadata = _text(folder, "thunk_metadata")
    text = compiled.as_text() or ""
    kernels = read_kernels(read_module(text), thunks, metadata)
    return Compiled(tuple(kernels), seconds, hlo_hash(text))


def _text(folder: str, *names: str) -> str:
    """Return what XLA wrote under the first of these names that is there."""
    for name in names:
        found = sorted(Path(folder).glob(f"*.{name}.txt"))
        if found:
            return max(found, key=lambda path: path.stat().st_size).read_text(encoding="utf-8")
    raise RuntimeError(f"XLA wrote no {names[-1]}: jax {jax.__version__} is not supported")
