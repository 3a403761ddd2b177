"""The engine's wide steps (on a GPU) give the same results as its narrow ones (on a CPU)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from experiments import environments
from tests.engine import harness
from tests.graph.generators import random_graph
from xrl_jax.engine import match
from xrl_jax.engine.apply import apply
from xrl_jax.graph.graph import build
from xrl_jax.language.rule_files import standard_rules
from xrl_jax.rl.actions import draw
from xrl_jax.rl.decode import by_chance
from xrl_jax.rl.env import EnvParams, EnvState, batch_axes, ended_state, step
from xrl_jax.runtime import engine_jit

pytestmark = pytest.mark.slow  # it clears caches, so other tests compile again
RULES = harness.table_of(standard_rules())


@pytest.fixture(autouse=True)
def caches() -> Iterator[None]:
    """Clear JAX's caches, so that no other test uses the traces for wide steps."""
    yield
    jax.clear_caches()


def both(made: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return the result of `made` with narrow steps and with wide ones."""
    narrow = jax.device_get(made())
    jax.clear_caches()
    monkeypatch.setattr(engine_jit, "platform", lambda: "gpu")
    return narrow, jax.device_get(made())


def test_wide_steps_give_the_same_matches_and_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [
        build(*random_graph(np.random.default_rng(seed), 24), bucket=harness.BUCKET)
        for seed in range(4)
    ]

    def first_of(graph: harness.TensorGraph) -> Any:
        found = match.candidates(
            RULES.table, graph, match.match(RULES.table, graph), size=harness.SIZE
        )
        return found, apply(RULES.table, graph, *(c[0] for c in found[:3]))

    def made() -> Any:
        one = jax.jit(first_of)
        return [one(graph) for graph in graphs]

    narrow, wide = both(made, monkeypatch)
    assert all(bool(applied.ok) for _, applied in narrow)
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)


def test_wide_steps_give_the_same_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    program = environments.program_of("bert:layers=1", fold=True, seed=0)
    params = environments.params_of([program], RULES, envs=8, slots=16)
    axes = batch_axes(params)

    def one(state: EnvState, key: jax.Array, params: EnvParams) -> EnvState:
        act_key, step_key = jax.random.split(key)
        return step(step_key, state, draw(act_key, by_chance(state, params)), params)[0]

    def made() -> Any:
        steps = jax.jit(jax.vmap(one, in_axes=(0, 0, axes)))
        state = jax.vmap(ended_state, in_axes=(axes,))(params)
        for i in range(12):
            state = steps(state, jax.random.split(jax.random.key(i), 8), params)
        return state

    narrow, wide = both(made, monkeypatch)
    assert len(np.unique(narrow.seconds)) > 1, "all went the same way"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), narrow, wide)
