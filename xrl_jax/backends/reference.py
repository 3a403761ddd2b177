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
from collections.abc import Callable, Mapping, Sequence
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

_MOST_NODES = 48  # compiled together: twice as many take more than twice as long
_SURE = 32.0  # standard errors beyond which a comparison is not in doubt
_EXACT = "neg abs max min clamp copy nextafter iota input weight array const hole pack proj".split()
_MOVES = "transpose reshape broadcast slice rev concat pad".split()
_SUMS = ("reduce_sum", "window_sum", "cumsum")
_EXTREMES = {
    f"{kind}_{way}": f"{kind}_max" for kind in ("reduce", "window") for way in ("max", "min")
}
_EXTREMES |= {"cummax": "cummax", "cummin": "cummax"}
# Of a node of the one, the other says whether there was NaN.
_KEEP_NAN = {
    f"{kind}_{way}": f"{kind}_sum" for kind in ("reduce", "window") for way in ("max", "min")
}
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
            found = run.graph(0, [Value(wide(i, x)) for i, x in enumerate(args)])
            exact, error = [on_host(v.exact) for v in found], [np.asarray(_bar(v)) for v in found]
            return Reference(exact, error, tuple(sorted(narrow)))

    return call


def _bar(v: Value) -> Any:
    if not _is_inexact(v.exact):
        return jnp.zeros(jnp.shape(v.exact), bool) if v.error is None else v.error
    return jnp.zeros(v.exact.shape) if v.error is None else jnp.sqrt(v.error)


