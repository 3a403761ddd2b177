"""The two hashes of a tensor graph.

`identity` covers everything that decides what the graph computes and how: operators, attributes,
lowerings, shapes, dtypes and constants; it is equal for graphs that differ in node order only. It
runs inside jit, on graphs under search. `timing_key` covers everything that decides the running
time: the same without the values of weights and constants, but with compile options, device and
versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, TensorGraph, args_of

_LANES = 2  # two 32-bit lanes make a 64-bit hash; JAX has no 64-bit integers by default
_SEEDS = np.array([0x9E3779B9, 0x85EBCA6B], np.uint32)


def _mix(h: jax.Array) -> jax.Array:
    """Apply a bijective finaliser on uint32: shifts and odd multipliers, different per lane."""
    m1 = jnp.asarray(np.array([0x7FEB352D, 0x846CA68B], np.uint32))
    m2 = jnp.asarray(np.array([0x9E485565, 0xC2B2AE35], np.uint32))
    h = (h ^ (h >> 16)) * m1
    h = (h ^ (h >> 15)) * m2
    return h ^ (h >> 16)


def fold_words(words: jax.Array) -> jax.Array:
    """Hash [..., W] uint32 words to [..., 2], by a fixed scan over the words."""
    h = jnp.broadcast_to(jnp.asarray(_SEEDS), (*words.shape[:-1], _LANES))
    for i in range(words.shape[-1]):
        h = _mix(h * jnp.uint32(31) + words[..., i, None] + jnp.uint32(i + 1))
    return h


def dot_words(words: jax.Array) -> jax.Array:
    """Hash [M, W] uint32 words to [M, 2]: mix each word, then multiply by a matrix of odd numbers.

    Unlike `fold_words` it is computed only once however many consumers it has: XLA duplicates cheap
    arithmetic for every consumer, but never a matrix product.
    """
    position = np.arange(1, words.shape[1] + 1, dtype=np.uint32)
    odd = fold_words(jnp.asarray(position)[:, None]) | 1
    mixed = _mix((words + position * np.uint32(0x632BE5AB))[..., None])[..., 0]
    return jnp.dot(mixed, odd, preferred_element_type=jnp.uint32)


def local_hash(graph: TensorGraph, digests: jax.Array) -> jax.Array:
    """Return the hash [N, 2] of each node without its arguments.

    Args:
      digests: [D, 2] uint32, content of the bindings that `ref` indexes; see `Program.digests`.
    """
    f = graph.nodes
    digest = jnp.where(f.ref[:, None] >= 0, digests[jnp.clip(f.ref, 0, len(digests) - 1)], 0)
    bits = jax.lax.bitcast_convert_type(f.value, jnp.uint32)
    columns = [f.op, f.lowering, f.rank, f.dtype]
    words = [c.astype(jnp.uint32)[:, None] for c in columns]
    words += [f.attrs.astype(jnp.uint32), f.shape.astype(jnp.uint32), bits[:, None], digest]
    return fold_words(jnp.concatenate(words, axis=1))


def node_hashes(graph: TensorGraph, digests: jax.Array) -> jax.Array:
    """Return the hash [N, 2] of each node with all it depends on (Merkle, in topological order)."""
    local = local_hash(graph, digests)
    table = args_of(graph)
    order = jnp.argsort(graph.globals.depth)
    slot = jnp.arange(1, ops.MAX_ARGS + 1, dtype=jnp.uint32)[:, None]

    def visit(hashes: jax.Array, n: jax.Array) -> tuple[jax.Array, None]:
        args = table[n]
        seen = jnp.where(args[:, None] > 0, _mix(hashes[args] + slot * jnp.uint32(0x632BE5AB)), 0)
        h = _mix(local[n] ^ jnp.sum(seen, axis=0, dtype=jnp.uint32))
        return hashes.at[n].set(jnp.where(graph.nodes.op[n] == ops.HOLE, 0, h)), None

    return jax.lax.scan(visit, jnp.zeros_like(local), order)[0]


def identity(graph: TensorGraph, digests: jax.Array) -> jax.Array:
    """Return the identity hash [2] uint32 of outputs in order and pinned nodes in any order."""
    hashes = node_hashes(graph, digests)
    out = graph.globals.outputs
    position = jnp.arange(1, len(out) + 1, dtype=jnp.uint32)[:, None]
    seen = _mix(hashes[jnp.maximum(out, 0)] + position * jnp.uint32(0x27D4EB2F))
    total = jnp.sum(jnp.where(out[:, None] > 0, seen, 0), axis=0, dtype=jnp.uint32)
    code = graph.nodes.op
    opaque = (code == ops.OPS["opaque"].code) | (code == ops.OPS["call"].code)
    pinned = (opaque & (graph.nodes.attrs[:, 0] == 1))[:, None]
    return _mix(total + jnp.sum(jnp.where(pinned, hashes, 0), axis=0, dtype=jnp.uint32))


def timing_key(nodes: Sequence[Node], outputs: Sequence[int], *, extra: Sequence[str] = ()) -> str:
    """Return a hex key of what decides running time: structure, types, lowerings and `extra`.

    Args:
      nodes, outputs: a graph or region on the host, in topological order.
      extra: further text that matters, such as compile options, device and versions.
    """
    lines = [
        f"{n.op}.{n.lowering}{n.args}{n.attrs}{n.shape}{n.dtype}"
        + (f"#{n.ref}" if n.op in ("opaque", "call") else "")
        for n in nodes
    ]
    text = "\n".join([*lines, str(tuple(outputs)), *extra])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
