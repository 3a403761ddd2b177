"""Parameters of the roofline, and those to start calibration from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xrl_jax.cost.view import CLASSES, CORRECTED


@dataclass(frozen=True)
class Rates:
    """Parameters of the roofline.

    Attributes:
      flop_rate: flops per second, by class.
      bandwidth: bytes per second, by class.
      overhead: seconds per node, by class.
      scale: corrections, by `CORRECTED`.
      multiple: measured times as multiples of the roofline, by `lowering_kind_of`.
      pass_overhead: seconds that an elementwise loop takes for each array it reads or writes, in
        addition to its bytes.
    """

    flop_rate: Mapping[str, float]
    bandwidth: Mapping[str, float]
    overhead: Mapping[str, float]
    scale: Mapping[str, float]
    multiple: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    pass_overhead: float = 0.0

    def pass_seconds(self, n_bytes: float) -> float:
        """Return the seconds of a pass of a loop that reads or writes an array of `n_bytes`."""
        return self.pass_overhead + n_bytes / self.bandwidth["elementwise"]


# Start of calibration, before there is any timing: an average CPU. Only ratios matter to a search.
DEFAULT_RATES = Rates(
    flop_rate=dict.fromkeys(CLASSES, 2e10) | {"conv": 8e10, "dot": 1e11, "elementwise": 5e10},
    bandwidth=dict.fromkeys(CLASSES, 1.5e10),
    overhead=dict.fromkeys(CLASSES, 1e-6) | {"elementwise": 2e-7},  # several share a loop
    scale=dict.fromkeys(CORRECTED, 1.0),
)
# The same for a large GPU. Starting a kernel takes longer than most kernels of a small batch.
_GPU_RATES = Rates(
    flop_rate=dict.fromkeys(CLASSES, 2e13) | {"conv": 1e14, "dot": 1e14},
    bandwidth=dict.fromkeys(CLASSES, 3e12),
    overhead=dict.fromkeys(CLASSES, 2e-6) | {"conv": 4e-6, "dot": 4e-6, "elementwise": 0.0},
    scale=dict.fromkeys(CORRECTED, 1.0),
    pass_overhead=6e-7,
)


def first_rates(platform: str) -> Rates:
    """Return the rates to start calibration from on a JAX platform."""
    return _GPU_RATES if platform == "gpu" else DEFAULT_RATES
