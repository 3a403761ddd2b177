"""The entry point: `optimize` turns a function into a verified one that is at least as fast."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from xrl_jax.accept.accept import Acceptance, accept, last_seconds, unchecked
from xrl_jax.accept.baselines import CLOSED_OVER
from xrl_jax.accept.samples import concrete
from xrl_jax.backends.domain import bounded_rules, rules_for
from xrl_jax.backends.fast import Fast
from xrl_jax.cost.config import DEFAULT, CostConfig
from xrl_jax.cost.model import Oracle
from xrl_jax.frontends.callbacks import (
    has_callbacks,
    program_without_callbacks,
    with_callbacks,
    without_callbacks,
)
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.language.rule import Rule
from xrl_jax.language.rule_files import available_rules, select_rules, standard_rules
from xrl_jax.language.table import CompiledRules, compile_rules
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.store import STORE_FILE, TimingStore, default_cache_dir
from xrl_jax.measure.worker import Worker
from xrl_jax.precision.budget import ErrorBudget, check_tolerance, error_budget
from xrl_jax.precision.inputs import calibration_inputs
from xrl_jax.precision.narrow import lower_precision, without_narrow_types
from xrl_jax.program.arguments import flatten_as
from xrl_jax.program.program import Program
from xrl_jax.report.live import LiveProgress
from xrl_jax.report.make import make_report
from xrl_jax.report.text import Report
from xrl_jax.runtime.compile_cache import COMPILED, persistent_cache
from xrl_jax.runtime.ctrl_c import keep_ctrl_c
from xrl_jax.runtime.engine_jit import on_cpu
from xrl_jax.runtime.settings import own_settings, under_users_settings
from xrl_jax.search.base import Budget, Problem, SearchResult, Strategy, predicted
from xrl_jax.search.chain import WithShare, chain
from xrl_jax.search.recall import recall, record_path, remember
from xrl_jax.search.time_whole import TimeWhole
from xrl_jax.strategies import find_strategy
from xrl_jax.transform.start import start_of
from xrl_jax.verify.verify import verified

_LEAST_LAST, _MOST_LAST = 0.3, 0.6  # share of the budget for the check and the final timing
_LEAST_TIMING, _MOST_TIMING = 3.0, 30.0  # seconds for the final timing
_LEAST_SEARCH = 1e-3  # seconds for a search when no time is left: it returns the original
_STRICT = 0.6  # share of the search's time that is used before types are narrowed
_TOO_LONG = 4.0  # a check that would take more than this many budgets is not begun


@dataclass(frozen=True)
class _Task:
    """A program to optimise and the settings for it.

    Attributes:
      given: the user's function as a program.
      original: the same program in the form that is run during optimisation, see `_to_run`.
      program: the start of the search, see `start_of`.
      rules: the rules that may be used; those available on this platform are compiled in `table`.
      arguments: flat example arguments, or their shapes.
    """

    name: str
    given: Program
    original: Program
    program: Program
    strategy: Strategy
    rules: tuple[Rule, ...]
    table: CompiledRules
    arguments: list[Any]
    assume: tuple[str, ...]
    tolerance: float | str | None
    calibration: Sequence[Sequence[Any]]
    cost_config: CostConfig


def _task(
    fn: Callable[..., Any] | Program,
    example_args: tuple[Any, ...],
    weights: int | Sequence[int],
    search: str | Strategy,
    rules: Any,
    **settings: Any,
) -> _Task:
    """Return the task; `settings` are its fields of the same names."""
    strategy = find_strategy(search)
    # A slip is reported before anything is traced.
    select_rules(standard_rules(settings["assume"], bounded=True), rules)
    given = fn if isinstance(fn, Program) else from_jax(fn, *example_args, weights=weights)
    original = _to_run(given, fn, example_args, weights)
    platform = jax.default_backend()
    with on_cpu():
        program = start_of(original, platform)
        library = rules_for(program, settings["assume"], platform)
        chosen = tuple(verified(select_rules(library, rules), library))
        table = compile_rules(available_rules(chosen, platform))
    arguments: list[Any] = list(original.in_avals)
    if example_args:
        arguments, _ = flatten_as(original.in_tree, example_args, {})
    name = getattr(fn, "__name__", None) or "program"
    return _Task(name, given, original, program, strategy, chosen, table, arguments, **settings)


def optimize(
    fn: Callable[..., Any] | Program,
    *example_args: Any,
    weights: int | Sequence[int] = (),
    search: str | Strategy = "taso",
    rules: Any = None,
    budget: Budget | None = None,
    key: jax.Array | None = None,
    tolerance: float | str | None = None,
    calibration: Sequence[Sequence[Any]] = (),
    assume: Sequence[str] = (),
    cache_dir: str | os.PathLike[str] | None = None,
    cost_config: CostConfig = DEFAULT,
    progress: bool = True,
) -> Fast:
    """Return a function that computes the same values as `fn` and is faster on this machine.

    If no faster function is found, the result runs `fn` itself.

    Args:
      fn: a JAX function of pytrees (arrays it closes over are weights), or a Program.
      example_args: pytrees of arrays, numbers or `jax.ShapeDtypeStruct`s; optional for a Program.
        Leaves of other types, and numbers whose value is needed to trace `fn`, are static. If a
        call has other shapes, dtypes or static values, the result runs `fn` itself.
      weights: positions of the arguments that stay the same between calls. Values that depend on
        weights only are computed once.
      search: the name of a search (see `xrl_jax.strategies.SEARCHES`), or a strategy, which is run
        unchanged; `xrl_jax.search.chain.pipeline` adds the stages that named searches have.
      rules: None for all verified rules; otherwise names, families or Rule objects, where "-name"
        excludes a rule. Rules that are not in xrl_jax's library are verified first.
      budget: limits on seconds and measurements; 60 seconds by default. Of the seconds, 30 to 60 %
        are reserved for the check of the result and its final timing. If these take longer, the
        progress display says so; if they would take more than four times the budget, the original
        is returned and nothing is checked.
      key: random key for the search; `jax.random.key(0)` by default.
      tolerance: None for results that err at most four times as much as the original's. A number is
        the largest error against float64, relative to the largest element of a result; "bf16" or
        "f16" stands for the error of `fn` in that type. Both allow narrower types wherever these
        save time; the result is checked on 16 or more inputs on which no choice was made.
      calibration: typical inputs for a tolerance, each a tuple of the positional arguments that are
        not weights; drawn from the elements of the example arguments by default.
      assume: assumptions about values, e.g. ("finite",). "finite" allows rules that may lose NaN,
        infinities or part of the range of floats; without it, such rules are used only if given as
        Rule objects. "in-domain" skips a test of the arguments: a result that was checked only on
        values up to a bound otherwise runs the original for arguments that exceed the bound.
      cache_dir: folder for timings and results; None for the user's cache folder. A second search
        of the same program starts from the result of the first.
      cost_config: hyperparameters of the cost model.
      progress: whether to show a live display.

    Under `jax.disable_jit`, `jax_debug_nans` and `jax_debug_infs` the result runs `fn` itself.
    During optimisation the callbacks of `fn` run once or a few times; those without results never.

    Ctrl-C ends the current phase; the next one continues with the results so far. During the
    search, only the best program found is then timed and checked; during the check, the original is
    returned; during the final timing, earlier timings in the worker process decide.

    Returns:
      A `Fast` with the signature and the results of `fn`; its `report` describes the optimisation.

    Raises:
      RuleError: a rule that is not in the library fails its verification.
      TraceError: `fn` cannot be traced.
      ValueError: a search, rule, assumption, tolerance or calibration input is not possible; the
        message names it.

    >>> def fn(x):
    ...     return jnp.tanh(x) + 0.0
    >>> budget = xrl_jax.Budget(seconds=1.0)
    >>> fast = xrl_jax.optimize(fn, jnp.ones(3), budget=budget, progress=False)
    >>> fast(jnp.zeros(3)).tolist(), fast.report.used in ("original", "optimized")
    ([0.0, 0.0, 0.0], True)
    """
    budget = budget or Budget()
    budget_clock = Stopwatch(budget.seconds)
    check_tolerance(tolerance, calibration)
    allowed = dict(assume=tuple(assume), tolerance=tolerance, calibration=calibration)
    task = _task(fn, example_args, weights, search, rules, cost_config=cost_config, **allowed)
    folder = default_cache_dir() if cache_dir is None else cache_dir
    return _optimised(task, budget, budget_clock, folder, key, progress=progress)


def _optimised(
    task: _Task,
    budget: Budget,
    budget_clock: Stopwatch,
    folder: str | os.PathLike[str],
    key: jax.Array | None,
    *,
    progress: bool,
) -> Fast:
    """Run the search, check and time its result, and make the report.

    Args:
      budget_clock: the clock of the budget, already running.
    """
    with (
        own_settings(),
        keep_ctrl_c(),
        LiveProgress(task.name, budget.seconds, progress=progress) as live,
        TimingStore(os.path.join(folder, STORE_FILE)) as store,
        Worker() as worker,
    ):
        with persistent_cache(os.path.join(folder, COMPILED)), on_cpu():
            oracle = Oracle(store, worker, config=task.cost_config)
            run = predicted(task.program, oracle.costs)
        reserved, no_time_reason = _reserved_seconds(task.original, run, budget.seconds, live)
        clock = replace(budget_clock, seconds=budget.seconds - reserved)  # of the search
        errors = _error_budget(task, live)
        left = replace(budget, seconds=max(clock.left, _LEAST_SEARCH))
        # If timings cannot be stored, results cannot either; the store has warned.
        record = None if store.in_memory else _record(task, folder, store)
        with persistent_cache(os.path.join(folder, COMPILED)), on_cpu():
            found = _searched(task, errors, oracle, record, live, left, key)
        search_seconds = clock.elapsed
        worker.close()  # it holds the programs it timed, with their weights
        accepted = _accepted(task, errors, found, oracle, live, budget_clock, no_time_reason)
    with on_cpu():
        report = make_report(
            name=task.name,
            strategy=task.strategy,
            seed=None,
            program=task.program,
            found=found,
            accepted=accepted,
            rules=task.rules,
            oracle=oracle,
            search_seconds=search_seconds,
            total_seconds=budget_clock.elapsed,
        )
    if accepted.used and record is not None:
        strict = without_narrow_types(accepted.candidate)
        remember(record, strict.program, strict.steps)
    return _fast(task.given, accepted, report)


def _record(task: _Task, folder: str | os.PathLike[str], store: TimingStore) -> Path:
    """Return the path of the record that keeps this task's result."""
    return record_path(folder, task.program, task.table.rules, store.target)


