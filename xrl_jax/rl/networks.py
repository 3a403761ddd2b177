"""The policy: a graph attention network over the nodes, a score for each candidate.

After X-RLflow (He, Parker, Yoneki, MLSys 2023): nodes take up their edges, k layers of graph
attention follow, and a global update:

    h_i' = s(W (sum_j e_ij || h_i)),    h_i' = s(sum_j a_ij W h_j),    g' = s(W (sum_i h_i || g))

Here attention goes both ways along the edges, in several heads, with residuals and normalisation;
and a candidate is scored from what it touches, what it makes, its rule and the whole, so that their
order and number do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph

from xrl_jax.rl.features import N_FORMS, N_OPS, Observation

_NEVER = -1e9  # logit of an empty slot
_MOST_LOGIT = 8.0  # of attention


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of the policy.

    Attributes:
      width: of a node's embedding; a multiple of `heads`.
      layers: graph attention layers; 5 in X-RLflow.
      heads: of each; 1 in X-RLflow.
      n_rules: how many rules can be told apart.
    """

    width: int = 32
    layers: int = 3
    heads: int = 4
    n_rules: int = 512


class Output(NamedTuple):
    """What the network says of a state."""

    logits: jax.Array  # [M + 1], of the candidates and of No-Op, the last; empty slots are masked
    value: jax.Array  # scalar, expected return


class Attention(nn.Module):
    """Graph attention (Velickovic et al., ICLR 2018) along the edges, one way.

    Call with nodes [N, D], senders and receivers [E], which edges exist [E] -> [N, D].

    Logits are bounded instead of reduced by their maximum, and sums and weights go into one
    segment sum: scattering is what takes the time on a CPU.
    """

    width: int
    heads: int

    @nn.compact
    def __call__(
        self, x: jax.Array, senders: jax.Array, receivers: jax.Array, exists: jax.Array
    ) -> jax.Array:
        n, each = x.shape[0], self.width // self.heads
        sent = nn.Dense(self.width + self.heads, use_bias=False)(x)[senders]
        received = nn.Dense(self.heads, use_bias=False)(x)[receivers]
        logits = nn.leaky_relu(sent[:, self.width :] + received, 0.2)
        logits = _MOST_LOGIT * jnp.tanh(logits / _MOST_LOGIT)
        weights = jnp.where(exists[:, None], jnp.exp(logits), 0.0)
        values = sent[:, : self.width].reshape(-1, self.heads, each) * weights[..., None]
        parts = jnp.concatenate([values.reshape(-1, self.width), weights], axis=1)
        summed = jraph.segment_sum(parts, receivers, n)
        total = jnp.maximum(summed[:, self.width :, None], 1e-6)
        mean = summed[:, : self.width].reshape(n, self.heads, each) / total
        return mean.reshape(n, self.width)


class Embedding(nn.Module):
    """Rows of a table by codes [...], as a product: its derivative scatters nothing."""

    n: int
    width: int

    @nn.compact
    def __call__(self, codes: jax.Array) -> jax.Array:
        return nn.Dense(self.width, use_bias=False)(jax.nn.one_hot(codes, self.n))


def counts_of(codes: jax.Array, n: int) -> jax.Array:
    """How often each code from 1 to n - 1 is in the rows of `codes` [..., Q]: [..., n]."""
    return jnp.sum(jax.nn.one_hot(codes, n), axis=-2).at[..., 0].set(0.0)


class PolicyNetwork(nn.Module):
    """Logits and value of one observation; vmap for more."""

    config: NetworkConfig

    @nn.compact
    def __call__(self, seen: Observation) -> Output:
        c = self.config
        live, exists = seen.live[:, None], seen.senders > 0
        x = Embedding(N_FORMS, c.width)(seen.form)
        x += nn.Dense(c.width)(seen.numbers)
        x = jnp.where(live, nn.relu(nn.LayerNorm()(x)), 0.0)
        for _ in range(c.layers):
            down = Attention(c.width, c.heads)(x, seen.senders, seen.receivers, exists)
            up = Attention(c.width, c.heads)(x, seen.receivers, seen.senders, exists)
            new = nn.Dense(c.width)(jnp.concatenate([x, down, up], axis=1))
            x = jnp.where(live, nn.LayerNorm()(x + nn.relu(new)), 0.0)
        mean = jnp.sum(x, axis=0) / jnp.maximum(jnp.sum(live), 1)
        whole = nn.relu(nn.Dense(c.width)(jnp.concatenate([mean, jnp.max(x, axis=0), seen.whole])))
        makes = nn.Dense(c.width, use_bias=False)(counts_of(seen.made, N_OPS))
        touched = jnp.concatenate([x[seen.root], x[seen.partner]], axis=1)
        moves = Embedding(c.n_rules, c.width)(jnp.maximum(seen.rule, 0)) + makes
        moves += nn.Dense(c.width)(jnp.concatenate([touched, seen.moves], axis=1))
        moves += nn.Dense(c.width)(whole)
        moves = nn.relu(nn.Dense(c.width)(nn.relu(moves)))
        small = nn.initializers.orthogonal(0.01)
        scores = nn.Dense(1, kernel_init=small)(moves)[:, 0]
        stop = nn.Dense(1, kernel_init=small)(nn.relu(nn.Dense(c.width)(whole)))
        value = nn.Dense(1)(nn.relu(nn.Dense(c.width)(whole)))
        logits = jnp.concatenate([jnp.where(seen.valid, scores, _NEVER), stop])
        return Output(logits, value[0])
