"""A search's result is kept, and the next search of the same program begins with it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine import harness
from tests.search.fakes import FakeOracle, compiled_rules
from tests.transform.test_layout import W, traced
from tests.transform.test_layout import X as IMAGE
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.language.rule_files import load_rules
from xrl_jax.measure.target import Target
from xrl_jax.search.base import Budget, Found, Problem, Step
from xrl_jax.search.recall import recall, record_path, remember
from xrl_jax.strategies import find_strategy
from xrl_jax.transform.layout import FEATURES_LAST, convert_layout

RULES = load_rules(harness.ADD_ZERO)
HERE = Target("cpu", "a processor", 2, "jax 1", "")
STEPS = (Step(0, "add-zero", "%3 add[4]", 1e-6),)
X = jnp.arange(4.0)
OTHER = 2 * X


def original():
    return from_jax(lambda x: jnp.tanh(x) + 0.0, X)


def better():
    return original().with_graphs(from_jax(lambda x: jnp.tanh(x), X).graphs)


def test_a_remembered_result_is_recalled_with_its_steps(tmp_path: Path) -> None:
    path = record_path(tmp_path, original(), RULES, HERE)
    remember(path, better(), STEPS)
    found = recall(path, original())
    assert found is not None and found.steps == STEPS
    assert str(found.program) == str(better())
    np.testing.assert_array_equal(found.program(X), jnp.tanh(X))


def test_nothing_is_recalled_at_first(tmp_path: Path) -> None:
    assert recall(record_path(tmp_path, original(), RULES, HERE), original()) is None


def test_records_depend_on_program_rules_and_machine_but_not_on_weight_values(
    tmp_path: Path,
) -> None:
    def path(fn, x, *, rules=RULES, target=HERE) -> Path:
        return record_path(tmp_path, from_jax(fn, x), rules, target)

    base = path(lambda x: x + X, X)
    assert path(lambda x: x + OTHER, X) == base
    other_target = Target("cpu", "another processor", 2, "jax 1", "")
    others = [
        path(lambda x: x - X, X),
        path(lambda x: x + X, jnp.ones((1, 4))),
        path(lambda x: x + X, X, rules=[]),
        path(lambda x: x + X, X, target=other_target),
    ]
    assert len({base, *others}) == 5


def test_a_result_with_bodies_in_another_layout_is_recalled(tmp_path: Path) -> None:
    """The inputs and results of its bodies have other shapes than in the original."""
    program = traced()
    transposed = convert_layout(program, FEATURES_LAST)
    path = record_path(tmp_path, program, RULES, HERE)
    remember(path, transposed, ())
    found = recall(path, program)
    assert found is not None
    assert sorted(a.shape for a in found.program.bodies[0].in_avals) == [(1, 4, 5, 3), (3, 3, 1, 1)]
    np.testing.assert_array_equal(found.program(W, IMAGE), program(W, IMAGE))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"program": "graph {", "steps": []}'])
def test_a_damaged_record_is_ignored(tmp_path: Path, text: str) -> None:
    path = record_path(tmp_path, original(), RULES, HERE)
    path.parent.mkdir()
    path.write_text(text)
    assert recall(path, original()) is None


def test_a_folder_that_cannot_be_written_to_is_reported(tmp_path: Path) -> None:
    path = record_path(tmp_path, original(), RULES, HERE)
    path.parent.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="the result is not kept"):
        remember(path, better(), STEPS)


def test_with_little_time_the_recalled_result_is_returned_without_timing() -> None:
    oracle = FakeOracle()
    recalled = Found(better(), float("inf"), STEPS)
    problem = Problem(original(), compiled_rules(), oracle, recalled=recalled)
    found = find_strategy("greedy")(problem, Budget(seconds=5.0), jax.random.key(0))
    assert [(f.steps, f.timing) for f in found.best] == [(STEPS, None), ((), None)]
    assert found.best[0].program is recalled.program
    assert oracle.spending.measurements == 0
