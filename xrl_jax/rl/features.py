"""Observations: scalars and integer codes that describe a state to a policy.

Times are relative to the start of the episode.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost.view import CORRECTED
from xrl_jax.graph import ops
from xrl_jax.graph.graph import TensorGraph, args_of
from xrl_jax.lower.table import LOWERINGS
from xrl_jax.rl.env import EnvParams, EnvState, allowed, rules_of, same_rule

# Every lowering of every operator has a code of its own.
_LOWERING_NAMES = [
    [f.name for f in LOWERINGS.get(op, ()) if f.rounds is None] or ["plain"] for op in ops.OP_NAMES
]
_FIRST_LOWERING = np.cumsum([0, *map(len, _LOWERING_NAMES[:-1])])
LOWERING_NAMES = tuple(
    f"{op} {n}" for op, ns in zip(ops.OP_NAMES, _LOWERING_NAMES, strict=True) for n in ns
)
N_LOWERINGS = len(LOWERING_NAMES)
N_OPS = len(ops.OP_NAMES)
N_NODE = ops.MAX_RANK * (1 + ops.MAX_ARGS) + ops.MAX_ATTRS + 6  # features of a node
EDGES = 2  # edges kept for each slot of the bucket; those beyond are left out
N_CANDIDATE = 7  # features of a candidate
# Of these, the predicted changes in time: by itself, and by its rule where that gains.
SAVING_COLUMNS = (0, 6)
GAIN_COLUMN = 2  # whether it saves anything
N_GLOBAL = 7 + len(CORRECTED)  # features of the whole state


class GraphFeatures(NamedTuple):
    """A graph as a policy sees it; `values` are logarithms and shares of the order of 1."""

    lowering: jax.Array  # [N] int32, code of operator and lowering; 0 for holes
    values: jax.Array  # [N, N_NODE] float32
    senders: jax.Array  # [E] int32, arguments; 0 for no edge
    receivers: jax.Array  # [E] int32, the nodes that read them; ascending where there are edges

    @property
    def live(self) -> jax.Array:
        """[N] bool, which slots hold a node."""
        return self.lowering > 0


class Observation(NamedTuple):
    """A state as a policy sees it."""

    graph: GraphFeatures
    rule: jax.Array  # [M] int32; -1 empty
    root: jax.Array  # [M] int32
    partner: jax.Array  # [M] int32
    made: jax.Array  # [M, Q] int32, operators of the nodes that a candidate would make
    candidates: jax.Array  # [M, N_CANDIDATE] float32
    allowed: jax.Array  # [2 M + 1] bool, which indices have an effect
    globals: jax.Array  # [N_GLOBAL] float32

    @property
    def valid(self) -> jax.Array:
        """[M] bool, which slots hold a candidate."""
        return self.rule >= 0


def observe(state: EnvState, params: EnvParams) -> Observation:
    """Return the observation of a state.

    It describes the graph by its nodes and edges, and each candidate by its rule, the nodes it
    touches and makes, and its predicted saving, on its own and together with the other candidates
    of its rule (extrapolated from those in slots to all). The corrections of the cost table are
    included because they tell the cost of lowerings that are not in the graph yet.
    """
    first, candidates, valid = params.start.seconds, state.candidates, state.candidates.valid
    same = same_rule(candidates, params.table)
    # Number of candidates that each one in a slot stands for.
    n_represented = jnp.maximum(candidates.n / params.slots, 1.0)
    saved = jnp.stack([candidates.seconds, jnp.minimum(candidates.seconds, 0.0)], axis=1)
    of_rule = n_represented * (same @ saved)
    seen = graph_features(state.graph, params.start.counts[state.owner], first)
    columns = [
        _share(candidates.seconds / first),
        _share(candidates.gone / first),
        candidates.seconds < 0,
        candidates.partner > 0,
        jnp.log1p(n_represented * jnp.sum(same, axis=1)) / 4,
        _share(of_rule[:, 0] / first),
        _share(of_rule[:, 1] / first),
    ]
    corrections = jnp.log(params.costs.scale)
    global_features = [
        state.seconds / first,
        state.best / first,
        _share((state.seconds - state.best) / first),
        state.t / params.horizon,
        jnp.log1p(candidates.n) / 8,
        jnp.log1p(jnp.sum(seen.live)) / 8,
        jnp.log1p(state.macro.left) / 8,
        *(corrections - jnp.mean(corrections)),
    ]
    return Observation(
        graph=seen,
        rule=rules_of(candidates, params.table),
        root=candidates.root,
        partner=candidates.partner,
        made=candidates.nodes.op,
        candidates=jnp.where(
            valid[:, None], jnp.stack([jnp.asarray(c, jnp.float32) for c in columns], axis=1), 0.0
        ),
        allowed=allowed(candidates, params.table),
        globals=jnp.stack([jnp.asarray(c, jnp.float32) for c in global_features]),
    )


def graph_features(graph: TensorGraph, counts: jax.Array, first: jax.Array) -> GraphFeatures:
    """Return the features of a graph: its edges, and of each node the lowering, attributes, shapes
    of the result and of the arguments, time, and number of runs.

    Args:
      graph: priced.
      counts: [N] runs of each node in one run of the program.
      first: predicted seconds of the program at the start of the episode.
    """
    f = graph.nodes
    live = f.op != ops.HOLE
    size = jnp.sum(jnp.log2(jnp.maximum(f.shape, 1).astype(jnp.float32)), axis=1)
    outputs = graph.globals.outputs
    is_output = jnp.zeros(live.shape, bool).at[jnp.maximum(outputs, 0)].max(outputs > 0)
    args = args_of(graph)
    # The arguments' shapes, by position, are features of the node; in the paper, of the edges.
    of_args = jnp.where((args > 0)[..., None], (_log(f.shape) / 8)[args], 0.0)
    columns = [
        _log(f.shape) / 8,
        _log(f.attrs) / 8,
        f.rank[:, None] / ops.MAX_RANK,
        size[:, None] / 24,
        _share(f.cost * counts / first)[:, None],
        (jnp.log2(jnp.maximum(counts, 1.0)) / 4)[:, None],
        f.weight_only[:, None],
        is_output[:, None],
        of_args.reshape(len(args), -1),
    ]
    values = jnp.concatenate([jnp.asarray(c, jnp.float32) for c in columns], axis=1)
    edge = jnp.nonzero(args.reshape(-1) > 0, size=EDGES * len(args), fill_value=0)[0]
    edge = edge.astype(jnp.int32)
    return GraphFeatures(
        lowering=jnp.where(live, jnp.asarray(_FIRST_LOWERING)[f.op] + f.lowering, 0).astype(
            jnp.int32
        ),
        values=jnp.where(live[:, None], values, 0.0),
        senders=args.reshape(-1)[edge],
        receivers=edge // ops.MAX_ARGS,
    )


def _log(values: jax.Array) -> jax.Array:
    """Return sign(v) log2(1 + |v|) of integers."""
    v = values.astype(jnp.float32)
    return jnp.sign(v) * jnp.log2(1.0 + jnp.abs(v))


def _share(share: jax.Array) -> jax.Array:
    """Scale a share of the whole time, of either sign, so that 0.001 still differs from 0."""
    return jnp.sign(share) * jnp.log2(1.0 + 1e3 * jnp.abs(share)) / 2
