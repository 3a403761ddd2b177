"""JAX primitives for the library's kernels, on their own and in partitions.

`kernel` is one convolution or product, with the derivatives and the vmap of the same lax code.
`partition` is one call of several operators, on weights that `pack` has converted to the layouts
that the library wants. `pack` is linear and takes weights only, so hoisting moves it out of the
call.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from xrl_jax.libraries.onednn.c_api import (
    DST,
    SCRATCHPAD,
    SRC,
    Desc,
    Library,
    UnimplementedError,
    library,
)
from xrl_jax.libraries.onednn.careful import careful_plan, loses_nan
from xrl_jax.libraries.onednn.native import Place, Step, register
from xrl_jax.libraries.onednn.plan import plan
from xrl_jax.libraries.onednn.spec import (
    Conv,
    Dot,
    Instruction,
    Kernel,
    Op,
    Partition,
    Winograd,
)
from xrl_jax.libraries.onednn.spec_text import name_of, partition, text_of

_F32 = np.dtype(np.float32)
_PACK, _UNPACK, _RUN = "pack", "unpack", "run"
_TARGETS: dict[str, Target] = {}  # by name
_LOCK = threading.Lock()
_EXPORTS_TARGETS = ContextVar("exports_targets", default=False)


class Target(NamedTuple):
    """A target of XLA's custom calls.

    Attributes:
      name: XLA's name for it, which also depends on how weights are packed.
      what: the action: "run", "pack" or "unpack".
      text: the partition as text.
      index: index of the input that is packed or unpacked.
    """

    name: str
    what: str
    text: str
    index: int


def kernel(op: Kernel, *operands: jax.Array) -> jax.Array:
    """Compute one operator by the library; as lax code where it or its kernel is missing."""
    return kernel_p.bind(*operands, op=op)


def run(part: Partition, *operands: jax.Array) -> list[jax.Array]:
    """Return the outputs of a partition; its packed inputs come from `pack`."""
    return list(partition_p.bind(*operands, part=part))


def pack(part: Partition, index: int, w: jax.Array) -> jax.Array:
    """Return a weight as the partition's packed input of this index: a vector."""
    return pack_p.bind(w, part=part, index=index)


