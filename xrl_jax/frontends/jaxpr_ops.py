"""Translates JAX primitives to native nodes: `TRANSLATIONS`, from primitive name to translation.

A translation either emits nodes whose plain lowering is bit-identical to the equation, or returns
None, and the equation stays opaque. Parameters are read by name, because the set of parameters
differs between versions of JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, pack_attrs
from xrl_jax.program.host import dtype_name

_WINDOW_RANK = 4  # dimensions a pooling node can hold


class Emit(Protocol):
    """The graph builder to which translations append nodes."""

    def node(self, op: str, args: Sequence[int], **attrs: int | Sequence[int]) -> int | None:
        """Append a node; returns None where its arguments and attributes do not fit the op."""
        ...

    def source(self, node: Node) -> int:
        """Return the index of a source equal to this one, appending it if there is none."""
        ...

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of a node."""
        ...


@dataclass(frozen=True)
class Site:
    """The input of a translation: an equation, with its operands as nodes."""

    params: Params
    args: tuple[int, ...]
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]

    def plain(self, *known: str) -> bool:
        """Return whether all parameters not in `known` are None, as `sharding` mostly is."""
        return all(v is None for k, v in self.params.items() if k not in known)


Result = int | Sequence[int | None] | None
Params = Mapping[str, Any]
Attrs = dict[str, int | Sequence[int]]
Translation = Callable[[Emit, Site], Result]


def _elementwise(op: str) -> Translation:
    """Translate to an op without attributes.

    Operands that JAX stretches from size 1 are broadcast first.
    """

    def translate(emit: Emit, site: Site) -> Result:
        if not site.plain():
            return None
        shape = site.out_avals[0].shape
        args: list[int] = []
        for arg in site.args:
            own = emit.shape(arg)
            if own and own != shape:
                dims = range(len(own))
                arg = emit.node("broadcast", [arg], shape=shape, rank=len(shape), dims=dims)
            if arg is None:
                return None
            args.append(arg)
        return emit.node(op, args)

    return translate


def _alias(emit: Emit, site: Site) -> Result:
    """Return the operand: the primitive matters only to JAX's transformations or the allocator."""
    return site.args[0]


def _cast(emit: Emit, site: Site) -> Result:
    """Translate `convert_element_type`; if only the weak type differs, return the operand."""
    if not site.plain("new_dtype", "weak_type"):
        return None
    if site.in_avals[0].dtype == site.out_avals[0].dtype:
        return site.args[0]
    name = dtype_name(site.out_avals[0].dtype)
    if name == "extended":
        return None
    return emit.node("cast", site.args, dtype=ops.DTYPE_CODE[name])


def _reshaped(emit: Emit, site: Site) -> Result:
    """Translate `reshape`, `squeeze` and `expand_dims`."""
    if not site.plain("new_sizes", "dimensions") or len(site.args) != 1:
        return None
    if "new_sizes" in site.params and site.params.get("dimensions") is not None:
        return None
    shape = site.out_avals[0].shape
    return emit.node("reshape", site.args, shape=shape, rank=len(shape))


def _with_attrs(op: str, attrs: Callable[[Params], Attrs], *known: str) -> Translation:
    """Translate to an op whose attributes `attrs` computes from the parameters.

    If `known` names any parameters, all others must be None.
    """

    def translate(emit: Emit, site: Site) -> Result:
        if known and not site.plain(*known):
            return None
        return emit.node(op, site.args, **attrs(site.params))

    return translate


def _axes(p: Params) -> Attrs:
    return {"axes": ops.mask_of(p["axes"])}


def _shape_and_dims(p: Params) -> Attrs:
    shape = p["shape"]
    return {"shape": shape, "rank": len(shape), "dims": p["broadcast_dimensions"]}


def _padding(p: Params) -> Attrs:
    columns = zip(*p["padding_config"], strict=True) if p["padding_config"] else ((), (), ())
    return dict(zip(("low", "high", "interior"), columns, strict=True))


def _arg_reduce(op: str) -> Translation:
    def translate(emit: Emit, site: Site) -> Result:
        axes = site.params["axes"]
        code = ops.DTYPE_CODE.get(dtype_name(site.params["index_dtype"]))
        if len(axes) != 1 or code is None or not site.plain("axes", "index_dtype"):
            return None
        return emit.node(op, site.args, axes=ops.mask_of(axes), dtype=code)

    return translate


def _concatenate(emit: Emit, site: Site) -> Result:
    """Translate `concatenate`; more operands than a node can have become a chain of nodes."""
    return _chained_concat(emit, site.args, site.params["dimension"])


