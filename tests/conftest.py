"""Set-up for all tests: reproducible property tests, a compilation cache, and printed figures.

A test that measures something worth reading calls `record_property("figure", "what was found")`;
the lines are printed at the end of the run, whichever process ran the test.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import hypothesis
import jax
import pytest

# The same examples at every run, so that a failure is due to a change. Slow generation is allowed.
hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled functions between runs, because most of the tests' time is compilation.

    Processes may share the folder: JAX sees an entry that another process is still writing as
    damaged, and compiles the function itself. XRL_JAX_TEST_CACHE names another folder; if it is
    empty, nothing is kept.
    """
    folder = os.environ.get("XRL_JAX_TEST_CACHE", str(config.rootpath / ".pytest_cache" / "xla"))
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


_MAPS = Path("/proc/self/maps")  # memory maps under Linux; each compiled function has some
_MOST_MAPS = 20_000  # a process may have 65,530, and XLA aborts where it gets no more


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exclude the objects that a test leaves behind from later garbage collections.

    `optimize` makes eleven collections, each of which takes longer the more objects there are.
    Between files, compiled functions are dropped if the process has many memory maps.
    """
    another = nextitem is None or nextitem.path != item.path
    if another and _MAPS.is_file() and len(_MAPS.read_bytes().splitlines()) > _MOST_MAPS:
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for group in terminalreporter.stats.values() for report in group]
    figures = [
        text
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, text in report.user_properties
        if name == "figure"
    ]
    if figures:
        terminalreporter.section("figures")
        for text in figures:
            terminalreporter.line(text)
