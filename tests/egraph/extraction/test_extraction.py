"""Extraction: small e-graphs that one can draw, and random ones against enumeration."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest

from xrl_jax.egraph.extraction.compared import by_estimate, by_sets, by_trees
from xrl_jax.egraph.extraction.discounted import by_tree_cost
from xrl_jax.egraph.extraction.extract import extract
from xrl_jax.egraph.extraction.instance import (
    Choice,
    Instance,
    InstanceError,
    from_json,
    instance_of,
    valued,
)
from xrl_jax.egraph.extraction.neighbourhoods import improved
from xrl_jax.egraph.extraction.programs import Program, solved
from xrl_jax.egraph.extraction.shared import shared
from xrl_jax.runtime.milp import MilpSolver

# Two products of one x, for 10 each, or one merged product for 12 that both results are parts of.
MERGED = instance_of(
    [
        ("both", 0, 0.0, (1, 2)),
        ("product a", 1, 10.0, (4,)),
        ("part a", 1, 0.0, (3,)),
        ("product b", 2, 10.0, (4,)),
        ("part b", 2, 0.0, (3,)),
        ("merged", 3, 12.0, (4,)),
        ("x", 4, 1.0, ()),
    ],
    roots=(0,),
    n_classes=5,
)


def names(instance: Instance, node: np.ndarray) -> list[str]:
    return [instance.names[n] for n in node if n >= 0]


@pytest.fixture(scope="module")
def solver():
    with MilpSolver() as solver:
        yield solver


def test_costs_of_trees_do_not_see_a_merged_product():
    """Nor do the extractors of others, which choose class by class."""
    assert by_trees(MERGED).cost == by_sets(MERGED).cost == by_estimate(MERGED).cost == 21.0


def test_sharing_finds_a_merged_product():
    best = shared(MERGED, by_tree_cost(MERGED, MERGED.cost))[1]
    assert best.cost == 13.0
    assert names(MERGED, best.node) == ["both", "part a", "part b", "merged", "x"]


def test_a_neighbourhood_finds_a_merged_product(solver):
    full = by_tree_cost(MERGED, MERGED.cost)
    assert improved(MERGED, full, solver, lambda: 10.0)[1].cost == 13.0


def test_extraction_proves_its_result():
    found = extract(MERGED, lambda: 10.0)
    assert (found.choice.cost, found.proven) == (13.0, True)


def test_without_time_the_greedy_choice_is_returned():
    """It divides the merged product's cost by its two readers."""
    found = extract(MERGED, lambda: 0.0)
    assert (found.greedy, found.choice.cost, found.proven) == (13.0, 13.0, False)


def test_ctrl_c_keeps_the_best_so_far():
    """It comes after the first better choice."""
    told: list[float] = []

    def tell(choice: Choice) -> None:
        told.append(choice.cost)
        if len(told) == 2:
            raise KeyboardInterrupt

    two = instance_of(
        [
            *[("all", 0, 0.0, (1, 2)), ("a", 1, 10.0, ()), ("b", 2, 10.0, ())],
            *[("part a", 1, 0.0, (3,)), ("part b", 2, 0.0, (3,)), ("merged", 3, 15.0, (4, 5, 6))],
            *[("x", c, 1.0, ()) for c in (4, 5, 6)],
        ],
        roots=(0,),
        n_classes=7,
    )
    found = extract(two, lambda: 10.0, tell=tell)
    assert told == [20.0, 18.0]
    assert (found.choice.cost, found.interrupted, found.proven) == (18.0, True, False)


def test_a_cheap_cycle_is_no_choice():
    """a = f b and b = g a for nothing; or a leaf for 5."""
    cyclic = instance_of(
        [("f", 0, 0.0, (1,)), ("g", 1, 0.0, (0,)), ("leaf", 1, 5.0, ())], roots=(0,), n_classes=2
    )
    assert valued(cyclic, np.array([0, 1])).cost == np.inf
    assert extract(cyclic, lambda: 10.0).choice.cost == 5.0


def test_enodes_that_are_never_better_are_left_out():
    small = instance_of(
        [
            ("itself", 0, 0.0, (0,)),
            ("cheap", 0, 1.0, (1,)),
            ("dear", 0, 2.0, (1,)),
            ("more", 0, 1.0, (1, 2)),
            ("lost", 2, 0.0, (3,)),
            ("leaf", 1, 1.0, ()),
        ],
        roots=(0,),
        n_classes=4,
    )
    assert small.names == ("cheap", "leaf")


