"""Searches on e-graphs: merges, and what results may rest on."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest

from tests.search.fakes import FakeOracle
from xrl_jax.cost.enodes import allowed_lowerings
from xrl_jax.cost.regions import Region
from xrl_jax.egraph import uct
from xrl_jax.egraph.tensor_graph import egraph_of
from xrl_jax.egraph.tensor_saturation import tensor_rules
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph import ops
from xrl_jax.graph.graph import nodes_of
from xrl_jax.language.rule_files import standard_rules
from xrl_jax.language.table import CompiledRules, compile_rules
from xrl_jax.measure.timing import Timing
from xrl_jax.program.program import Program
from xrl_jax.search.base import Budget, Problem, SearchResult, Step, Strategy
from xrl_jax.search.eqsat_mcts import EqsatMCTS
from xrl_jax.search.extracting import start_buckets
from xrl_jax.search.saturating import Saturating, actions_of
from xrl_jax.search.tensat import Tensat, steps_to

X, *W = (jax.random.normal(jax.random.key(i), (8, 8)) for i in range(4))
NAMES = ("merge-dots-by-left", "slice-of-slice", "slice-of-concat-left", "slice-of-concat-right")
ENOUGH = Budget(seconds=600.0)


@cache
def rules() -> CompiledRules:
    return compile_rules([r for r in standard_rules() if r.name in NAMES])


@cache
def program() -> Program:
    """Three products of one array."""

    def three(x: jax.Array, *w: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(x @ v for v in w)

    return from_jax(three, X, *W, weights=(1, 2, 3))


def price(region: Region) -> Timing:
    """Every product takes a millisecond, however large it is."""
    seconds = 1e-3 if region.node.op == "dot" else 1e-5
    return Timing(seconds, seconds, seconds, repeats=9)


def run(search: Strategy, of: Program | None = None) -> SearchResult:
    problem = Problem(of or program(), rules(), FakeOracle(price))
    return search(problem, ENOUGH, jax.random.key(0))


@pytest.mark.parametrize(
    "search",
    [
        Tensat(greedy_share=0.0, own_start=True),
        EqsatMCTS(greedy_share=0.0, own_start=True, simulations=8, rounds=3),
    ],
    ids=["tensat", "eqsat-mcts"],
)
def test_all_products_of_an_array_become_one(search):
    best = run(search).best[0].program
    assert [n.op for n in nodes_of(best.graph)[0]].count("dot") == 1
    for result, w in zip(best(X, *W), W, strict=True):
        np.testing.assert_allclose(result, X @ w, rtol=1e-4, atol=1e-5)


def test_all_products_of_each_layer_become_one():
    """Three layers of three products each."""

    def layers(x: jax.Array, *w: jax.Array) -> jax.Array:
        for _ in range(3):
            q, k, v = (x @ each for each in w)
            x = q * k + v
        return x

    found = run(Tensat(greedy_share=0.0, own_start=True), from_jax(layers, X, *W)).best[0].program
    assert [n.op for n in nodes_of(found.graph)[0]].count("dot") == 3


def test_tree_search_finds_the_merge():
    """From an e-graph of the program alone, when operators are timed."""
    oracle = FakeOracle(price)
    Tensat(own_start=True)(Problem(program(), rules(), oracle), ENOUGH, jax.random.key(0))
    start = egraph_of([program().graph])
    environment = Saturating(
        tensor_rules(rules().rules),
        oracle.costs,
        nodes=2000,
        allowed=allowed_lowerings(rules().rules),
        n_outputs=3,
        threads=1,
    )
    state = environment.start(start, program().graph)
    first = environment.cost(state)
    found = uct.search(environment, state, first, jax.random.key(0), simulations=8)
    assert (first, found.cost) == (pytest.approx(3e-3, rel=0.1), pytest.approx(1e-3, rel=0.1))
    dots = np.asarray(found.state.graph.op) == ops.OPS["dot"].code
    assert dots.sum() > 3


def test_a_program_that_costs_nothing_is_searched():
    views = from_jax(lambda x: x.reshape(4, 16), X)
    assert run(EqsatMCTS(simulations=4, rounds=1), views).best[-1].seconds == 0.0


class Interrupted:
    """A prior during which a user presses Ctrl-C."""

    def compile(self, problem: Problem) -> None:
        pass

    def __call__(self, problem: Problem, key: jax.Array) -> dict[str, float]:
        raise KeyboardInterrupt


def test_ctrl_c_during_the_prior_keeps_what_was_found():
    found = run(EqsatMCTS(prior=Interrupted(), simulations=4, rounds=2))
    assert found.interrupted
    assert [n.op for n in nodes_of(found.best[0].program.graph)[0]].count("dot") == 1


def test_a_prior_makes_a_rule_more_likely_to_be_tried():
    """The sum over both rules is five times that without a prior."""
    two = tensor_rules([r for r in standard_rules() if r.name.startswith("slice-of-concat")]).rules
    weights = [action.weight for action in actions_of(two, {two[1].name: 1.0})]
    assert weights[:2] == [1.0, 9.0]
    assert [a.weight for a in actions_of(two)][:2] == [1.0, 1.0]


def test_steps_name_the_rules_that_assume_something():
    """A result may rest on any rule that an e-graph was grown by."""
    table = tensor_rules([r for r in standard_rules(("finite",)) if r.assumes or r.name in NAMES])
    assuming = [i for i, r in enumerate(table.rules) if r.assumes]
    used = np.zeros(len(table.rules), bool)
    used[[assuming[0], *(i for i, r in enumerate(table.rules) if r.name in NAMES)]] = True
    name = table.rules[assuming[1]].name
    seeds = [Step(0, "first", "", 1.0)], [Step(0, name, "%3", 1.0), Step(0, "other", "", 1.0)]
    given = [(None, list(steps)) for steps in seeds]
    found = steps_to(given, table, used, Step(0, "saturation", "", 0.0))  # type: ignore[arg-type]
    assert [s.rule for s in found] == ["first", "saturation", name, table.rules[assuming[0]].name]


def test_a_limit_on_enodes_below_the_size_of_the_program_is_raised():
    """A sum of 1,100 numbers is not too large for a limit of 1,000 e-nodes."""

    def total(x: jax.Array) -> jax.Array:
        for n in range(1100):
            x = x + float(n)
        return x

    of = from_jax(total, X)
    [(graph, bucket)] = start_buckets(Problem(of, rules(), FakeOracle(price)), 1000)
    assert bucket == 16384
    assert egraph_of([graph]).bucket == 16384
