"""The table of searches at the same costs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from experiments.search_table import run, searches, table_of
from tests.search.test_strategies import program, rules
from xrl_jax.cost.rates import DEFAULT_RATES
from xrl_jax.cost.roofline import cost_table
from xrl_jax.search.greedy import Greedy
from xrl_jax.strategies import SEARCHES


def test_a_search_costs_a_share_of_the_original_and_times_nothing():
    cell = run(Greedy(), program(), rules(), cost_table({}, DEFAULT_RATES), seconds=60.0, seed=0)
    assert 0 < cell["share"] <= 1
    assert cell["candidates"] > 0


def test_cells_are_means_and_deviations_over_seeds():
    cells = [{"share": share, "seconds": 2.0, "candidates": 1.0} for share in (0.5, 0.7)]
    rows = {"bert": {"taso": cells, "greedy": cells[:1]}}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table_of(rows, ["greedy", "taso", "tensat"]))
    assert "│ bert    │ 50.0  2 s │ 60.0 ± 14.1  2 s │        │" in console.export_text()


@pytest.mark.parametrize("plain", [False, True])
def test_every_search_of_the_package_with_a_result_to_compare_is_there(plain):
    assert SEARCHES.keys() - {"random", "local"} <= searches(plain=plain).keys()
