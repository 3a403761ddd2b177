"""Estimates on literal samples, and the reports of `compare` and `measure`; absolute times are
never tested.
"""

from __future__ import annotations

import gc
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xrl_jax
from xrl_jax.measure import comparison
from xrl_jax.measure.comparison import call_seconds, calls_per_turn, compare, interleave, measure
from xrl_jax.measure.timing import Ratio, Timing, median_interval, paired_ratio


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def sleeper(milliseconds: float):
    return lambda: time.sleep(milliseconds / 1e3)


def test_a_timing_survives_strict_json():
    for timing in (
        Timing(1.0, 0.5, 2.0, 9, 0.25, "ab", relative=0.5, reference="r"),
        Timing.without("killed", "signal SIGKILL"),
    ):
        text = json.dumps(timing.as_dict(), allow_nan=False)
        assert Timing.from_dict(json.loads(text)) == timing


def test_a_failed_timing_is_infinitely_slow():
    assert Timing.without("failed", "why").seconds == math.inf
    assert not Timing.without("failed", "why").ok


@pytest.mark.parametrize(
    "values", [{}, {"status": "ok"}, {**Timing(1, 1, 1).as_dict(), "status": "fine"}, ["ok"], None]
)
def test_values_that_are_not_a_timing_are_refused(values):
    with pytest.raises(ValueError):
        Timing.from_dict(values)


def test_median_interval_of_order_statistics():
    # Tables of the sign test: for n = 20 the 6th and the 15th value hold the median with 95.9 %.
    assert median_interval(range(1, 21)) == (10.5, 6.0, 15.0)
    # n = 10: the 2nd and the 9th, 97.9 %.
    assert median_interval(range(10, 0, -1)) == (5.5, 2.0, 9.0)
    # n = 6: the range, 96.9 %.
    assert median_interval([1, 2, 3, 4, 5, 6]) == (3.5, 1.0, 6.0)


def test_median_interval_of_few_samples_is_their_range():
    assert median_interval([3.0]) == (3.0, 3.0, 3.0)
    assert median_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)


def test_median_interval_covers_the_median_as_often_as_stated():
    draws = rng().lognormal(size=(2000, 25))
    hits = sum(low <= 1.0 <= high for _, low, high in map(median_interval, draws.tolist()))
    assert 0.94 < hits / 2000 < 0.99


def test_median_interval_ignores_an_outlier():
    assert median_interval([1.0] * 19 + [1000.0]) == (1.0, 1.0, 1.0)


def test_median_interval_of_many_samples():
    samples = np.arange(100_000.0).tolist()
    median, low, high = median_interval(samples)
    # 1.96 standard deviations of Binomial(n, 1/2) are 310 places.
    assert (median, low, high) == (
        49999.5,
        pytest.approx(49690, abs=2),
        pytest.approx(50309, abs=2),
    )


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        median_interval([])


def test_paired_ratio_cancels_load_common_to_a_round():
    load = rng().lognormal(sigma=2.0, size=30)
    ratio = paired_ratio(list(3.0 * load), list(2.0 * load), rng=rng())
    assert ratio.value == pytest.approx(1.5)
    assert ratio.high - ratio.low < 1e-9


def test_paired_ratio_of_swapped_samples_is_the_inverse():
    a, b = rng().lognormal(size=(2, 12))
    forward, back = paired_ratio(a, b, rng=rng()), paired_ratio(b, a, rng=rng())
    assert forward.value * back.value == pytest.approx(1.0, abs=1e-12)
    assert forward.low * back.high == pytest.approx(1.0, rel=0.05)


def test_paired_ratio_covers_the_truth_as_often_as_stated():
    generator = rng()
    hits = 0
    for _ in range(200):
        noise = generator.lognormal(sigma=0.1, size=(2, 25))
        ratio = paired_ratio(1.2 * noise[0], noise[1], rng=generator, resamples=300)
        hits += ratio.low <= 1.2 <= ratio.high
    assert 0.88 < hits / 200 <= 1.0


def test_paired_ratio_depends_on_the_generator_alone():
    a, b = rng().lognormal(size=(2, 12))
    assert paired_ratio(a, b, rng=rng()) == paired_ratio(a, b, rng=rng())


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0])])
def test_samples_that_are_not_pairs_are_refused(a, b):
    with pytest.raises(ValueError, match="equal length"):
        paired_ratio(a, b, rng=rng())


