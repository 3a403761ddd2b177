"""Origins of values: where a value comes from, as far as that decides what its readers pay.

XLA computes elementwise operators, broadcasts and movements inside the loop that reads them, never
inside a library call. So a chain of them reads memory where it begins and writes it where a call
needs its result; the nodes in between cost arithmetic only. Some calls compute the operators that
follow them before they write (`lower.chains`). The model charges a node for its reads, and a call
also for writing arguments that were never written:

    origin of an argument   an elementwise node pays      a call (conv, dot, window) pays
    MEMORY                  a read                        -
    LOOP                    -                             a write
    CALL, KERNEL            nothing, where it is absorbed; else a read
    LIBRARY                 a read, or less where it joins

LIBRARY and KERNEL are values inside a library call that holds many operators
(`libraries.base.Calls`): kernels that feed each other and the operators between them form one
partition. Entering a partition has a cost, once for each connected one. A ReLU is the last operator
that a call absorbs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.engine.new_nodes import NewNodes
from xrl_jax.graph import ops, work
from xrl_jax.graph.graph import Nodes, TensorGraph, args_of
from xrl_jax.libraries.base import NO_CALLS
from xrl_jax.libraries.registry import by_name, calling, libraries
from xrl_jax.lower.table import LOWERINGS, is_available, shares_calls

# Origins. MEMORY: written to memory. LOOP: computed in the loop of its reader. CALL: of a call that
# can absorb more operators before it writes. LIBRARY: inside a call of many kernels. KERNEL: both.
MEMORY, LOOP, CALL, LIBRARY, KERNEL = 0, 1, 2, 3, 4
_MOVES = ("broadcast", "transpose", "slice", "pad", "concat", "rev", "cast", "copy", "iota")
_VIEWS = ("reshape",)
_FOLLOWERS = ("add", "max")  # operators that an epilogue can hold
MOST_LOWERINGS = 32  # of one operator
_SWEEPS = 5  # longest chain of new nodes: a call, a bias, a sum, a ReLU, a reshape


def _mask(names: tuple[str, ...]) -> np.ndarray:
    return np.array([n in names for n in ops.OP_NAMES])


_IS_ELEMENTWISE = np.array([work.FAMILY[n] == "elementwise" for n in ops.OP_NAMES])
_IS_ELEMENTWISE &= ~_mask(work.SCANS)
_IS_LOOP = _IS_ELEMENTWISE | _mask(_MOVES)
_IS_VIEW, _IS_FOLLOWER = _mask(_VIEWS), _mask(_FOLLOWERS)
_IS_CALL = np.array([work.FAMILY[n] in ("conv", "dot", "window") for n in ops.OP_NAMES])
# Operators that XLA runs as a step of their own, so that a partition ends before them.
_IS_STEP = _IS_CALL | np.array([work.FAMILY[n] == "reduce" for n in ops.OP_NAMES])
_IS_STEP |= _mask(("softmax",))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sharing:
    """Which calls hold several operators on a target, and the costs of such calls."""

    absorbs: jax.Array  # [operators, lowerings] bool, can take an epilogue
    members: jax.Array  # [operators, lowerings] bool, kernels of a library that share calls
    fused: jax.Array  # [operators] bool, fused into a loop with their neighbours
    enter: jax.Array  # [] seconds to enter such a call
    leave: jax.Array  # [] seconds that XLA's next call takes longer after it
    joined: jax.Array  # [] passes over its arguments that an operator in it takes
    in_loop: jax.Array  # [] the same for one of `fused`
    loops: jax.Array  # [operators] bool, cost no more than what their loop reads and writes
    library: str | None = field(metadata=dict(static=True))  # that makes these calls


def sharing(platform: str) -> Sharing:
    """Return the `Sharing` of a JAX platform, given the libraries that are available."""
    library = calling(platform)
    calls = None if library is None else library.calls()
    costs = NO_CALLS if calls is None else calls.costs

    def which(test: Callable[[str, int], bool]) -> jax.Array:
        table = np.zeros((len(ops.OP_NAMES), MOST_LOWERINGS), bool)
        for code, op in enumerate(ops.OP_NAMES):
            for i in range(len(LOWERINGS[op])):
                table[code, i] = test(op, i)
        return jnp.asarray(table)

    merged = {op for lib in libraries() for op in lib.absorbing(platform)}

    def absorbing(op: str, i: int) -> bool:
        own = LOWERINGS[op][i].absorbs is not None and is_available(op, i, platform)
        return own or op in merged

    return Sharing(
        which(absorbing),
        which(lambda op, i: shares_calls(op, i, library)),
        jnp.asarray(_mask(tuple(costs.fused))),
        *map(jnp.float32, (costs.enter, costs.leave, costs.joined, costs.in_loop)),
        loops=computed_in_loops(platform),
        library=None if library is None else library.name,
    )


def computed_in_loops(platform: str) -> jax.Array:
    """Return which operators [operators] cost no more than what their loop reads and writes.

    XLA:GPU computes movements in the kernel that reads them; XLA:CPU often copies.
    """
    return jnp.asarray(_IS_LOOP if platform == "gpu" else _IS_ELEMENTWISE)


def _origin(of: Sharing, f: Nodes, arg_origins: jax.Array) -> jax.Array:
    """Return origins [...] of nodes, given those of their arguments [..., A] (absent: MEMORY)."""
    by_call = of.absorbs[f.op, f.lowering] | is_absorbed(f.op, arg_origins)
    loop = jnp.asarray(_IS_LOOP)[f.op]
    joined, member = is_joined(of, f, arg_origins), is_member(of, f.op, f.lowering)
    goes_on = by_call & (f.op != ops.OPS["max"].code)
    outside = jnp.where(goes_on, CALL, jnp.where(loop & ~by_call, LOOP, MEMORY))
    inside = jnp.where(member | goes_on, KERNEL, LIBRARY)
    own = jnp.where(joined | member, inside, outside)
    # Weight-only values are computed and written beforehand; only broadcasts are left to a call.
    own = jnp.where(f.weight_only & (f.op != ops.OPS["broadcast"].code), MEMORY, own)
    return jnp.where(jnp.asarray(_IS_VIEW)[f.op], arg_origins[..., 0], own).astype(jnp.int32)


def origins(of: Sharing, graph: TensorGraph) -> jax.Array:
    """Return the origin [N] of every node's value."""
    f, args, outputs = graph.nodes, args_of(graph), graph.globals.outputs
    start = jnp.zeros(len(args), jnp.int32)
    again = jnp.where(f.op == ops.OPS["input"].code, f.attrs[:, 0], 0)
    # The result whose value a loop-carried input takes in the next iteration.
    result = outputs[jnp.clip(again - 1, 0, len(outputs) - 1)]

    def step(found: jax.Array) -> jax.Array:
        own = _origin(of, f, found[args])
        return jnp.where((again > 0) & (found[result] >= LIBRARY), LIBRARY, own)

    def unfinished(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(carry[0] != carry[1])

    # The number of steps is the most nodes between one kernel and the next: a few.
    return jax.lax.while_loop(unfinished, lambda c: (c[1], step(c[1])), (start, step(start)))[1]


def origins_with(of: Sharing, new: NewNodes, bound: jax.Array) -> jax.Array:
    """Return origins [2P + Q]: of bound nodes, given as `bound` [2P], and of the nodes a rewrite
    makes.
    """
    made = jnp.zeros(len(new.args), jnp.int32)
    for _ in range(_SWEEPS):
        made = _origin(of, new.nodes, of_args(new.args, jnp.concatenate([bound, made])))
    return jnp.concatenate([bound, made])


def of_args(codes: jax.Array, found: jax.Array) -> jax.Array:
    """Return origins [...] of arguments, from the codes of `NewNodes.args`; MEMORY where absent."""
    return jnp.where(codes >= 0, found[jnp.maximum(codes, 0)], MEMORY)


def is_member(of: Sharing, op: jax.Array, lowering: jax.Array) -> jax.Array:
    """Return whether nodes [...] are kernels of a partition."""
    return of.members[op, lowering]


class Node(Protocol):
    """The fields of nodes [...] that decide whether a partition takes them in."""

    @property
    def op(self) -> jax.Array: ...
    @property
    def lowering(self) -> jax.Array: ...
    @property
    def attrs(self) -> jax.Array: ...
    @property
    def rank(self) -> jax.Array: ...


def can_join(of: Sharing, f: Node) -> jax.Array:
    """Return whether nodes [...] that are not kernels can be part of a library call."""
    calls = None if of.library is None else by_name(of.library).calls()
    return jnp.zeros(f.op.shape, bool) if calls is None else calls.costs.can_join(f)


def is_joined(of: Sharing, f: Node, arg_origins: jax.Array) -> jax.Array:
    """Return whether nodes [...] that are not kernels are computed in a partition."""
    return can_join(of, f) & jnp.any(arg_origins >= LIBRARY, axis=-1)


def is_fused(of: Sharing, op: jax.Array) -> jax.Array:
    """Return whether nodes [...], if joined, are fused into a loop with their neighbours."""
    return of.fused[op]


def enters_call(of: Sharing, f: Node, arg_origins: jax.Array) -> jax.Array:
    """Return whether nodes [...] are kernels that read nothing from a partition."""
    return is_member(of, f.op, f.lowering) & ~jnp.any(arg_origins >= LIBRARY, axis=-1)


def leaves_call(of: Sharing, f: Node, arg_origins: jax.Array) -> jax.Array:
    """Return whether nodes [...] are XLA's calls or reductions that read from a partition."""
    ours = is_member(of, f.op, f.lowering) | is_joined(of, f, arg_origins)
    return jnp.asarray(_IS_STEP)[f.op] & ~ours & jnp.any(arg_origins >= LIBRARY, axis=-1)


def is_absorbed(op: jax.Array, arg_origins: jax.Array) -> jax.Array:
    """Return whether nodes [...] are computed by the call that makes one of their arguments."""
    return jnp.any(_can_absorb(arg_origins), axis=-1) & jnp.asarray(_IS_FOLLOWER)[op]


def _can_absorb(origins: jax.Array) -> jax.Array:
    """Return whether values [...] come from calls that can absorb the next operator."""
    return (origins == CALL) | (origins == KERNEL)


def pays_read(op: jax.Array, arg_origins: jax.Array) -> jax.Array:
    """Return which arguments [..., A] nodes read from memory, provided they are elementwise."""
    absorbed = _can_absorb(arg_origins) & jnp.asarray(_IS_FOLLOWER)[op][..., None]
    return (arg_origins != LOOP) & ~absorbed


def pays_write(op: jax.Array, arg_origins: jax.Array) -> jax.Array:
    """Return which arguments [..., A] are written to memory because the nodes reading them are
    calls.
    """
    return (arg_origins == LOOP) & jnp.asarray(_IS_CALL)[op][..., None]


class Readers(NamedTuple):
    """The number of readers of each value, by what they pay for it."""

    loops: jax.Array  # [N] elementwise nodes that no epilogue can hold
    followers: jax.Array  # [N] elementwise nodes that an epilogue can hold
    calls: jax.Array  # [N]
    members: jax.Array  # [N] kernels of a partition
    leavers: jax.Array  # [N] calls and reductions that are never part of a partition

    def passes(self, slot: jax.Array, origin: jax.Array) -> jax.Array:
        """Return how often the value at `slot` is read or written for its readers if it has this
        origin.
        """
        loops, followers, calls, *_ = (n[slot] for n in self)
        written = (origin == MEMORY) | (origin == LIBRARY)
        passes = [loops + followers, loops]
        return jnp.select([written, _can_absorb(origin)], passes, calls)

    def switches(self, of: Sharing, slot: jax.Array, origin: jax.Array) -> jax.Array:
        """Return the seconds that readers of the value at `slot` take to enter or leave a partition
        if it has this origin, provided that no other argument makes them do so.
        """
        members, leavers = self.members[slot], self.leavers[slot]
        return jnp.where(origin >= LIBRARY, of.leave * leavers, of.enter * members)


def readers(of: Sharing, graph: TensorGraph) -> Readers:
    """Return the readers of every node; weight-only nodes do not count as readers."""
    f, args = graph.nodes, args_of(graph)
    counts = jnp.where(f.weight_only | (f.op == ops.HOLE), 0, 1)

    def count(reads: np.ndarray) -> jax.Array:
        here = jnp.where(jnp.asarray(reads)[f.op], counts, 0)
        return jnp.zeros(len(args), jnp.int32).at[args].add(here[:, None])

    plain, followers = _IS_ELEMENTWISE & ~_IS_FOLLOWER, _IS_ELEMENTWISE & _IS_FOLLOWER
    member = is_member(of, f.op, f.lowering)
    never = jnp.asarray(_IS_STEP)[f.op] & ~member & ~can_join(of, f)
    zeros = jnp.zeros(len(args), jnp.int32)
    members, leavers = (
        zeros.at[args].add(jnp.where(which, counts, 0)[:, None]) for which in (member, never)
    )
    return Readers(count(plain), count(followers), count(_IS_CALL), members, leavers)
