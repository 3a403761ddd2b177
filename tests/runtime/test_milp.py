"""The process that solves mixed-integer programs."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest

from xrl_jax.runtime import milp_process
from xrl_jax.runtime.milp import Milp, MilpSolver


def knapsack(values: list[float], weights: list[float], limit: float) -> Milp:
    """Most value within a weight: minimise -values x subject to -weights x >= -limit."""
    n = len(values)
    return Milp(
        -np.array(values),
        np.zeros(n, np.int64),
        np.arange(n),
        -np.array(weights),
        np.array([-limit]),
        np.zeros(n),
        np.ones(n),
        np.ones(n),
    )


def test_a_program_is_solved_to_its_optimum():
    with MilpSolver() as solver:
        found = solver.solve(knapsack([6, 10, 12], [1, 2, 3], 5), 10.0)
    assert found.optimal and found.x is not None
    assert found.x.round().tolist() == [0, 1, 1]
    assert found.bound == pytest.approx(-22.0)


def test_a_program_without_a_solution_is_infeasible():
    with MilpSolver() as solver:
        found = solver.solve(knapsack([1], [1], -1), 10.0)
    assert found.x is None and found.infeasible


def test_a_process_that_was_killed_is_started_again():
    with MilpSolver() as solver:
        assert solver.solve(knapsack([1], [1], 1), 10.0).optimal
        process = solver._process
        assert process is not None
        process.kill()
        process.wait()
        assert solver.solve(knapsack([1], [1], 1), 10.0).x is None
        assert solver.solve(knapsack([1], [1], 1), 10.0).optimal


PRINTING = """
import os, sys
from xrl_jax.runtime import milp_process

def solve(given, seconds):
    os.write(1, b"a warning of the solver")
    print("and one of Python")
    return {"x": given}

milp_process._solve = solve
milp_process.main()
"""


def test_what_the_solver_prints_is_no_answer():
    """HiGHS prints some warnings from C++, past Python's standard output."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PRINTING], stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        milp_process.write(process.stdin, (7, 1.0))
        assert milp_process.read(process.stdout) == {"x": 7}
        process.stdin.close()


@pytest.mark.parametrize("left", [0, 4, 9])
def test_an_answer_that_was_cut_off_is_the_end(left):
    whole = io.BytesIO()
    milp_process.write(whole, "answer")
    with pytest.raises(EOFError):
        milp_process.read(io.BytesIO(whole.getvalue()[:left]))
