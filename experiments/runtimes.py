"""Other inference runtimes for CPUs, with which an engineer would otherwise run the network."""

from __future__ import annotations

import functools
import io
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.backends.onnx.model import model_proto
from xrl_jax.frontends.jaxpr import from_jax

if TYPE_CHECKING:
    import onnx

TOLERANCE = 1e-3  # of float32 outputs, relative to their largest magnitude
LARGEST = (1 << 31) - 1  # bytes that a protobuf may have
_WINDOW = 0.01  # seconds over which `wait_until_idle` measures the CPU time

Run = Callable[..., list[np.ndarray]]


class DisagreementError(ValueError):
    """A runtime's outputs differ from the network's; the message says by how much."""


@dataclass(frozen=True)
class Loaded:
    """A model in a runtime, as a function of its inputs (NumPy arrays, in their order).

    Attributes:
      session: the runtime's own object.
    """

    session: Any
    run: Run

    def __call__(self, *inputs: np.ndarray) -> list[np.ndarray]:
        return self.run(*inputs)

    def wait_until_idle(self, *, at_most: float = 1.0) -> None:
        """Wait until this process uses no CPU, for at most `at_most` seconds.

        After a call the threads of a runtime busy-wait for the next one (those of ONNX Runtime for
        some 40 ms). A function timed meanwhile has a core less.
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
    """Return `fn(weights, *inputs)` as an ONNX model of the inputs, for inputs of these shapes."""
    program = from_jax(fn, weights, *inputs, weights=(0,), fold=False)
    return model_proto(program, name=name, weights=(weights,))


def onnx_runtime(
    model: onnx.ModelProto,
    threads: int,
    *,
    int8: bool = False,
    spinning: bool = True,
    optimized_to: str | None = None,
    profile_to: str | None = None,
) -> Loaded:
    """Load the model into ONNX Runtime on the CPU, with all of its graph optimisations.

    Args:
      threads: number of threads for one operator; operators run one after the other.
      int8: whether weights are in int8, and activations rounded to it in every call.
      spinning: whether its threads busy-wait for the next call, which is its default; see
        `Loaded.wait_until_idle`. Otherwise they stop, and start a little later.
      optimized_to: file for the optimised graph, for inspection.
      profile_to: prefix of the name of the file that `session.end_profiling()` writes.

    Raises:
      ImportError: there is no onnxruntime package.
      ValueError: the model is too large for one protobuf.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError("this needs ONNX Runtime: pip install onnxruntime") from error
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
    serialized = _serialized(model)
    session = onnxruntime.InferenceSession(
        _in_int8(model) if int8 else serialized, options, providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_inputs()]

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        feeds = dict(zip(names, map(np.asarray, inputs), strict=True))
        return [np.asarray(value) for value in session.run(None, feeds)]

    return Loaded(session, run)


def _in_int8(model: onnx.ModelProto) -> bytes:
    """Return the model with weights in int8, and activations that each call rounds to int8."""
    from onnxruntime.quantization import quantize_dynamic

    # Fewer levels where a processor adds products in 16 bits.
    cpu = Path("/proc/cpuinfo")
    reduce_range = not cpu.is_file() or "vnni" not in cpu.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        quantize_dynamic(model, path, per_channel=True, reduce_range=reduce_range)
        return path.read_bytes()


def jit_in_bfloat16(fn: Callable[..., Any], weights: Any) -> Loaded:
    """Return the network under `jax.jit`, with weights, inputs and arithmetic in bfloat16."""

    def cast(x: Any, before: Any, after: Any) -> Any:
        return jnp.asarray(x, after) if jnp.result_type(x) == before else x

    narrow = functools.partial(cast, before=jnp.float32, after=jnp.bfloat16)
    wide = functools.partial(cast, before=jnp.bfloat16, after=jnp.float32)
    given = jax.tree.map(narrow, weights)
    jitted = jax.jit(lambda *x: jax.tree.map(wide, fn(given, *jax.tree.map(narrow, x))))

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(y) for y in jax.tree.leaves(jitted(*inputs))]

    return Loaded(jitted, run)


def openvino(model: onnx.ModelProto, threads: int, *, precision: str = "f32") -> Loaded:
    """Load the model into OpenVINO on the CPU, set for the latency of one call.

    Results are views of OpenVINO's own memory, valid until the next call.

    Args:
      precision: "f32" or "bf16"; OpenVINO's default depends on the processor.

    Raises:
      ImportError: there is no openvino package.
      ValueError: the model is too large for one protobuf, or OpenVINO refuses it.
    """
    # Otherwise importing openvino would send usage statistics, from a fork of this process.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        import openvino
    except ImportError as error:
        raise ImportError("this needs OpenVINO: pip install openvino") from error
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
    }
    core = openvino.Core()
    try:
        compiled = core.compile_model(
            core.read_model(io.BytesIO(_serialized(model))), "CPU", settings
        )
    except RuntimeError as error:
        raise ValueError(f"OpenVINO refuses the model: {' '.join(str(error).split())}") from error
    request = compiled.create_infer_request()

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        # It does not share a scalar that is read-only, and copies a read-only array in every call.
        given = {i: np.require(x, requirements="W") for i, x in enumerate(inputs)}
        results = request.infer(given, share_inputs=True, share_outputs=True)
        return [results[i] for i in range(len(compiled.outputs))]

    return Loaded(request, run)


# By the names of their packages.
RUNTIMES: dict[str, Callable[[onnx.ModelProto, int], Loaded]] = {
    "onnxruntime": onnx_runtime,
    "openvino": openvino,
}
# The same in narrower types, to compare results within a tolerance with.
NARROWER: dict[str, Callable[[onnx.ModelProto, int], Loaded]] = {
    "onnxruntime-int8": functools.partial(onnx_runtime, int8=True),
    "openvino-bf16": functools.partial(openvino, precision="bf16"),
}
JIT_BF16 = "jit-bf16"  # the network under jax.jit, cast to bfloat16
TITLES = {
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "onnxruntime-int8": "ONNX Runtime in int8",
    "openvino-bf16": "OpenVINO in bfloat16",
    JIT_BF16: "jit in bfloat16",
}


def _serialized(model: onnx.ModelProto) -> bytes:
    """Return the model as one protobuf; raise ValueError if it is too large for that."""
    size = model.ByteSize()
    if size > LARGEST:
        raise ValueError(
            f"model {model.graph.name!r} has {size} bytes, more than a protobuf's {LARGEST}"
        )
    return model.SerializeToString()


def check_agreement(
    run: Run,
    fn: Callable[..., Any],
    weights: Any,
    inputs: Sequence[np.ndarray],
    *,
    tolerance: float = TOLERANCE,
) -> float:
    """Return the error of `run(*inputs)` against `jax.jit(fn)(weights, *inputs)`, see `error_of`.

    Raises:
      DisagreementError: the error is above `tolerance`.
    """
    wanted = [np.asarray(a) for a in jax.tree.leaves(jax.jit(fn)(weights, *inputs))]
    error = error_of(run(*inputs), wanted)
    if not error <= tolerance:
        raise DisagreementError(f"its outputs differ by {error:.2g}, more than {tolerance:.2g}")
    return error


def error_of(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """Return the largest difference relative to the largest magnitude wanted, over all outputs; it
    is infinite if shapes or the number of outputs differ, or a value is not finite.
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