def _error_budget(task: _Task, live: LiveProgress) -> ErrorBudget | None:
    """Return the budget of error that the user allows; None if nothing may be narrowed."""
    if task.tolerance is None:
        return None
    if isinstance(task.tolerance, str):
        live.phase(f"measuring the error of {task.name} in {task.tolerance}")
    leaves = concrete(task.original, task.arguments)
    batches = calibration_inputs(task.original, leaves, task.calibration)
    return error_budget(task.original, leaves, task.tolerance, batches)


def _searched(
    task: _Task,
    errors: ErrorBudget | None,
    oracle: Oracle,
    record: Path | None,
    live: LiveProgress,
    budget: Budget,
    key: jax.Array | None,
) -> SearchResult:
    """Run the strategy, time its best programs as a whole, and spend the budget of error."""
    recalled = None if record is None else recall(record, task.program)
    problem = Problem(task.program, task.table, oracle, live, live.phase, recalled)
    strategy = chain(task.strategy, TimeWhole())
    key = jax.random.key(0) if key is None else key
    narrow = lower_precision(task.original, task.program, errors, oracle.target.platform)
    if narrow is None:
        return strategy(problem, budget, key)
    found = chain(WithShare(strategy, _STRICT), narrow)(problem, budget, key)
    return found.with_note(errors.origin) if errors and found.frontier else found