def drawn(seed: int) -> Instance:
    """Return a random e-graph with cycles, of seven classes with up to three e-nodes."""
    draw = random.Random(seed)
    rows: list[tuple[str, int, float, tuple[int, ...]]] = [
        (f"leaf {c}", c, draw.randint(3, 9), ()) for c in range(7) if c > 3 or draw.random() < 0.3
    ]
    for c in range(7):
        for k in range(draw.randint(1, 2)):
            children = tuple(draw.sample(range(7), draw.randint(1, 3)))
            rows.append((f"node {c} {k}", c, draw.randint(0, 6), children))
    try:
        return instance_of(rows, (0, 1), 7)
    except InstanceError:
        return drawn(seed + 1000)


def least(instance: Instance) -> float:
    """Return the least cost of all choices."""
    options = [list(instance.nodes_of(c)) or [-1] for c in range(instance.n_classes)]
    return min(valued(instance, np.array(c)).cost for c in itertools.product(*options))


@pytest.mark.parametrize("numbered", [True, False], ids=["numbers", "cuts"])
def test_programs_have_the_optimum_of_random_egraphs(solver, numbered):
    for seed in range(15):
        instance = drawn(seed)
        best = valued(instance, by_tree_cost(instance, instance.cost))
        program = Program(instance, best.node, range(7), numbered=numbered)
        found, proven = solved(program, best, solver, lambda: 10.0)
        cost = best.cost if found is None else valued(instance, found).cost
        assert proven and cost == pytest.approx(least(instance)), seed


def test_all_extractors_return_choices_no_better_than_the_optimum():
    for seed in range(40):
        instance = drawn(seed)
        optimum = least(instance)
        full = by_tree_cost(instance, instance.cost)
        choices = [by_trees, by_sets, by_estimate]
        costs = [by(instance).cost for by in choices] + [shared(instance, full)[1].cost]
        assert min(costs) >= optimum - 1e-9, seed
        assert max(costs) < np.inf, seed


GIVEN = {
    "nodes": {
        "0.0": {"op": "add", "children": ["1.0", "1.0"], "eclass": "0", "cost": 1.0},
        "1.0": {"op": "x", "children": [], "eclass": "1", "cost": 2.0},
    },
    "root_eclasses": ["0"],
}


def test_an_egraph_is_read_from_extraction_gyms_format():
    instance = from_json(json.dumps(GIVEN))
    assert (instance.names, instance.children) == (("0.0", "1.0"), ((1,), ()))
    assert extract(instance, lambda: 5.0).choice.cost == 3.0


def test_an_enode_without_cost_or_children_is_a_leaf_for_one():
    text = '{"nodes": {"a": {"op": "x", "eclass": "0"}}, "root_eclasses": ["0"]}'
    assert extract(from_json(text), lambda: 0.0).choice.cost == 1.0


@pytest.mark.parametrize("given", [{"cost": float("inf")}, {"cost": None}, {"subsumed": True}])
def test_enodes_that_must_not_be_chosen_are_left_out(given):
    """Rust writes an infinite cost as null."""
    cheap = {"op": "y", "children": [], "eclass": "1", "cost": 0.5}
    text = json.dumps({**GIVEN, "nodes": {**GIVEN["nodes"], "1.1": {**cheap, **given}}})
    assert extract(from_json(text), lambda: 5.0).choice.cost == 3.0
    text = json.dumps({"nodes": {"a": {**cheap, **given}}, "root_eclasses": ["1"]})
    with pytest.raises(InstanceError, match="class 1 has no e-node"):
        from_json(text)


def test_a_root_that_is_named_twice_is_paid_once():
    instance = from_json(json.dumps({**GIVEN, "root_eclasses": ["0", "1", "0", "0"]}))
    assert extract(instance, lambda: 5.0).choice.cost == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "not an e-graph"),
        ("{", "not an e-graph"),
        ('{"nodes": {}}', "has no 'root_eclasses'"),
        ('{"nodes": {"a": 1}, "root_eclasses": ["0"]}', "not the right kind of value"),
        ('{"nodes": {}, "root_eclasses": []}', "names no root"),
        (json.dumps(GIVEN).replace('["1.0", "1.0"]', '["7.0"]'), "has no '7.0'"),
        (
            json.dumps(GIVEN).replace('"root_eclasses": ["0"]', '"root_eclasses": ["5"]'),
            "has no '5'",
        ),
        (json.dumps(GIVEN).replace('"cost": 2.0', '"cost": -2.0'), "e-node 1.0 costs -2.0"),
    ],
)
def test_what_is_no_egraph_is_refused(text, message):
    with pytest.raises(InstanceError, match=message):
        from_json(text)


def test_a_root_that_cannot_be_built_is_refused():
    with pytest.raises(InstanceError, match="class 0 has no e-node that can be chosen"):
        instance_of([("f", 0, 1.0, (1,)), ("g", 1, 1.0, (0,))], roots=(0,), n_classes=2)
