"""Profiles of a result and of ONNX Runtime: milliseconds of a call by kind of operator.

  python -m experiments.profiles --network=squeezenet --result=out/benchmark/squeezenet/taso

--result is a folder that experiments.optimize has written. For xrl_jax's result, oneDNN reports the
time of its primitives; the rest of a call is XLA's code, xrl_jax's own loops between primitives,
and call overhead. For ONNX Runtime, its own profiler is used. Each is first timed in a loop on its
own and then profiled in a second loop, because profilers cost time. --out gets a file for each
network.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

import xrl_jax
from experiments import targets
from experiments.runtimes import onnx_model, onnx_runtime
from experiments.targets import ConfigError, require_network
from xrl_jax.backends.onnx.values import ExportError
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.measure.target import target_here

CALLS = 30
# Kinds with their operators' names in oneDNN and ONNX Runtime; any other is a kind of its own.
KINDS = {
    "convolutions": ("convolution", "Conv", "FusedConv", "NhwcFusedConv"),
    "products": ("matmul", "inner_product", "MatMul", "Gemm", "FusedMatMul", "FusedGemm"),
    "rearranging": ("reorder", "ReorderInput", "ReorderOutput", "Transpose", "Reshape", "Squeeze"),
    "pooling": ("pooling", "MaxPool", "AveragePool", "GlobalAveragePool"),
    "sums and activations": (
        *("binary", "sum", "eltwise", "Add", "Mul", "Sub", "Div", "Relu", "Clip", "Gelu"),
        *("BiasGelu", "QuickGelu", "Sigmoid", "Tanh", "Erf", "Sqrt", "Pow", "Sum"),
    ),
    "softmax and normalisations": (
        *("softmax", "layer_normalization", "Softmax", "LayerNormalization"),
        *("SkipLayerNormalization", "ReduceMean", "ReduceSum"),
    ),
    "concatenating and slicing": ("concat", "Concat", "Slice", "Split", "Gather"),
}
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}


class Profile(NamedTuple):
    """Milliseconds of one call: in total, and of the parts that the profiler reports, by kind."""

    call: float
    parts: dict[str, float]


def in_loop(call: Callable[[], Any]) -> float:
    """Return the median milliseconds of a call, in a loop."""
    taken = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(taken))


def by_kind(parts: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return milliseconds per call by kind, given (operator, milliseconds) of all calls."""
    sums: dict[str, float] = collections.defaultdict(float)
    for name, milliseconds in parts:
        sums[_KIND_OF.get(name, name)] += milliseconds / CALLS
    return dict(sums)


def parse_onednn(text: str) -> list[tuple[str, float]]:
    """Return (primitive, milliseconds) of every execution in oneDNN's verbose output."""
    found = []
    for line in text.splitlines():
        words = line.split(",")
        if words[0] == "onednn_verbose" and "exec" in words:
            found.append((words[words.index("exec") + 2], float(words[-1])))
    return found


def parse_onnx_runtime(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return (operator, milliseconds) of every kernel in ONNX Runtime's profile."""
    kernels = [e for e in events if e["name"].endswith("_kernel_time")]
    return [(e["args"]["op_name"], 1e-3 * e["dur"]) for e in kernels]


@contextlib.contextmanager
def _printed_to(file: IO[bytes]) -> Iterator[None]:
    """Redirect the standard output of C code to a file."""
    sys.stdout.flush()
    libc, stdout = ctypes.CDLL(None), os.dup(1)
    libc.fflush(None)
    os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


def of_result(target: targets.Target, folder: Path) -> Profile:
    """Profile a result of experiments.optimize."""
    fast = xrl_jax.load(folder / "optimized.xrl")
    lib = library()

    def call() -> Any:
        return fast(*target.args)

    taken = in_loop(call)
    if lib is None:
        return Profile(taken, {})
    with tempfile.TemporaryFile() as file:
        with _printed_to(file):
            lib.set_verbose(1)
            in_loop(call)
            lib.set_verbose(0)
        file.seek(0)
        return Profile(taken, by_kind(parse_onednn(file.read().decode())))


def of_onnx_runtime(target: targets.Target) -> Profile:
    """Profile ONNX Runtime on the same network, weights and number of threads."""
    weights, *inputs = target.args
    model = onnx_model(target.fn, weights, *inputs, name=target.name)
    on_host, threads = jax.device_get(inputs), target_here().threads
    run = onnx_runtime(model, threads)
    taken = in_loop(lambda: run(*on_host))
    run.wait_until_idle()
    with tempfile.TemporaryDirectory() as folder:
        profiled = onnx_runtime(model, threads, profile_to=os.path.join(folder, "profile"))
        in_loop(lambda: profiled(*on_host))
        events = json.loads(Path(profiled.session.end_profiling()).read_text(encoding="utf-8"))
    return Profile(taken, by_kind(parse_onnx_runtime(events)))


def table(network: str, ours: Profile, theirs: Profile) -> Table:
    """Return a table of both profiles side by side, in milliseconds of a call."""
    shown = Table(title=f"{network}: milliseconds per call", title_justify="left")
    shown.add_column("")
    for name in ("ours", "ONNX Runtime"):
        shown.add_column(name, justify="right")

    def add(what: str, mine: float, theirs: float) -> None:
        shown.add_row(what, *(f"{v:.2f}" if v else "" for v in (mine, theirs)))

    kinds = {*ours.parts, *theirs.parts}
    largest = {k: max(ours.parts.get(k, 0.0), theirs.parts.get(k, 0.0)) for k in kinds}
    for kind in sorted(kinds, key=lambda k: -largest[k]):
        add(kind, ours.parts.get(kind, 0.0), theirs.parts.get(kind, 0.0))
    add("the rest", *(max(p.call - sum(p.parts.values()), 0.0) for p in (ours, theirs)))
    add("whole call", ours.call, theirs.call)
    return shown


def main(argv: Sequence[str]) -> int:
    """Profile and print. The exit status is 2 for bad flags."""
    network, folder = flags.FLAGS.network, Path(flags.FLAGS.result)
    try:
        if len(argv) > 1:
            raise ConfigError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
        require_network(network)
        if not (folder / "optimized.xrl").is_file():
            raise ConfigError(f"--result={folder}: the folder has no optimized.xrl")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    target = targets.from_model(network, seed=flags.FLAGS.seed)
    ours, theirs = of_result(target, folder), Profile(0.0, {})
    try:
        theirs = of_onnx_runtime(target)
    except (ExportError, ImportError, ValueError) as problem:
        print(f"ONNX Runtime is left out: {problem}", file=sys.stderr)
    Console().print(table(network, ours, theirs))
    values = {"network": network, "ours": ours._asdict(), "ONNX Runtime": theirs._asdict()}
    out = Path(flags.FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{network}.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    print(f"results are in {out}")
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("network", "squeezenet", "Network to profile.")
    flags.DEFINE_string(
        "result", "out/squeezenet", "Folder that experiments.optimize wrote for it."
    )
    flags.DEFINE_integer("seed", 0, "Seed of the network's weights.")
    flags.DEFINE_string("out", "out/profiles", "Folder of the results.")
    app.run(main)