def _accepted(
    task: _Task,
    errors: ErrorBudget | None,
    found: SearchResult,
    oracle: Oracle,
    live: LiveProgress,
    budget_clock: Stopwatch,
    no_time_reason: str,
) -> Acceptance:
    """Accept the first of the best programs that passes the check, and time it with the original.

    Args:
      no_time_reason: why there is no time for this; "" if there is.
    """
    if no_time_reason:
        return unchecked(found.best, no_time_reason)
    return accept(
        task.original,
        found.best,
        task.arguments,
        tolerance=None if errors is None else errors.tolerance,
        typical=() if errors is None else errors.checked_on,
        close_over=oracle.constants,
        bounded_rules=bounded_rules(task.rules, task.assume),
        guarded="in-domain" not in task.assume,
        seconds=lambda: _last_timing_seconds(found, budget_clock),
        tell=live.phase,
    )


def _fast(given: Program, accepted: Acceptance, report: Report) -> Fast:
    """Return the function that the user gets."""
    if not accepted.used:
        # The original in its fastest variant, so that the result is not slower than any baseline.
        as_constants = accepted.baseline.startswith(CLOSED_OVER)
        return Fast(given, given.fn, report=report, close_over=as_constants)
    return Fast(
        replace(with_callbacks(accepted.candidate.program), fn=given.fn),
        given.fn,
        options=accepted.candidate.options,
        report=report,
        close_over=accepted.close_over,
        traced_program=given if accepted.traced_speedup == 1.0 else None,
        original=given,
        domain=accepted.domain,
    )


