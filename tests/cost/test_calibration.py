"""Rates, multiples of lowerings and corrections, from timings with round numbers."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.cost.calibration import (
    Sample,
    calibrate,
    correct,
    pessimistic_costs,
    priors,
    varied,
)
from xrl_jax.cost.config import CostConfig
from xrl_jax.cost.rates import DEFAULT_RATES, first_rates
from xrl_jax.cost.roofline import CORRECTED, cost_table
from xrl_jax.graph import ops
from xrl_jax.lower.table import number_of


def samples(op_class: str, *rates: float) -> list[Sample]:
    """Return samples of 100 flops and 1000 bytes that take 1 / rate seconds."""
    return [Sample(op_class, 100.0, 1000.0, 1.0 / r) for r in rates]


def test_calibration_takes_the_rate_that_the_faster_quarter_reaches():
    rates = calibrate(samples("dot", 1, 2, 3, 4, 5))
    assert rates.flop_rate["dot"] == pytest.approx(400.0, rel=1e-5)
    assert rates.bandwidth["dot"] == DEFAULT_RATES.bandwidth["dot"]


def test_the_start_of_a_kernel_is_no_part_of_a_rate():
    gpu = first_rates("gpu")
    assert gpu.overhead["dot"] == 4e-6
    twelve_us = [Sample("dot", 8e8, 1.0, 12e-6)] * 5
    assert calibrate(twelve_us, gpu).flop_rate["dot"] == pytest.approx(8e8 / 8e-6)
    two_us = [Sample("dot", 1e8, 1.0, 2e-6)] * 5  # half of it is for the product at least
    assert calibrate(two_us, gpu).flop_rate["dot"] == pytest.approx(1e8 / 1e-6)


def line(op_class: str, overhead: float, bandwidth: float) -> list[Sample]:
    """Return samples of 1 to 1000 bytes that take an overhead plus the time of their bytes."""
    return [Sample(op_class, 1.0, b, overhead + b / bandwidth) for b in (1.0, 10.0, 100.0, 1000.0)]


def test_classes_without_arithmetic_have_an_overhead_and_a_bandwidth():
    rates = calibrate(line("reduce", 0.5, 4000.0))
    assert rates.bandwidth["reduce"] == pytest.approx(4000.0)
    assert rates.overhead["reduce"] == pytest.approx(0.5)
    assert rates.pass_overhead == 0.0


def test_tiny_regions_alone_say_nothing_about_bandwidth():
    tiny = [Sample("reduce", 1.0, 1.0, t) for t in (0.5, 0.5, 0.5, 0.5)]
    assert calibrate(tiny).overhead["reduce"] + 1 / calibrate(tiny).bandwidth[
        "reduce"
    ] == pytest.approx(0.5)


def test_three_samples_are_too_few_for_a_rate():
    rates = calibrate(samples("dot", 1, 2, 3))
    assert rates.flop_rate == DEFAULT_RATES.flop_rate


def test_a_lowering_has_the_median_of_its_multiples_of_the_roofline():
    """The class's rate is 400 flops a second, which the faster quarter of the timings reach. All
    but the plain lowering have an optimistic estimate, three quarters of their multiple.
    """
    mine = [replace(s, lowering_kind=(9, 0, 0)) for s in samples("dot", 1, 2, 2)]
    other = [replace(s, lowering_kind=(9, 0, 1)) for s in samples("dot", 4, 4)]
    rates = calibrate(mine + other)
    assert rates.flop_rate["dot"] == pytest.approx(400.0, rel=1e-5)
    assert rates.multiple[9, 0, 0] == pytest.approx(2.0, rel=1e-3)
    assert rates.multiple[9, 0, 1] == pytest.approx(0.75, rel=1e-3)


def test_an_untimed_lowering_takes_its_prior_multiple_of_the_plain_one():
    own = [replace(s, lowering_kind=(9, 2, 0)) for s in samples("dot", 1, 4, 4, 4)]
    mine = [s for s in own if s.seconds == 1.0]  # four times its roofline
    prior = {(9, 2, 5): 0.5, (9, 1, 5): 0.5}
    rates = calibrate([*mine, *(replace(s, lowering_kind=(0, 0, 0)) for s in own[1:])], prior=prior)
    assert rates.multiple[9, 2, 5] == pytest.approx(0.75 * 0.5 * 4, rel=1e-3)
    # In a kind without timings, the plain lowering is assumed to take what it takes here.
    assert rates.multiple[9, 1, 0] == pytest.approx(4.0, rel=1e-3)
    assert rates.multiple[9, 1, 5] == pytest.approx(0.75 * 0.5 * 4, rel=1e-3)


def test_a_lowering_is_predicted_no_faster_in_another_kind_than_where_timed():
    """Grouped convolutions (kind 2) usually take a tenth in the library, because XLA's take ten
    times their roofline. But in the kind that was timed, the library's took all of it.
    """
    own = [replace(s, lowering_kind=(9, 0, 0)) for s in samples("dot", 1, 2, 2)]
    other = [replace(s, lowering_kind=(9, 0, 1)) for s in samples("dot", 4, 4)]
    rates = calibrate(own + other, prior={(9, 2, 1): 0.1, (9, 2, 5): 0.3})
    assert rates.multiple[9, 2, 1] == rates.multiple[9, 0, 1] == pytest.approx(0.75, rel=1e-3)
    assert rates.multiple[9, 2, 5] == pytest.approx(0.75 * 0.3 * 2, rel=1e-3)


def test_a_timing_in_one_layout_predicts_the_other_until_that_is_timed():
    """Kinds 0 and 3 are convolutions with features elsewhere and last. The plain lowering is no
    exception; otherwise transposing an image would seem to gain.
    """
    first = [replace(s, lowering_kind=(9, 0, 0)) for s in samples("dot", 1, 2, 2)]
    other = [replace(s, lowering_kind=(9, 0, 1)) for s in samples("dot", 4, 4)]
    last = [replace(s, lowering_kind=(9, 3, 1)) for s in samples("dot", 8, 8)]
    before, after = calibrate(first + other), calibrate(first + other + last)
    assert before.multiple[9, 3, 0] == before.multiple[9, 0, 0] == pytest.approx(2.0, rel=1e-3)
    assert before.multiple[9, 3, 1] == before.multiple[9, 0, 1]
    assert after.multiple[9, 3, 1] == pytest.approx(0.5 * after.multiple[9, 0, 1], rel=1e-3)


@pytest.mark.parametrize(("library", "expected"), [(None, 0.26), ("there", 0.1)])
def test_priors_depend_on_the_installed_libraries(monkeypatch, library, expected):
    monkeypatch.setattr("xrl_jax.libraries.onednn.library.library", lambda: library)
    prior = priors("cpu")
    assert prior[ops.OPS["conv"].code, 2, number_of("conv", "onednn")] == expected
    assert priors("tpu") == {}


def test_elementwise_loops_have_an_overhead_for_each_pass_of_a_sum():
    rates = calibrate(line("elementwise", 0.6, 2000.0))
    assert rates.bandwidth["elementwise"] == pytest.approx(2000.0)
    assert rates.pass_overhead == pytest.approx(0.2)
    assert rates.pass_seconds(1000.0) == pytest.approx(0.7)


def test_calibrating_in_steps_equals_calibrating_at_once():
    first = line("reduce", 0.5, 4000.0) + line("window", 1.0, 100.0)
    more = line("movement", 0.1, 5.0)
    steps = calibrate(first + more, calibrate(first))
    assert steps == calibrate(first + more)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_timings_does_not_matter(seed):
    """Rates are equal to the last bit: a store returns timings in another order than they were made
    in.
    """
    rng = np.random.default_rng(seed)
    timed = [Sample("reduce", 1.0, *rng.uniform(1.0, 2.0, 2)) for _ in range(9)]
    assert calibrate(timed) == calibrate([timed[i] for i in rng.permutation(9)])


def test_correct_predictions_change_nothing():
    rates = correct(DEFAULT_RATES, [{"dot": 1.0, "conv": 1.0}, {"dot": 3.0}], [2.0, 3.0])
    assert rates.scale["dot"] == pytest.approx(1.0) and rates.scale["conv"] == pytest.approx(1.0)


def test_one_program_scales_all_its_classes_alike():
    rates = correct(DEFAULT_RATES, [{"dot": 1.0, "conv": 1.0}], [4.0])
    assert rates.scale["dot"] == pytest.approx(2.0) and rates.scale["conv"] == pytest.approx(2.0)
    assert rates.scale["reduce"] == 1.0


def test_only_corrections_are_varied_by_log_normal_factors():
    costs = replace(cost_table({(0, 1): 1e-3}), scale=jnp.full(len(CORRECTED), 2.0))
    many = jax.vmap(lambda key: varied(costs, key, spread=0.5).scale)
    factors = np.log(many(jax.random.split(jax.random.key(0), 500)) / 2.0)
    assert factors.mean() == pytest.approx(0.0, abs=0.03)
    assert factors.std() == pytest.approx(0.5, abs=0.03)
    one = varied(costs, jax.random.key(0), spread=0.5)
    jax.tree.map(np.testing.assert_array_equal, replace(one, scale=costs.scale), costs)


def test_untimed_lowerings_have_an_optimistic_and_a_pessimistic_estimate():
    """A lowering usually takes 0.8 of the plain one's time: 0.75 of this is the optimistic
    estimate, and 1 / 0.75 of it the pessimistic one.
    """
    prior = {(1, 0, 1): 0.8}
    costs = cost_table({(0, 1): 1e-3}, calibrate([], DEFAULT_RATES, prior))
    pessimistic = pessimistic_costs(costs)
    assert costs.multiple[1, 0, :2].tolist() == pytest.approx([1.0, 0.6])
    assert pessimistic.multiple[1, 0, :2].tolist() == pytest.approx([1.0, 0.8 / 0.75])
    assert pessimistic.timed.tolist() == costs.timed.tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [("optimistic", 0.0), ("peak", 1.5), ("ridge", -1.0), ("weight_only", np.nan)],
)
def test_a_hyperparameter_out_of_its_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"CostConfig.{name} is {value}"):
        CostConfig(**{name: value})


def test_the_degree_of_optimism_is_configurable():
    prior, config = {(1, 0, 1): 0.8}, CostConfig(optimistic=0.5)
    rates = calibrate([], DEFAULT_RATES, prior, config=config)
    costs = cost_table({}, rates, config=config)
    assert costs.multiple[1, 0, 1] == pytest.approx(0.4)
    assert pessimistic_costs(costs).multiple[1, 0, 1] == pytest.approx(1.6)


def test_a_second_correction_continues_from_the_first():
    once = correct(DEFAULT_RATES, [{"dot": 1.0}], [2.0])
    again = correct(once, [{"dot": 2.0}], [3.0])  # predicted under the scale of 2
    assert again.scale["dot"] == pytest.approx(3.0)


def test_many_programs_separate_the_classes():
    shares = [{"dot": 1.0, "conv": 0.1}, {"dot": 0.1, "conv": 1.0}] * 20
    rates = correct(DEFAULT_RATES, shares, [1.3, 3.1] * 20)  # true scales: 1 and 3
    assert rates.scale["dot"] == pytest.approx(1.0, abs=0.1)
    assert rates.scale["conv"] == pytest.approx(3.0, abs=0.2)


def test_programs_of_free_operators_correct_nothing():
    assert correct(DEFAULT_RATES, [{}], [1.0]) == DEFAULT_RATES
