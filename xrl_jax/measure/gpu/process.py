"""The process at the other end of `predictor.Predictor`: compiles artifacts for a GPU that this
machine need not have, and answers with predicted seconds instead of measured ones.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

import jax

from xrl_jax.libraries import registry
from xrl_jax.measure.gpu.compiler import Compiled, compile_for, place
from xrl_jax.measure.gpu.devices import gpu_of
from xrl_jax.measure.gpu.predict import program_seconds, summary
from xrl_jax.measure.target import Target
from xrl_jax.measure.timing import Timing, error_text
from xrl_jax.measure.worker_process import option_value, serve
from xrl_jax.runtime.target_platform import making_for

METHOD = "predicted 3"  # increase with every change of predicted seconds


class _Server:
    """Answers frames. Keeps the timing of every job, by identity: nothing is compiled twice."""

    def __init__(self, kind: str, factors: Mapping[str, float]) -> None:
        self._gpu, self._factors = gpu_of(kind), factors
        self._timings: dict[str, Timing] = {}

    def answer(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        try:
            if header["do"] == "hello":
                place(self._gpu.kind)
                with making_for("gpu"):
                    libraries = registry.versions()
                how = " ".join([METHOD, *(f"{k} x{f!r}" for k, f in sorted(self._factors.items()))])
                versions = f"jax {jax.__version__} {libraries} {how}"
                target = Target(self._gpu.name, "", 0, versions, "")
                return {"overhead_seconds": 0.0, "target": dataclasses.asdict(target)}
            if header["identity"] not in self._timings:
                self._timings[header["identity"]] = self._predicted(header, body)
            timing, named = self._timings[header["identity"]], header.get("reference")
            if header["do"] == "hold":
                return {"held": True}
            if named is not None:
                reference = self._timings.get(named["identity"])
                if reference is None:
                    return {"needs_reference": True}
                relative = timing.seconds / reference.seconds
                timing = dataclasses.replace(timing, relative=relative, reference=named["key"])
            return {"timing": timing.as_dict()}
        except Exception as error:  # whatever goes wrong in a job is that job's result
            return {"timing": Timing.without("failed", error_text(error)).as_dict()}

    def _predicted(self, header: dict[str, Any], artifact: bytes) -> Timing:
        compiled = self._compiled(header, artifact)
        seconds = program_seconds(compiled.kernels, self._gpu, self._factors)
        if header["slope"]:  # of one copy, which is not launched on its own
            seconds -= self._gpu.launch
        return Timing(
            seconds,
            seconds,
            seconds,
            repeats=1,
            compile_seconds=compiled.compile_seconds,
            hlo_hash=compiled.hlo_hash,
            kernels=summary(compiled.kernels),
        )

    def _compiled(self, header: dict[str, Any], artifact: bytes) -> Compiled:
        """Raises what JAX raises."""
        exported = jax.export.deserialize(bytearray(artifact))

        def call(*leaves: Any) -> Any:
            arguments, keywords = jax.tree.unflatten(exported.in_tree, leaves)
            return exported.call(*arguments, **keywords)

        options = {name: option_value(value) for name, value in header["options"].items()}
        return compile_for(
            self._gpu,
            call,
            exported.in_avals,
            options,
            constants=header["constants"],
            any_layout=header["any_layout"],
        )


if __name__ == "__main__":
    serve(lambda: _Server(sys.argv[1], json.loads(sys.argv[2])))