def _last_timing_seconds(found: SearchResult, budget_clock: Stopwatch) -> float:
    """Return the seconds for the final timing; the least if Ctrl-C ended the search."""
    left = 0.0 if found.interrupted else budget_clock.left
    return min(max(0.5 * left, _LEAST_TIMING), _MOST_TIMING)


def _reserved_seconds(
    program: Program, run: float, seconds: float, live: LiveProgress
) -> tuple[float, str]:
    """Return the seconds reserved for the check and the final timing, and why there is no time for
    them ("" if there is).

    Prints a message if they are likely to take longer than the reserved seconds.

    Args:
      run: seconds of one run of the program.
      seconds: the whole budget.
    """
    last, least = last_seconds(program, run), last_seconds(program)
    reserved = min(max(last, _LEAST_LAST * seconds), _MOST_LAST * seconds)
    if least > _TOO_LONG * seconds:
        return (
            reserved,
            f"checking a result takes about {least:.0f} s, and the budget is {seconds:g} s",
        )
    if last > reserved:
        live.say(f"the final check and timing take about {last:.0f} s, whatever the budget")
    return reserved, ""


def _to_run(
    given: Program,
    fn: Callable[..., Any] | Program,
    example_args: tuple[Any, ...],
    weights: int | Sequence[int],
) -> Program:
    """Return the program as it is run during optimisation: with stand-ins for its callbacks, and
    with its function traced under the user's JAX settings, not under xrl_jax's own.
    """
    if has_callbacks(given):
        if isinstance(fn, Program):
            given = program_without_callbacks(given)
        else:
            quiet = without_callbacks(fn, given.in_tree)
            leaves, _ = flatten_as(given.in_tree, example_args, {})
            args, _ = jax.tree.unflatten(given.in_tree, leaves)
            given = from_jax(quiet, *args, weights=weights)
    return given if given.fn is None else replace(given, fn=under_users_settings(given.fn))
