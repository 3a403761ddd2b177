"""Random nodes of every operator in the table, with fitting arguments.

Their dtypes, ranks and sizes include more than those on which rules are verified.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node
from xrl_jax.verify.samplers.base import Rejected
from xrl_jax.verify.samplers.sketch import Sketch

_DTYPES = (
    *("float32",) * 10,
    *("float16", "bfloat16", "float64") * 3,
    *("int32", "int8", "uint8", "uint32", "int64", "int16"),
    *("complex64", "complex128", "bool"),
)


class _Any(Sketch):
    dtypes = _DTYPES
    features = (1, 1, 2, 2, 3, 4, 17)

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng, zero=rng.random() < 0.2)
        self.most = self.number(3, ops.MAX_RANK)


@dataclass(frozen=True)
class Sample:
    """A node and its arguments."""

    node: Node
    args: tuple[Node, ...]

    def values(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Draw arguments, rounded to their dtypes so that float64 gets the same values."""
        found = []
        for arg in self.args:
            dtype = jnp.dtype(arg.dtype)
            whole = dtype.kind in "iu"
            found.append(rng.integers(0, 9, arg.shape) if whole else rng.normal(size=arg.shape))
            found[-1] = np.asarray(found[-1], dtype)
        return found


def random_node(op: str, rng: np.random.Generator) -> Sample:
    """Draw a random node of an operator."""
    while True:
        drawing = _Any(rng)
        try:
            node = drawing.nodes[drawing.node(op)]
        except Rejected:
            continue
        args = tuple(drawing.nodes[a] for a in node.args)
        return Sample(replace(node, args=tuple(range(len(args)))), args)
