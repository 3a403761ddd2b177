"""A `Measurer` that predicts instead of measuring: for GPUs that this machine does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping

from xrl_jax.measure.gpu.compiler import COMPILER_FOLDER
from xrl_jax.measure.gpu.devices import gpu_of
from xrl_jax.measure.worker import Worker, python_path


class Predictor(Worker):
    """Compiles jobs for a kind of GPU in a process of its own, and predicts their seconds.

    Args:
      kind: see `devices.GPUS`.
      factors: corrections by the kind of a kernel; see `fit`.

    Raises:
      ValueError: there is no such kind.
    """

    def __init__(self, kind: str, factors: Mapping[str, float] | None = None) -> None:
        self.gpu = gpu_of(kind)
        super().__init__(
            process=("xrl_jax.measure.gpu.process", kind, json.dumps(factors or {})),
            environment={
                "JAX_PLATFORMS": "cpu",
                "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "PYTHONPATH": python_path(COMPILER_FOLDER),
            },
        )
