"""Results of several seeds together, on made-up figures."""

from __future__ import annotations

import math

import pytest

from experiments.over_seeds import by_network, mean_over_seeds, speedups, summary, table, verdict
from experiments.side_by_side import Entry, SideBySide


def entry(speedup: float) -> Entry:
    return Entry(0.01 / speedup, speedup, speedup, speedup, "jit", 1e-6, 1e-5)


def result(network: str, taso: float, xrlflow: float) -> SideBySide:
    """Return the result of a network on which greedy search returns the original."""
    return SideBySide(
        network=network,
        jits={"jit": 0.01},
        noise=(0.98, 1.02),
        entries={"greedy": entry(1.0), "taso": entry(taso), "xrlflow": entry(xrlflow)},
        ratios={f"{s}/xrlflow": (xrlflow / v, 0.0, 9.0) for s, v in (("taso", taso),)},
        runtimes={},
    )


SEEDS = [[result("bert", 1.2, 1.5)], [result("bert", 1.25, 1.5)], [result("bert", 1.3, 1.5)]]


def test_a_mean_over_seeds_is_geometric_with_students_interval() -> None:
    mean = mean_over_seeds([1.0, 4.0])
    assert mean.value == pytest.approx(2.0)
    half = 12.706 * math.log(2.0)  # Student's t, one degree of freedom; the standard error is log 2
    assert math.log(mean.high / mean.value) == pytest.approx(half, rel=1e-4)
    assert math.log(mean.value / mean.low) == pytest.approx(half, rel=1e-4)


def test_one_seed_has_no_interval() -> None:
    assert mean_over_seeds([1.5]) == (pytest.approx(1.5), 0.0, math.inf)


def test_a_search_is_compared_with_the_best_of_the_others() -> None:
    judged = verdict([seed[0] for seed in SEEDS], "xrlflow")
    assert judged is not None
    assert judged.best_other == "taso"
    assert judged.ratio.value == pytest.approx(1.2, abs=0.01)
    assert judged.text == "ahead"


@pytest.mark.parametrize(
    ("tasos", "said"), [((1.2, 2.0, 1.4), "even"), ((1.9, 2.0, 2.1), "behind")]
)
def test_the_verdict_depends_on_the_whole_interval(tasos: tuple[float, ...], said: str) -> None:
    judged = verdict([result("bert", taso, 1.5) for taso in tasos], "xrlflow")
    assert judged is not None
    assert judged.text == said


def test_equal_speedups_have_the_ratio_one() -> None:
    judged = verdict([result("bert", 1.0, 1.0)] * 2, "greedy")
    assert judged is not None
    assert judged.ratio.value == 1.0


def test_only_networks_with_results_for_every_seed_are_counted() -> None:
    of_seeds = [[result("bert", 1.2, 1.5), result("vit", 1.0, 1.0)], [result("bert", 1.2, 1.5)]]
    assert list(by_network(of_seeds)) == ["bert"]


def test_a_search_that_failed_with_one_seed_has_no_mean() -> None:
    broken = result("bert", 1.2, 1.5)
    del broken.entries["taso"]
    assert list(speedups([result("bert", 1.2, 1.5), broken])) == ["greedy", "xrlflow"]


def test_the_table_counts_verdicts_and_states_earlier_costs_of_a_search() -> None:
    lines = table(SEEDS, "xrlflow", {"xrlflow": "trained for 21 min"}).splitlines()
    assert lines[2] == (
        "| bert | 1.00 (1.00-1.00) | 1.25 (1.13-1.38) | 1.50 (1.50-1.50) "
        "| 1.20 (1.09-1.33) | taso | ahead |"
    )
    assert lines[4:] == [
        "xrlflow against the best other search, 3 seeds: 1 ahead, 0 even, 0 behind",
        "xrlflow: trained for 21 min",
    ]


def test_the_summary_is_plain_data() -> None:
    row = summary(SEEDS, "xrlflow")["bert"]
    assert row["speedups"]["xrlflow"]["value"] == pytest.approx(1.5)
    assert (row["verdict"]["best_other"], row["verdict"]["text"]) == ("taso", "ahead")
