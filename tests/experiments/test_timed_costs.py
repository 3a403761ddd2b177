"""Cost tables from timings: they hold all that a search has asked for, and are saved as files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.targets import ConfigError
from experiments.timed_costs import load_costs, oracle_of, save_costs, timed_costs
from tests.search.fakes import SECONDS, FakeOracle, compiled_rules, made_up
from xrl_jax.cost.programs import WITHOUT_TRYING
from xrl_jax.cost.regions import Region
from xrl_jax.cost.roofline import cost_table
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.measure.timing import Timing


def loops_too(region: Region) -> Timing:
    """Return made-up timings, also for elementwise loops."""
    return made_up(region) if region.node.op in SECONDS else Timing(1e-5, 1e-5, 1e-5, repeats=9)


def test_every_lowering_that_taso_has_tried_is_in_the_table() -> None:
    x, w = jnp.ones((16, 8)), jnp.ones((16, 4))
    program = from_jax(lambda x, w: jnp.einsum("ki,kj->ij", x, w), x, w)
    oracle = FakeOracle(loops_too)
    table = timed_costs({"one": program}, compiled_rules(), oracle, seconds=60.0, seed=0)
    known = np.asarray(table.timed)[np.asarray(table.keys)[:, 0] != 0xFFFFFFFF]
    # The time of wrapping operations is subtracted, so no entry exceeds its made-up time.
    assert [r.node.op for r in oracle.timed].count("dot") == len(known) == len(SECONDS["dot"])
    assert known.max() <= max(SECONDS["dot"])


def test_a_saved_table_is_read_back_unchanged(tmp_path: Path) -> None:
    table = cost_table({(1, 2): 0.5, (3, 4): 0.25})
    save_costs(table, tmp_path / "costs.npz")
    jax.tree.map(np.testing.assert_array_equal, load_costs(tmp_path / "costs.npz"), table)


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_file_that_is_no_table_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "costs.npz"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"costs\.npz is damaged or not a cost table"):
        load_costs(file)


def test_a_table_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    table = cost_table({})
    save_costs(replace(table, scale=table.scale[:-1]), tmp_path / "costs.npz")
    with pytest.raises(
        ConfigError, match=r"costs\.npz was written by another version: remove it.*'scale'"
    ):
        load_costs(tmp_path / "costs.npz")


def test_costs_can_be_of_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    with oracle_of(tmp_path, "h200") as oracle:
        assert oracle.target.platform == "gpu"
        assert oracle.options == WITHOUT_TRYING


def test_without_a_record_of_a_gpu_the_error_says_what_to_do(tmp_path: Path) -> None:
    records = pytest.raises(ValueError, match="run `python -m experiments.gpu_lab` on one")
    with records, oracle_of(tmp_path, "h200", from_record=True):
        raise AssertionError("there are no costs")
