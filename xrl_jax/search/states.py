"""Graph states as searches see them: a priced graph with its match masks, its candidates, and
single steps between states.

Everything numeric is jitted once for a bucket and a rule table; the host keeps only lists. A state
whose bucket is full grows into the next one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost import roofline
from xrl_jax.cost.model import price
from xrl_jax.cost.roofline import CostTable, NodeView
from xrl_jax.graph import graph as graph_lib
from xrl_jax.graph import ops
from xrl_jax.graph.engine_jit import engine_jit
from xrl_jax.graph.graph import TensorGraph
from xrl_jax.graph.hash import identity
from xrl_jax.graph.program import Program
from xrl_jax.rewrite import match as match_lib
from xrl_jax.rewrite.apply import Applied, apply
from xrl_jax.rewrite.delta import deltas
from xrl_jax.rewrite.match import Candidates
from xrl_jax.rewrite.table import CompiledRules, RuleTable

_SIZES = (256, 1024, 4096, 16384)  # room for candidates


@dataclass(frozen=True)
class Moves:
    """All candidates of a state, on the host, with what they would change."""

    entry: np.ndarray  # [M]
    root: np.ndarray  # [M]
    partner: np.ndarray  # [M]
    delta: np.ndarray  # [M] seconds added
    gone: np.ndarray  # [M] seconds of the nodes that go
    views: NodeView  # [M, Q, ...] of the nodes they would make


@dataclass(frozen=True)
class State:
    """A graph under search."""

    graph: TensorGraph  # priced
    masks: jax.Array  # [N, W] where rules match, before the changes below
    changed: jax.Array  # [N] bool, nodes that changed since the masks were made
    seconds: float


def _size_for(count: int) -> int:
    return next((s for s in _SIZES if s >= count), _SIZES[-1])


def in_one_bucket(program: Program) -> list[TensorGraph]:
    """The program's graphs in the bucket of the largest: everything is then compiled once."""
    bucket = max(g.nodes.op.shape[0] for g in program.graphs)
    return [
        g if g.nodes.op.shape[0] == bucket else graph_lib.grow(g, bucket) for g in program.graphs
    ]


@functools.partial(engine_jit, static_argnames="size")
def _find(table: RuleTable, graph: TensorGraph, masks: jax.Array, *, size: int) -> Candidates:
    return match_lib.candidates(table, graph, masks, size=size)


@engine_jit
def _deltas(
    table: RuleTable, costs: CostTable, graph: TensorGraph, found: Candidates
) -> tuple[Any, Any, Any]:
    result = deltas(table, graph, found, roofline.price_of_new(costs, graph))
    return result.seconds, result.gone, roofline.view_new(result.new)


# The first match of a graph is a rematch of all its nodes: the matcher is then compiled once.
_rematch = engine_jit(match_lib.rematch)
_remove_dead = engine_jit(graph_lib.remove_dead)


@engine_jit
def _apply(
    table: RuleTable,
    costs: CostTable,
    graph: TensorGraph,
    entry: jax.Array,
    root: jax.Array,
    partner: jax.Array,
) -> tuple[Applied, jax.Array]:
    done = apply(table, graph, entry, root, partner)
    done = done._replace(graph=roofline.priced(costs, done.graph))
    return done, roofline.total(done.graph)


_identity = engine_jit(identity)


@dataclass
class Space:
    """The space of rewritings of one graph under a rule table."""

    rules: CompiledRules
    digests: jax.Array
    # Room for candidates: as much as a state was met to need, by the entries that were allowed.
    room: dict[bytes, int] = field(default_factory=dict)

    def start(self, graph: TensorGraph, costs: CostTable) -> State:
        """The first state: priced, not yet matched."""
        table = self.rules.table
        graph, seconds = price(costs, _remove_dead(graph))
        n = graph.nodes.op.shape[0]
        nothing = jnp.zeros((n, table.n_words), jnp.uint32)
        return State(graph, nothing, jnp.ones(n, bool), float(seconds))

    def matched(self, state: State) -> State:
        """The state with masks that know all changes; `moves` of it costs less when asked again."""
        if not bool(jnp.any(state.changed)):
            return state
        masks = _rematch(self.rules.table, state.graph, state.masks, state.changed)
        return replace(state, masks=masks, changed=jnp.zeros_like(state.changed))

    def reprice(self, state: State, costs: CostTable) -> State:
        """The state under newer costs."""
        graph, seconds = price(costs, state.graph)
        return replace(state, graph=graph, seconds=float(seconds))

    def moves(self, state: State, costs: CostTable, allowed: np.ndarray | None = None) -> Moves:
        """The candidates of a state, cheapest first.

        Args:
          allowed: [E] which entries of the rule table count; all for None.
        """
        table = self.rules.table
        state = self.matched(state)
        masks, asked = state.masks, b""
        if allowed is not None:
            masks, asked = masks & self._words(allowed), allowed.tobytes()
        # Each size is compiled, so one that cannot do is not tried.
        least = _size_for(int(np.bitwise_count(np.asarray(masks)).sum()))
        least = max(least, self.room.get(asked, 0))
        for size in (s for s in _SIZES if s >= least):
            found = _find(table, state.graph, masks, size=size)
            if int(found.count) <= size:
                self.room[asked] = size
                break
        else:
            raise graph_lib.GraphError(f"more than {_SIZES[-1]} candidates; use fewer rules")
        seconds, gone, views = _deltas(table, costs, state.graph, found)
        delta = np.asarray(seconds)
        order = np.argsort(delta, kind="stable")
        order = order[np.isfinite(delta[order])]
        return Moves(
            np.asarray(found.entry)[order],
            np.asarray(found.root)[order],
            np.asarray(found.partner)[order],
            delta[order],
            np.asarray(gone)[order],
            NodeView(*(np.asarray(v)[order] for v in views)),  # type: ignore[arg-type]
        )

    def _words(self, allowed: np.ndarray) -> np.ndarray:
        """The rows of entries [E] as words [W] of the masks."""
        rows = allowed[np.asarray(self.rules.table.row_entry)]
        return np.packbits(rows, bitorder="little").view(np.uint32)

    def step(
        self, state: State, costs: CostTable, entry: int, root: int, partner: int
    ) -> State | None:
        """The state after one rewrite; None where the candidate no longer matches. Grows the bucket
        when it is full.
        """
        done, seconds = _apply(
            self.rules.table,
            costs,
            state.graph,
            jnp.int32(entry),
            jnp.int32(root),
            jnp.int32(partner),
        )
        if bool(done.ok):
            return State(done.graph, state.masks, state.changed | done.changed, float(seconds))
        if bool(done.full):
            _, _, slots = graph_lib.nodes_of(state.graph)
            place = {slot: i + 1 for i, slot in enumerate(slots)}
            grown = self.start(graph_lib.grow(state.graph), costs)
            return self.step(grown, costs, entry, place.get(root, 0), place.get(partner, 0))
        return None

    def identity(self, state: State) -> tuple[int, int]:
        """The identity hash of the state's graph."""
        h = np.asarray(_identity(state.graph, self.digests))
        return int(h[0]), int(h[1])

    def rule_name(self, entry: int) -> str:
        return self.rules.rules[int(self.rules.table.entry_rule[entry])].name

    def place(self, state: State, root: int) -> str:
        """A short text of the node a candidate is anchored at."""
        f = state.graph.nodes
        shape = ",".join(str(int(d)) for d in np.asarray(f.shape[root])[: int(f.rank[root])])
        return f"%{root} {ops.OP_NAMES[int(f.op[root])]}[{shape}]"
