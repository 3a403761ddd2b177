"""`optimize`: its result is right, and no failure or interruption on the way loses it.

Most tests use made-up timings (`made_up`): all regions take the same time, so that removing work is
what gains, and the final timing says that the result is twice as fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import signal
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xrl_jax
from tests.accept.test_accept import fake_compare
from tests.search.fakes import RULES
from xrl_jax.accept import accept, last_timing
from xrl_jax.accept.last_timing import OPTIMISED
from xrl_jax.cost import calibration, roofline
from xrl_jax.cost.config import CostConfig
from xrl_jax.cost.model import Oracle
from xrl_jax.cost.rates import Rates
from xrl_jax.language.rule_parser import parse_rules
from xrl_jax.libraries.onednn import calls as onednn
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.lower import table as lowerings
from xrl_jax.measure.store import TimingStore
from xrl_jax.measure.timing import Timing
from xrl_jax.measure.worker import Worker
from xrl_jax.search import stages
from xrl_jax.search.backtracking import Taso
from xrl_jax.search.base import Budget, Found, Problem, SearchResult, StopReason
from xrl_jax.search.chain import alone, pipeline
from xrl_jax.search.greedy import Greedy
from xrl_jax.search.refine import Refine
from xrl_jax.search.stages import Search
from xrl_jax.search.time_whole import TimeWhole
from xrl_jax.transform import start

# The module: the package's attribute of that name is the function.
front = importlib.import_module("xrl_jax.optimize")

REFINED = Refine.refined
SOME_RULES = tuple(parse_rules(RULES)[0])
KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {"v": jax.random.normal(KEYS[0], (6, 6)), "w": jax.random.normal(KEYS[1], (6, 6))}
X = jax.random.normal(KEYS[2], (6, 6))


def network(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Compute two contractions, with two transposes between them that have no effect."""
    h = jnp.tanh(x @ params["v"])
    return jnp.transpose(jnp.transpose(h)) @ params["w"]


class MadeUpWorker(Worker):
    """A worker that returns a millisecond for everything; a program takes half as long as its
    reference.

    Attributes:
      interrupt: whether to press Ctrl-C at a job, given its reference.
    """

    overhead_seconds = 0.0  # type: ignore[assignment]
    interrupt: Callable[..., bool] = staticmethod(lambda reference: False)

    def submit(self, jobs, *, reference=None, **_):  # type: ignore[override]
        if self.interrupt(reference):
            raise KeyboardInterrupt
        relative = None if reference is None else 0.5
        return [Timing(1e-3, 0.9e-3, 1.1e-3, repeats=9, relative=relative) for _ in jobs]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpWorker]:
    """Replace the times of regions, programs and the final timing by made-up ones."""

    class Mine(MadeUpWorker):
        pass

    monkeypatch.setattr(front, "Worker", Mine)
    # It would never end: every program would be twice as fast as the one before.
    monkeypatch.setattr(Refine, "refined", lambda self, problem, start, *_: start)
    monkeypatch.setattr(last_timing, "compare", fake_compare({OPTIMISED: 0.5}))
    return Mine


@pytest.fixture
def optimize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return `optimize` with a few rules that are known to be right."""
    monkeypatch.setattr(front, "verified", lambda rules, trusted: rules)
    # Canonicalisation would leave nothing for the rules to do.
    monkeypatch.setattr(start, "canonical", lambda program: program)
    return functools.partial(
        xrl_jax.optimize,
        rules=SOME_RULES,
        budget=Budget(seconds=300.0),
        search="greedy",
        cache_dir=tmp_path / "cache",
        progress=False,
    )


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


# With the real worker ---------------------------------------------------------------------------


def test_a_small_network_end_to_end(optimize):
    fast = optimize(network, PARAMS, X, weights=0, search="taso", budget=Budget(seconds=10.0))
    same(fast(PARAMS, X), network(PARAMS, X))
    report = fast.report
    assert report.used in ("optimized", "original") and report.reason
    assert report.max_error <= report.tolerance < 1e-4
    assert report.measurements > 0 and report.failures == 0
    assert report.baseline_name in report.baselines and report.baseline_ms > 0


def made_up_programs(self, problem, best, *_):
    """Replace `TimeWhole.timed`: the first program takes half of the original's time."""
    timing = Timing(1e-3, 1e-3, 1e-3, relative=0.5)
    return [dataclasses.replace(best[0], timing=timing)]