def on_host(x: Any) -> np.ndarray:
    """An array on the host; of a key its data."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x)


class _Run:
    """One evaluation of a program; without `rounding`, no value has an error.

    A graph is compiled in pieces, between its calls of folded bodies, and each body once.
    """

    def __init__(self, program: Program, tell: Callable[[str], Any], *, rounding: bool) -> None:
        self.program = program
        self.tell = tell
        self.rounding = rounding
        self.pieces: dict[int, _Pieces] = {}  # by the index of the graph
        self.compiled: dict[tuple[int, int], Any] = {}  # by graph and first node

    def graph(self, index: int, args: Sequence[Value]) -> list[Value]:
        """The results of a graph of the program."""
        if index not in self.pieces:
            self.pieces[index] = _in_pieces(self.program, index)
        nodes, outputs, pieces = self.pieces[index]
        values: dict[int, Any] = {}  # a list where a node has several results
        for i, node in enumerate(nodes):
            match self.program.bindings[node.ref] if node.ref >= 0 else None:
                case Input(position):
                    values[i] = args[position]
                case Array(value):
                    values[i] = Value(jnp.asarray(widened(value)))
        for piece in pieces:
            first = piece.members[0]
            call = self.called(nodes[first])
            if call is not None:
                operands = [values[a] for a in flat_operands(nodes, nodes[first])]
                results = self.graph(call + 1, operands)
                values[first] = results[0] if len(results) == 1 else results
            else:
                run = functools.partial(self.piece, nodes, piece)
                run = self.compiled.setdefault((index, first), jax.jit(run))
                values |= run({a: values[a] for a in piece.taken})
            for a in piece.done:
                values.pop(a, None)
        return [values[o] for o in outputs]

    def called(self, node: Node) -> int | None:
        """The body that a node stands for; None where it is something else."""
        match self.program.bindings[node.ref] if node.op == "call" else None:
            case Call("inline", (body,)):
                return body
        return None

    def piece(
        self, nodes: Sequence[Node], piece: _Piece, taken: Mapping[int, Any]
    ) -> dict[int, Any]:
        """The values that a piece gives to others."""
        values = dict(taken)
        for i in piece.members:
            node = nodes[i]
            if node.op in ("opaque", "call"):
                held = flat_operands(nodes, node)
                operands = [values[a] for a in held]
                results = self.bound(node, operands, [_dtype_of(nodes[a]) for a in held])
                values[i] = results[0] if len(results) == 1 else results
            elif node.op == "proj":
                values[i] = values[node.args[0]][node.attr("index")]
            elif node.op != "pack":
                dtypes = [nodes[a].dtype for a in node.args]
                values[i] = self.native(node, dtypes, [values[a] for a in node.args])
        return {i: values[i] for i in piece.given}

    def native(self, node: Node, dtypes: Sequence[str], xs: Sequence[Value]) -> Value:
        """An operator of the table, on operands that have these dtypes in the program."""
        wide = _wide_node(node)
        y = lower(wide, *(x.exact for x in xs))
        if node.op in _KEEP_NAN and _is_inexact(y):
            # XLA:CPU drops NaN in some of them.
            lost = lower(replace(wide, op=_KEEP_NAN[node.op]), jnp.isnan(xs[0].exact) * 1.0)
            y = jnp.where(lost > 0, jnp.nan, y)
        if not self.rounding or not xs:
            return Value(y)
        if not _is_inexact(y):
            return Value(y, _doubt(node, wide, y, xs))
        error = _passed_on(node, wide, y, xs)
        if _rounds(node, dtypes):
            error = _sum(error, _rounding(y, jnp.dtype(node.dtype)))
        return Value(y, error)

    def bound(self, node: Node, xs: Sequence[Value], dtypes: Sequence[Any]) -> list[Value]:
        """An equation that the table cannot say, or control flow."""
        bound = self.program.bindings[node.ref]
        equation = bound.equation if isinstance(bound, Call) else bound
        assert isinstance(equation, Equation)
        if isinstance(bound, Call):
            equation = replace(equation, params=equation.params | self._bodies(bound))
        avals = equation.avals

        def run(*exact: Any) -> list[Any]:
            own = [x.dtype if d is None else d for x, d in zip(exact, dtypes, strict=True)]
            return wide_results(equation, exact, own, avals, self.tell)

        if self.rounding:
            return _by_random_signs(run, avals, xs)
        return [Value(y) for y in run(*(x.exact for x in xs))]

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


class _Piece(NamedTuple):
    """Nodes that are evaluated together, or one call of a body.

    Attributes:
      members: their indices.
      taken, given: values from other pieces, and for them.
      done: values that nobody uses after it.
    """

    members: list[int]
    taken: list[int]
    given: list[int]
    done: list[int]


_Pieces = tuple[list[Node], tuple[int, ...], list[_Piece]]


def _in_pieces(program: Program, index: int) -> _Pieces:
    """The nodes of a graph, its outputs, and what is evaluated together."""
    nodes, outputs, _ = nodes_of(program.graphs[index])
    groups: list[list[int]] = [[]]
    uses: list[list[int]] = []
    for i, node in enumerate(nodes):
        bound = program.bindings[node.ref] if node.ref >= 0 else None
        is_bound = isinstance(bound, Equation | Call)
        args = flat_operands(nodes, node) if is_bound else list(node.args)
        uses.append([] if node.op == "pack" else args)
        if isinstance(bound, Call) and bound.equation is None:
            groups += [[i], []]
        elif is_bound or node.ref < 0:
            if len(groups[-1]) >= _MOST_NODES:
                groups.append([])
            groups[-1].append(i)
    groups = [g for g in groups if g]
    last: dict[int, int] = {a: n for n, g in enumerate(groups) for i in g for a in uses[i]}
    last |= dict.fromkeys(outputs, len(groups))
    pieces = []
    for n, members in enumerate(groups):
        own = set(members)
        taken = list(dict.fromkeys(a for i in members for a in uses[i] if a not in own))
        given = [i for i in members if last.get(i, -1) > n]
        pieces.append(_Piece(members, taken, given, [a for a in taken if last[a] == n]))
    return nodes, outputs, pieces


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
    if op in ("reduce_max", "reduce_min"):
        return _of_extreme(node, y, xs[0])
    if op in _EXTREMES:
        return lower(replace(wide, op=_EXTREMES[op]), xs[0].error)
    if op in _STEPS:
        return _of_step(op, xs[0])
    if op == "softmax":
        return _of_softmax(node, y, xs[0])
    if node.spec.shape == "elementwise":
        return _of_elementwise(wide, xs)
    aval = jax.ShapeDtypeStruct(node.shape, jnp.dtype(node.dtype))
    (result,) = _by_random_signs(lambda *a: [lower(wide, *a)], [aval], xs)
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


def _of_extreme(node: Node, y: Any, x: Value) -> Any:
    """The largest of the errors of those elements that may be the one found."""
    axes = axes_of(node)
    apart = jnp.abs(x.exact - jnp.expand_dims(y, axes))
    error = jnp.where(_square(apart) <= _SURE * x.error, x.error, 0.0)
    return jnp.max(error, axis=axes)


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
    run: Callable[..., Sequence[Any]], avals: Sequence[Any], xs: Sequence[Value]
) -> list[Value]:
    """What `run` passes on, by its derivative along errors of random signs, roundings of its
    operands among them, for it may sum them up; without a derivative, an error as large relatively
    as theirs.
    """
    exact = [x.exact for x in xs]
    moving = [i for i, x in enumerate(xs) if _is_inexact(x.exact)]
    doubt = [x.error for x in xs if x.error is not None and not _is_inexact(x.exact)]

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
    for y, aval in zip(results, avals, strict=True):
        if not _is_inexact(y):
            found.append(Value(y, None if unsure is None else jnp.broadcast_to(unsure, y.shape)))
            continue
        slope = next(of)
        error = _rounding(y, aval.dtype)
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


def _rounds(node: Node, dtypes: Sequence[str]) -> bool:
    """Whether the operator rounds its result, of operands of these dtypes."""
    if node.op == "cast":
        source, target = (ops.DTYPE_BYTES[ops.DTYPE_CODE[d]] for d in (*dtypes, node.dtype))
        return target < source or "int" in dtypes[0]
    exact = node.op in _EXACT or node.op in _MOVES or node.op in _EXTREMES or node.op in _STEPS
    return not exact and node.op != "select"


def _rounding(y: Any, dtype: Any) -> Any:
    """The variance of a result's rounding; none where the dtype holds it exactly."""
    return jnp.where(y == y.astype(dtype), 0.0, _unit(dtype.name) ** 2 * _square(y))


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


def _dtype_of(node: Node) -> Any:
    """The dtype of a node in the program; None where that is the value's own."""
    return None if node.dtype in _UNTYPED else jnp.dtype(node.dtype)
