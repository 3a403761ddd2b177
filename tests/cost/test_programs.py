"""Whole programs: their jobs, and what is learned from their timings, made up here."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax

from xrl_jax.cost.model import Oracle
from xrl_jax.cost.programs import (
    IN_ONE_GRAPH,
    choose_constants,
    choose_options,
    learn_from,
    program_job,
    shares,
)
from xrl_jax.cost.roofline import cost_table
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.measure.store import TimingStore
from xrl_jax.measure.target import Target
from xrl_jax.measure.timing import Timing
from xrl_jax.measure.worker import Worker
from xrl_jax.program.program import Program

A = (("fast", "a"),)
W, X = jnp.ones((3, 2)), jnp.ones((4, 3))
MACHINE = Target("cpu", "made up", 1, "jax 0", "")


def programs(n: int) -> list[Program]:
    """Return n programs that differ in the number of their additions."""

    def fn(times):
        return lambda w, x: x @ (w * 2.0) + sum([x[0, 0]] * times)

    return [from_jax(fn(i + 1), W, X, weights=(0,)) for i in range(n)]


class Pair(Oracle):
    """An oracle that answers whether constants pay with the relative time of a job without
    constants. The reference is the job with them, so that the worker keeps it.
    """

    def __init__(self, relative: float | None) -> None:
        super().__init__(TimingStore(None, target=MACHINE), Worker())
        self.relative, self.asked = relative, 0

    def time_job(self, job, *, reference=None, **_):
        assert reference is not None
        assert job.constants == 0 and reference.constants > 0
        self.asked += 1
        return Timing(1.0, 1.0, 1.0, relative=self.relative)


def convolution(w, x):
    names = ("NCHW", "OIHW", "NCHW")
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=names)


CONVOLUTION = from_jax(convolution, jnp.ones((2, 3, 1, 1)), jnp.ones((1, 3, 4, 4)), weights=(0,))


@pytest.mark.parametrize(("relative", "pays"), [(1.06, True), (1.05, False), (None, False)])
def test_constants_must_gain_five_per_cent(relative, pays):
    pair = Pair(relative)
    choose_constants(pair, CONVOLUTION)
    assert pair.constants is pays


def test_whether_constants_pay_is_remembered():
    pair = Pair(1.1)
    choose_constants(pair, CONVOLUTION)
    pair.relative = 1.0
    choose_constants(pair, CONVOLUTION)
    assert pair.constants
    assert pair.asked == 1 and pair.spending.from_store == 1


def test_without_weights_constants_are_not_tried():
    without = from_jax(convolution, jnp.ones((2, 3, 1, 1)), jnp.ones((1, 3, 4, 4)))
    pair = Pair(9.0)
    choose_constants(pair, without)
    assert not pair.constants


def test_constants_are_not_tried_for_products():
    pair = Pair(9.0)
    choose_constants(pair, programs(1)[0])
    assert not pair.constants and pair.asked == 0


class OnGpu(Oracle):
    """An oracle of a GPU that answers with the relative time of the job under options."""

    def __init__(self, relative: float | None) -> None:
        gpu = Target("NVIDIA made up", "", 1, "jax 0", "")
        super().__init__(TimingStore(None, target=gpu), Worker())
        self.relative = relative

    def time_job(self, job, *, reference=None, **_):
        assert reference is not None
        assert (job.options, reference.options) == (IN_ONE_GRAPH, ())
        return Timing(1.0, 1.0, 1.0, relative=self.relative)


@pytest.mark.parametrize(
    ("relative", "options"),
    [(0.5, IN_ONE_GRAPH), (1.01, IN_ONE_GRAPH), (1.05, ()), (None, ())],
)
def test_on_a_gpu_operators_are_priced_in_one_graph_unless_the_original_loses_by_it(
    relative, options
):
    oracle = OnGpu(relative)
    choose_options(oracle, CONVOLUTION)
    assert oracle.options == options


def test_on_a_cpu_there_are_no_base_options():
    pair = Pair(0.1)
    choose_options(pair, CONVOLUTION)
    assert pair.options == () and pair.asked == 0


def test_a_job_takes_prepared_weights_and_the_inputs():
    job = program_job(programs(1)[0])
    exported = jax.export.deserialize(bytearray(job.artifact))
    assert [a.shape for a in exported.in_avals] == [(3, 2), (4, 3)]
    assert "multiply" not in exported.mlir_module()  # w * 2 is computed before the call


def test_jobs_of_different_options_have_different_keys():
    (program,) = programs(1)
    assert program_job(program).key != program_job(program, A).key


def test_whole_program_timings_correct_the_cost_table(monkeypatch):
    faster, failed, original = programs(3)
    asked = []
    monkeypatch.setattr(Oracle, "correct", lambda _, *given: asked.append(given))
    oracle = Oracle(TimingStore(None, target=MACHINE), Worker())
    timing = Timing(2e-3, 2e-3, 2e-3, relative=0.5)
    learn_from(oracle, [(faster, timing), (failed, Timing.without("failed", "no"))], original)
    costs = oracle.costs
    assert asked == [([shares(faster, costs), shares(original, costs)], [2e-3, 4e-3])]


def test_shares_count_a_body_as_often_as_it_runs():
    def fn(x):
        return jax.lax.scan(lambda c, _: (jnp.transpose(c) + c, None), x, None, length=5)[0]

    program = from_jax(fn, jnp.ones((4, 4)))
    table = cost_table({})
    found = shares(program, table)
    once = {c: s / 5 for c, s in found.items()}
    assert set(found) == {"movement", "elementwise"}
    # At 15 GB/s: the transpose reads and writes 64 bytes; the sum reads 64 more, because its loop
    # computes the transpose.
    assert once["movement"] == pytest.approx(1e-6 + 128 / 1.5e10, rel=1e-5)
    assert once["elementwise"] == pytest.approx(2e-7 + 16 / 5e10 + 64 / 1.5e10, rel=1e-5)