def test_short_functions_are_called_several_times_per_turn():
    assert calls_per_turn(1e-5, 1e-3) == 100
    assert calls_per_turn(0.5, 1e-3) == 1
    assert calls_per_turn(0.0, 1e-3) == 1000


class Waited:
    """A result that notes in `events` when it is waited for."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        events.append("called")

    def block_until_ready(self) -> None:
        self.events.append("waited")


def test_every_call_is_waited_for():
    events: list[str] = []
    call_seconds(lambda: {"out": Waited(events)}, calls=3)
    assert events == ["called", "waited"] * 3


def test_a_gpu_gets_eight_calls_before_the_host_waits(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    events: list[str] = []
    call_seconds(lambda: Waited(events), calls=10)
    assert events == ["called"] * 8 + ["waited"] * 8 + ["called"] * 2 + ["waited"] * 2


def called_order(seed: int) -> list[str]:
    order: list[str] = []
    fns = {name: lambda name=name: order.append(name) for name in "abc"}
    interleave(
        fns,
        dict.fromkeys("abc", 1),
        seconds=0.0,
        min_rounds=6,
        max_rounds=6,
        rng=np.random.default_rng(seed),
        warm_caches=False,
    )
    return order


def test_every_round_calls_each_function_once_in_random_order():
    order = called_order(0)
    rounds = [tuple(order[start : start + 3]) for start in range(0, 18, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 1


def test_each_turn_is_followed_by_a_pause_of_a_twentieth_and_at_most_10_ms(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(comparison, "call_seconds", lambda fn, calls: 0.04)
    monkeypatch.setattr(comparison.time, "sleep", pauses.append)
    for calls in (2, 100):
        rng = np.random.default_rng(0)
        one = {"a": lambda: None}, {"a": calls}
        interleave(*one, seconds=0.0, min_rounds=1, max_rounds=1, rng=rng, warm_caches=False)
    assert pauses == pytest.approx([0.004, 0.01])


@pytest.mark.parametrize(("seconds", "untimed"), [(1e-4, 12), (0.01, 3), (0.03, 1), (0.06, 0)])
def test_a_turn_begins_with_untimed_calls_that_warm_the_caches(monkeypatch, seconds, untimed):
    now, calls = [0.0], [0]
    monkeypatch.setattr(comparison.time, "perf_counter", lambda: now[0])

    def fn() -> None:
        now[0] += seconds
        calls[0] += 1

    rounds, rng = 11, np.random.default_rng(0)
    options = {"seconds": 0.0, "min_rounds": rounds, "max_rounds": rounds, "rng": rng}
    interleave({"fn": fn}, {"fn": 2}, warm_caches=True, **options)
    first = max(untimed, 1)  # it is not known yet how long a call takes
    assert calls[0] == first + 10 * untimed + rounds * 2


def test_the_function_after_a_turn_is_called_and_not_timed():
    calls: list[str] = []
    found = compare(
        {"quick": lambda: calls.append("quick"), "other": lambda: None},
        seconds=0.0,
        min_rounds=3,
        max_rounds=3,
        turn_seconds=0.0,
        baseline="quick",
        seed=0,
        after={"quick": lambda: (calls.append("rest"), time.sleep(0.02))},
    )
    untimed = 3 + 3 * 12  # to compile and time it once, and before each turn
    assert calls.count("rest") == 3 and calls[-1] == "rest"
    assert calls.count("quick") == untimed + 3
    assert found.timings["quick"].seconds < 0.01


def test_the_order_is_decided_by_the_seed():
    assert called_order(1) == called_order(1) != called_order(2)


def test_no_garbage_is_collected_while_the_clock_runs():
    seen = []
    compare({"a": lambda: seen.append(gc.isenabled())}, seconds=0.0, baseline="a", seed=0)
    assert seen[3:] and not any(seen[3:])  # three calls warm it up
    assert gc.isenabled()


def test_garbage_collection_is_enabled_again_after_an_interrupt():
    def interrupt(rounds: int, seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare({"a": lambda: None}, seconds=0.0, baseline="a", seed=0, progress=interrupt)
    assert gc.isenabled()


def test_compare_reports_how_much_faster_each_is():
    fns = {"slow": sleeper(20), "fast": sleeper(1)}
    comparison = compare(fns, seconds=0.0, min_rounds=15, baseline="slow", seed=0)
    assert comparison.ratios["slow"] == Ratio(1.0, 1.0, 1.0)
    fast = comparison.ratios["fast"]
    assert fast.value > 2.0 and fast.low <= fast.value <= fast.high
    assert comparison.ratio("fast", "slow").value == pytest.approx(1.0 / fast.value)
    assert comparison.timings["fast"].seconds < comparison.timings["slow"].seconds


def test_compare_takes_the_minimum_number_of_rounds_even_without_time():
    comparison = compare({"a": sleeper(1)}, seconds=0.0, min_rounds=7, baseline="a", seed=0)
    assert comparison.timings["a"].repeats == 7


def test_compare_reports_its_progress():
    seen: list[int] = []
    compare(
        {"a": sleeper(1)},
        seconds=0.0,
        baseline="a",
        seed=0,
        progress=lambda rounds, seconds: seen.append(rounds),
    )
    assert seen == [1, 2, 3, 4, 5]


def test_a_failing_function_does_not_affect_the_timing_of_others():
    def broken():
        raise RuntimeError("out of luck")

    comparison = compare({"a": sleeper(1), "b": broken}, seconds=0.0, baseline="a", seed=0)
    assert comparison.timings["a"].ok
    assert comparison.timings["b"].status == "failed"
    assert comparison.timings["b"].error == "RuntimeError: out of luck"
    assert list(comparison.ratios) == ["a"]
    with pytest.raises(ValueError, match="'b' was not timed; there are timings of: a"):
        comparison.ratio("a", "b")
    with pytest.raises(RuntimeError, match="out of luck"):
        compare({"a": sleeper(1), "b": broken}, seconds=0.0, baseline="b", seed=0)


def test_an_unknown_baseline_is_named():
    with pytest.raises(ValueError, match="'c' is not among the functions: a, b"):
        compare({"a": sleeper(1), "b": sleeper(1)}, seconds=0.0, baseline="c", seed=0)


def test_measure_times_a_function_and_hashes_its_compiled_program():
    x = jnp.ones((16, 16))
    plain = measure(lambda x: jnp.tanh(x) @ x, x, seconds=0.0)
    jitted = measure(jax.jit(lambda y: jnp.tanh(y) @ y), np.ones((16, 16), np.float32), seconds=0.0)
    assert plain.ok and plain.repeats == 5 and plain.seconds > 0.0 < plain.compile_seconds
    assert plain.hlo_hash == jitted.hlo_hash != ""


def test_measure_names_what_it_cannot_time():
    with pytest.raises(TypeError, match="measure takes one program or function, got dict"):
        xrl_jax.measure({"plain": jnp.sin})  # type: ignore[arg-type]


def test_measure_makes_inputs_for_shapes():
    tree = {"x": jax.ShapeDtypeStruct((4,), jnp.float32), "n": jnp.arange(4)}
    assert measure(lambda tree: tree["x"][tree["n"]], tree, seconds=0.0).ok


def test_measure_passes_static_arguments_on():
    power = jax.jit(lambda x, n: x**n, static_argnums=1)
    assert measure(power, jnp.ones(4), 3, seconds=0.0).ok


def test_measure_refuses_functions_that_donate_their_arguments():
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    with pytest.raises(ValueError, match=r"arguments \(0,\) are donated"):
        measure(donating, jnp.ones(4), seconds=0.0)


@pytest.mark.parametrize(("needed", "rounds"), [(1, 5), (12, 15)])
def test_compare_continues_until_all_rounds_together_decide(needed, rounds):
    comparison = compare(
        {"a": sleeper(1), "b": sleeper(1)},
        seconds=0.0,
        min_rounds=5,
        baseline="a",
        seed=0,
        decides=lambda so_far: len(so_far.samples["a"]) >= needed,
        longest=60.0,
    )
    assert len(comparison.samples["a"]) == len(comparison.samples["b"]) == rounds


def test_compare_stops_at_its_time_limit():
    comparison = compare(
        {"a": sleeper(1)}, seconds=0.0, min_rounds=5, baseline="a", seed=0, decides=lambda _: False
    )
    assert len(comparison.samples["a"]) == 5
