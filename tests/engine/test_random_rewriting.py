"""Any sequence of rewrites preserves the function: 10,000 random rewrites, each of them checked.

8,000 rewrites are made in random graphs and 500 in each of four networks of reduced width. After
each one the graph must be valid (hence acyclic) and compute in double precision the same values as
the first graph. In addition, one walk through a network of full size is made for every 500
rewrites: each graph on it must be valid, and the last one must compute the same values.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import models
from tests.engine import harness
from tests.graph.generators import random_graph
from tests.graph.valid import is_valid
from tests.quick import QUICK
from xrl_jax.accept.accuracy import Accuracy, assess, references
from xrl_jax.accept.samples import samples
from xrl_jax.backends.domain import right_everywhere
from xrl_jax.backends.fast import Fast
from xrl_jax.engine.apply import apply
from xrl_jax.engine.match import candidates, rematch
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.bindings import Equation, Input
from xrl_jax.graph.check import check
from xrl_jax.graph.graph import BUCKETS, Node, TensorGraph, build, grow, n_live, nodes_of
from xrl_jax.language.rule_files import standard_rules
from xrl_jax.language.table import CompiledRules, RuleTable
from xrl_jax.libraries.registry import calling
from xrl_jax.lower.table import applicable
from xrl_jax.program.program import Program, to_jax
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.search.in_library import in_library
from xrl_jax.verify.domains import Floats
from xrl_jax.verify.evaluate import evaluate

N_STEPS = 10_000
N_NETWORK = 500  # rewrites of each network at reduced width
PER_FULL = 500  # rewrites for which there is one walk at full size
LENGTH = 25  # steps of a walk, at most
N_SPECIAL, PER_TEST = 1024, 64  # random graphs checked on special values
MOST_ROUNDED = 2  # of `PER_TEST`
BATCH = 16  # random graphs rewritten at once
TOLERANCE = 1e-7  # relative to an output's largest value; rounding alone is eight digits smaller
REDUCED: Mapping[str, dict[str, Any]] = {
    "bert": dict(layers=1, width=8, heads=2, vocabulary=10, tokens=4),
    "inceptionv3": dict(image_size=75, width=0.05, classes=5),
    "resnext50": dict(image_size=32, width=0.125, groups=4, classes=10),
    "squeezenet": dict(image_size=32, width=0.1, classes=10),
}

Values = Mapping[int, Any]  # by `ref`


class Steps(NamedTuple):
    """The steps of a walk; [S] steps, after the batch axis if there is one."""

    graph: TensorGraph  # after each step
    variant: jax.Array  # [S] int32
    ok: jax.Array  # [S] bool, whether there was a rewrite and room for it
    valid: jax.Array  # [S] bool


def random_walk(
    table: RuleTable, graph: TensorGraph, key: jax.Array, *, n_steps: int = LENGTH
) -> Steps:
    """Apply random rewrites one after the other. A rule is drawn first, then one of its matches, so
    that rare rules are applied as well.
    """
    n, n_rules = graph.nodes.op.shape[0], table.variant_rule.shape[0]

    def step(carry: Any, key: jax.Array) -> tuple[Any, Steps]:
        graph, masks, changed = carry
        masks = rematch(table, graph, masks, changed)
        found = candidates(table, graph, masks, size=4 * n, pair_size=n)
        rule = jnp.where(found.variant >= 0, table.variant_rule[found.variant], n_rules)
        often = jnp.zeros(n_rules + 1).at[rule].add(1.0)
        i = jax.random.categorical(
            key, jnp.where(found.variant >= 0, -jnp.log(often[rule]), -np.inf)
        )
        after = apply(table, graph, found.variant[i], found.root[i], found.partner[i])
        done = Steps(after.graph, found.variant[i], after.ok, is_valid(after.graph))
        return (after.graph, masks, after.changed), done

    start = (graph, jnp.zeros((n, table.n_words), jnp.uint32), jnp.ones(n, bool))
    return jax.lax.scan(step, start, jax.random.split(key, n_steps))[1]


walk = engine_jit(random_walk, static_argnames="n_steps")
walk_batch = engine_jit(jax.vmap(random_walk, in_axes=(None, 0, 0)))


def results(graph: TensorGraph, values: Values) -> list[np.ndarray]:
    nodes, outputs, _ = nodes_of(graph)
    return [np.asarray(v) for v in evaluate(nodes, outputs, values, Floats())]


def assert_same(got: list[np.ndarray], want: list[np.ndarray], context: str) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        scale = np.max(np.abs(b[np.isfinite(b)]), initial=1.0)
        np.testing.assert_allclose(
            a, b, rtol=0.0, atol=TOLERANCE * scale, err_msg=f"{context}: output {i}"
        )


class AppliedRewrite(NamedTuple):
    """A rewrite that was applied."""

    rule: str
    graph: TensorGraph
    trail: str  # the rules so far, for messages


def applied_rewrites(rules: CompiledRules, steps: Steps, context: str) -> Iterator[AppliedRewrite]:
    """Yield the steps of one walk (on the host) up to the first without a candidate or without
    room. Assert that all graphs are well formed and all lowerings applicable.
    """
    names: list[str] = []
    for i in range(len(steps.ok)):
        if not steps.ok[i]:
            return
        names.append(rules.rules[int(rules.table.variant_rule[int(steps.variant[i])])].name)
        trail = f"{context}: {', '.join(names)}"
        graph = jax.tree.map(lambda leaf, i=i: leaf[i], steps.graph)
        check(graph, name=trail)
        assert steps.valid[i], trail
        nodes, _, _ = nodes_of(graph)
        for n in nodes:
            allowed = applicable(n, tuple(nodes[a] for a in n.args)) if n.lowering else (0,)
            assert n.lowering in allowed, f"{trail}: {n.op} has a lowering that is not right for it"
        yield AppliedRewrite(names[-1], graph, trail)


@pytest.fixture(scope="module")
def library() -> CompiledRules:
    return harness.table_of(standard_rules())


# --- random graphs


def random_values(nodes: Sequence[Node], seed: int) -> Values:
    """Return a random value for each argument, by `ref`."""
    rng = np.random.default_rng(seed)
    return {n.ref: rng.uniform(-1.0, 1.0, n.shape) for n in nodes if n.ref >= 0}


def rewrite_random_graphs(rules: CompiledRules, seeds: range, fired: Counter[str]) -> None:
    """Walk through a random graph for each of `BATCH` seeds; check the structure and values of
    every graph.
    """
    drawn = [random_graph(np.random.default_rng(seed), 24) for seed in seeds]
    graphs = [build(*g, bucket=harness.BUCKET) for g in drawn]
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *graphs)
    steps = jax.device_get(walk_batch(rules.table, stacked, keys))
    for i, (seed, (nodes, _), graph) in enumerate(zip(seeds, drawn, graphs, strict=True)):
        values = random_values(nodes, seed)
        want = results(graph, values)
        own = jax.tree.map(lambda leaf, i=i: leaf[i], steps)
        for done in applied_rewrites(rules, own, f"seed {seed}"):
            assert_same(results(done.graph, values), want, done.trail)
            fired[done.rule] += 1


def test_random_rewrites_keep_the_function(library: CompiledRules) -> None:
    fired: Counter[str] = Counter()
    rewrite_random_graphs(library, range(BATCH), fired)
    assert fired.total() >= BATCH * LENGTH // 2


@pytest.mark.slow
def test_many_random_rewrites_keep_the_function(library: CompiledRules, record_property) -> None:  # type: ignore[no-untyped-def]
    fired: Counter[str] = Counter()
    first = 1000
    while fired.total() < N_STEPS - len(REDUCED) * N_NETWORK:
        rewrite_random_graphs(library, range(first, first + BATCH), fired)
        first += BATCH
    record_property(
        "figure",
        f"{fired.total()} random rewrites of {first - 1000} random graphs by {len(fired)} rules: "
        "every graph valid and its function kept",
    )


# --- special values


def program_of(nodes: Sequence[Node], outputs: Sequence[int], graph: TensorGraph) -> Program:
    """Return a random graph as a program whose arguments are its inputs and weights."""
    sources = sorted((n for n in nodes if n.ref >= 0), key=lambda n: n.ref)
    avals = tuple(jax.ShapeDtypeStruct(n.shape, n.dtype) for n in sources)
    return Program(
        graph,
        (),
        tuple(map(Input, range(len(sources)))),
        avals,
        tuple(n.op == "weight" for n in sources),
        jax.tree.structure(((0,) * len(sources), {})),
        jax.tree.structure((0,) * len(outputs)),
        len(outputs),
    )


def accuracy_of(program: Program, rewritten: Program, seed: int) -> Accuracy:
    """Compare the rewritten program, with its kernels handed to the library, with the original. The
    samples are ordinary values, zeros and outliers, the largest values of a domain, NaN and
    infinities.
    """
    rng = np.random.default_rng(seed)
    leaves = [jnp.asarray(rng.uniform(-1.0, 1.0, a.shape), a.dtype) for a in program.in_avals]
    handed, _ = in_library(rewritten, standard_rules(), calling("cpu"))
    fast = Fast(right_everywhere(handed), None, options=QUICK, original=program)
    checks = samples(program, leaves)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning means that the original is run
        return assess(
            jax.jit(to_jax(program), compiler_options=QUICK),
            lambda *args: fast(*args),
            references(program, checks),
            checks,
        )


def check_special_values(rules: CompiledRules, first: int, n: int = BATCH) -> list[str]:
    """Walk through `BATCH` random graphs; assert that the last graph of each of the first `n` walks
    has NaN and infinities where the original has them.

    Returns:
      Those of them, as text, that round more than is allowed.
    """
    rounded: list[str] = []
    seeds = range(first, first + BATCH)
    drawn = [random_graph(np.random.default_rng(seed), 24) for seed in seeds]
    graphs = [build(*g, bucket=harness.BUCKET) for g in drawn]
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *graphs)
    steps = jax.device_get(walk_batch(rules.table, stacked, keys))
    for i in range(n):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], steps)
        trail, end = f"seed {seeds[i]}", graphs[i]
        for done in applied_rewrites(rules, own, trail):
            trail, end = done.trail, done.graph
        program = program_of(*drawn[i], graphs[i])
        found = accuracy_of(program, program.with_graphs([end]), seeds[i])
        if found.error > found.tolerance or found.element > 1:
            rounded.append(f"{trail}: {found.reason}")
        else:
            assert found.ok, f"{trail}: {found.reason}"
    return rounded


def test_rewrites_keep_special_values(library: CompiledRules) -> None:
    assert check_special_values(library, 0, 4) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, N_SPECIAL, PER_TEST))
def test_many_rewrites_keep_special_values(library: CompiledRules, first: int) -> None:
    """NaN and infinities appear where the original has them. In a few graphs, elements may round
    more than allowed where terms cancel that a rule has moved (x + v + w as x + (v + w));
    `optimize` refuses such a result.
    """
    starts = range(first, first + PER_TEST, BATCH)
    rounded = [text for start in starts for text in check_special_values(library, start)]
    assert len(rounded) <= MOST_ROUNDED, rounded


# --- networks


def network(name: str, options: Mapping[str, Any]) -> tuple[TensorGraph, Values]:
    """Return a network's graph, with room to rewrite, and its arguments in double precision. An
    equation that the op table cannot express may be any function of its operands.
    """
    model = models.get(name, **options)
    program = from_jax(model.fn, model.weights, *model.inputs, weights=(0,), fold=False)
    args = [np.asarray(x, np.float64) for x in jax.tree.leaves((model.weights, *model.inputs))]
    values: dict[int, Any] = {}
    for ref, binding in enumerate(program.bindings):
        match binding:
            case Input(position):
                values[ref] = args[position]
            case Equation(n_outputs=1) as equation:
                values[ref] = some_function(equation.avals[0].shape, ref)
            case _:
                raise AssertionError(f"{name}: a binding of kind {type(binding).__name__}")
    graph = program.graph
    room = next(b for b in BUCKETS if b >= 1.4 * int(n_live(graph)))
    return grow(graph, room) if room > graph.nodes.op.shape[0] else graph, values


def some_function(shape: tuple[int, ...], seed: int) -> Callable[..., np.ndarray]:
    """Return a function of any arrays that is sensitive to each of them."""
    base = np.random.default_rng(seed).normal(size=shape)
    return lambda *args: base + sum(np.sin(k + np.mean(a)) for k, a in enumerate(args))


def expected(graph: TensorGraph, values: Values) -> list[np.ndarray]:
    """Return the network's outputs; assert that they are finite and not constant, so worth
    comparing.
    """
    want = results(graph, values)
    assert all(np.all(np.isfinite(w)) and np.std(w) > 1e-6 for w in want)
    return want


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REDUCED))
def test_random_rewrites_keep_networks(library: CompiledRules, name: str, record_property) -> None:  # type: ignore[no-untyped-def]
    graph, values = network(name, REDUCED[name])
    want = expected(graph, values)
    fired: Counter[str] = Counter()
    for seed in range(2 * N_NETWORK // LENGTH):
        steps = jax.device_get(walk(library.table, graph, jax.random.key(seed)))
        for done in applied_rewrites(library, steps, f"seed {seed}"):
            assert_same(results(done.graph, values), want, done.trail)
            fired[done.rule] += 1
        if fired.total() >= N_NETWORK:
            break
    assert fired.total() >= N_NETWORK
    record_property(
        "figure",
        f"{fired.total()} random rewrites of {name} at reduced width by {len(fired)} rules: "
        "every graph valid and its function kept",
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REDUCED))
def test_random_rewrites_keep_networks_at_full_size(
    library: CompiledRules,
    name: str,
    record_property,  # type: ignore[no-untyped-def]
) -> None:
    graph, values = network(name, {})
    want = expected(graph, values)
    n_walks = N_STEPS // PER_FULL // len(REDUCED)
    n_taken = 0
    for seed in range(1000, 1000 + n_walks):
        steps = jax.device_get(walk(library.table, graph, jax.random.key(seed)))
        walked = list(applied_rewrites(library, steps, f"seed {seed}"))
        assert len(walked) >= LENGTH // 2
        assert_same(results(walked[-1].graph, values), want, walked[-1].trail)
        n_taken += len(walked)
    record_property(
        "figure",
        f"{n_walks} walks of {n_taken} steps in all through {name} at full size: every graph "
        "valid, the function kept at the end of each",
    )
