"""ONNX models of a few nodes, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def tensor(name, shape, kind: int = FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def array(name, values, dtype: Any = np.float32):
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def model(nodes, inputs, outputs, initialisers=(), opset=17, functions=(), extra=()):
    graph = helper.make_graph(nodes, "test", inputs, outputs, list(initialisers))
    opsets = [helper.make_opsetid("", opset), *extra]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=8)
