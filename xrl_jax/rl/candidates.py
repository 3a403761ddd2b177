"""X-RLflow's own form of the policy: every candidate's graph is made and encoded.

The graphs that the candidates would make and the current one, which stands for No-Op, are one batch
for a graph attention network; what it says of each is laid side by side, slot after slot, and two
dense networks make logits and a value of that. So slots mean something, and their number is fixed.
A candidate is taken once, never with others.

Source: He, Parker, Yoneki, MLSys 2023, and its code (PPO_GN_model_v4). What a node shows is ours
(`rl.features`): of the original's features, weights, attributes and results' shapes are missing.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from xrl_jax.engine.apply import instantiated
from xrl_jax.graph.graph import TensorGraph
from xrl_jax.rl.actions import Logits
from xrl_jax.rl.env import KINDS, EnvParams, EnvState, rewritten
from xrl_jax.rl.features import N_LOWERINGS, GraphFeatures, graph_features
from xrl_jax.rl.neighbours import neighbours_of
from xrl_jax.rl.networks import NEVER, Attention, Embedding, NetworkConfig, Output

_GLOBAL = 32  # numbers that a graph is summed up in
_HIDDEN = (256, 64)  # widths of the heads


class Moment(NamedTuple):
    """What the candidates' graphs are made from: small enough to be kept for learning."""

    graph: TensorGraph  # priced
    owner: jax.Array  # [N] int32
    counts: jax.Array  # [N] float32, of the graphs of the program
    first: jax.Array  # seconds where the episode began
    variant: jax.Array  # [M] int32; -1 empty
    root: jax.Array  # [M] int32
    partner: jax.Array  # [M] int32


class CandidateGraphs(NamedTuple):
    """What each candidate would make, and the current graph, the last."""

    graphs: GraphFeatures  # [M + 1, ...]
    valid: jax.Array  # [M] bool


def moment(state: EnvState, params: EnvParams) -> Moment:
    """What is kept of a state."""
    start, candidates = params.start, state.candidates
    return Moment(
        state.graph,
        state.owner,
        start.counts,
        start.seconds,
        candidates.variant,
        candidates.root,
        candidates.partner,
    )


def candidate_graphs(kept: Moment, params: EnvParams) -> CandidateGraphs:
    """The graphs that the candidates would make.

    Args:
      params: of these the rules and the costs.
    """

    def seen(graph: TensorGraph, owner: jax.Array) -> GraphFeatures:
        return graph_features(graph, kept.counts[owner], kept.first)

    def made(variant: jax.Array, root: jax.Array, partner: jax.Array) -> GraphFeatures:
        candidate = instantiated(params.table, kept.graph, variant, root, partner)
        alone = jax.tree.map(lambda v: v[None], candidate)
        after = rewritten(params, kept.graph, kept.owner, alone)
        return seen(after.graph, after.owner)

    candidates = jax.vmap(made)(kept.variant, kept.root, kept.partner)
    now = seen(kept.graph, kept.owner)
    graphs = jax.tree.map(lambda c, n: jnp.concatenate([c, n[None]]), candidates, now)
    return CandidateGraphs(graphs, kept.variant >= 0)


class GraphSummary(nn.Module):
    """[_GLOBAL] numbers of one graph."""

    config: NetworkConfig

    @nn.compact
    def __call__(self, graph: GraphFeatures) -> jax.Array:
        c, live = self.config, graph.live[:, None]
        args, _ = neighbours_of(graph)
        x = Embedding(N_LOWERINGS, c.width, name="lowerings")(graph.lowering)
        x = jnp.where(live, x + nn.Dense(c.width)(graph.numbers), 0.0)
        for _ in range(c.layers):
            # Every node is its own neighbour, too.
            x = nn.leaky_relu(Attention(c.width, c.heads)(x, lambda v: args(v) + v))
            x = jnp.where(live, x, 0.0)
        return nn.Dense(_GLOBAL)(jnp.sum(x, axis=0))


class CandidatesNetwork(nn.Module):
    """Logits and value of one state's candidate graphs; vmap for more."""

    config: NetworkConfig

    @nn.compact
    def __call__(self, seen: CandidateGraphs) -> Output:
        summary = nn.vmap(
            GraphSummary, variable_axes={"params": None}, split_rngs={"params": False}
        )
        of_each = summary(self.config, name="graphs")(seen.graphs)
        valid = jnp.append(seen.valid, True)  # No-Op always is
        flat = jnp.where(valid[:, None], of_each, 0.0).reshape(-1)
        logits = _Head(len(of_each))(flat)
        value = _Head(1)(flat)
        said = jnp.where(valid, logits, NEVER)
        macro_actions = jnp.full((KINDS - 1) * (len(said) - 1), NEVER)
        index = jnp.concatenate([said[:-1], macro_actions, said[-1:]])
        return Output(Logits(index, jnp.zeros(len(said) - 1)), value[0])


class _Head(nn.Module):
    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in _HIDDEN:
            x = nn.tanh(nn.Dense(width)(x))
        return nn.Dense(self.size, kernel_init=nn.initializers.orthogonal(0.01))(x)