def _chained_concat(emit: Emit, parts: Sequence[int | None], axis: int) -> Result:
    rest = [p for p in parts if p is not None]
    if len(rest) < len(parts):
        return None
    joined = emit.node("concat", rest[: ops.MAX_ARGS], axis=axis)
    rest = rest[ops.MAX_ARGS :]
    while rest and joined is not None:
        joined = emit.node("concat", [joined, *rest[: ops.MAX_ARGS - 1]], axis=axis)
        rest = rest[ops.MAX_ARGS - 1 :]
    return joined


def _slice(emit: Emit, site: Site) -> Result:
    start, limit = site.params["start_indices"], site.params["limit_indices"]
    stride = site.params.get("strides") or (1,) * len(start)
    return emit.node("slice", site.args, start=start, limit=limit, stride=stride)


def _split(emit: Emit, site: Site) -> Result:
    """Translate `split` to one slice for each result."""
    axis, parts, at = site.params["axis"], [], 0
    shape = site.in_avals[0].shape
    for size in site.params["sizes"]:
        start = [at if d == axis else 0 for d in range(len(shape))]
        limit = [at + size if d == axis else n for d, n in enumerate(shape)]
        parts.append(
            emit.node("slice", site.args, start=start, limit=limit, stride=(1,) * len(shape))
        )
        at += size
    return parts


def _stack(emit: Emit, site: Site) -> Result:
    """Translate `stack` to a concatenation of reshaped operands."""
    axis = site.params["axis"]
    shape = list(site.in_avals[0].shape)
    shape.insert(axis, 1)
    if len(shape) > ops.MAX_RANK:
        return None
    parts = [emit.node("reshape", [a], shape=shape, rank=len(shape)) for a in site.args]
    return _chained_concat(emit, parts, axis)


def _unstack(emit: Emit, site: Site) -> Result:
    """Translate `unstack` to reshaped slices of size one."""
    axis, shape = site.params["axis"], site.in_avals[0].shape
    out = site.out_avals[0].shape
    parts = []
    for k in range(shape[axis]):
        start = [k if d == axis else 0 for d in range(len(shape))]
        limit = [k + 1 if d == axis else n for d, n in enumerate(shape)]
        part = emit.node("slice", site.args, start=start, limit=limit, stride=(1,) * len(shape))
        parts.append(
            part if part is None else emit.node("reshape", [part], shape=out, rank=len(out))
        )
    return parts


def _tile(emit: Emit, site: Site) -> Result:
    """Translate `tile`: broadcast each repeated dimension to (repeats, size), then reshape."""
    shape: list[int] = []
    dims: list[int] = []
    for size, repeats in zip(site.in_avals[0].shape, site.params["reps"], strict=True):
        shape += [size] if repeats == 1 else [repeats, size]
        dims.append(len(shape) - 1)
    out = site.out_avals[0].shape
    if len(shape) > ops.MAX_RANK:
        return None
    spread = emit.node("broadcast", site.args, shape=shape, rank=len(shape), dims=dims)
    return spread if spread is None else emit.node("reshape", [spread], shape=out, rank=len(out))


def _window(op: str) -> Translation:
    def translate(emit: Emit, site: Site) -> Result:
        p = site.params
        rank = len(p["window_dimensions"])
        ones = (1,) * rank
        if rank > _WINDOW_RANK or len(site.args) != 1:
            return None
        if tuple(p["base_dilation"]) != ones or tuple(p["window_dilation"]) != ones:
            return None
        low, high = ([c[i] for c in p["padding"]] for i in range(2))
        window, stride = p["window_dimensions"], p["window_strides"]
        return emit.node(op, site.args, window=window, stride=stride, low=low, high=high)

    return translate


def _select(emit: Emit, site: Site) -> Result:
    """Translate `select_n` of two cases by a boolean."""
    if len(site.args) != 3 or dtype_name(site.in_avals[0].dtype) != "bool":
        return None
    return emit.node("select", site.args)


def _iota(emit: Emit, site: Site) -> Result:
    aval = site.out_avals[0]
    if site.args or len(aval.shape) > ops.MAX_RANK or not site.plain("dtype", "shape", "dimension"):
        return None
    attrs = pack_attrs("iota", {"axis": site.params["dimension"]})
    return emit.source(Node("iota", attrs=attrs, shape=aval.shape, dtype=dtype_name(aval.dtype)))


