"""The interpreter that runs the `bytecode` of all rules, on many bindings at once (jitted)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Nodes, pack_attrs
from xrl_jax.language.bytecode import CODE, LITERAL, OPCODES, K, R
from xrl_jax.runtime.engine_jit import wide

T = TypeVar("T")
_NO_VALUE = 0x7FC00001  # bits of a float that no literal equals


def features(nodes: Nodes) -> jax.Array:
    """Return the features [N, F] int32 of nodes that programs may read; see `bytecode.FEATURES`."""
    # Only a scalar constant has a value that conditions may rely on.
    known = (nodes.op == ops.OPS["const"].code) & (nodes.ref < 0)
    value = jnp.where(nodes.value == 0, 0.0, nodes.value)  # normalises -0.0 to 0.0
    bits = jnp.where(known, jax.lax.bitcast_convert_type(value, jnp.int32), _NO_VALUE)
    columns = (
        nodes.rank,
        nodes.dtype,
        nodes.op,
        nodes.lowering,
        nodes.weight_only.astype(jnp.int32),
        bits,
    )
    return jnp.concatenate([nodes.attrs, nodes.shape, *(c[:, None] for c in columns)], axis=1)


def _elementwise(x: jax.Array, y: jax.Array, op: jax.Array, imm: jax.Array) -> jax.Array:
    """Compute all lane-wise opcodes that cost next to nothing, and select the result of `op`."""

    def number(p: jax.Array) -> jax.Array:
        return p.astype(jnp.int32)

    results = {
        "lane": jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), x.shape),
        "+": x + y,
        "-": x - y,
        "*": x * y,
        "min": jnp.minimum(x, y),
        "max": jnp.maximum(x, y),
        "=": number(x == y),
        "/=": number(x != y),
        "<": number(x < y),
        "<=": number(x <= y),
        ">": number(x > y),
        ">=": number(x >= y),
        "and": number((x != 0) & (y != 0)),
        "or": number((x != 0) | (y != 0)),
        "bit": (x >> jnp.clip(y, 0, 31)) & 1,
        "shl": x << jnp.clip(y, 0, 30),
        "not": number(x == 0),
    }
    chosen = jnp.broadcast_to(imm, x.shape)
    for name, value in results.items():
        chosen = jnp.where(op == CODE[name], value, chosen)
    return chosen


def _shifted(x: jax.Array, by: jax.Array) -> jax.Array:
    """Shift lanes: lane i of the result is lane i + by [C, 1]."""
    return _gather(x, jnp.arange(K) + by)


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, jnp.clip(index, 0, x.shape[1] - 1), axis=1)


def _layout_code(x: jax.Array, table: jax.Array) -> jax.Array:
    hit = jnp.all(table[None, :, :4] == x[:, None, :4], axis=2)
    return jnp.where(jnp.any(hit, axis=1), jnp.argmax(hit, axis=1), -1)


def _execute(
    registers: jax.Array, instruction: jax.Array, features: jax.Array, bound: jax.Array
) -> jax.Array:
    """Return the result [C, K] of an instruction [C, 6] for each binding.

    Of the costly opcodes, only those that occur in `instruction` are computed.
    """
    op, a, b, c, imm, _ = jnp.moveaxis(instruction, 1, 0)[..., None]
    lane = jnp.arange(K, dtype=jnp.int32)
    head = lane < R
    layouts = jnp.asarray(np.pad(np.array(ops.LAYOUTS, np.int32), ((0, 0), (0, K - 4))))
    defaults = jnp.asarray([pack_attrs(name, {}) for name in ops.OPS], jnp.int32)
    powers = np.array([8**i for i in range(R)] + [0] * (K - R), np.int32)

    def operand(r: jax.Array) -> jax.Array:
        value = registers[jnp.maximum(r[:, 0], 0), jnp.arange(len(r))]
        return jnp.where(r == LITERAL, imm, value)

    x, y = operand(a), operand(b)

    def full(v: jax.Array) -> jax.Array:
        return jnp.broadcast_to(v[:, None].astype(jnp.int32), x.shape)

    def division() -> jax.Array:
        safe = jnp.where(y == 0, 1, y)
        return jnp.where(op == CODE["//"], x // safe, x % safe)

    def load() -> jax.Array:
        slot = jnp.take_along_axis(bound, a, axis=1)
        column = jnp.minimum(b + jnp.where(c == 1, 0, lane), features.shape[1] - 1)
        return jnp.where((c == 1) | (lane < c), features[slot, column], imm)

    def reduction() -> jax.Array:
        truth = x != 0
        every = [jnp.sum(x, 1), jnp.prod(x, 1), jnp.all(truth, 1), jnp.any(truth, 1)]
        return full(jnp.select([op[:, 0] == CODE["sum"] + i for i in range(4)], every))

    def invert() -> jax.Array:
        perm = jnp.where(head, x, lane)
        return jnp.argmax(perm[:, None, :] == lane[:, None], axis=2).astype(jnp.int32)

    def pack() -> jax.Array:
        before_end = head & (jnp.cumsum((x < 0) & head, axis=1) == 0)
        return full(jnp.sum(jnp.where(before_end, (x + 1) * powers, 0), axis=1))

    def put() -> jax.Array:
        return jnp.where((lane >= imm) & (lane < imm + c), _shifted(y, -imm), x)

    costly = {
        ("load",): load,
        ("if",): lambda: jnp.where(x != 0, y, operand(c)),
        ("//", "%"): division,
        ("defaults",): lambda: defaults[imm[:, 0]],
        ("at",): lambda: full(_gather(x, y[:, :1])[:, 0]),
        ("gather",): lambda: _gather(x, y),
        ("invert",): invert,
        ("sum", "prod", "all", "any"): reduction,
        ("unpack",): lambda: jnp.where(head, (x // np.maximum(powers, 1)) % 8 - 1, -1),
        ("pack",): pack,
        ("layout",): lambda: full(_layout_code(x, layouts)),
        ("axis-perm",): lambda: layouts[jnp.clip(x[:, 0], 0, len(layouts) - 1)],
        ("put",): put,
        ("cumsum",): lambda: jnp.cumsum(x, axis=1),
    }
    family = np.full(len(OPCODES), -1, np.int32)
    for i, names in enumerate(costly):
        family[[CODE[n] for n in names]] = i
    kind = jnp.asarray(family)[op]
    branches = [
        lambda old, i=i, compute=compute: jnp.where(kind == i, compute(), old)
        for i, compute in enumerate(costly.values())
    ]
    return apply_present(kind[:, 0], branches, _elementwise(x, y, op, imm))


def apply_present(kind: jax.Array, branches: Sequence[Callable[[T], T]], start: T) -> T:
    """Apply to `start`, in order, those of up to 32 branches whose index is in `kind` [C].

    -1 in `kind` stands for no branch. A branch must leave the elements of other kinds unchanged.

    A loop over the branches in use takes XLA:CPU less time than a test for each branch. Where steps
    are wide (see `engine_jit.wide`), all branches are computed.
    """
    if wide():
        for branch in branches:
            start = branch(start)
        return start
    bits = jnp.where(kind >= 0, jnp.uint32(1) << kind.astype(jnp.uint32), jnp.uint32(0))
    wanted = jax.lax.reduce(bits, jnp.uint32(0), jax.lax.bitwise_or, (0,))

    def one(carry: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        wanted, value = carry
        lowest = jax.lax.population_count((wanted & -wanted) - 1).astype(jnp.int32)
        return wanted & (wanted - 1), jax.lax.switch(lowest, branches, value)

    return jax.lax.while_loop(lambda c: c[0] != 0, one, (wanted, start))[1]


@jax.jit  # traced once for all callers
def run(
    code: jax.Array,
    length: jax.Array,
    program: jax.Array,
    features: jax.Array,
    bound: jax.Array,
    present: jax.Array,
    registers: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Run a program on each of many bindings, all at the same instruction.

    Args:
      code: [V, I, 6] int32, columns opcode, a, b, c, imm, and whether the result is checked.
      length: [V], number of instructions.
      program: [C] int32, which of the V programs to run.
      features: [N, F] int32.
      bound: [C, 2P] int32, slots.
      present: [C] bool, bindings to evaluate.
      registers: [I, C, K] int32, a buffer to write to; its content does not matter (clearing it
        takes longer than most programs).

    Returns:
      Registers [I, C, K] int32, and [C] bool, where the conditions hold. Registers of bindings
      whose conditions do not hold are meaningless.
    """
    idle = jnp.zeros(code.shape[2], jnp.int32)
    n_steps = length[program]
    # Copied before the loop, so that each step reads its instructions contiguously.
    mine = jax.lax.optimization_barrier(jnp.swapaxes(code[program], 0, 1))

    def going(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        i, _, holds = carry
        return jnp.any(holds & (i < n_steps))

    def step(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        i, registers, holds = carry
        instruction = jnp.where(holds[:, None], mine[i], idle)
        result = _execute(registers, instruction, features, bound)
        holds &= (instruction[:, 5] == 0) | jnp.all(result != 0, axis=1)
        return i + 1, registers.at[i].set(result), holds

    return jax.lax.while_loop(going, step, (jnp.int32(0), registers, present))[1:]
