"""`Sketch`: a graph to which random nodes of any operator are added one by one.

All random operators are drawn by it: rules are verified on patterns that it fills in
(`verify.instances`), and tests draw single nodes and whole graphs.
"""

from __future__ import annotations

import math
from typing import Any

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, infer, pack_attrs
from xrl_jax.language.rule import Pattern, Var
from xrl_jax.verify.samplers.base import Drawing, Rejected, Want
from xrl_jax.verify.samplers.kinds import attributes
from xrl_jax.verify.samplers.table import SAMPLERS

MAX_ELEMENTS = 4096


def fits(shape: tuple[int, ...], want: Want) -> bool:
    if want is None:
        return True
    return len(shape) == len(want) and all(
        w is None or w == s for s, w in zip(shape, want, strict=True)
    )


class Sketch(Drawing):
    """A graph that is being drawn; unbound variables become inputs."""

    def node(self, op: str, *args: int | None, n_args: int | None = None) -> int:
        """Add a random node of an operator; return its index in `nodes`.

        Args:
          args: indices of its first arguments; for None, and after the last one, arguments are
            drawn.
          n_args: number of arguments; by default a random number that the operator accepts.

        Raises:
          Rejected: this draw does not fit; another may.
        """
        least, most = ops.OPS[op].arity
        n = self.number(max(least, len(args)), most) if n_args is None else n_args
        names = [f"?{i}" for i in range(n)]
        self.bound = {v: a for v, a in zip(names, args, strict=False) if a is not None}
        return self.make(Pattern(op, tuple(map(Var, names))), None, self._dtype_of(op))

    def _dtype_of(self, op: str) -> str:
        """Return a dtype that a node may have, given its bound arguments."""
        spec = ops.OPS[op]
        if spec.dtype == "bool":
            return "bool"
        if spec.dtype in ("attr", "given"):
            return self.dtype_among(ops.TAKES[spec.gives])
        giver = 1 if spec.dtype == "arg1" else 0
        if f"?{giver}" in self.bound:
            return self.nodes[self.bound[f"?{giver}"]].dtype
        return self.dtype_among(spec.dtypes_of(giver))

    def make(self, p: Pattern | Var, want: Want, dtype: str) -> int:
        if isinstance(p, Var):
            return self._variable(p.name, want, dtype)
        spec, known = ops.OPS[p.op], self.forced(p)
        if spec.shape == "given":
            shape = self.shape() if want is None else self.fill(want)
            packed = pack_attrs(p.op, attributes(self, p.op, len(shape), dtype) | known)
            return self.finish(p, Node(p.op, attrs=packed, shape=shape, dtype=dtype))
        args, attrs = SAMPLERS[spec.shape](self, p, want, dtype, known)
        packed = pack_attrs(p.op, attrs | known)
        arg_nodes = [self.nodes[a] for a in args]
        typed = infer(p.op, packed, arg_nodes)
        if typed is None or not spec.takes_dtypes([n.dtype for n in arg_nodes]):
            raise Rejected
        shape, got = typed
        if len(shape) > ops.MAX_RANK or math.prod(shape) > MAX_ELEMENTS:
            raise Rejected
        if not fits(shape, want) or got != dtype:
            raise Rejected
        return self.finish(p, Node(p.op, tuple(args), packed, shape=shape, dtype=got))

    def _variable(self, name: str, want: Want, dtype: str) -> int:
        if name not in self.bound:
            self.bound[name] = self.leaf(name, want, dtype)
        elif not fits(self.nodes[self.bound[name]].shape, want):
            raise Rejected
        return self.bound[name]

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    # --- for subclasses to override ---

    def forced(self, p: Pattern) -> dict[str, Any]:
        """Return attributes that are fixed instead of drawn, by field."""
        return {}

    def leaf(self, name: str, want: Want, dtype: str) -> int:
        """Add a node for a variable; return its index."""
        shape = self.shape() if want is None else self.fill(want)
        if math.prod(shape) > MAX_ELEMENTS:
            raise Rejected
        return self.add(Node("input", shape=shape, dtype=dtype, ref=len(self.nodes)))

    def finish(self, p: Pattern, node: Node) -> int:
        """Add the node drawn for a pattern; return its index."""
        return self.add(node)