def _dot(emit: Emit, site: Site) -> Result:
    p = site.params
    if not site.plain("dimension_numbers", "precision", "preferred_element_type"):
        return None
    precision = ops.encode_precision(p["precision"])
    if precision is None or max(len(a.shape) for a in site.in_avals) > ops.MAX_RANK:
        return None
    (lc, rc), (lb, rb) = p["dimension_numbers"]
    return emit.node(
        "dot",
        site.args,
        lhs_contract=ops.pack_dims(tuple(lc)),
        rhs_contract=ops.pack_dims(tuple(rc)),
        lhs_batch=ops.pack_dims(tuple(lb)),
        rhs_batch=ops.pack_dims(tuple(rb)),
        precision=precision,
        dtype=ops.DTYPE_CODE[dtype_name(site.out_avals[0].dtype)],
    )


_CONV_PARAMS = (
    "window_strides padding lhs_dilation rhs_dilation dimension_numbers "
    "feature_group_count batch_group_count precision preferred_element_type"
).split()


def _conv(emit: Emit, site: Site) -> Result:
    """Translate `conv_general_dilated` over one or two spatial dimensions, except complex ones."""
    p = site.params
    layouts = p["dimension_numbers"]
    specs = (layouts.lhs_spec, layouts.rhs_spec, layouts.out_spec)
    precision = ops.encode_precision(p["precision"])
    dtype = dtype_name(site.out_avals[0].dtype)
    if precision is None or not site.plain(*_CONV_PARAMS) or dtype.startswith("complex"):
        return None
    if any(tuple(s) not in ops.LAYOUT_CODE for s in specs):
        return None
    lhs_layout, rhs_layout, out_layout = (ops.LAYOUT_CODE[tuple(s)] for s in specs)
    low, high = ([c[i] for c in p["padding"]] for i in range(2))
    return emit.node(
        "conv",
        site.args,
        stride=p["window_strides"],
        low=low,
        high=high,
        lhs_dilation=p["lhs_dilation"],
        rhs_dilation=p["rhs_dilation"],
        groups=p["feature_group_count"],
        batch_groups=p["batch_group_count"],
        lhs_layout=lhs_layout,
        rhs_layout=rhs_layout,
        out_layout=out_layout,
        precision=precision,
        dtype=ops.DTYPE_CODE[dtype],
    )


# Ops without attributes that have the same name as their primitive.
_SAME_NAME = (
    "neg exp exp2 expm1 log log1p tanh logistic sqrt rsqrt cbrt sin cos tan asin acos atan sinh "
    "cosh asinh acosh atanh erf erfc erf_inv lgamma digamma abs sign floor ceil not square "
    "population_count clz is_finite sub div rem pow atan2 nextafter shift_left "
    "shift_right_logical shift_right_arithmetic add mul max min and or xor ne eq ge gt le lt clamp"
).split()
_REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor".split()

TRANSLATIONS: Mapping[str, Translation] = MappingProxyType(
    {
        **{name: _elementwise(name) for name in _SAME_NAME},
        "add_any": _elementwise("add"),
        "copy": _alias,
        "copy_p": _alias,
        "stop_gradient": _alias,
        "name": _alias,
        "convert_element_type": _cast,
        "reshape": _reshaped,
        "squeeze": _reshaped,
        "expand_dims": _reshaped,
        "broadcast_in_dim": _with_attrs(
            "broadcast", _shape_and_dims, "shape", "broadcast_dimensions"
        ),
        "transpose": _with_attrs("transpose", lambda p: {"perm": p["permutation"]}),
        "concatenate": _concatenate,
        "slice": _slice,
        "split": _split,
        "stack": _stack,
        "unstack": _unstack,
        "tile": _tile,
        "pad": _with_attrs("pad", _padding),
        "rev": _with_attrs("rev", lambda p: {"axes": ops.mask_of(p["dimensions"])}),
        **{name: _with_attrs(name, _axes, "axes") for name in _REDUCTIONS},
        "argmax": _arg_reduce("argmax"),
        "argmin": _arg_reduce("argmin"),
        **{
            n: _with_attrs(n, lambda p: {"axis": p["axis"], "reverse": int(p["reverse"])})
            for n in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
        },
        "reduce_window_sum": _window("window_sum"),
        "reduce_window_max": _window("window_max"),
        "reduce_window_min": _window("window_min"),
        "select_n": _select,
        "integer_pow": _with_attrs("integer_pow", lambda p: {"exponent": p["y"]}),
        "round": _with_attrs("round", lambda p: {"method": int(p["rounding_method"])}),
        "iota": _iota,
        "dot_general": _dot,
        "conv_general_dilated": _conv,
    }
)
