"""The onnx package's own backend node tests: every case passes or is refused by name."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx.backend.test.loader import load_model_tests
from onnx.numpy_helper import to_array

from tests.quick import QUICK
from xrl_jax.frontends.onnx import UnsupportedOnnxError, from_onnx
from xrl_jax.frontends.onnx_ops.base import UnknownValueError
from xrl_jax.program.program import to_jax

SAMPLE_SIZE = 200


def through_program(model: onnx.ModelProto, constants: dict[str, np.ndarray]) -> Callable[..., Any]:
    """Convert a model with known inputs to a function of the other inputs: the code under test."""
    program = to_jax(from_onnx(model, constants=constants))

    def call(*arrays: np.ndarray) -> Any:
        lowered = jax.jit(program).lower(*arrays)
        return lowered.compile(compiler_options=QUICK)(*arrays)

    return call


@cache
def all_cases() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model_tests(kind="node")


def load_case(case: Any, arrays: dict[str, Any], load: Callable[..., Any]):
    """Load a case, with inputs that decide shapes as known values. Return the function and its
    arguments.
    """
    constants: dict[str, np.ndarray] = {}
    while True:
        try:
            return load(case.model, constants), [a for n, a in arrays.items() if n not in constants]
        except UnknownValueError as error:
            new = [name for name in arrays if name in error.needs and name not in constants]
            if not new:
                raise
            constants.update((name, arrays[name]) for name in new)


def named_arrays(protos: Any, values: Sequence[Any]) -> dict[str, Any]:
    """Return arrays by name; some cases hold them as protobufs or scalars."""
    arrays = {}
    for proto, value in zip(protos, values, strict=False):
        if isinstance(value, onnx.TensorProto):
            value = to_array(value)
        arrays[proto.name] = np.asarray(value) if isinstance(value, np.generic) else value
    return arrays


# Tolerances for cases whose expected values are computed when they are loaded, with errors beyond
# their own tolerance: under NumPy 2.5 this one expects 2e-7, while the result is 0, which is right.
_ROUNDED = {"test_dft_inverse_opset19": 1e-6}


def run_case(
    case: Any,
    load: Callable[..., Any] = through_program,
    *,
    x64: bool = True,
    detail: list[str] | None = None,
) -> str:
    """Return "passed", "unsupported: name", "wrong" or "crashed"; `detail` receives the reason.

    Without x64, results of 64 bits are expected in 32.
    """
    notes: list[str] = [] if detail is None else detail
    with jax.enable_x64(x64):
        try:
            for inputs, expected in case.data_sets:
                arrays = named_arrays(case.model.graph.input, inputs)
                expected = named_arrays(case.model.graph.output, expected)
                call, rest = load_case(case, arrays, load)
                actual = call(*(np.asarray(array) for array in rest))
                actual = actual if isinstance(actual, tuple) else (actual,)
                atol = max(case.atol, _ROUNDED.get(case.name, 0.0))
                difference = compare(actual, list(expected.values()), case.rtol, atol)
                if difference:
                    notes.append(difference)
                    return "wrong"
        except UnsupportedOnnxError as error:
            return f"unsupported: {error.names[0]}"
        except Exception as error:  # a crash is a result of this test, and fails it
            notes.append(f"{type(error).__name__}: {error}")
            return "crashed"
    return "passed"


def compare(actual: Sequence[Any], expected: Sequence[Any], rtol: float, atol: float) -> str:
    """Return a text that says how outputs differ, empty if they agree."""
    if len(actual) != len(expected):
        return f"{len(actual)} outputs instead of {len(expected)}"
    for got, want in zip(actual, expected, strict=True):
        got, want = np.asarray(got), np.asarray(want)
        dtype = jax.dtypes.canonicalize_dtype(want.dtype)
        if got.dtype != dtype or got.shape != want.shape:
            return f"{got.dtype}{got.shape} instead of {dtype}{want.shape}"
        if got.dtype.name == "bfloat16":
            rtol = max(rtol, 2**-6)  # two units in the last place, as onnx's own runner allows
        kind = np.complex128 if want.dtype.kind == "c" else np.float64
        got, want = got.astype(kind), want.astype(kind)
        if not np.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True):
            return f"differs: {got.ravel()[:8]} instead of {want.ravel()[:8]}"
    return ""


def sample(cases: Sequence[Any], size: int, seed: int) -> list[Any]:
    """Draw cases so that every operator occurs if possible, then at random up to `size`."""
    order = np.random.default_rng(seed).permutation(len(cases))
    seen: set[tuple[str, str]] = set()
    first, rest = [], []
    for case in (cases[i] for i in order):
        used = {(node.domain, node.op_type) for node in case.model.graph.node}
        (rest if used <= seen else first).append(case)
        seen |= used
    return (first + rest)[:size]


def report(results: dict[str, str]) -> str:
    """Return a text with the number of cases by result, and by name where they are unsupported."""
    counts = Counter(result.split(":")[0] for result in results.values())
    names = Counter(r.split(": ", 1)[1] for r in results.values() if r.startswith("unsupported"))
    head = ", ".join(f"{counts[k]} {k}" for k in ("passed", "unsupported", "wrong", "crashed"))
    listing = ", ".join(f"{name} ({count})" for name, count in names.most_common())
    return f"\nONNX backend node tests: {len(results)} cases, {head}\nunsupported: {listing}"


def run_cases(cases: Sequence[Any], capsys: pytest.CaptureFixture[str]) -> None:
    details: dict[str, list[str]] = defaultdict(list)
    results = {case.name: run_case(case, detail=details[case.name]) for case in cases}
    with capsys.disabled():
        print(report(results))
    bad = {name: details[name] for name, r in results.items() if r in ("wrong", "crashed")}
    assert bad == {}


def test_sample_passes_or_is_refused_by_name(capsys):
    run_cases(sample(all_cases(), SAMPLE_SIZE, seed=0), capsys)


@pytest.mark.slow
def test_every_case_passes_or_is_refused_by_name(capsys):
    run_cases(all_cases(), capsys)


def test_random_operators_are_refused():
    assert run_case(case_named("test_bernoulli")) == "unsupported: RandomUniformLike"
    dropout = run_case(case_named("test_training_dropout"))
    assert dropout == "unsupported: Dropout: training mode (random numbers)"


def case_named(name: str) -> Any:
    return next(case for case in all_cases() if case.name == name)


def test_a_wrong_result_is_detected():
    def wrong(model: onnx.ModelProto, constants: dict[str, np.ndarray]) -> Callable[..., Any]:
        return lambda x: x

    detail: list[str] = []
    assert run_case(case_named("test_abs"), wrong, detail=detail) == "wrong"
    assert detail[0].startswith("differs")


def test_a_crash_is_detected():
    def crash(model: onnx.ModelProto, constants: dict[str, np.ndarray]) -> Callable[..., Any]:
        raise RuntimeError("broken")

    detail: list[str] = []
    assert run_case(case_named("test_abs"), crash, detail=detail) == "crashed"
    assert detail == ["RuntimeError: broken"]
