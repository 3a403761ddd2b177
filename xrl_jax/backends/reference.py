"""The exact values of a program, as far as double precision goes, and how far rounding may take
the program from them.

Every float of the program is evaluated in float64: casts, constants and closed-over weights too,
through the plain form of every operator. With each number goes the variance of its rounding error
in the program's own precision, to first order: every operator passes on what its operands err by
(its derivative, squared) and adds the rounding of its result and of its sums. Roundings are taken
as independent, as in N. Higham and T. Mary, "A new approach to probabilistic rounding error
analysis" (SIAM J. Sci. Comput. 2019). An integer that comes from floats (a comparison, a rounding,
an argmax) is marked where an error of that size could change it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.backends.lowerings import lower
from xrl_jax.backends.plain import axes_of
from xrl_jax.backends.wide import wide_dtype, wide_results, widened
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, nodes_of
from xrl_jax.graph.operands import flat_operands
from xrl_jax.graph.program import CONTROL_FLOW, Array, Call, Equation, Input, Program

_SURE = 32.0  # standard errors beyond which a comparison is not in doubt
_EXACT = "neg abs max min clamp copy nextafter iota input weight array const hole pack proj".split()
_MOVES = "transpose reshape broadcast slice rev concat pad".split()
_SUMS = ("reduce_sum", "window_sum", "cumsum")
_EXTREMES = {
    f"{kind}_{way}": f"{kind}_max" for kind in ("reduce", "window") for way in ("max", "min")
}
_EXTREMES |= {"cummax": "cummax", "cummin": "cummax"}
_COMPARISONS = ("eq", "ne", "ge", "gt", "le", "lt")
_STEPS = ("floor", "ceil", "round", "sign")


class Value(NamedTuple):
    """What a node has.

    Attributes:
      exact: the value; floats in double precision.
      error: of floats the variance of the rounding error, of other numbers whether such an error
        could change them; None where there is none.
    """

    exact: Any
    error: Any = None


class Reference(NamedTuple):
    """Flat results of a program, on the host.

    Attributes:
      exact: floats in double precision.
      error: for each of them the standard rounding error of every element; of integers and booleans
        whether a rounding error could change them.
      narrow: names of what had to run in the program's own precision.
    """

    exact: list[np.ndarray]
    error: list[np.ndarray]
    narrow: tuple[str, ...]


def reference(program: Program) -> Callable[[Sequence[Any]], Reference]:
    """A function of flat arguments: the program's results in double precision, and the errors that
    its own precision explains. It holds the weights of its last call in double precision.

    Args:
      program: as it was traced; forms chosen for its nodes are not looked at.
    """
    narrow: set[str] = set()
    run = _Run(program, narrow.add, rounding=True)
    kept: dict[int, tuple[Any, Any]] = {}

    @jax.jit
    def results(leaves: Sequence[Any]) -> Any:
        found = run.graph(0, [Value(x) for x in leaves])
        return [(v.exact, _bar(v)) for v in found]

    def wide(i: int, x: Any) -> Any:
        if i in kept and kept[i][0] is x:
            return kept[i][1]
        # To the device at once: two copies of all weights are none of one array.
        on_device = jax.device_put(widened(x))
        if program.weights[i]:
            kept[i] = x, on_device
        return on_device

    def call(args: Sequence[Any]) -> Reference:
        with jax.enable_x64(True):
            pairs = results([wide(i, x) for i, x in enumerate(args)])
            exact = [_on_host(x) for x, _ in pairs]
            return Reference(exact, [np.asarray(e) for _, e in pairs], tuple(sorted(narrow)))

    return call


def _bar(v: Value) -> Any:
    if not _is_inexact(v.exact):
        return jnp.zeros(jnp.shape(v.exact), bool) if v.error is None else v.error
    return jnp.zeros(v.exact.shape) if v.error is None else jnp.sqrt(v.error)


def _on_host(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x)


class _Run:
    """One evaluation of a program; without `rounding`, no value has an error."""

    def __init__(self, program: Program, tell: Callable[[str], Any], *, rounding: bool) -> None:
        self.program = program
        self.tell = tell
        self.rounding = rounding

    def graph(self, index: int, args: Sequence[Value]) -> list[Value]:
        """The results of a graph of the program."""
        nodes, outputs, _ = nodes_of(self.program.graphs[index])
        values: list[Any] = []  # a list where a node has several results
        for node in nodes:
            values.append(self.node(node, nodes, values, args))
        return [values[o] for o in outputs]

    def node(
        self, node: Node, nodes: Sequence[Node], values: Sequence[Any], args: Sequence[Value]
    ) -> Any:
        match self.program.bindings[node.ref] if node.ref >= 0 else None:
            case Input(position):
                return args[position]
            case Array(value):
                return Value(jnp.asarray(widened(value)))
            case Equation() | Call() as bound:
                held = flat_operands(nodes, node)
                operands = [values[i] for i in held]
                dtypes = [_dtype_of(nodes[i], values[i]) for i in held]
                results = self.bound(bound, operands, dtypes)
                return results[0] if len(results) == 1 else results
        match node.op:
            case "pack":
                return None
            case "proj":
                return values[node.args[0]][node.attr("index")]
        return self.native(node, [values[a] for a in node.args], [nodes[a] for a in node.args])

    def native(self, node: Node, xs: Sequence[Value], args: Sequence[Node]) -> Value:
        """An operator of the table."""
        wide = _wide_node(node)
        y = lower(wide, *(x.exact for x in xs))
        if not self.rounding or not xs:
            return Value(y)
        if not _is_inexact(y):
            return Value(y, _doubt(node, wide, y, xs))
        error = _passed_on(node, wide, y, xs)
        if _rounds(node, args):
            error = _sum(error, _unit(node.dtype) ** 2 * _square(y))
        return Value(y, error)

    def bound(
        self, bound: Equation | Call, operands: Sequence[Value], dtypes: Sequence[Any]
    ) -> list[Value]:
        """An equation the table cannot say, or the bodies of a call."""
        if isinstance(bound, Call) and bound.equation is None:
            return self.graph(bound.bodies[0] + 1, operands)
        equation = bound.equation if isinstance(bound, Call) else bound
        assert equation is not None
        avals = equation.avals
        if isinstance(bound, Call):
            equation = replace(equation, params=equation.params | self._bodies(bound))

        def run(*xs: Any) -> list[Any]:
            return wide_results(equation, xs, dtypes, avals, self.tell)

        if not self.rounding:
            return [Value(y) for y in run(*(x.exact for x in operands))]
        return _by_random_signs(run, operands, [a.dtype for a in avals])

    def _bodies(self, call: Call) -> dict[str, Any]:
        """The parameters of control flow that hold its jaxprs, in double precision."""
        inner = _Run(self.program, self.tell, rounding=False)
        traced = []
        for b in call.bodies:
            structs = [
                jax.ShapeDtypeStruct(
                    a.shape, wide_dtype(a.dtype), weak_type=getattr(a, "weak_type", False)
                )
                for a in self.program.bodies[b].in_avals
            ]

            def run(*args: Any, b: int = b) -> list[Any]:
                return [v.exact for v in inner.graph(b + 1, [Value(x) for x in args])]

            traced.append(jax.make_jaxpr(run)(*structs))
        if call.kind == "cond":
            return {"branches": tuple(traced)}
        return dict(zip(CONTROL_FLOW[call.kind], traced, strict=True))


# --- what an operator passes on of its operands' errors ---


def _passed_on(node: Node, wide: Node, y: Any, xs: Sequence[Value]) -> Any:
    """The variance of a float result that comes from its operands and from sums; None for none."""
    op = node.op
    if op in ("dot", "conv"):
        return _of_product(node, wide, *xs)
    if op in _SUMS:
        squares = lower(wide, _square(xs[0].exact))
        passed = None if xs[0].error is None else lower(wide, xs[0].error)
        return _sum(passed, _sum_unit(node.dtype) ** 2 * squares)
    if op == "select":
        return _of_select(wide, xs)
    if op == "cast":
        return _of_cast(xs[0])
    if all(x.error is None for x in xs):
        return None
    if op in _MOVES:
        return lower(wide, *map(_variance, xs))
    if op in _EXTREMES:
        return lower(replace(wide, op=_EXTREMES[op]), xs[0].error)
    if op in _STEPS:
        return _of_step(op, xs[0])
    if op == "softmax":
        return _of_softmax(node, y, xs[0])
    if node.spec.shape == "elementwise":
        return _of_elementwise(wide, xs)
    (result,) = _by_random_signs(lambda *a: [lower(wide, *a)], xs, [jnp.dtype(node.dtype)])
    return result.error


def _of_product(node: Node, wide: Node, a: Value, b: Value) -> Any:
    """Of sums of products: the operands' errors times the other's squares, and the roundings.

    In float32, scaled: of an error's size two digits are enough.
    """
    unit = _sum_unit(node.dtype) ** 2
    left = _sum(a.error, unit * _square(a.exact))
    variance = _narrow_product(wide, left, _square(b.exact))
    if b.error is not None:
        variance = variance + _narrow_product(wide, _square(a.exact), b.error)
    return variance


def _narrow_product(wide: Node, a: Any, b: Any) -> Any:
    scales = [jnp.max(jnp.where(jnp.isfinite(x), x, 0.0), initial=0.0) for x in (a, b)]
    scales = [jnp.where(s > 0, s, 1.0) for s in scales]
    a, b = ((x / s).astype(jnp.float32) for x, s in zip((a, b), scales, strict=True))
    single = _with_dtype(replace(wide, dtype="float32"), "float32")
    return lower(single, a, b).astype(jnp.float64) * scales[0] * scales[1]


def _of_select(wide: Node, xs: Sequence[Value]) -> Any:
    which, *cases = xs
    error = None
    if any(c.error is not None for c in cases):
        error = lower(wide, which.exact, *map(_variance, cases))
    if which.error is not None:
        first, *rest = (c.exact for c in cases)
        apart = functools.reduce(jnp.maximum, (_square(c - first) for c in rest))
        error = _sum(error, jnp.where(which.error, apart, 0.0))
    return error


def _of_cast(x: Value) -> Any:
    if _is_inexact(x.exact) or x.error is None:
        return x.error
    return jnp.where(x.error, 1.0, 0.0)


def _of_step(op: str, x: Value) -> Any:
    """A rounding makes a whole step where an error can carry the operand over a border."""
    return jnp.where(_near_step(op, x.exact, x.error), 4.0 if op == "sign" else 1.0, 0.0)


def _near_step(op: str, x: Any, error: Any) -> Any:
    border = {"sign": jnp.zeros_like, "round": lambda x: jnp.floor(x) + 0.5}.get(op, jnp.round)(x)
    return jnp.abs(x - border) <= _SURE * jnp.sqrt(error)


def _of_softmax(node: Node, y: Any, x: Value) -> Any:
    """dy = y (dx - sum y dx)."""
    axes = axes_of(node)
    common = jnp.sum(_square(y) * x.error, axis=axes, keepdims=True)
    return _scaled(_square(y), x.error + common)


def _of_elementwise(wide: Node, xs: Sequence[Value]) -> Any:
    total = None
    for i, x in enumerate(xs):
        if x.error is None or not _is_inexact(x.exact):
            continue

        def of_one(a: Any, i: int = i) -> Any:
            return lower(wide, *(a if j == i else o.exact for j, o in enumerate(xs)))

        _, slope = jax.jvp(of_one, (x.exact,), (jnp.ones_like(x.exact),))
        total = _sum(total, _scaled(_square(slope), x.error))
    return total


def _by_random_signs(
    run: Callable[..., Sequence[Any]], xs: Sequence[Value], dtypes: Sequence[Any]
) -> list[Value]:
    """What `run` passes on, by its derivative along errors of random signs, roundings of its
    operands among them, for it may sum them up; without a derivative, an error as large relatively
    as theirs.
    """
    exact = [x.exact for x in xs]
    moving = [i for i, x in enumerate(xs) if _is_inexact(x.exact)]
    doubt = [x.error for x in xs if x.error is not None and not _is_inexact(x.exact)]
    rest = [(_unit(d.name) ** 2 if _is_inexact_dtype(d) else 0.0) for d in dtypes]

    def of_moving(*moved: Any) -> list[Any]:
        given = list(exact)
        for i, x in zip(moving, moved, strict=True):
            given[i] = x
        return [y for y in run(*given) if _is_inexact(y)]

    results = list(run(*exact))
    slopes: list[Any] = [None] * sum(map(_is_inexact, results))
    if moving:
        errors = [_variance(xs[i]) + 2.0**-48 * _square(exact[i]) for i in moving]
        steps = [jnp.sqrt(e) * _signs(e) for e in errors]
        try:
            steps = [s.astype(exact[i].dtype) for i, s in zip(moving, steps, strict=True)]
            _, slopes = jax.jvp(of_moving, [exact[i] for i in moving], steps)
        except Exception:  # no derivative is defined
            sizes = [jnp.max(_square(exact[i]), initial=1e-300) for i in moving]
            worst = sum(jnp.max(e, initial=0) / n for e, n in zip(errors, sizes, strict=True))
            slopes = [y * jnp.sqrt(worst) for y in results if _is_inexact(y)]
    unsure = jnp.any(jnp.stack([jnp.any(d) for d in doubt])) if doubt else None
    of = iter(slopes)
    found = []
    for y, unit in zip(results, rest, strict=True):
        if not _is_inexact(y):
            found.append(Value(y, None if unsure is None else jnp.broadcast_to(unsure, y.shape)))
            continue
        slope = next(of)
        error = unit * _square(y)
        error = error if slope is None else error + _square(slope)
        if unsure is not None:
            error = jnp.where(unsure, jnp.inf, error)
        found.append(Value(y, error))
    return found


def _signs(x: Any) -> Any:
    return jnp.where(jax.random.bits(jax.random.key(0), x.shape, jnp.uint8) & 1, 1.0, -1.0)


def _doubt(node: Node, wide: Node, y: Any, xs: Sequence[Value]) -> Any:
    """Whether rounding errors could change a number that is none of the floats."""
    if all(x.error is None for x in xs):
        return None
    op, (x, *more) = node.op, xs
    floats = _is_inexact(x.exact)
    if op in _COMPARISONS and floats:
        variance = _variance(x) + _variance(more[0])
        return jnp.abs(x.exact - more[0].exact) <= _SURE * jnp.sqrt(variance)
    if op == "cast" and floats:
        return _near_step("floor", x.exact, x.error)
    if op in ("argmax", "argmin"):
        return _of_argmax(node, wide, x)
    if op == "is_finite":
        return None
    flags = [jnp.zeros(v.exact.shape, bool) if v.error is None else v.error for v in xs]
    if op in _MOVES:
        return lower(replace(_with_dtype(wide, "bool"), dtype="bool"), *flags)
    if op == "select" or node.spec.shape == "elementwise":
        found = flags[0]
        for f in flags[1:]:
            found = found | f
        return jnp.broadcast_to(found, y.shape)
    return jnp.broadcast_to(jnp.any(jnp.stack([jnp.any(f) for f in flags])), y.shape)


def _of_argmax(node: Node, wide: Node, x: Value) -> Any:
    """Whether another element is as far out as the one found, within the errors."""
    axes = axes_of(node)
    if not _is_inexact(x.exact):
        return jnp.any(x.error, axis=axes)
    out = x.exact if node.op == "argmax" else -x.exact
    far = _SURE * jnp.sqrt(x.error)
    lowest = jnp.max(out - far, axis=axes, keepdims=True)
    return jnp.sum(out + far >= lowest, axis=axes) > 1


# --- helpers ---


def _rounds(node: Node, args: Sequence[Node]) -> bool:
    """Whether the operator rounds its result."""
    if node.op == "cast":
        return (
            ops.DTYPE_BYTES[ops.DTYPE_CODE[node.dtype]]
            < ops.DTYPE_BYTES[ops.DTYPE_CODE[args[0].dtype]]
            or "int" in args[0].dtype
        )
    exact = node.op in _EXACT or node.op in _MOVES or node.op in _EXTREMES or node.op in _STEPS
    return not exact and node.op != "select"


def _unit(dtype: str) -> float:
    """The unit roundoff of a float's dtype."""
    return float(jnp.finfo(jnp.dtype(dtype)).eps) / 2


