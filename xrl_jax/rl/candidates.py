"""X-RLflow's own variant of the policy, which builds and encodes every candidate's graph.

A graph attention network encodes a batch of graphs: those that the candidates would make and the
current one, which stands for No-Op. The encodings are concatenated in the order of the slots, and
two dense networks compute logits and a value from them. The policy therefore depends on the order
of the slots, and their number is fixed. Candidates are taken once each; there are no macro-actions.

Source: He, Parker, Yoneki, MLSys 2023, and its code (PPO_GN_model_v4). The node features are those
of `rl.features`; the original's lack weights, attributes and shapes of results.
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

_GLOBAL = 32  # width of a graph's encoding
_HIDDEN = (256, 64)  # hidden widths of the heads


class CandidateInputs(NamedTuple):
    """What a state's candidate graphs are built from: small enough to be kept for learning."""

    graph: TensorGraph  # priced
    owner: jax.Array  # [N] int32
    counts: jax.Array  # [N] float32, how often each graph of the program runs
    first: jax.Array  # predicted seconds at the start of the episode
    variant: jax.Array  # [M] int32; -1 empty
    root: jax.Array  # [M] int32
    partner: jax.Array  # [M] int32


class CandidateGraphs(NamedTuple):
    """Features of the graph that each candidate would make and, last, of the current graph."""

    graphs: GraphFeatures  # [M + 1, ...]
    valid: jax.Array  # [M] bool


def candidate_inputs(state: EnvState, params: EnvParams) -> CandidateInputs:
    """Return the part of a state that is kept for learning."""
    start, candidates = params.start, state.candidates
    return CandidateInputs(
        state.graph,
        state.owner,
        start.counts,
        start.seconds,
        candidates.variant,
        candidates.root,
        candidates.partner,
    )


def candidate_graphs(kept: CandidateInputs, params: EnvParams) -> CandidateGraphs:
    """Build the graphs that the candidates would make and return their features.

    Args:
      params: only the rules and the costs are read.
    """

    def seen(graph: TensorGraph, owner: jax.Array) -> GraphFeatures:
        return graph_features(graph, kept.counts[owner], kept.first)

    def made(variant: jax.Array, root: jax.Array, partner: jax.Array) -> GraphFeatures:
        candidate = instantiated(params.table, kept.graph, variant, root, partner)
        one_candidate = jax.tree.map(lambda v: v[None], candidate)
        after = rewritten(params, kept.graph, kept.owner, one_candidate)
        return seen(after.graph, after.owner)

    candidates = jax.vmap(made)(kept.variant, kept.root, kept.partner)
    now = seen(kept.graph, kept.owner)
    graphs = jax.tree.map(lambda c, n: jnp.concatenate([c, n[None]]), candidates, now)
    return CandidateGraphs(graphs, kept.variant >= 0)


class GraphSummary(nn.Module):
    """Encodes one graph as a vector [_GLOBAL]."""

    config: NetworkConfig

    @nn.compact
    def __call__(self, graph: GraphFeatures) -> jax.Array:
        c, live = self.config, graph.live[:, None]
        args, _ = neighbours_of(graph)
        x = Embedding(N_LOWERINGS, c.width, name="lowerings")(graph.lowering)
        x = jnp.where(live, x + nn.Dense(c.width)(graph.values), 0.0)
        for _ in range(c.layers):
            # Every node is also its own neighbour.
            x = nn.leaky_relu(Attention(c.width, c.heads)(x, lambda v: args(v) + v))
            x = jnp.where(live, x, 0.0)
        return nn.Dense(_GLOBAL)(jnp.sum(x, axis=0))


class CandidatesNetwork(nn.Module):
    """Computes logits and value from the candidate graphs of one state; use vmap for a batch."""

    config: NetworkConfig

    @nn.compact
    def __call__(self, seen: CandidateGraphs) -> Output:
        summary = nn.vmap(
            GraphSummary, variable_axes={"params": None}, split_rngs={"params": False}
        )
        encodings = summary(self.config, name="graphs")(seen.graphs)
        valid = jnp.append(seen.valid, True)  # No-Op is always valid
        flat = jnp.where(valid[:, None], encodings, 0.0).reshape(-1)
        logits = _Head(len(encodings))(flat)
        value = _Head(1)(flat)
        masked_logits = jnp.where(valid, logits, NEVER)
        macro_actions = jnp.full((KINDS - 1) * (len(masked_logits) - 1), NEVER)
        index = jnp.concatenate([masked_logits[:-1], macro_actions, masked_logits[-1:]])
        return Output(Logits(index, jnp.zeros(len(masked_logits) - 1)), value[0])


class _Head(nn.Module):
    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in _HIDDEN:
            x = nn.tanh(nn.Dense(width)(x))
        return nn.Dense(self.size, kernel_init=nn.initializers.orthogonal(0.01))(x)
