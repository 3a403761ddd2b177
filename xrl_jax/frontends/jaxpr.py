"""`from_jax`, which converts a JAX function to a Program.

The function is traced to a jaxpr. Its calls are inlined, control flow becomes calls of bodies,
equations that the op table can express become native nodes (`jaxpr_ops`), and every other equation
becomes an opaque node that keeps the equation. Every function that JAX can trace is accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from xrl_jax.frontends.jaxpr_ops import TRANSLATIONS, Site
from xrl_jax.frontends.trace import TraceError, trace_call
from xrl_jax.graph import ops
from xrl_jax.graph.bindings import CONTROL_FLOW, Array, Call, Equation, Input
from xrl_jax.graph.equations import JITS, is_plain
from xrl_jax.graph.graph import Node, infer, pack_attrs
from xrl_jax.program.host import (
    Bindings,
    HostGraph,
    HostProgram,
    append_holder,
    assemble,
    dtype_name,
    exact_float32,
    live,
    source_key,
    struct,
)
from xrl_jax.program.program import Program
from xrl_jax.runtime.settings import own_settings
from xrl_jax.transform.chains import with_loop_carried
from xrl_jax.transform.fold import fold_host

__all__ = ["TraceError", "from_jax"]

# A jit called more than once becomes a body if it has at least this many equations, including those
# of the calls in it. Smaller ones (softmax, gelu, variance; mostly JAX's own helpers) are inlined,
# so that rules match across their boundary.
MIN_SHARED_EQUATIONS = 16

# Primitives that are equivalent to their inner jaxpr as long as no derivatives are taken.
_INLINED = (
    *JITS,
    "closed_call",
    "core_call",
    "core_closed_call",
    "call",
    "named_call",
    "remat",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_vmap_call",
)
_JAXPR_NAMES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")


def from_jax(
    fn: Callable[..., Any],
    *example_args: Any,
    weights: Sequence[int] | int = (),
    fold: bool = True,
    **example_kwargs: Any,
) -> Program:
    """Trace a JAX function into a Program.

    Args:
      fn: a function of pytrees. Arrays it closes over count as weights.
      example_args: pytrees of arrays, `jax.ShapeDtypeStruct`s and Python numbers; any other leaf
        (a string, a function) is static, i.e. part of the arguments' structure. So is a number if
        `fn` cannot be traced without its value.
      weights: positions of the positional arguments that stay the same between calls.
      fold: whether jits called more than once and equal repeated regions become bodies; if False,
        everything except control flow is in the main graph.
      example_kwargs: keyword arguments, like `example_args`.

    Raises:
      TraceError: `fn` cannot be traced with these arguments.
      ValueError: a position in `weights` is out of range.

    >>> program = xrl_jax.from_jax(lambda x: jnp.tanh(x) + 1.0, jnp.ones(3))
    >>> print(program)
    graph main {
      %1: float32[3] = input() ref=@0  # argument 0
      %2: float32[] = const() value=1.0
      %3: float32[3] = tanh(%1)
      %4: float32[3] = add(%3, %2)
      return %4
    }
    """
    constant = _weight_positions(weights, len(example_args))
    closed, out_tree, leaves, in_tree = trace_call(fn, example_args, example_kwargs)
    args, _ = jax.tree.unflatten(in_tree, leaves)
    flags = [i in constant for i, a in enumerate(args) for _ in jax.tree.leaves(a)]
    flags += [False] * (len(leaves) - len(flags))  # keyword arguments
    with own_settings():
        host = _Tracing(closed, share=fold).program()
        if fold:
            host = with_loop_carried(fold_host(host))
        weak = [i for i, a in enumerate(closed.out_avals) if getattr(a, "weak_type", False)]
        return assemble(host, flags, in_tree=in_tree, out_tree=out_tree, fn=fn, weak_outputs=weak)


def _weight_positions(weights: Sequence[int] | int, n_args: int) -> set[int]:
    positions = tuple(weights) if isinstance(weights, Iterable) else (weights,)
    for w in positions:
        if isinstance(w, bool) or not isinstance(w, (int, np.integer)):
            raise ValueError(
                f"weights={weights!r}: give positions of arguments: 0 or (0, 2), or () for none"
            )
        if not -n_args <= w < n_args:
            raise ValueError(
                f"weights={positions!r}: there is no positional argument {w}, the function is "
                f"called with {n_args}"
            )
    return {w % n_args for w in positions}


def _unclosed(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return the jaxpr and the constants of a closed or an open jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _inner(equation: Any) -> Any | None:
    """Return the jaxpr to which an equation is equivalent; None where there is none."""
    if equation.primitive.name not in _INLINED:
        return None
    params = equation.params
    if not is_plain(params):
        return None
    for key in _JAXPR_NAMES:
        inner, _ = _unclosed(params.get(key))
        if hasattr(inner, "eqns") and len(inner.invars) == len(equation.invars):
            return params[key] if len(inner.outvars) == len(equation.outvars) else None
    return None


class _Tracing:
    """State shared by the graphs of one function: bindings, bodies, number of calls of each jit."""

    def __init__(self, closed: Any, *, share: bool) -> None:
        self.closed = closed
        self.bindings = Bindings()
        self.bodies: list[HostGraph] = []
        self.body_of: dict[Any, int] = {}
        self.inferred: dict[Any, Any] = {}  # cache by op, attributes, argument types
        self.sites: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self._count(closed.jaxpr)
        self.share = share

    def program(self) -> HostProgram:
        main = self.graph(self.closed, "main")
        return HostProgram(main, tuple(self.bodies), tuple(self.bindings.rows))

    def graph(self, closed: Any, name: str) -> HostGraph:
        """Return the graph of a closed jaxpr."""
        jaxpr, consts = _unclosed(closed)
        builder = _GraphBuilder(self)
        args = [builder.input(i, v.aval) for i, v in enumerate(jaxpr.invars)]
        outputs = builder.run(jaxpr, consts, args)
        in_avals = tuple(struct(v.aval) for v in jaxpr.invars)
        return HostGraph(tuple(builder.nodes), tuple(outputs), in_avals, name)

    def body(self, closed: Any, name: str) -> int:
        """Return the index of the body of a closed jaxpr; jaxprs with equal graphs share a body."""
        jaxpr, consts = _unclosed(closed)
        key = (id(jaxpr), *(id(c) for c in consts))
        if key not in self.body_of:
            graph = live(self.graph(closed, name))
            if graph not in self.bodies:
                self.bodies.append(graph)
            self.body_of[key] = self.bodies.index(graph)
        return self.body_of[key]

    def is_shared(self, inner: Any) -> bool:
        """Return whether a call of this jaxpr stays a call, i.e. is not inlined."""
        jaxpr, _ = _unclosed(inner)
        return (
            self.share
            and not jaxpr.effects
            and self.sites[id(jaxpr)] > 1
            and self.sizes[id(jaxpr)] >= MIN_SHARED_EQUATIONS
        )

    def _count(self, jaxpr: Any) -> int:
        """Return the number of equations, with those of inner calls; also counts call sites."""
        if id(jaxpr) in self.sizes:
            return self.sizes[id(jaxpr)]
        size = 0
        for equation in jaxpr.eqns:
            inner = _inner(equation)
            nested = [inner] if inner is not None else _control_flow_jaxprs(equation)
            if not nested:
                size += 1
            for each in nested:
                self.sites[id(_unclosed(each)[0])] += 1
                size += self._count(_unclosed(each)[0])
        self.sizes[id(jaxpr)] = size
        return size


def _control_flow_jaxprs(equation: Any) -> list[Any]:
    """Return the jaxprs of scan, while or cond in the order of `Call.bodies`; [] for others."""
    values = [equation.params[k] for k in CONTROL_FLOW.get(equation.primitive.name, ())]
    return [j for v in values for j in (v if isinstance(v, (tuple, list)) else (v,))]


class _GraphBuilder:
    """One graph under construction; implements `jaxpr_ops.Emit`."""

    def __init__(self, tracing: _Tracing) -> None:
        self.tracing = tracing
        self.nodes: list[Node] = []
        self.sources: dict[Any, int] = {}
        self.pinned: int | None = None  # the last node with effects

    def source(self, node: Node) -> int:
        key = source_key(node)
        if key not in self.sources:
            self.sources[key] = len(self.nodes)
            self.nodes.append(node)
        return self.sources[key]

    def shape(self, index: int) -> tuple[int, ...]:
        return self.nodes[index].shape

    def node(self, op: str, args: Sequence[int], **attrs: int | Sequence[int]) -> int | None:
        operands = [self.nodes[a] for a in args]
        vector = pack_attrs(op, attrs)
        if any(not -(2**31) <= a < 2**31 for a in vector):
            return None
        key = (op, vector, tuple((n.shape, n.dtype) for n in operands))
        if key not in self.tracing.inferred:
            self.tracing.inferred[key] = infer(op, vector, operands)
        inferred = self.tracing.inferred[key]
        if inferred is None:
            return None
        shape, dtype = inferred
        self.nodes.append(Node(op, tuple(args), vector, shape=shape, dtype=dtype))
        return len(self.nodes) - 1

    def input(self, position: int, aval: Any) -> int:
        ref = self.tracing.bindings.add(Input(position))
        shape, dtype = tuple(getattr(aval, "shape", ())), dtype_name(getattr(aval, "dtype", None))
        return self.source(Node("input", shape=shape, dtype=dtype, ref=ref))

    def array(self, value: Any) -> int:
        """Return a source for a constant: `const` for a scalar, `array` for any other shape.

        A scalar that float32 represents exactly is stored in the node, otherwise in a binding.
        """
        shape, dtype = tuple(np.shape(value)), dtype_name(getattr(value, "dtype", None))
        if shape == () and dtype != "extended":
            value = np.asarray(value)
            exact = exact_float32(value)
            if exact is not None:
                return self.source(Node("const", dtype=dtype, value=exact))
            ref = self.tracing.bindings.add(Array(value))
            return self.source(Node("const", dtype=dtype, ref=ref))
        ref = self.tracing.bindings.add(Array(value))
        return self.source(Node("array", shape=shape, dtype=dtype, ref=ref))

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[int]) -> list[int]:
        """Append the jaxpr's equations, with its inputs bound to `args`; returns its outputs."""
        env: dict[Any, int] = dict(zip(jaxpr.invars, args, strict=True))
        env.update((v, self.array(c)) for v, c in zip(jaxpr.constvars, consts, strict=True))

        def read(atom: Any) -> int:
            if isinstance(atom, Literal):
                value = atom.val
                if not hasattr(value, "dtype"):
                    value = np.asarray(value, atom.aval.dtype)  # type: ignore[attr-defined]
                return self.array(value)
            return env[atom]

        for equation in jaxpr.eqns:
            results = self.equation(equation, [read(v) for v in equation.invars])
            env.update(zip(equation.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, equation: Any, args: Sequence[int]) -> list[int]:
        """Append the nodes of an equation; returns those of its results."""
        name = equation.primitive.name
        inner = _inner(equation)
        if inner is not None:
            if name in JITS and self.tracing.is_shared(inner):
                body = self.tracing.body(inner, str(equation.params.get("name") or name))
                return self.bound(Call("inline", (body,)), "call", equation, args)
            return self.run(*_unclosed(inner), args)
        if name in CONTROL_FLOW and all(_is_array(v.aval) for v in equation.invars):
            bodies = tuple(
                self.tracing.body(j, f"{name} {i}" if name != "scan" else name)
                for i, j in enumerate(_control_flow_jaxprs(equation))
            )
            call = Call(name, bodies, _equation(equation))
            return self.bound(call, "call", equation, args)
        return self.native(equation, args) or self.bound(
            _equation(equation), "opaque", equation, args
        )

    def native(self, equation: Any, args: Sequence[int]) -> list[int] | None:
        """Append an equation as native nodes; returns None where the op table cannot express it."""
        translate = TRANSLATIONS.get(equation.primitive.name)
        avals = [v.aval for v in (*equation.invars, *equation.outvars)]
        if translate is None or equation.effects or not equation.outvars:
            return None
        if any(not hasattr(a, "shape") or len(a.shape) > ops.MAX_RANK for a in avals):
            return None
        if any(dtype_name(a.dtype) == "extended" for a in avals):
            return None
        n_in = len(equation.invars)
        site = Site(equation.params, tuple(args), tuple(avals[:n_in]), tuple(avals[n_in:]))
        result = translate(self, site)
        results = [result] if isinstance(result, int) or result is None else list(result)
        for r, aval in zip(results, site.out_avals, strict=True):
            if r is None or (self.nodes[r].shape, self.nodes[r].dtype) != (
                tuple(aval.shape),
                dtype_name(aval.dtype),
            ):
                return None
        return results  # type: ignore[return-value]

    def bound(
        self, binding: Call | Equation, op: str, equation: Any, args: Sequence[int]
    ) -> list[int]:
        """Append an `opaque` or `call` node; returns the nodes of its results."""
        node = Node(op, ref=self.tracing.bindings.add(binding))
        if equation.effects:
            node = replace(node, attrs=pack_attrs(op, {"pinned": 1}))
        types = [(_shape(v.aval), _dtype(v.aval)) for v in equation.outvars]
        after = self.pinned if equation.effects else None
        index, results = append_holder(self.nodes, node, args, types, after)
        if equation.effects:
            self.pinned = index
        return results


def _is_array(aval: Any) -> bool:
    """Return False for references to mutable arrays, which cannot be arguments of a body."""
    return hasattr(aval, "shape") and not hasattr(aval, "inner_aval")


def _shape(aval: Any) -> tuple[int, ...]:
    return tuple(getattr(aval, "shape", ()))


def _dtype(aval: Any) -> str:
    return dtype_name(getattr(aval, "dtype", None))


def _equation(equation: Any) -> Equation:
    avals = tuple(v.aval for v in equation.outvars)
    return Equation(equation.primitive, dict(equation.params), len(avals), avals)