def _sum_unit(dtype: str) -> float:
    """Of sums, which are accumulated in float32 at least."""
    return min(_unit(dtype), 2.0**-24)


def _is_inexact_dtype(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _is_inexact(x: Any) -> bool:
    return _is_inexact_dtype(x.dtype)


def _square(x: Any) -> Any:
    return jnp.real(x * jnp.conj(x)) if jnp.iscomplexobj(x) else x * x


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


def _scaled(by: Any, error: Any) -> Any:
    """The product; what has no error keeps none where a derivative is infinite."""
    return jnp.where(error > 0, by * error, 0.0)


def _variance(x: Value) -> Any:
    return jnp.zeros(x.exact.shape) if x.error is None else x.error


def _wide_node(node: Node) -> Node:
    if node.spec.shape != "given" and node.spec.lowerings != ("xla",):
        node = replace(node, lowering=0)
    wide = wide_dtype(jnp.dtype(node.dtype)).name if node.dtype not in _UNTYPED else node.dtype
    node = replace(node, dtype=wide)
    attrs = list(node.attrs)
    for f in node.spec.fields:
        if f.name == "precision":
            attrs[f.offset] = 0
        if f.name == "dtype":
            named = ops.DTYPES[attrs[f.offset]]
            attrs[f.offset] = ops.DTYPE_CODE[wide_dtype(jnp.dtype(named)).name]
    return replace(node, attrs=tuple(attrs))


_UNTYPED = ("none", "extended", "tuple")


def _with_dtype(node: Node, dtype: str) -> Node:
    """The node with another dtype attribute, where it has one."""
    attrs = list(node.attrs)
    for f in node.spec.fields:
        if f.name == "dtype":
            attrs[f.offset] = ops.DTYPE_CODE[dtype]
    return replace(node, attrs=tuple(attrs))


def _dtype_of(node: Node, value: Any) -> Any:
    return value.exact.dtype if node.dtype in _UNTYPED else jnp.dtype(node.dtype)
