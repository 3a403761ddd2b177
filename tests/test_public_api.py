"""The public names: all exist, have the signatures that others rely on, and are loaded on first
use.
"""

from __future__ import annotations

import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import xrl_jax

SIGNATURES = {
    "optimize": (
        "fn *example_args weights search rules budget key tolerance calibration assume cache_dir"
        " cost_config progress"
    ),
    "Budget": "seconds measurements",
    "from_jax": "fn *example_args weights fold **example_kwargs",
    "from_onnx": "path input_shapes dimensions constants",
    "to_jax": "program",
    "load": "path",
    "load_rules": "path_or_text",
    "verify_rule": "rule seed samples",
    "candidates": "program rules assume",
    "apply": "program candidate",
    "measure": "program_or_fn *args seconds",
}
VALUES = ("Program", "Rule", "Timing", "Candidate", "Verdict")
ERRORS = ("TraceError", "LoadError", "SaveError", "RuleError")


def parameters(fn: object) -> str:
    mark = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(fn).parameters.values()  # type: ignore[arg-type]
    return " ".join(mark.get(p.kind, "") + p.name for p in found)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert parameters(getattr(xrl_jax, name)) == SIGNATURES[name]


def test_every_public_name_is_listed_and_loads() -> None:
    assert {*SIGNATURES, *VALUES, *ERRORS} <= set(xrl_jax.__all__) <= set(dir(xrl_jax))
    for name in xrl_jax.__all__:
        assert getattr(xrl_jax, name).__module__.startswith("xrl_jax."), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'optimise'"):
        _ = xrl_jax.optimise


def test_functions_are_not_hidden_by_modules_of_the_same_name() -> None:
    program = """
import xrl_jax.optimize, xrl_jax.engine.apply, xrl_jax.accept.measure
import xrl_jax
assert all(callable(getattr(xrl_jax, n)) for n in xrl_jax.__all__), "a module hides a function"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_nothing_is_loaded_before_it_is_used() -> None:
    program = """
import sys
import xrl_jax
loaded = sorted(m for m in sys.modules if m.startswith("xrl_jax."))
assert loaded == [], loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_errors_are_value_errors() -> None:
    for name in ERRORS:
        assert issubclass(getattr(xrl_jax, name), ValueError)


def test_measure_times_programs_and_functions() -> None:
    x = jnp.ones((4, 4))
    program = xrl_jax.from_jax(lambda w, x: x @ (w * 2), x, x, weights=(0,))
    for timing in (
        xrl_jax.measure(program, seconds=0.01),
        xrl_jax.measure(program, x, x, seconds=0.01),
        xrl_jax.measure(jnp.sin, x, seconds=0.01),
    ):
        assert timing.ok and 0 < timing.low <= timing.seconds <= timing.high


def test_measure_refuses_other_arguments_than_the_programs() -> None:
    program = xrl_jax.from_jax(jnp.sin, jax.ShapeDtypeStruct((4,), jnp.float32))
    with pytest.raises(TypeError, match=r"is float32\[3\], the program was made for float32\[4\]"):
        xrl_jax.measure(program, jnp.ones(3))
    with pytest.raises(TypeError, match="the program was made for"):
        xrl_jax.measure(program, jnp.ones(4), jnp.ones(4))
