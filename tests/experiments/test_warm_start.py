"""The costs of the cold and of the warm search, and their commands, on made-up figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.warm_start import COLD, LONG, WARM, Config, command_of, figures
from tests.experiments.test_benchmark import NET, entry

SECONDS = {LONG: 300.0, COLD: 60.0, WARM: 10.0}
CONFIG = Config("bert", "taso", SECONDS, 20.0, 0, Path("out"))


def test_the_warm_search_uses_the_cache_of_the_long_one() -> None:
    cache = {
        run: next(w for w in command_of(CONFIG, run) if "cache_dir" in w).split("=")[1]
        for run in SECONDS
    }
    assert cache == {LONG: "out/cache", COLD: "out/cold_cache", WARM: "out/cache"}
    assert "--budget_seconds=10" in command_of(CONFIG, WARM)


def test_shares_are_relative_to_the_long_search() -> None:
    spent = {"compile_seconds": 5.0, "measure_seconds": 10.0, "search_seconds": 25.0}
    report = {**spent, "measurements": 40, "from_store": 2, "candidates": 300}
    entries = {
        LONG: entry(2.0, 1.9, 2.1),
        COLD: entry(1.9, 1.8, 2.0),
        WARM: entry(2.0, 1.9, 2.1),
    }
    found = figures(dict.fromkeys(SECONDS, report), replace(NET, entries=entries))
    assert found[COLD] == {
        **report,
        "seconds": 40.0,
        "speedup": 1.9,
        "share": pytest.approx(0.95),
    }
    assert found[WARM]["share"] == 1.0


def test_an_unknown_network_is_refused() -> None:
    message = r"--model=bart: there is no such network; did you mean bert\? \(known: bert, "
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, model="bart")
