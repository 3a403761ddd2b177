"""Graph states as searches see them: a priced graph with its match masks, its candidates, and
single steps between states.

All numeric work is jitted once for each bucket and rule table; the host keeps only lists. A state
whose bucket is full grows into the next larger one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost.model import price
from xrl_jax.cost.roofline import CostTable, total
from xrl_jax.cost.view import CostView, view_new
from xrl_jax.engine import match as match_lib
from xrl_jax.engine.apply import apply
from xrl_jax.engine.delta import deltas
from xrl_jax.engine.match import Candidates
from xrl_jax.graph import graph as graph_lib
from xrl_jax.graph import ops, passes
from xrl_jax.graph.graph import TensorGraph
from xrl_jax.graph.hash import identity
from xrl_jax.language.rule import Rule
from xrl_jax.language.table import CompiledRules, RuleTable
from xrl_jax.program.program import Program
from xrl_jax.runtime.engine_jit import engine_jit

# Capacity for candidates: per slot of the bucket, and the least and the most in total. Each size
# that is needed is compiled, so there are few.
_CAPACITY_PER_SLOT, _LEAST_CAPACITY, _MOST_CAPACITY = 2, 1024, 65536
_PRICED_AT_ONCE = 512  # candidates
_AT_ONCE = 256  # rewrites in one jitted call


@dataclass(frozen=True)
class PricedCandidates:
    """All candidates of a state, on the host, with the changes that they would make."""

    variant: np.ndarray  # [M]
    root: np.ndarray  # [M]
    partner: np.ndarray  # [M]
    delta: np.ndarray  # [M] seconds added
    gone: np.ndarray  # [M] seconds of the nodes they would remove
    views: CostView  # [M, Q, ...] of the nodes they would make

    def at(self, i: int) -> tuple[int, int, int]:
        """Return variant, root and partner of candidate `i`."""
        return int(self.variant[i]), int(self.root[i]), int(self.partner[i])


@dataclass(frozen=True)
class State:
    """A graph under search."""

    graph: TensorGraph  # priced
    masks: jax.Array  # [N, W] where rules match, as of before `changed`
    changed: jax.Array  # [N] bool, nodes that changed since the masks were made
    seconds: float


def in_one_bucket(program: Program) -> list[TensorGraph]:
    """Return the program's graphs in the bucket of the largest, each with room for as many outputs,
    so that everything is compiled once.
    """
    bucket = max(g.nodes.op.shape[0] for g in program.graphs)
    n_out = max(len(g.globals.outputs) for g in program.graphs)
    graphs = [graph_lib.with_room_for_outputs(g, n_out) for g in program.graphs]
    return [g if g.nodes.op.shape[0] == bucket else graph_lib.grow(g, bucket) for g in graphs]


@functools.partial(engine_jit, static_argnames="size")
def _find(table: RuleTable, graph: TensorGraph, masks: jax.Array, *, size: int) -> Candidates:
    return match_lib.candidates(table, graph, masks, size=size)


@engine_jit
def _deltas(
    table: RuleTable, costs: CostTable, graph: TensorGraph, found: Candidates, start: jax.Array
) -> tuple[Any, Any, Any]:
    """Return the cost change, the removed cost and the new nodes' views of `_PRICED_AT_ONCE`
    candidates, from `start` on.
    """
    variant, root, partner = (
        jax.lax.dynamic_slice_in_dim(c, start, _PRICED_AT_ONCE) for c in found[:3]
    )
    part = Candidates(variant, root, partner, found.count)
    price = costs.price_of_new(graph)
    result = deltas(table, graph, part, price, keep=jax.vmap(view_new))
    return result.seconds, result.gone, result.kept


# The first match of a graph is a rematch of all its nodes, so that one matcher is compiled.
_rematch = engine_jit(match_lib.rematch)
_remove_dead = engine_jit(passes.remove_dead)


class _Applied(NamedTuple):
    """The result of applying a list of candidates."""

    graph: TensorGraph  # priced
    changed: jax.Array  # [N] bool
    ok: jax.Array  # [_AT_ONCE] bool, which were applied
    full: jax.Array  # bool: there was no room for candidate `done`
    done: jax.Array  # how many were processed
    seconds: jax.Array


@engine_jit
def _apply(
    table: RuleTable,
    costs: CostTable,
    graph: TensorGraph,
    candidates: Candidates,
) -> _Applied:
    """Apply the candidates that still match, one after the other, until the bucket is full."""

    def continues(carry: tuple[jax.Array, ...]) -> jax.Array:
        i, *_, full = carry
        return (i < candidates.count) & ~full

    def apply_next(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        i, graph, changed, ok, _ = carry
        at = candidates.variant[i], candidates.root[i], candidates.partner[i]
        made = apply(table, graph, *at)
        i = jnp.where(made.full, i, i + 1)
        return i, made.graph, changed | made.changed, ok.at[i - 1].max(made.ok), made.full

    nothing = jnp.zeros(graph.nodes.op.shape, bool), jnp.zeros(_AT_ONCE, bool), jnp.bool_(False)
    done, graph, changed, ok, full = jax.lax.while_loop(
        continues, apply_next, (jnp.int32(0), graph, *nothing)
    )
    graph = costs.priced(graph)
    return _Applied(graph, changed, ok, full, done, total(graph))


_identity = engine_jit(identity)


def place_text(slot: int, op: np.ndarray, shape: np.ndarray, rank: np.ndarray) -> str:
    """Return a short text for a node: its slot, operator and shape."""
    return f"%{slot} {ops.OP_NAMES[int(op)]}[{','.join(str(d) for d in shape[:rank])}]"


def variants_where(rules: CompiledRules, wanted: Callable[[Rule], bool]) -> np.ndarray:
    """Return [V] bool: which variants of the rule table belong to wanted rules."""
    fits = np.array([wanted(r) for r in rules.rules], bool)
    rule_of = np.asarray(rules.table.variant_rule)
    return fits[rule_of] & (rule_of >= 0)


@dataclass
class Space:
    """The space of rewrites of one graph under a rule table."""

    rules: CompiledRules
    digests: jax.Array
    # The capacity for candidates that states have needed so far, by the allowed variants.
    capacity: dict[bytes, int] = field(default_factory=dict)

    def start(self, graph: TensorGraph, costs: CostTable) -> State:
        """Return the first state: priced, not yet matched."""
        table = self.rules.table
        graph, seconds = price(costs, _remove_dead(graph))
        n = graph.nodes.op.shape[0]
        nothing = jnp.zeros((n, table.n_words), jnp.uint32)
        return State(graph, nothing, jnp.ones(n, bool), float(seconds))

    def matched(self, state: State) -> State:
        """Return the state with masks up to date, which makes repeated `candidates` cheaper."""
        if not bool(jnp.any(state.changed)):
            return state
        masks = _rematch(self.rules.table, state.graph, state.masks, state.changed)
        return replace(state, masks=masks, changed=jnp.zeros_like(state.changed))

    def reprice(self, state: State, costs: CostTable) -> State:
        """Return the state under newer costs."""
        graph, seconds = price(costs, state.graph)
        return replace(state, graph=graph, seconds=float(seconds))

    def candidates(
        self, state: State, costs: CostTable, allowed: np.ndarray | None = None
    ) -> PricedCandidates:
        """Return the candidates of a state, cheapest first.

        Args:
          allowed: [V] bool, which variants of the rule table may be used; None for all.

        Raises:
          GraphError: the candidates need a capacity above `_MOST_CAPACITY`.
        """
        table = self.rules.table
        state = self.matched(state)
        masks, allowed_key = state.masks, b""
        if allowed is not None:
            masks, allowed_key = masks & self._mask_words(allowed), allowed.tobytes()
        of_bucket = _CAPACITY_PER_SLOT * state.graph.nodes.op.shape[0]
        size = max(of_bucket, _LEAST_CAPACITY, self.capacity.get(allowed_key, 0))
        least = int(np.bitwise_count(np.asarray(masks)).sum())
        while size < least:  # known to be too small: a trial would compile this size
            size *= 4
        while True:
            if size > _MOST_CAPACITY:
                raise graph_lib.GraphError(
                    f"more than {_MOST_CAPACITY} candidates in one graph: use fewer rules"
                )
            found = _find(table, state.graph, masks, size=size)
            if int(found.count) <= size:
                break
            size *= 4
        self.capacity[allowed_key] = size
        starts = range(0, max(int(found.count), 1), _PRICED_AT_ONCE)
        parts = [_deltas(table, costs, state.graph, found, jnp.int32(i)) for i in starts]
        delta, gone, views = jax.tree.map(lambda *vs: np.concatenate(vs), *parts)
        order = np.argsort(delta, kind="stable")
        order = order[np.isfinite(delta[order])]
        variant, root, partner = (np.asarray(c)[order] for c in found[:3])
        view = jax.tree.map(lambda v: v[order], views)
        return PricedCandidates(variant, root, partner, delta[order], gone[order], view)

    def _mask_words(self, allowed: np.ndarray) -> np.ndarray:
        """Return the trees of the allowed variants as words [W] of the masks."""
        trees = allowed[np.asarray(self.rules.table.tree_variant)]
        return np.packbits(trees, bitorder="little").view(np.uint32)

    def step(
        self, state: State, costs: CostTable, variant: int, root: int, partner: int
    ) -> State | None:
        """Return the state after one rewrite; None where the candidate no longer matches. The
        bucket grows if it is full.
        """
        after, taken = self.steps(state, costs, [(variant, root, partner)])
        return after if taken else None

    def steps(
        self, state: State, costs: CostTable, candidates: Sequence[tuple[int, int, int]]
    ) -> tuple[State, list[int]]:
        """Apply candidates one after the other; return the state after them and the indices of
        those that still matched and were applied.

        Ends early where the bucket has had to grow: slots have moved then, and candidates have to
        be found again.

        Args:
          candidates: variant, root and partner of each.
        """
        taken: list[int] = []
        first = 0
        while first < len(candidates):
            part = np.zeros((_AT_ONCE, 3), np.int32)
            given = candidates[first : first + _AT_ONCE]
            part[: len(given)] = given
            made = _apply(
                self.rules.table,
                costs,
                state.graph,
                Candidates(part[:, 0], part[:, 1], part[:, 2], np.int32(len(given))),  # type: ignore[arg-type]
            )
            state = State(
                made.graph, state.masks, state.changed | made.changed, float(made.seconds)
            )
            taken += [first + int(i) for i in np.flatnonzero(made.ok)]
            first += int(made.done)
            if bool(made.full):
                variant, root, partner = candidates[first]
                _, _, slots = graph_lib.nodes_of(state.graph)
                place = {slot: i + 1 for i, slot in enumerate(slots)}
                grown = self.start(graph_lib.grow(state.graph), costs)
                at = variant, place.get(root, 0), place.get(partner, 0)
                after, made_there = self.steps(grown, costs, [at])
                return after, [*taken, *(first + i for i in made_there)]
        return state, taken

    def identity(self, state: State) -> tuple[int, int]:
        """Return the identity hash of the state's graph."""
        h = np.asarray(_identity(state.graph, self.digests))
        return int(h[0]), int(h[1])

    def rule_name(self, variant: int) -> str:
        return self.rules.rules[int(np.asarray(self.rules.table.variant_rule)[variant])].name

    def place(self, state: State, root: int) -> str:
        """Return a short text for the root node of a candidate."""
        nodes = state.graph.nodes
        return place_text(root, *(np.asarray(f)[root] for f in (nodes.op, nodes.shape, nodes.rank)))
