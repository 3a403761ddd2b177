"""Families of graphs that trap greedy search, with costs computed from numbers of operations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.exhaust import Exhausted, exhaust
from experiments.trap_benchmark import (
    Config,
    Costs,
    EndCosts,
    end_costs,
    is_trap,
    policies,
    searches_with,
    summary,
)
from experiments.traps import FAMILIES, Size, draw_members, member
from tests.search.fakes import FakeOracle
from xrl_jax.cost.regions import Region
from xrl_jax.graph.graph import n_live
from xrl_jax.graph.work import node_work
from xrl_jax.measure.timing import Timing
from xrl_jax.search.base import Problem

ROOT = Path(__file__).resolve().parents[2]
WHOLE = 2 * 128 * 256 * 256  # operations of a product of [128, 256] and [256, 256]


def by_operations(region: Region) -> Timing:
    """Return a timing of one nanosecond for each operation."""
    flops, _ = node_work(region.node, region.args)
    seconds = flops * 1e-9
    return Timing(seconds, seconds, seconds, repeats=9)


def costs_of(name: str) -> Costs:
    family = FAMILIES[name]
    return Costs(family, family.compiled(), FakeOracle(by_operations))


def operations(seconds: float) -> float:
    """Convert seconds to products of [128, 256] and [256, 256]. Elementwise operators add far less
    than one such product.
    """
    return seconds / (WHOLE * 1e-9)


def test_a_low_rank_adapter_is_a_trap() -> None:
    """With a and b of rank 16: x w + (x a) b -> x w + x (a b), at a loss, -> x (w + a b)."""
    costs = costs_of("adapter")
    found = exhaust(costs.problem(member(costs.family, [(16, 1)])))
    assert found.states == 4
    assert operations(found.start) == pytest.approx(1 + 2 * 16 / 256, abs=0.01)
    assert found.downhill == found.start
    assert operations(found.optimum) == pytest.approx(1.0, abs=0.01)
    assert [s.rule for s in found.steps] == ["dot-assoc-right", "dot-factor-left"]
    assert operations(-found.steps[0].gain) == pytest.approx(1 - 2 * 16 / 256, abs=0.01)
    assert is_trap(found)


def test_an_adapter_alone_is_already_optimal() -> None:
    costs = costs_of("adapter")
    found = exhaust(costs.problem(member(costs.family, [(16, 0)])))
    assert (found.states, found.start) == (2, found.optimum)
    assert not is_trap(found)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("adapter", [(16, 1), (64, 0), (4, 1)]),
        ("layout", [(16, 1, 2), (32, 3, 2)]),
        ("merge", [(1,), (2,), (4,)]),
        ("split", [(4,), (16,)]),
    ],
)
def test_costs_of_a_member_are_sums_over_its_blocks(name: str, sizes: list[Size]) -> None:
    costs = costs_of(name)
    blocks = {s: exhaust(costs.problem(member(costs.family, [s]))) for s in sizes}
    whole = exhaust(costs.problem(member(costs.family, sizes)))
    summed = costs.of_member(sizes, blocks)
    assert summed.states == whole.states
    for field in ("start", "downhill", "optimum"):
        assert getattr(summed, field) == pytest.approx(getattr(whole, field), rel=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_training_members_have_no_unseen_sizes(name: str) -> None:
    family = FAMILIES[name]
    members = draw_members(family, training=8, unseen=10, blocks=6, seed=0)
    assert {len(m) for m in members.training} <= {3, 4, 5, 6}
    assert {len(m) for m in members.unseen} <= set(range(6, 13))
    assert not {s for m in members.training for s in m} & set(family.unseen)
    assert {s for m in members.unseen for s in m} & set(family.unseen)
    sizes = [int(n_live(member(family, m).graph)) for m in members.unseen]
    assert 20 <= min(sizes) <= max(sizes) <= 200


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_no_symmetric_rules(name: str) -> None:
    assert not any(rule.symmetric for rule in FAMILIES[name].compiled().rules)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_rules_of_a_family_apply_to_its_blocks(name: str) -> None:
    family = FAMILIES[name]
    program = member(family, [family.sizes[-1]])
    found = exhaust(Problem(program, family.compiled(), FakeOracle(by_operations)))
    assert found.states > 1


def test_the_summary_counts_how_often_a_search_reaches_the_optimum() -> None:
    found = [
        EndCosts(((1,),), 3.0, 1.0, 2.0, {"greedy": 2.0, "policy": 1.0}),
        EndCosts(((2,),), 3.0, 1.0, 1.0, {"greedy": 1.5, "policy": 1.0005}),
    ]
    rows = summary(found)
    assert rows["downhill, at best"] == {"reached": 1, "of": 2, "above": 0.5}
    assert rows["greedy"] == {"reached": 0, "of": 2, "above": 0.75}
    assert rows["policy"]["reached"] == 2


def test_a_trap_is_a_block_whose_optimum_greedy_steps_miss() -> None:
    assert is_trap(Exhausted(3.0, 2.0, 1.9, (), 7))
    assert not is_trap(Exhausted(3.0, 2.0, 1.99, (), 7))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--families=layout,nothing"], "nothing"),
        (["--searches=policy,nothing"], "nothing"),
        (["--members=5"], "--envs=32 must be a multiple of --members"),
        (["--devices=3"], "--envs=32 must be a multiple of --devices"),
        (["--seed=1"], "holds results of other flags"),
    ],
)
def test_invalid_flags_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "experiments.trap_benchmark", f"--out={tmp_path}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_damaged_policy_file_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "merge.msgpack").write_bytes(b"no policy")
    command = [sys.executable, "-m", "experiments.trap_benchmark", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "merge.msgpack is damaged" in done.stderr
    assert "choose another --out" in done.stderr


@pytest.mark.slow
def test_a_trained_policy_escapes_traps_that_catch_greedy_search(tmp_path: Path) -> None:
    config = Config(
        families=("adapter",),
        searches=("greedy", "backtracking", "policy"),
        members=4,
        unseen=3,
        blocks=3,
        envs=16,
        updates=240,  # 120 are too few
        devices=1,
        seconds=60.0,
        seed=0,
        out=tmp_path,
    )
    costs = costs_of("adapter")
    members = draw_members(costs.family, training=4, unseen=3, blocks=3, seed=0)
    blocks = costs.blocks()
    both = policies(config, costs, members, tmp_path / "adapter.msgpack")
    searches = searches_with(both)
    compared = {n: searches[n] for n in ("greedy", "backtracking", "policy")}
    rows = summary(end_costs(config, costs, blocks, members, compared))
    assert rows["policy"]["reached"] == rows["policy"]["of"] == 3
    for caught in ("downhill, at best", "greedy", "backtracking"):
        assert rows[caught]["reached"] < 3
