"""GPUs that programs can be compiled for without one: their names, limits and rates.

Figures are from NVIDIA's data sheets of the H100 SXM and the H200, and from what JAX reports on
them. `reached` is the share of the data sheet's bandwidth that a copy reaches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

_RATES = MappingProxyType(  # dense, flops per second
    {
        "float64": 6.7e13,
        "float32": 6.7e13,  # no tensor cores: what Precision.HIGHEST uses
        "tf32": 4.95e14,
        "bfloat16": 9.9e14,
        "float16": 9.9e14,
        "float8_e4m3fn": 1.98e15,
        "int8": 1.98e15,
    }
)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
      kind: its name in flags and in records, e.g. "h200".
      name: the device kind that JAX reports.
      memory: bytes.
      bandwidth: bytes per second of the data sheet.
      reached: share of it that a copy reaches.
      rates: flops per second, by the type of products.
      l2: bytes of the second-level cache.
      cores: multiprocessors.
      graph_gap: seconds between two kernels of one CUDA graph.
      launch: seconds that the host takes to launch a kernel or a graph.
    """

    kind: str
    name: str
    memory: int
    bandwidth: float
    reached: float = 0.9
    rates: Mapping[str, float] = dataclasses.field(default_factory=lambda: _RATES)
    l2: int = 50 << 20
    cores: int = 132
    clock: float = 1.98e9
    graph_gap: float = 1.2e-6
    launch: float = 4e-6


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.kind: gpu
        for gpu in (
            Gpu("h100", "NVIDIA H100 80GB HBM3", 84_942_979_072, 3.35e12),
            Gpu("h200", "NVIDIA H200", 151_397_597_184, 4.8e12),
        )
    }
)

# XLA's codes of types and, for each, (units per core, operations per clock) of its scalar units and
# of its tensor cores.
_SCALAR_UNITS = {4: (64, 1), 8: (64, 1), 10: (128, 2), 11: (128, 1), 12: (64, 1), 16: (128, 2)}
_TENSOR_UNITS = {
    key: (4, n) for key, n in {2: 1024, 10: 512, 11: 256, 16: 512, 19: 1024, 20: 1024}.items()
}


def gpu_of(kind: str) -> Gpu:
    """Return the GPU of this kind.

    Raises:
      ValueError: there is none; the message lists those there are.
    """
    if kind not in GPUS:
        raise ValueError(f"there is no GPU {kind!r} to compile for (there are: {', '.join(GPUS)})")
    return GPUS[kind]


def target_config(gpu: Gpu, cuda: str) -> str:
    """Return XLA's description of a GPU, a `GpuTargetConfigProto` as text.

    Args:
      cuda: version of CUDA's runtime that is compiled for, e.g. "12.9.0".
    """
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth:.0f}
  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {gpu.clock / 1e9}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  scalar_unit_description {{ {_unit_rates(_SCALAR_UNITS, gpu.clock)} }}
  matrix_unit_description {{ {_unit_rates(_TENSOR_UNITS, gpu.clock)} }}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  device_address_bits: 64
  ecc_enabled: true
  name: "{gpu.name}"
  driver_version: "{cuda}"
  runtime_version: "{cuda}"
  compile_time_toolkit_version: "{cuda}"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""


def _unit_rates(units: Mapping[int, tuple[int, int]], clock: float) -> str:
    return " ".join(
        f"rate_infos {{ key: {key} value {{ clock_rate_ghz: {clock / 1e9} "
        f"units_per_core: {per_core} ops_per_clock: {per_clock} }} }}"
        for key, (per_core, per_clock) in units.items()
    )
