"""The target of a timing: everything it depends on besides the program that was timed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from pathlib import Path

import jax
import jaxlib.version

from xrl_jax.libraries.registry import versions


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a program runs: everything a timing depends on besides the program. The second half of
    a store's key.
    """

    device: str  # kind, as the backend names it, e.g. "cpu"
    cpu: str  # model name
    threads: int  # cores this process may use
    versions: str  # of jax, jaxlib, the platform and the libraries of kernels
    flags: str  # XLA_FLAGS, sorted

    @property
    def platform(self) -> str:
        """JAX's name of the platform: "cpu", "gpu" or "tpu"."""
        if self.device == "cpu":
            return "cpu"
        return "tpu" if self.device.startswith("TPU") else "gpu"


def target_here() -> Target:
    """Return the target that this process runs on. Starts JAX's backend."""
    device = jax.devices()[0]
    platform_version = " ".join(str(device.client.platform_version).split())
    libraries = f"jax {jax.__version__} jaxlib {jaxlib.version.__version__}"
    kernels = f" {versions()}".rstrip()
    of = f"{libraries} {device.platform} {platform_version}{kernels}"
    flags = " ".join(sorted(os.environ.get("XLA_FLAGS", "").split()))
    return Target(device.device_kind, _cpu_model(), usable_cores(), of, flags)


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