def endless(node, *arrays):
    """Lower a contraction to code that never ends."""
    x = jax.lax.while_loop(lambda x: x[0, 0] < jnp.inf, jnp.sin, arrays[0])
    return x @ arrays[1]


class Killed(Worker):
    """A worker whose process is killed once the timing of a region has taken five seconds."""

    def submit(self, jobs, *, reference=None, **options):
        pid = (self.overhead_seconds, self.pid)[1]
        assert pid is not None
        killer = threading.Timer(5.0, os.kill, (pid, signal.SIGKILL))
        if reference is None:
            killer.start()
        try:
            return super().submit(jobs, reference=reference, **options)
        finally:
            killer.cancel()


PROMISING = Rates(
    flop_rate=dict.fromkeys(roofline.CLASSES, 1e18),
    bandwidth=dict.fromkeys(roofline.CLASSES, 1e18),
    overhead=dict.fromkeys(roofline.CLASSES, 0.0),
    scale=dict.fromkeys(roofline.CORRECTED, 1.0),
)


@pytest.fixture
def endless_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the lowering "swapped" of contractions endless, and always worth timing: by the
    roofline, what was not timed yet takes no time, whatever a busy machine says the others take.
    """
    monkeypatch.setattr(calibration, "calibrate", lambda samples, rates, prior, config: rates)
    rows = list(lowerings.LOWERINGS["dot"])
    rows[3] = dataclasses.replace(rows[3], fn=endless)
    monkeypatch.setattr(lowerings, "LOWERINGS", {**lowerings.LOWERINGS, "dot": tuple(rows)})


@pytest.mark.slow
@pytest.mark.usefixtures("endless_lowering")
@pytest.mark.parametrize(
    ("worker", "timeout"), [(Worker, 5.0), (Killed, 20.0)], ids=["hangs", "killed"]
)
def test_a_candidate_that_hangs_or_kills_the_worker_is_skipped(
    worker, timeout, optimize, monkeypatch
):
    monkeypatch.setattr(front, "Worker", worker)
    monkeypatch.setattr(front, "Oracle", functools.partial(Oracle, rates=PROMISING))
    monkeypatch.setattr(TimeWhole, "timed", made_up_programs)
    monkeypatch.setattr(last_timing, "compare", fake_compare({OPTIMISED: 0.5}))
    config = CostConfig(region_timeout=timeout)
    fast = optimize(network, PARAMS, X, weights=0, cost_config=config)
    assert fast.report.used == "optimized" and fast.report.failures == 1
    assert fast.report.changed_settings == ("CostConfig.region_timeout",)
    assert "swapped" not in str(fast.program)
    same(fast(PARAMS, X), network(PARAMS, X))


@pytest.mark.usefixtures("endless_lowering")
@pytest.mark.parametrize("status", ["timeout", "killed"])
@pytest.mark.parametrize(
    "alone",  # seconds of the endless lowering's region; other regions take a millisecond
    [None, 0.5e-3, 1e-3],
    ids=["as a region", "as a program", "in a neighbourhood"],
)
def test_a_candidate_that_loses_the_worker_is_tried_and_counted_once(
    alone, status, optimize, made_up, monkeypatch
):
    lost: list[str] = []

    def submit(self, jobs, *, reference=None, seconds_per_job=1.0, **_):
        (job,) = jobs
        is_endless = b"sine" in job.artifact
        if is_endless and (alone is None or seconds_per_job > 0.1):
            lost.append(job.identity)
            return [Timing.without(status, "no")]
        t = alone if is_endless else 1e-3
        return [Timing(t, t, t, relative=None if reference is None else 1.0)]

    monkeypatch.setattr(made_up, "submit", submit)
    monkeypatch.setattr(front, "Oracle", functools.partial(Oracle, rates=PROMISING))
    monkeypatch.setattr(Refine, "refined", REFINED)
    fast = optimize(network, PARAMS, X, weights=0, rules=[*SOME_RULES[:1], *SOME_RULES[3:]])
    assert (len(lost), fast.report.failures) == (1, 1)
    assert "swapped" not in str(fast.program)


# Reproducibility, and kinds of searches ---------------------------------------------------------


def test_the_same_key_and_store_give_the_same_steps(optimize, made_up, monkeypatch):
    rng = np.random.default_rng()

    def submit(self, jobs, **_):  # no two timings are the same
        return [Timing(t, t, t, relative=1.0) for t in rng.uniform(1e-3, 2e-3, len(jobs))]

    monkeypatch.setattr(made_up, "submit", submit)
    monkeypatch.setattr(TimeWhole, "timed", made_up_programs)
    budget = Budget(seconds=600.0, measurements=1000)
    first = optimize(network, PARAMS, X, weights=0, search="taso", budget=budget)
    second = optimize(network, PARAMS, X, weights=0, search="taso", budget=budget)
    assert first.report.measurements > 0 and second.report.measurements == 0
    assert second.report.from_store == first.report.measurements
    assert second.report.steps == first.report.steps != ()
    assert second.report.predicted_ms_after == first.report.predicted_ms_after
    assert str(second.program) == str(first.program)


def test_the_best_programs_are_timed_with_the_rest_of_the_budget(optimize, made_up, monkeypatch):
    """Of ten timings, five are for loops and the search, and five for programs."""
    spent: list[tuple[int, int | None]] = []

    def search(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        spent.append((problem.oracle.spending.measurements, budget.measurements))
        return Taso()(problem, budget, key)

    budget = Budget(seconds=600.0, measurements=10)
    report = optimize(network, PARAMS, X, weights=0, search=pipeline(search), budget=budget).report
    assert [limit for _, limit in spent] == [5] and spent[0][0] > 0
    assert 5 < report.measurements <= 10
    own = Search(search)._search_measurements
    assert [own(n) for n in (0, 1, 100, None)] == [0, 1, 94, None]


def test_a_search_that_is_judged_alone_is_not_refined(optimize, made_up, monkeypatch):
    monkeypatch.setattr(Refine, "refined", lambda *_: pytest.fail("it was refined"))
    report = optimize(network, PARAMS, X, weights=0, search=alone(Greedy())).report
    assert report.used == "optimized"


def test_a_search_object_runs_unchanged_and_its_best_program_is_timed(optimize, made_up):
    report = optimize(network, PARAMS, X, weights=0, search=Greedy()).report
    assert report.used == "optimized" and report.search == "greedy"


# Functions and arguments that are accepted ------------------------------------------------------


def test_operations_without_effect_are_removed(made_up, optimize):
    fast = optimize(network, PARAMS, X, weights=0)
    assert fast.report.used == "optimized"
    assert fast.report.rules_fired == {"turn-twice": 1, "turn-not": 1}
    assert fast.report.stop_reason is StopReason.EXHAUSTED
    assert "transpose" not in str(fast.program)
    same(fast(PARAMS, X), network(PARAMS, X))
    same(jax.jit(fast)(PARAMS, X), network(PARAMS, X))


def test_gradients_are_those_of_the_original(made_up, optimize):
    def loss(params, x):
        return jnp.sum(network(params, x) ** 2)

    fast = optimize(loss, PARAMS, X, weights=0)
    assert fast.report.used == "optimized"
    same(jax.grad(fast)(PARAMS, X), jax.grad(loss)(PARAMS, X))


def test_a_value_and_gradient_can_be_optimised(made_up, optimize):
    step = jax.value_and_grad(lambda params, x: jnp.sum(network(params, x) ** 2))
    fast = optimize(step, PARAMS, X)
    assert fast.report.used == "optimized" and "turn-not" in fast.report.rules_fired
    same(fast(PARAMS, X), step(PARAMS, X))


def test_a_program_with_or_without_examples(made_up, optimize):
    program = xrl_jax.from_jax(network, PARAMS, X, weights=(0,))
    for examples in ((), (PARAMS, X)):
        fast = optimize(program, *examples)
        assert fast.report.used == "optimized"
        same(fast(PARAMS, X), network(PARAMS, X))


def test_shapes_suffice_as_examples(made_up, optimize):
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (PARAMS, X))
    fast = optimize(network, *shapes, weights=0)
    assert fast.report.used == "optimized" and fast.report.max_error < 1e-5
    same(fast(PARAMS, X), network(PARAMS, X))


def zero_weights(params, x):
    return network(jax.tree.map(jnp.zeros_like, params), x)


def with_print(params, x):
    jax.debug.print("seen {}", x[0, 0])
    return network(params, x)


def with_callback(params, x):
    double = jax.pure_callback(
        lambda a: 2 * np.asarray(a), jax.ShapeDtypeStruct(x.shape, x.dtype), x
    )
    return network(params, double)


def with_opaque(params, x):
    return jnp.sort(network(params, jax.lax.top_k(x, 6)[0]), axis=1)


def constant(params, x):
    return jnp.arange(3), jnp.float32(2.5)


def integers(params, x):
    n = (x * 100).astype(jnp.int32)
    return jnp.transpose(jnp.transpose(n @ n)), n > 0


def not_numbers(params, x):
    return jnp.log(network(params, x)), network(params, x) / 0.0


def identity(params, x):
    return x, params, x


@pytest.mark.parametrize(
    "fn",
    [
        zero_weights,
        with_print,
        with_callback,
        with_opaque,
        constant,
        integers,
        not_numbers,
        identity,
    ],
    ids=lambda f: f.__name__,
)
def test_any_function_is_accepted(fn, made_up, optimize):
    fast = optimize(fn, PARAMS, X, weights=0)
    assert fast.report.reason.startswith(f"the {fast.report.used.replace('z', 's')}")
    expected = fn(PARAMS, X)
    got = fast(PARAMS, X)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_effects_happen_once_a_call(made_up, optimize, capfd):
    fast = optimize(with_print, PARAMS, X, weights=0)
    jax.effects_barrier()
    capfd.readouterr()
    fast(PARAMS, X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 1


def test_a_function_that_cannot_be_traced_is_refused_by_name(optimize):
    def branches(x):
        return x if x[0, 0] > 0 else -x

    with pytest.raises(xrl_jax.TraceError):
        optimize(branches, X)


def test_a_rule_can_be_switched_off(made_up, optimize):
    fast = optimize(network, PARAMS, X, weights=0, rules=[*SOME_RULES, "-turn-twice"])
    assert fast.report.rules_fired == {}


def test_unknown_rules_and_searches_are_refused_before_any_work(optimize):
    def untouched(x):
        raise AssertionError("traced")

    with pytest.raises(
        ValueError, match="no rule or family 'turn-thrice'; similar names: .*turn-twice"
    ):
        optimize(untouched, X, rules=[*SOME_RULES, "turn-thrice"])
    with pytest.raises(ValueError, match="no search 'gredy'.*did you mean 'greedy'"):
        optimize(untouched, X, search="gredy")


def test_a_custom_search_function_is_accepted(made_up, optimize):
    def mine(problem, budget, key):
        return Greedy()(problem, budget, key)

    fast = optimize(network, PARAMS, X, weights=0, search=mine)
    assert fast.report.search == "mine" and fast.report.used == "optimized"


def test_two_threads_optimise_and_call_at_once(made_up, optimize):
    results: list[Any] = [None, None]
    shared = optimize(network, PARAMS, X, weights=0)

    def work(i: int) -> None:
        mine = optimize(network, PARAMS, (i + 1.0) * X, weights=0)
        results[i] = [mine(PARAMS, X), *(shared(PARAMS, X) for _ in range(20))]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for found in results:
        for result in found:
            same(result, network(PARAMS, X))


# Ctrl-C -----------------------------------------------------------------------------------------


def test_ctrl_c_in_the_search_returns_what_was_found(made_up, optimize):
    seen = []

    def late(reference) -> bool:
        seen.append(reference)
        return (
            reference is None and len(seen) == 4
        )  # dot, transpose, the merged transpose, then a new lowering

    made_up.interrupt = staticmethod(late)
    fast = optimize(network, PARAMS, X, weights=0, search="taso")
    assert fast.report.stop_reason is StopReason.INTERRUPTED
    same(fast(PARAMS, X), network(PARAMS, X))


@pytest.fixture
def interruptible():
    # Tests that a shell runs in the background ignore Ctrl-C by default.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_search_even_if_its_exception_is_suppressed(
    made_up, optimize, interruptible
):
    seen = []

    def early(reference) -> bool:
        seen.append(reference)
        if len(seen) == 2:  # the first of the regions
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return False

    made_up.interrupt = staticmethod(early)
    fast = optimize(network, PARAMS, X, weights=0, search="taso")
    assert fast.report.stop_reason is StopReason.INTERRUPTED
    # Jobs: whether constants pay, the first region, and the whole original.
    assert len(seen) == 3
    same(fast(PARAMS, X), network(PARAMS, X))


def test_ctrl_c_in_a_search_that_does_not_handle_it_returns_the_original(made_up, optimize):
    def rude(problem, budget, key):
        raise KeyboardInterrupt

    fast = optimize(network, PARAMS, X, weights=0, search=rude)
    assert fast.report.stop_reason is StopReason.INTERRUPTED
    assert fast.report.steps == ()
    same(fast(PARAMS, X), network(PARAMS, X))
    str(fast.report)


def test_ctrl_c_while_programs_are_timed_continues_with_the_check(made_up, optimize):
    made_up.interrupt = staticmethod(lambda reference: reference is not None)
    fast = optimize(network, PARAMS, X, weights=0)
    assert fast.report.max_error <= fast.report.tolerance
    same(fast(PARAMS, X), network(PARAMS, X))


def interrupt(*_args: Any, **_options: Any) -> Any:
    raise KeyboardInterrupt


def test_ctrl_c_in_the_final_timing_returns_what_was_found(made_up, optimize, monkeypatch):
    monkeypatch.setattr(last_timing, "compare", interrupt)
    fast = optimize(network, PARAMS, X, weights=0)
    assert fast.report.used == "optimized" and "transpose" not in str(fast.program)
    assert "the final timing was interrupted" in fast.report.reason
    assert fast.report.speedup == pytest.approx(2.0)


def test_ctrl_c_in_the_check_returns_the_original(made_up, optimize, monkeypatch):
    monkeypatch.setattr(accept, "assess", interrupt)
    fast = optimize(network, PARAMS, X, weights=0)
    assert fast.report.used == "original" and "was interrupted" in fast.report.reason
    same(fast(PARAMS, X), network(PARAMS, X))
    assert fast.report.from_dict(fast.report.as_dict()).reason == fast.report.reason


# Without a search -------------------------------------------------------------------------------


@pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
@pytest.mark.parametrize(("completed", "kernels"), [(pipeline, 2), (alone, 0)])
def test_a_program_with_all_kernels_in_the_library_is_timed_too(
    completed, kernels, made_up, tmp_path
):
    """Nothing is timed beside the result of a search that is judged on its own."""

    def nothing(problem, budget, key):
        found = (Found(problem.program, 1.0),)
        return SearchResult(found, 1.0, 0, StopReason.EXHAUSTED)

    fast = xrl_jax.optimize(
        network,
        PARAMS,
        X,
        weights=0,
        search=completed(nothing),
        rules="lowering_dot",
        cache_dir=tmp_path,
    )
    assert [s.rule for s in fast.report.steps] == ["dot-as-onednn"] * kernels
    same(fast(PARAMS, X), network(PARAMS, X))


@pytest.mark.parametrize(("uses", "expected"), [(True, ["the engine"]), (False, [])])
def test_the_engine_is_compiled_for_a_search_that_calls_it(
    uses, expected, made_up, tmp_path, monkeypatch
):
    compiled = []
    monkeypatch.setattr(stages, "compile_engine", lambda *_: compiled.append("the engine"))

    def nothing(problem, budget, key):
        found = (Found(problem.program, 1.0),)
        return SearchResult(found, 1.0, 0, StopReason.EXHAUSTED)

    search = alone(nothing, uses_engine=uses)
    xrl_jax.optimize(network, PARAMS, X, weights=0, search=search, cache_dir=tmp_path)
    assert compiled == expected


@pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
def test_with_little_time_library_kernels_are_timed_without_a_search(made_up, tmp_path):
    def never(problem, budget, key):
        raise AssertionError("there is no time for this")

    short = Budget(seconds=10.0)
    fast = xrl_jax.optimize(
        network,
        PARAMS,
        X,
        weights=0,
        search=pipeline(never),
        rules="lowering_dot",
        budget=short,
        cache_dir=tmp_path,
    )
    assert [s.rule for s in fast.report.steps] == ["dot-as-onednn"] * 2


def test_the_report_says_if_there_was_no_time_to_compile_the_engine(made_up, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "is_compiled", lambda *_: False)

    def never(problem, budget, key):
        raise AssertionError("there is no time for this")

    short = Budget(seconds=25.0)
    fast = xrl_jax.optimize(
        jnp.tanh, X, search=pipeline(never), rules="add-zero", budget=short, cache_dir=tmp_path
    )
    assert fast.report.stop_reason is StopReason.COLD
    assert "not started: compiling its engine takes about 45 s" in str(fast.report)


# The cache folder -------------------------------------------------------------------------------


def test_a_corrupted_store_is_moved_aside(made_up, optimize, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "timings.sqlite").write_bytes(b"not a database" * 100)
    with pytest.warns(RuntimeWarning, match="not usable.*was moved to"):
        fast = optimize(network, PARAMS, X, weights=0)
    assert fast.report.used == "optimized"
    assert len(list((tmp_path / "cache").glob("*.corrupt-1"))) == 1


def test_a_locked_store_only_disables_the_store(made_up, optimize, tmp_path, monkeypatch):
    path = tmp_path / "cache" / "timings.sqlite"
    TimingStore(path).close()
    monkeypatch.setattr(front, "TimingStore", functools.partial(TimingStore, timeout=0.1))
    other = sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.warns(RuntimeWarning, match="locked"):
        fast = optimize(network, PARAMS, X, weights=0)
    other.close()
    assert fast.report.used == "optimized"


def test_a_check_that_exceeds_its_share_is_announced_beforehand(
    made_up, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(front, "last_seconds", lambda program, run=0.0: 30.0)
    ten = Budget(seconds=10.0)
    fast = xrl_jax.optimize(network, PARAMS, X, weights=0, budget=ten, cache_dir=tmp_path)
    assert fast.report.used == "optimized"
    said = "network: the final check and timing take about 30 s, whatever the budget"
    assert capsys.readouterr().err.splitlines()[0] == said


def test_a_check_that_takes_many_times_the_budget_is_not_begun(made_up, tmp_path, monkeypatch):
    monkeypatch.setattr(front, "last_seconds", lambda program, run=0.0: 50.0)
    ten = Budget(seconds=10.0)
    fast = xrl_jax.optimize(network, PARAMS, X, weights=0, budget=ten, cache_dir=tmp_path)
    assert fast.report.used == "original"
    assert fast.report.reason == (
        "the original is returned: checking a result takes about 50 s, and the budget is 10 s"
    )
    same(fast(PARAMS, X), network(PARAMS, X))


def test_a_cache_folder_that_cannot_be_created_only_disables_the_cache(made_up, optimize, tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="timings are kept in memory only"):
        fast = optimize(network, PARAMS, X, weights=0, cache_dir=tmp_path / "file" / "cache")
    assert fast.report.used == "optimized"


def test_a_wrong_rule_of_the_user_is_refused(tmp_path):
    text = '(rule sum-is-product (source "nowhere") (lhs (add ?x ?y)) (rhs (mul ?x ?y)))'
    (wrong,) = parse_rules(text)[0]
    with pytest.raises(xrl_jax.RuleError, match="sum-is-product is not verified"):
        xrl_jax.optimize(
            network, PARAMS, X, weights=0, rules=[wrong], cache_dir=tmp_path, progress=False
        )


def test_lowerings_of_a_missing_library_are_not_tried(made_up, monkeypatch, tmp_path) -> None:
    tried: list[str] = []

    def look(problem, budget, key):
        tried.extend(rule.name for rule in problem.rules.rules)
        return Greedy()(problem, budget, key)

    monkeypatch.setattr(onednn, "available", lambda: False)
    xrl_jax.optimize(network, PARAMS, X, search=look, rules="lowering_dot", cache_dir=tmp_path)
    assert "dot-as-swapped" in tried and "dot-as-onednn" not in tried
