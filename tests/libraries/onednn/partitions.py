"""Random partitions, random inputs for them, and their outputs by the library and by XLA."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.libraries.onednn import kernels
from xrl_jax.libraries.onednn.spec import (
    RELU,
    Binary,
    Clip,
    Concat,
    Conv,
    Dot,
    Epilogue,
    Instruction,
    Op,
    Partition,
    Pool,
    Reshape,
    Shape,
)

CLIPS = (RELU, Clip(0.0, 6.0), Clip(-1.0, 1.0), Clip(high=1.0), Clip(low=-1.0), Clip(1.0, 2.0))
FEATURES = (1, 3, 5, 8, 13, 16, 24, 32, 40)
OUTS = (1, 3, 8, 13, 16)


@dataclass
class Maker:
    """Builder of a partition; the next operator takes the last value."""

    rng: np.random.Generator
    inputs: list[Shape] = field(default_factory=list)
    packed: list[bool] = field(default_factory=list)
    code: list[tuple[Op, list[tuple[str, int]], Shape]] = field(default_factory=list)
    last: tuple[str, int] = ("input", 0)
    shape: Shape = ()

    def some(self, choices):
        return choices[int(self.rng.integers(len(choices)))]

    def input(self, shape: Shape, *, packed: bool = False) -> tuple[str, int]:
        self.inputs.append(shape)
        self.packed.append(packed)
        return "input", len(self.inputs) - 1

    def append(self, op: Op, args: list[tuple[str, int]], shape: Shape) -> None:
        self.code.append((op, args, shape))
        self.last, self.shape = ("made", len(self.code) - 1), shape

    def epilogue(self, shape: Shape, bias: Shape) -> tuple[Epilogue, list[tuple[str, int]]]:
        has_bias, has_addend = (bool(self.rng.integers(2)) for _ in range(2))
        more = [self.input(bias)] * has_bias
        more += [self.input(shape)] * has_addend
        clip = None if self.rng.integers(4) == 0 else self.some(CLIPS)
        return Epilogue(has_bias, has_addend, clip), more

    # --- operators ---

    def conv(self) -> None:
        n, *sizes, c = self.shape
        kind = int(self.rng.integers(4))
        groups = {0: c, 1: next(g for g in (4, 2, 3, 1) if c % g == 0)}.get(kind, 1)
        outs = c if kind == 0 else groups * self.some(OUTS)
        window = [1, 1] if kind == 2 else [min(self.some((1, 3, 3, 5)), s) for s in sizes]
        dilation = [
            self.some((1, 2)) if (w - 1) * 2 < s else 1 for w, s in zip(window, sizes, strict=True)
        ]
        stride = [self.some((1, 1, 2)) for _ in sizes]
        padding = [(self.some(range(w)), self.some(range(w))) for w in window]
        made = [
            (s + low + high - (w - 1) * d - 1) // t + 1
            for s, (low, high), w, d, t in zip(
                sizes, padding, window, dilation, stride, strict=True
            )
        ]
        shape = (n, *made, outs)
        w = self.input((*window, c // groups, outs), packed=True)
        after, more = self.epilogue(shape, (outs,))
        op = Conv(tuple(stride), tuple(padding), tuple(dilation), groups, after)
        self.append(op, [self.last, w, *more], shape)

    def dot(self) -> None:
        m, k = int(np.prod(self.shape[:-1])), self.shape[-1]
        if len(self.shape) > 2:
            self.append(Reshape((m, k)), [self.last], (m, k))
        n = self.some((*FEATURES, 200))
        transposed = bool(self.rng.integers(2))
        w = self.input((n, k) if transposed else (k, n), packed=True)
        after, more = self.epilogue((m, n), (1, n))
        self.append(Dot(False, transposed, after), [self.last, w, *more], (m, n))

    def pool(self) -> None:
        sizes = self.shape[1:3]
        window = [min(self.some((2, 3)), s) for s in sizes]
        stride = [self.some((1, 2)) for _ in sizes]
        padding = [(self.some(range(w)), self.some(range(w))) for w in window]
        made = [
            (s + low + high - w) // t + 1
            for s, (low, high), w, t in zip(sizes, padding, window, stride, strict=True)
        ]
        kind = self.some(("max", "max", "sum"))
        scale = 1 / (window[0] * window[1]) if kind == "sum" else 1.0
        edges = ((0, 0), *padding, (0, 0))
        op = Pool(kind, (1, *window, 1), (1, *stride, 1), edges, scale)
        self.append(op, [self.last], (self.shape[0], *made, self.shape[3]))

    def binary(self) -> None:
        shape = self.some((self.shape, (1,) * (len(self.shape) - 1) + self.shape[-1:]))
        op = Binary(self.some(("max", "min", "add", "mul")))
        self.append(op, [self.last, self.input(shape)], self.shape)

    def clip(self) -> None:
        self.append(self.some(CLIPS), [self.last], self.shape)

    def concat(self) -> None:
        shape = (*self.shape[:-1], 2 * self.shape[-1])
        self.append(Concat(len(shape) - 1), [self.last, self.last], shape)

    def partition(self, outputs: list[tuple[str, int]]) -> Partition:
        n = len(self.inputs)
        number = {"input": 0, "made": n}
        code = tuple(
            Instruction(op, tuple(number[kind] + i for kind, i in args), shape)
            for op, args, shape in self.code
        )
        found = tuple(number[kind] + i for kind, i in outputs)
        return Partition(tuple(self.inputs), tuple(self.packed), code, found)


def a_partition(rng: np.random.Generator) -> Partition:
    """Return a chain of up to five operators; the last value is returned, and maybe another."""
    m = Maker(rng)
    m.shape = (m.some((1, 1, 2)), *(int(n) for n in rng.integers(1, 15, 2)), m.some(FEATURES))
    m.input(m.shape)
    for _ in range(int(rng.integers(1, 6))):
        if len(m.shape) == 4 and rng.integers(8):
            m.some((m.conv, m.conv, m.pool, m.binary, m.clip, m.concat))()
        else:
            m.some((m.dot, m.dot, m.binary, m.clip))()
    outputs = [m.last]
    if rng.integers(2):
        outputs.append(("made", int(rng.integers(len(m.code)))))
    return m.partition(outputs)


def numbers(part: Partition, rng: np.random.Generator) -> list[np.ndarray]:
    """Return finite random inputs."""
    made = []
    for shape, packed in zip(part.inputs, part.packed, strict=True):
        x = rng.standard_normal(shape).astype(np.float32)
        made.append(x / np.float32(np.sqrt(np.prod(shape[:-1]))) if packed else x)
    return made


def called(part: Partition, *inputs: np.ndarray) -> list[np.ndarray]:
    """Return the outputs by the library."""

    def fn(*xs):
        each = enumerate(zip(xs, part.packed, strict=True))
        return kernels.run(part, *(kernels.pack(part, i, x) if p else x for i, (x, p) in each))

    return [np.asarray(y) for y in jax.jit(fn)(*map(jnp.asarray, inputs))]


def by_xla(part: Partition, *inputs: np.ndarray) -> list[np.ndarray]:
    """Return the outputs by lax code. The maxima of windows use `lax.max`, because XLA's own
    pooling drops NaN in some shapes.
    """

    def fn(*xs):
        values = list(xs)
        for i in part.code:
            args = [values[a] for a in i.args]
            if isinstance(i.op, Pool) and i.op.kind == "max":
                values.append(_largest(i.op, args[0]))
            else:
                values.append(i.op(*args))
        return [values[o] for o in part.outputs]

    return [np.asarray(y) for y in jax.jit(fn)(*map(jnp.asarray, inputs))]


def _largest(op: Pool, x: jax.Array) -> jax.Array:
    x = jnp.pad(x, op.padding, constant_values=-jnp.inf)
    made = [(n - w) // s + 1 for n, w, s in zip(x.shape, op.window, op.stride, strict=True)]
    parts = [
        lax.slice(
            x,
            start,
            [a + (n - 1) * s + 1 for a, n, s in zip(start, made, op.stride, strict=True)],
            op.stride,
        )
        for start in product(*map(range, op.window))
    ]
    return functools.reduce(lax.max, parts)
