"""The policy: a graph attention network over the nodes, and a score for each candidate.

It follows X-RLflow (He, Parker, Yoneki, MLSys 2023): an update of nodes from their edges, k layers
of graph attention, and a global update:

    h_i' = s(W (sum_j e_ij || h_i)),    h_i' = s(sum_j a_ij W h_j),    g' = s(W (sum_i h_i || g))

Here attention follows the edges in both directions, with several heads, residual connections and
layer normalisation. A candidate is scored from the nodes it touches, the operators it makes, its
rule and the global state, so the order and number of candidates do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from xrl_jax.rl.actions import Logits
from xrl_jax.rl.env import KINDS, ONCE
from xrl_jax.rl.features import (
    GAIN_COLUMN,
    N_CANDIDATE,
    N_GLOBAL,
    N_LOWERINGS,
    N_NODE,
    N_OPS,
    SAVING_COLUMNS,
    Observation,
)
from xrl_jax.rl.neighbours import Neighbours, neighbours_of
from xrl_jax.rl.rows import rows
from xrl_jax.runtime.engine_jit import wide

NEVER = -1e9  # logit of an action without effect
_MOST_LOGIT = 8.0  # bound of attention logits
_GAIN_MASK_LOGIT = 3.0  # mask logit, before training, of a candidate that gains; 0 if it loses


@dataclass(frozen=True)
class NetworkConfig:
    """Configuration of the policy network.

    Attributes:
      width: of a node's embedding; a multiple of `heads`.
      layers: number of graph attention layers; 5 in X-RLflow.
      heads: of each layer; 1 in X-RLflow.
      encoder: "touched" scores a candidate by the nodes it touches; "candidates", as in X-RLflow,
        encodes the graph that each candidate would make (`rl.candidates`).
      slots: number of candidate slots that "candidates" requires; 500 in X-RLflow.
      n_rules: number of rules that the policy distinguishes.
      prior_scale: weight of an action's predicted gain before training; with 2, one that saves a
        percent of the time is some 30 times as probable as one that saves nothing. 0 in X-RLflow.
      macro_actions: whether rules may be applied at many places at once (`rl.env`); not in
        X-RLflow, and not with "candidates".
    """

    width: int = 32
    layers: int = 2
    heads: int = 4
    encoder: str = "touched"
    slots: int = 64
    n_rules: int = 512
    prior_scale: float = 2.0
    macro_actions: bool = True


class Output(NamedTuple):
    """The network's output for a state."""

    logits: Logits  # of the actions; indices without effect are masked
    value: jax.Array  # scalar, expected return


class Attention(nn.Module):
    """Graph attention (Velickovic et al., ICLR 2018) in one direction of the edges.

    Call with nodes [N, D] and a function that sums over neighbours; returns [N, D].

    The logits are linear: the receiver's contribution is the same for all its neighbours and
    cancels, so that a_ij = exp(s_j) / sum_k exp(s_k). Numerator and denominator are then two sums
    over neighbours, and nothing else has to follow the edges.
    """

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, neighbours: Neighbours) -> jax.Array:
        values = nn.Dense(self.width, use_bias=False)(x)
        logits = nn.Dense(self.heads, use_bias=False)(x)
        weights = jnp.exp(_MOST_LOGIT * jnp.tanh(logits / _MOST_LOGIT))
        both = neighbours(jnp.concatenate([values * self.columns(weights), weights], axis=1))
        return both[:, : self.width] / jnp.maximum(self.columns(both[:, self.width :]), 1e-6)

    def columns(self, of_heads: jax.Array) -> jax.Array:
        """Repeat the value of each head, [N, heads], for all of its columns, [N, width]."""
        each = self.width // self.heads
        if wide():
            return jnp.repeat(of_heads, each, axis=1)
        return of_heads @ jnp.repeat(jnp.eye(self.heads), each, axis=1)  # faster on a CPU


