"""ONNX Runtime as a rival: what an engineer would otherwise run the network with on this CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xrl_jax.backends.onnx.model import model_proto
from xrl_jax.frontends.jaxpr import from_jax

if TYPE_CHECKING:
    import onnx

TOLERANCE = 1e-3  # of float32 outputs, relative to their largest magnitude
LARGEST = (1 << 31) - 1  # bytes that a protobuf may have
_WINDOW = 0.01  # seconds over which `wait_until_idle` looks at the CPU time

Run = Callable[..., list[np.ndarray]]


class RivalError(ValueError):
    """A rival that computes something else; the message says by how much."""


@dataclass(frozen=True)
class Runtime:
    """A model in ONNX Runtime, as a function of its inputs (NumPy arrays, in their order)."""

    session: Any
    names: tuple[str, ...]

    def __call__(self, *inputs: np.ndarray) -> list[np.ndarray]:
        feeds = dict(zip(self.names, map(np.asarray, inputs), strict=True))
        return self.session.run(None, feeds)

    def wait_until_idle(self, *, at_most: float = 1.0) -> None:
        """Wait until this process uses no CPU, for at most so many seconds.

        After a call the threads of ONNX Runtime wait busily for the next one for some 40 ms.
        Whatever is timed meanwhile has a core less.
        """
        end = time.monotonic() + at_most
        while time.monotonic() < end:
            used = time.process_time()
            time.sleep(_WINDOW)
            if time.process_time() - used < 0.05 * _WINDOW:
                return


def onnx_model(
    fn: Callable[..., Any], weights: Any, *inputs: Any, name: str = "network"
) -> onnx.ModelProto:
    """`fn(weights, *inputs)` as an ONNX model of the inputs, for inputs of these shapes."""
    program = from_jax(fn, weights, *inputs, weights=(0,), fold=False)
    return model_proto(program, name=name, weights=(weights,))


def onnx_runtime(
    model: onnx.ModelProto,
    threads: int,
    *,
    spinning: bool = True,
    optimized_to: str | None = None,
    profile_to: str | None = None,
) -> Runtime:
    """The model in ONNX Runtime on the CPU, all of its graph optimisations on.

    Args:
      threads: for one operator; operators run one after the other.
      spinning: whether its threads wait busily for the next call, which is its default; see
        `Runtime.wait_until_idle`. Without it they stop, and start a little later.
      optimized_to: a file for the optimised graph, to look at.
      profile_to: how the name of the file begins that `session.end_profiling()` writes.

    Raises:
      ImportError: there is no onnxruntime package.
      ValueError: the model is too large for one protobuf.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError("the rival needs ONNX Runtime: pip install onnxruntime") from error
    size = model.ByteSize()
    if size > LARGEST:
        raise ValueError(
            f"model {model.graph.name!r} has {size} bytes, ONNX Runtime takes {LARGEST}"
        )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # it warns that an optimised file is for this machine only
    if not spinning:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if optimized_to is not None:
        options.optimized_model_filepath = optimized_to
    if profile_to is not None:
        options.enable_profiling, options.profile_file_prefix = True, profile_to
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return Runtime(session, tuple(value.name for value in session.get_inputs()))


def check_agreement(
    run: Run,
    fn: Callable[..., Any],
    weights: Any,
    inputs: Sequence[np.ndarray],
    *,
    tolerance: float = TOLERANCE,
) -> float:
    """The error of `run(*inputs)` against `jax.jit(fn)(weights, *inputs)`, see `error_of`.

    Raises:
      RivalError: it is above `tolerance`.
    """
    wanted = [np.asarray(a) for a in jax.tree.leaves(jax.jit(fn)(weights, *inputs))]
    error = error_of(run(*inputs), wanted)
    if not error <= tolerance:
        raise RivalError(f"the rival's outputs differ by {error:.2g}, more than {tolerance:.2g}")
    return error


def error_of(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """The largest difference relative to the largest magnitude wanted, over all outputs; infinite
    where shapes or numbers of outputs differ or a value is not finite.
    """
    if [a.shape for a in got] != [a.shape for a in wanted]:
        return np.inf
    errors = [0.0]
    for a, b in zip(got, wanted, strict=True):
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return np.inf
        if b.size:
            wide = np.asarray(a, np.float64) - np.asarray(b, np.float64)
            errors.append(float(np.abs(wide).max() / max(float(np.abs(b).max()), 1e-30)))
    return max(errors)