def single_op(op: Op, shapes: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> Partition:
    """Return a partition of one operator."""
    packed = tuple(i == 1 and packs(op, shapes[1]) for i in range(len(shapes)))
    code = (Instruction(op, tuple(range(len(shapes))), shape),)
    return Partition(tuple(shapes), packed, code, (len(shapes),))


def packs(op: Op, shape: tuple[int, ...]) -> bool:
    """Whether the second operand, of this shape, is to be packed: a weight is, an operand with a
    batch axis is not.
    """
    return isinstance(op, Conv | Winograd) or (isinstance(op, Dot) and len(shape) == 2)


def is_possible(part: Partition) -> bool:
    """Whether the library is available and has kernels for the whole partition."""
    lib = library()
    if lib is None:
        return False
    try:
        plan(lib, part)
    except UnimplementedError:
        return False
    return True


def has_kernels(fn: Any, args: Sequence[Any]) -> bool:
    """Whether a function of arrays of these shapes and dtypes calls kernels, and the library has
    all of them.
    """
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    eqns = [e for e in jax.make_jaxpr(fn)(*avals).jaxpr.eqns if e.primitive is kernel_p]
    return bool(eqns) and all(
        is_possible(
            single_op(e.params["op"], [v.aval.shape for v in e.invars], e.outvars[0].aval.shape)
        )
        for e in eqns
    )


# --- names, for files and other processes ---


def targets_in(module: bytes) -> list[Target]:
    """Return the targets that a serialised module calls, for `register_targets` elsewhere."""
    with _LOCK:
        return [target for name, target in _TARGETS.items() if name.encode() in module]


def names() -> list[str]:
    """Return all names registered with XLA so far."""
    with _LOCK:
        return list(_TARGETS)


def register_targets(targets: Sequence[Target]) -> None:
    """Register the targets with XLA under the names they had where `targets_in` found them.

    Raises:
      RuntimeError: the library is missing, or packs weights in another way.
    """
    for name, what, text, index in targets:
        if _register_target(_library(), what, partition(text), index) != name:
            raise RuntimeError(
                "it has weights packed in another layout than oneDNN uses here: optimise the "
                "function again, or use the version of xrl_jax that wrote it"
            )


@functools.cache
def _register_target(lib: Library, what: str, part: Partition, index: int) -> str:
    """Register a call with XLA and return its name."""
    fast = plan(lib, part)
    moves = {i: w.moves for i, w in fast.weights.items()}
    packed = {i: [lib.layout(d) for move in m for d in move] for i, m in moves.items()}
    name = name_of(part, f"{lib.name}, {packed}")
    steps: Sequence[Step]
    careful: Sequence[Step] = ()
    if what == _RUN:
        steps, arena = fast.steps, fast.arena
        if loses_nan(part):
            careful, careful_arena = careful_plan(lib, part)
            arena = max(arena, careful_arena)
    else:
        name = f"{name}.{what}{index}"
        copies = [_copy_step(lib, *(m if what == _PACK else m[::-1])) for m in moves[index]]
        steps, arena = [step for step, _ in copies], max(nbytes for _, nbytes in copies)
    register(lib, name, steps, arena, careful)
    with _LOCK:
        _TARGETS[name] = Target(name, what, text_of(part), index)
    return name


def _copy_step(lib: Library, source: Desc, target: Desc) -> tuple[Step, int]:
    """Return the step that copies the argument, in one layout, to the result, in another, and the
    bytes of the arena that it needs.
    """
    prim = lib.reorder(source, target)
    scratch = lib.of(prim, "scratchpad")
    places = [(SRC, source, Place.argument(0)), (DST, target, Place.result(0))]
    if nbytes := lib.nbytes(scratch):
        places.append((SCRATCHPAD, scratch, Place.arena(0)))
    return Step(lib.primitive(prim), tuple(places)), nbytes


def _library() -> Library:
    lib = library()
    if lib is None:
        raise RuntimeError("oneDNN is missing: pip install 'xrl_jax[onednn]'")
    return lib


def _unpacked_aval(part: Partition, index: int) -> ShapedArray:
    """Return the abstract value of a weight before it is packed."""
    reads = (i.op for i in part.code if isinstance(i.op, Conv | Dot) and i.args[1] == index)
    dtype = next((op.right for op in reads), "float32")
    dtype = "int32" if dtype == "int16" else dtype  # in pairs
    return ShapedArray(part.inputs[index], jnp.dtype(dtype))


def _packed_aval(part: Partition, index: int) -> ShapedArray:
    lib = _library()
    return ShapedArray((-(-plan(lib, part).weights[index].nbytes // 4),), _F32)


@contextlib.contextmanager
def exporting_targets() -> Iterator[None]:
    """Mark exports in this context as going into files that carry the targets."""
    token = _EXPORTS_TARGETS.set(True)
    try:
        yield
    finally:
        _EXPORTS_TARGETS.reset(token)


# --- the primitives ---


def _warns_on_export(rule: Any) -> Any:
    """Wrap a lowering rule: warn, before `jax.export` refuses the call, what to do instead."""

    def lowered(ctx: Any, *operands: Any, **params: Any) -> Any:
        for_export = getattr(ctx.module_context.lowering_parameters, "for_export", False)
        if for_export and not _EXPORTS_TARGETS.get():
            warnings.warn(
                "jax.export cannot export oneDNN's kernels, which this optimised function calls: "
                "use fast.save(path) to write it to a file, and xrl_jax.load(path) to read it",
                stacklevel=2,
            )
        return rule(ctx, *operands, **params)

    return lowered


def _primitive(name: str, *, multiple: bool = False) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = multiple

    @functools.cache
    def compiled(**params: Any) -> Any:
        return jax.jit(functools.partial(primitive.bind, **params))

    primitive.def_impl(lambda *args, **params: compiled(**params)(*args))
    return primitive


kernel_p = _primitive("onednn_kernel")
partition_p = _primitive("onednn_partition", multiple=True)
pack_p = _primitive("onednn_pack")
unpack_p = _primitive("onednn_unpack")


def _kernel_aval(*avals: Any, op: Kernel) -> ShapedArray:
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return ShapedArray(jax.eval_shape(op, *structs).shape, _F32)


def _kernel_code(*operands: jax.Array, op: Kernel) -> jax.Array:
    shape = jax.eval_shape(op, *operands).shape
    part = single_op(op, [a.shape for a in operands], shape)
    if not is_possible(part):
        return op(*operands)
    first, second, *more = operands
    if part.packed[1]:
        second = pack(part, 1, second)
    return run(part, first, second, *more)[0]


def _kernel_jvp(primals: Any, tangents: Any, *, op: Kernel) -> Any:
    return jax.jvp(op, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _kernel_batched(operands: Any, axes: Any, *, op: Kernel) -> Any:
    return jax.vmap(op, axes)(*operands), 0


kernel_p.def_abstract_eval(_kernel_aval)
mlir.register_lowering(kernel_p, mlir.lower_fun(_kernel_code, multiple_results=False))
ad.primitive_jvps[kernel_p] = _kernel_jvp
batching.primitive_batchers[kernel_p] = _kernel_batched


def _partition_code(*operands: jax.Array, part: Partition) -> list[jax.Array]:
    lib = _library()
    results = [jax.ShapeDtypeStruct(part.shape(o), _F32) for o in part.outputs]
    return list(jax.ffi.ffi_call(_register_target(lib, _RUN, part, 0), results)(*operands))


def _partition_jvp(primals: Any, tangents: Any, *, part: Partition) -> Any:
    # The library does not unpack kernels in integers, which are there in float32, too.
    in_levels = {
        i.args[1]: i.args[2:4] for i in part.code if isinstance(i.op, Conv) and i.op.in_integers
    }

    def unpacked(i: int, operands: Sequence[jax.Array]) -> jax.Array:
        if i in in_levels:
            factors, kernel = (operands[k] for k in in_levels[i])
            return jnp.round(kernel / factors)
        x = operands[i]
        return unpack_p.bind(x, part=part, index=i) if part.packed[i] else x

    def as_lax(*operands: jax.Array) -> list[jax.Array]:
        return part(*(unpacked(i, operands) for i in range(len(operands))))

    return jax.jvp(as_lax, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _looped_over_batch(primitive: Primitive) -> Any:
    """Return a batching rule that loops, because the library's arrays take no further axis."""

    def batched(operands: Any, axes: Any, **params: Any) -> Any:
        indices = [i for i, a in enumerate(axes) if a is not None]
        mapped = [jnp.moveaxis(operands[i], axes[i], 0) for i in indices]

        def one(xs: Any) -> Any:
            given = list(operands)
            for i, x in zip(indices, xs, strict=True):
                given[i] = x
            return primitive.bind(*given, **params)

        results = jax.lax.map(one, mapped)
        return results, [0] * len(results) if primitive.multiple_results else 0

    return batched


def _partition_avals(*_: Any, part: Partition) -> list[ShapedArray]:
    return [ShapedArray(part.shape(o), _F32) for o in part.outputs]


partition_p.def_abstract_eval(_partition_avals)
mlir.register_lowering(
    partition_p, _warns_on_export(mlir.lower_fun(_partition_code, multiple_results=True))
)
ad.primitive_jvps[partition_p] = _partition_jvp
batching.primitive_batchers[partition_p] = _looped_over_batch(partition_p)


def _packing_code(x: jax.Array, *, part: Partition, index: int, what: str) -> jax.Array:
    result = (_packed_aval if what == _PACK else _unpacked_aval)(part, index)
    name = _register_target(_library(), what, part, index)
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(result.shape, result.dtype))(x)


for _p, _what, _inverse in ((pack_p, _PACK, unpack_p), (unpack_p, _UNPACK, pack_p)):
    _code = functools.partial(_packing_code, what=_what)
    mlir.register_lowering(_p, mlir.lower_fun(_code, multiple_results=False))
    batching.primitive_batchers[_p] = _looped_over_batch(_p)
    # Each permutes elements, and its transpose permutes them back.
    ad.deflinear2(_p, lambda ct, _, *, inverse=_inverse, **params: [inverse.bind(ct, **params)])
pack_p.def_abstract_eval(lambda _, *, part, index: _packed_aval(part, index))
unpack_p.def_abstract_eval(lambda _, *, part, index: _unpacked_aval(part, index))
