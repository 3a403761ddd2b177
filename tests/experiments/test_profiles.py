"""Times reported by profilers, summed by kind of operator."""

from __future__ import annotations

import pytest

from experiments.profiles import CALLS, by_kind, parse_onednn, parse_onnx_runtime

VERBOSE = """\
onednn_verbose,info,oneDNN v3.2.0 (commit n/a)
onednn_verbose,exec,cpu,convolution,jit_1x1:avx512_core,forward_inference,src_f32,,,mb1_ic64,0.25
onednn_verbose,exec,cpu,reorder,jit:uni,undef,src_f32::blocked:acdb,,,1x64x56x56,0.5
a line of somebody else, exec
onednn_verbose,exec,cpu,convolution,jit:avx512_core,forward_inference,src_f32,,,mb1_ic3,1.5
"""
EVENTS = [
    {"name": "model_run", "dur": 5000, "args": {}},
    {"name": "conv1_kernel_time", "dur": 1500, "args": {"op_name": "FusedConv"}},
    {"name": "conv1_fence_before", "dur": 1, "args": {"op_name": "FusedConv"}},
    {"name": "odd_kernel_time", "dur": 250, "args": {"op_name": "Unusual"}},
]


def test_lines_of_onednn() -> None:
    assert parse_onednn(VERBOSE) == [
        ("convolution", 0.25),
        ("reorder", 0.5),
        ("convolution", 1.5),
    ]


def test_events_of_onnx_runtime() -> None:
    assert parse_onnx_runtime(EVENTS) == [("FusedConv", 1.5), ("Unusual", 0.25)]


def test_operators_are_summed_by_kind_for_one_call() -> None:
    parts = [("convolution", 3.0), ("FusedConv", 6.0), ("reorder", 3.0), ("Unusual", 1.5)]
    assert by_kind(parts) == pytest.approx(
        {"convolutions": 9.0 / CALLS, "rearranging": 3.0 / CALLS, "Unusual": 1.5 / CALLS}
    )
