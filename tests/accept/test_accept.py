"""The final decision: a result that is right and faster beyond noise, or the original and the
reason.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.accept import accept as lib
from xrl_jax.accept import last_timing
from xrl_jax.accept.accept import accept, last_seconds
from xrl_jax.accept.baselines import AS_ARGUMENTS, CLOSED_OVER
from xrl_jax.accept.last_timing import CONTROL, OPTIMISED, ORIGINAL, UNPREPARED
from xrl_jax.accept.samples import concrete, samples
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import build, nodes_of
from xrl_jax.lower.table import name_of, number_of
from xrl_jax.measure.comparison import Comparison, warm_up
from xrl_jax.measure.timing import Ratio, Timing
from xrl_jax.program.program import Program
from xrl_jax.search.base import Found, Step

W, X = jnp.full((3, 2), 0.5), jnp.ones((4, 3))


def fn(w, x):
    return jnp.tanh(x @ w)


PROGRAM = from_jax(fn, W, X, weights=(0,))
BEFORE = Timing(0.8, 0.79, 0.81, repeats=9, relative=0.5)  # in the worker: twice as fast


def with_op(op: str) -> Program:
    """Return the program with another function in place of tanh."""
    nodes, outputs, _ = nodes_of(PROGRAM.graph)
    changed = [replace(n, op=op) if n.op == "tanh" else n for n in nodes]
    return PROGRAM.with_graphs([build(changed, outputs)])


def finalist(program: Program = PROGRAM, timing: Timing = BEFORE, place: str = "") -> Found:
    """Return a program that was timed, with one step that distinguishes it from others."""
    return Found(program, 0.8, (Step(0, "rule", place, 0.1),), timing=timing)


def test_the_final_check_is_estimated_longer_for_large_weights_and_slow_runs() -> None:
    """The first program has four nodes and 24 bytes of weights, too few to affect the estimate."""
    compiling = last_seconds(PROGRAM)
    assert 2.0 < compiling < 2.2
    assert last_seconds(PROGRAM, 0.0) == pytest.approx(compiling, rel=1e-6)
    assert last_seconds(PROGRAM, 0.5) == pytest.approx(compiling + 60.0, rel=1e-6)
    large = jax.ShapeDtypeStruct((250_000, 1000), jnp.float32)
    program = from_jax(fn, large, jax.ShapeDtypeStruct((4, 250_000), jnp.float32), weights=(0,))
    assert last_seconds(program, 0.0) == pytest.approx(compiling + 55.0, rel=1e-3)


# An option that this backend knows and that changes nothing here.
OPTIONS = (("xla_cpu_experimental_ynn_fusion_type", ""),)


def fake_compare(seconds: dict[str, float], spread: float = 0.01):
    """Return a `comparison.compare` with made-up seconds by name; what fails to run still fails."""

    def compare(fns, *, baseline, seed, **_):
        timings, drawn = {}, {}
        for name, run in fns.items():
            try:
                warm_up(run)
            except Exception as error:
                timings[name] = Timing.without("failed", str(error))
                continue
            t = seconds.get(name, 1.0)
            drawn[name] = [t * (1 + spread * ((7 * i) % 5 - 2)) for i in range(20)]
            timings[name] = Timing(t, t, t, repeats=20)
        return Comparison(baseline, timings, {}, drawn, seed)

    return compare


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch):
    def use(**options):
        monkeypatch.setattr(last_timing, "compare", fake_compare(**options))

    return use


def accepted(finalists, program=PROGRAM, arguments=(W, X), **options):
    usual = {"tolerance": None, "seconds": lambda: 0.1}
    return accept(program, finalists, arguments, **{**usual, **options})


def test_a_correct_and_faster_result_is_used(times):
    times(seconds={AS_ARGUMENTS: 2.0, CLOSED_OVER: 1.0, OPTIMISED: 0.5})
    found = accepted([finalist()])
    assert found.used
    assert found.reason == "the optimised function is returned: it is right and faster beyond noise"
    assert found.baseline == CLOSED_OVER  # the strongest
    assert found.speedup.value == pytest.approx(2.0)
    assert set(found.baselines) == {AS_ARGUMENTS, CLOSED_OVER}


def test_with_traced_weights_the_faster_function_without_preparation_runs(times):
    faster = {AS_ARGUMENTS: 2.0, CLOSED_OVER: 1.0, OPTIMISED: 0.5, UNPREPARED: 1.6}
    times(seconds=faster)
    assert accepted([finalist()]).traced_speedup == pytest.approx(1.25)  # over AS_ARGUMENTS
    times(seconds={**faster, UNPREPARED: 2.4})
    found = accepted([finalist()])
    assert found.used and found.traced_speedup == 1.0
    times(seconds={OPTIMISED: 0.5})
    no_weights = from_jax(fn, W, X)
    found = accepted([finalist(no_weights)], no_weights)
    assert found.unprepared is None and found.traced_speedup == found.speedup.value


def test_a_slower_result_is_not_used(times):
    times(seconds={OPTIMISED: 1.2})
    found = accepted([finalist()])
    assert not found.used
    assert found.reason == "the original is returned: nothing found is faster beyond noise"
    assert found.speedup.value == pytest.approx(1 / 1.2)


def test_a_result_faster_only_by_its_options_is_used_and_reported(times):
    suffix = " + options"
    under = {AS_ARGUMENTS + suffix: 0.5, CLOSED_OVER + suffix: 0.5}
    times(seconds={AS_ARGUMENTS: 1.1, CLOSED_OVER: 1.0, OPTIMISED: 0.5, **under})
    found = accepted([replace(finalist(), options=OPTIONS)])
    assert found.used
    assert found.reason.endswith("which is as fast only with the same compile options")
    assert found.speedup.value == pytest.approx(1.0)


def test_a_result_slower_than_the_original_with_its_options_is_not_used(times):
    suffix = " + options"
    under = {AS_ARGUMENTS + suffix: 0.4, CLOSED_OVER + suffix: 0.4}
    times(seconds={AS_ARGUMENTS: 1.1, CLOSED_OVER: 1.0, OPTIMISED: 0.5, **under})
    assert not accepted([replace(finalist(), options=OPTIONS)]).used


def test_a_gain_within_the_noise_of_the_control_is_not_used(times):
    times(seconds={OPTIMISED: 0.95, CONTROL: 1.1}, spread=0.0)
    assert not accepted([finalist()]).used
    times(seconds={OPTIMISED: 0.95, CONTROL: 1.01}, spread=0.0)
    assert accepted([finalist()]).used


@pytest.mark.parametrize(
    ("gain", "noise", "is_undecided"),
    [
        (Ratio(1.05, 1.02, 1.08), 1.00, False),  # faster
        (Ratio(1.02, 0.99, 1.06), 1.00, True),  # perhaps faster
        (Ratio(1.02, 1.01, 1.03), 1.04, False),  # faster by less than noise
        (Ratio(0.95, 0.93, 0.99), 1.00, False),  # slower
    ],
)
def test_a_result_that_may_still_be_faster_is_timed_for_longer(
    monkeypatch, gain, noise, is_undecided
):
    asked: list[bool] = []

    def compare(fns, *, decides=None, **options):
        found = fake_compare({})(fns, **options)
        asked.extend([] if decides is None else [decides(found)])
        return found

    one = Timing(1.0, 1.0, 1.0)
    told = last_timing.InterleavedTimings(
        {"jit": one}, "jit", one, gain, Ratio(noise, noise, noise), gain
    )
    monkeypatch.setattr(last_timing, "compare", compare)
    monkeypatch.setattr(last_timing, "_outcome", lambda *_: told)
    accepted([finalist()])
    assert asked == [not is_undecided]


def test_a_wrong_result_is_not_used_however_fast(times):
    times(seconds={OPTIMISED: 0.1})
    found = accepted([finalist(with_op("sin"))])
    assert not found.used and not found.accuracy.ok
    assert found.reason.startswith(
        "the original is returned: the result's error against float64 is"
    )


def test_the_first_correct_finalist_is_chosen(times):
    times(seconds={OPTIMISED: 0.5})
    found = accepted([finalist(with_op("sin")), finalist(place="second"), finalist(place="third")])
    assert found.used and found.candidate.steps[0].place == "second"


def test_a_given_tolerance_decides(times):
    times(seconds={OPTIMISED: 0.5})
    assert accepted([finalist(with_op("erf"))], tolerance=1.0).used
    assert not accepted([finalist()], tolerance=0.0).used


@pytest.mark.parametrize("tolerance", [None, 1e-2])
def test_an_integer_that_a_rounding_error_decides_may_differ(times, tolerance):
    """In float32, 1 / 41 * 41 is slightly less than 1."""
    times(seconds={OPTIMISED: 0.5})
    x = jnp.ones(3)
    original = from_jax(lambda x: jnp.floor(x / 41 * 41).astype(jnp.int32), x)
    candidate = from_jax(lambda x: jnp.floor(x).astype(jnp.int32), x)
    assert original(x).tolist() == [0, 0, 0] and candidate(x).tolist() == [1, 1, 1]
    found = accepted([finalist(candidate)], original, (x,), tolerance=tolerance)
    assert found.accuracy.ok


def test_a_result_that_cannot_be_run_is_not_used(times):
    times(seconds={})
    nodes, outputs, _ = nodes_of(PROGRAM.graph)
    broken = PROGRAM.with_graphs(
        [build([replace(n, lowering=99) if n.op == "dot" else n for n in nodes], outputs)]
    )
    found = accepted([finalist(broken)])
    assert not found.used
    assert found.reason.startswith("the original is returned: the result cannot be run")


def test_an_error_of_the_original_is_raised(times):
    times(seconds={})

    def host(_):
        raise ZeroDivisionError("from the original")

    def raises(x):
        return jax.pure_callback(host, jax.ShapeDtypeStruct((3,), jnp.float32), x)

    program = from_jax(raises, jnp.ones(3))
    with pytest.raises(Exception, match="from the original"):
        accepted([finalist(program)], program, [jnp.ones(3)])


def interrupt(*_args, **_options):
    raise KeyboardInterrupt


def test_ctrl_c_in_the_final_timing_leaves_the_workers_timings(monkeypatch):
    monkeypatch.setattr(last_timing, "compare", interrupt)
    found = accepted([finalist()])
    assert found.used
    assert found.speedup.value == 2.0
    assert found.speedup.low == pytest.approx(1.6 / 0.81)
    assert found.baseline == ORIGINAL and found.baselines[ORIGINAL].seconds == pytest.approx(1.6)
    assert "the final timing was interrupted" in found.reason
    assert found.traced_speedup == 1.0  # this was not timed


def test_ctrl_c_in_the_final_timing_without_earlier_timings_gives_the_original(monkeypatch):
    monkeypatch.setattr(last_timing, "compare", interrupt)
    found = accepted([finalist(timing=Timing.without("failed", "no"))])
    assert not found.used
    assert "interrupted before the final timing" in found.reason


def test_ctrl_c_in_the_check_gives_the_original(monkeypatch):
    monkeypatch.setattr(lib, "assess", interrupt)
    found = accepted([finalist()])
    assert not found.used
    assert found.reason == (
        "the original is returned: the check against the original was interrupted"
    )


def test_weight_bytes_are_those_of_prepared_weights(times):
    times(seconds={})
    program = from_jax(lambda w, x: x @ (w * 2.0), W, X, weights=(0,))
    assert accepted([finalist(program)], program).weight_bytes_added == 3 * 2 * 4


def test_arguments_given_as_shapes_are_drawn_at_random():
    leaves = concrete(PROGRAM, [np.asarray(W), jax.ShapeDtypeStruct((4, 3), jnp.float32)])
    assert all(isinstance(x, jax.Array) for x in leaves)
    np.testing.assert_array_equal(leaves[0], W)
    assert leaves[1].shape == (4, 3) and float(jnp.std(leaves[1])) > 0.1


def test_numbers_become_arrays_of_the_traced_dtype():
    program = from_jax(lambda x, s: x * s, X, 2.5)
    assert concrete(program, [X, 2.5])[1].dtype == program.in_avals[1].dtype


def test_numbers_become_arrays_of_weak_type() -> None:
    program = from_jax(lambda x, s: x * s, X, 2.5)
    assert concrete(program, [X, 2.5])[1].weak_type


def test_samples_are_drawn_at_the_inputs_scale_and_keep_weights():
    x = 100.0 + 5.0 * jax.random.normal(jax.random.key(0), (50, 3))
    program = from_jax(fn, W, x, weights=(0,))
    first, again, *others = samples(program, [W, x])
    assert first[1] is x and all(s[0] is W for s in (again, *others))
    assert abs(float(jnp.mean(again[1])) - 100.0) < 5.0
    assert not np.allclose(again[1], x)


def test_samples_have_zeros_other_signs_large_numbers_and_special_values():
    x = jax.random.normal(jax.random.key(0), (50, 3))
    largest = float(jnp.abs(x).max())
    program = from_jax(fn, W, x, weights=(0,))
    *_, mixed, large, special = (np.asarray(s[1]) for s in samples(program, [W, x]))
    assert (mixed == 0).sum() >= 5 and np.abs(mixed).max() == pytest.approx(2 * largest, rel=1e-5)
    assert np.abs(large).max() == pytest.approx(4 * largest, rel=1e-5)
    assert np.isnan(special).sum() == 1 and sorted(special[np.isinf(special)]) == [-np.inf, np.inf]


def test_samples_of_weak_type_have_a_weak_type() -> None:
    x = jnp.full((3,), 0.5)
    assert x.weak_type
    for sample in samples(from_jax(jnp.tanh, x), [x]):
        assert sample[0].weak_type and sample[0].dtype == x.dtype


@pytest.mark.parametrize("x", [jnp.arange(4), jnp.zeros((0, 3)), jax.random.key(0)], ids=str)
def test_integers_keys_and_empty_arrays_are_not_drawn_again(x):
    program = from_jax(lambda x: x, x)
    assert all(sample[0] is x for sample in samples(program, [x]))


def grouped(lowering: str):
    """Return a convolution of two groups, the same with the lowering of this name, and its
    arguments.
    """
    w, x = jnp.full((4, 2, 1, 1), 0.5), jnp.ones((1, 4, 3, 3))

    def conv(w, x):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=2)

    program = from_jax(conv, w, x, weights=(0,))
    nodes, outputs, _ = nodes_of(program.graph)
    number = number_of("conv", lowering)
    new = [replace(n, lowering=number) if n.op == "conv" else n for n in nodes]
    return program, program.with_graphs([build(new, outputs)]), (w, x)


def test_a_lowering_that_is_not_correct_on_all_arguments_has_a_domain(times):
    times(seconds={OPTIMISED: 0.5})
    program, dense, args = grouped("dense")
    found = accepted([finalist(dense)], program, args)
    assert found.used and found.domain == (None, 4.0)
    assert accepted([finalist(dense)], program, args, guarded=False).domain is None
    assert accepted([finalist(program)], program, args).domain is None


def test_if_a_lowering_is_wrong_outside_its_domain_the_correct_one_is_tried(times):
    """Without a guard, the dense lowering carries NaN from one group to the other."""
    times(seconds={OPTIMISED: 0.5})
    program, dense, args = grouped("dense")
    found = accepted([finalist(dense)], program, args, guarded=False)
    assert found.used
    assert all(name_of(n) != "dense" for n in nodes_of(found.candidate.program.graph)[0])


def test_rules_for_finite_operands_make_no_program_with_others(times):
    """exp overflows for operands that are inside of any domain; tanh(exp(x)) is finite again."""
    times(seconds={OPTIMISED: 0.5})
    bounded = frozenset({"rule"})

    def same(w, x):
        return jnp.tanh(2 * (x @ w))

    def with_exp(w, x):
        return 1 - 2 / (1 + jnp.exp(4 * (x @ w)))

    program = from_jax(same, W, X, weights=(0,))
    other = from_jax(with_exp, W, X, weights=(0,))
    found = accepted([finalist(program)], program, bounded_rules=bounded)
    assert found.used and found.domain == (None, 4.0)
    assert accepted([finalist(other)], program).used
    found = accepted([finalist(other)], program, bounded_rules=bounded)
    assert not found.used and "operands that may not be finite" in found.reason


def test_the_final_timing_runs_without_a_fake():
    found = accepted([finalist()], seconds=lambda: 0.05)
    assert found.optimised.repeats >= 7 and 0.0 < found.optimised.seconds < 1.0
    assert found.noise.low <= found.noise.value <= found.noise.high