class Embedding(nn.Module):
    """Looks up rows [..., width] of a learned table by codes [...]."""

    n: int
    width: int

    @nn.compact
    def __call__(self, codes: jax.Array) -> jax.Array:
        small = nn.initializers.normal(self.width**-0.5)
        return rows(jnp.asarray(self.param("kernel", small, (self.n, self.width))), codes)


class PolicyNetwork(nn.Module):
    """Computes logits and value of one observation; use vmap for a batch."""

    config: NetworkConfig

    @nn.compact
    def __call__(self, obs: Observation) -> Output:
        c = self.config
        chex.assert_shape(
            [obs.graph.values, obs.candidates, obs.globals],
            [(None, N_NODE), (len(obs.rule), N_CANDIDATE), (N_GLOBAL,)],
            custom_message="this takes one observation at a time: use jax.vmap for several",
        )
        graph, live = obs.graph, obs.graph.live[:, None]
        args, users = neighbours_of(graph)
        x = Embedding(N_LOWERINGS, c.width, name="lowerings")(graph.lowering)
        x += nn.Dense(c.width)(graph.values)
        x = jnp.where(live, nn.relu(nn.LayerNorm()(x)), 0.0)
        for _ in range(c.layers):
            down, up = (Attention(c.width, c.heads)(x, each) for each in (args, users))
            new = nn.Dense(c.width)(jnp.concatenate([x, down, up], axis=1))
            x = jnp.where(live, nn.LayerNorm()(x + nn.relu(new)), 0.0)
        mean = jnp.sum(x, axis=0) / jnp.maximum(jnp.sum(live), 1)
        pooled = jnp.concatenate([mean, jnp.max(x, axis=0), obs.globals])
        global_state = nn.relu(nn.Dense(c.width)(pooled))
        made = Embedding(N_OPS, c.width, name="makes")(obs.made)
        makes = jnp.sum(jnp.where((obs.made > 0)[..., None], made, 0.0), axis=1)
        touched = jnp.concatenate([rows(x, obs.root), rows(x, obs.partner)], axis=1)
        candidates = Embedding(c.n_rules, c.width, name="rules")(jnp.maximum(obs.rule, 0)) + makes
        candidates += nn.Dense(c.width)(jnp.concatenate([touched, obs.candidates], axis=1))
        candidates += nn.Dense(c.width)(global_state)
        candidates = nn.relu(nn.Dense(c.width)(nn.relu(candidates)))
        small = nn.initializers.orthogonal(0.01)
        # The predicted gain of an action enters its score directly, even before training, which
        # thus begins with greedy search at some temperature, not with a random walk. A predicted
        # loss does not enter there: where nothing gains, all losing actions are equally likely.
        scores = nn.Dense(KINDS, kernel_init=small)(candidates)
        by_gain = c.prior_scale * jax.nn.one_hot(jnp.array(SAVING_COLUMNS), N_CANDIDATE).T
        gains = nn.initializers.constant(by_gain)
        saved = jnp.maximum(-obs.candidates, 0.0)
        scores += nn.Dense(KINDS, use_bias=False, kernel_init=gains)(saved)
        gain = nn.initializers.constant(
            _GAIN_MASK_LOGIT * jax.nn.one_hot(GAIN_COLUMN, N_CANDIDATE)[:, None]
        )
        mask = nn.Dense(1, kernel_init=small, name="mask")(candidates)
        mask += nn.Dense(1, use_bias=False, kernel_init=gain, name="gains")(obs.candidates)
        stop = nn.Dense(1, kernel_init=small)(nn.relu(nn.Dense(c.width)(global_state)))
        value = nn.Dense(1)(nn.relu(nn.Dense(c.width)(global_state)))
        logits = jnp.concatenate([scores.T.reshape(-1), stop])
        kind = jnp.arange(logits.size) // len(scores)
        can = obs.allowed & (c.macro_actions | (kind == ONCE) | (kind == KINDS))
        return Output(Logits(jnp.where(can, logits, NEVER), mask[:, 0]), value[0])
