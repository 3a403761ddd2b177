"""oneDNN as a shared library, through its C interface.

The library comes with the Python package `onednn-cpu-gomp` (`pip install xrl_jax[onednn]`), or with
the operating system. Descriptors and primitives created here live as long as the process, because
the code that uses them holds their addresses.

Source: oneDNN 3, include/oneapi/dnnl/dnnl.h and dnnl_types.h (github.com/uxlfoundation/oneDNN).
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import importlib.util
import os
import platform
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from xrl_jax.libraries.onednn.installed import PACKAGE, environment, packaged
from xrl_jax.libraries.onednn.post_ops import NO_POST_OPS, PostOps

_MAJOR = 3  # version of the interface
# Threads spin while they wait for the next operator, for some hundred microseconds at most, because
# XLA uses the same cores. Each is bound to a processor: two that wait for each other on one
# processor would take turns.
_OPENMP = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "5000", "OMP_PROC_BIND": "true"}

_TYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "int32": 4, "int8": 5, "uint8": 6}
_CPU, _INFERENCE, _DIRECT, _ANY, _USER_SCRATCHPAD = 1, 96, 1, 1, 1
SRC, SRC_1, DST, WEIGHTS, BIAS, SCRATCHPAD, MULTIPLE_SRC = 1, 2, 17, 33, 41, 80, 1024
_POST_OP, _SCALES = 32768, 4096
_QUERY = {"src": 129, "weights": 131, "dst": 133, "scratchpad": 136}
_IMPLEMENTATION = 8
_STRIDES, _RANK, _TYPE, _START, _PADDED = 14, 256, 258, 259, 260  # of a memory descriptor
_N_BLOCKS, _BLOCKS, _BLOCKED = 263, 264, 265  # number of blocks, their sizes, their axes
_BINARY = {name: 0x1FFF0 + i for i, name in enumerate(("add", "mul", "max", "min", "div", "sub"))}
# Bits in the code of an instruction set.
_AVX2, _AVX512, _BF16, _SUMS_IN_32_BITS = 0x4, 0x20, 0x80, 0x48
_POOLS = {"max": 0x1FF, "average": 0x2FF}

Desc = int  # address of a memory descriptor: dims, strides, blocks
Prim = int  # address of a primitive descriptor


class UnimplementedError(RuntimeError):
    """The library has no kernel, or only its reference kernel, for the request."""


class _Version(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("patch", ctypes.c_int),
        ("hash", ctypes.c_char_p),
        ("cpu_runtime", ctypes.c_uint),
        ("gpu_runtime", ctypes.c_uint),
    ]


class Library:
    """The functions of the library that xrl_jax uses, with the CPU as the engine."""

    def __init__(self, path: str) -> None:
        processors = os.sched_getaffinity(0)
        with environment(_OPENMP):
            self._lib = ctypes.CDLL(path)
        os.sched_setaffinity(0, processors)  # OpenMP has bound the thread that loads it
        self._lib.dnnl_version.restype = ctypes.POINTER(_Version)
        v = self._lib.dnnl_version().contents
        if v.major != _MAJOR:
            raise OSError(f"{path} is oneDNN {v.major}.{v.minor}, but {_MAJOR} is required")
        self._lib.dnnl_primitive_desc_query_md.restype = ctypes.c_void_p
        self._lib.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
        engine = ctypes.c_void_p()
        self._check(
            self._lib.dnnl_engine_create(ctypes.byref(engine), _CPU, ctypes.c_size_t(0)), "engine"
        )
        self.engine = int(engine.value or 0)
        isa = int(self._lib.dnnl_get_effective_cpu_isa())
        # Layouts chosen by the library depend on these.
        self.lanes = 16 if isa & _AVX512 else 8  # elements of a vector in its kernels
        # Types narrower than float32 that it multiplies faster.
        exact = bool(isa & _SUMS_IN_32_BITS)
        integers = ("int8",) if exact else ("uint8", "int8")
        with_avx2 = ("int16", *integers) if isa & _AVX2 else ()
        self.operand_types = ("bfloat16",) * bool(isa & _BF16) + with_avx2
        # The largest level of a kernel in int8: without instructions that add products in 32 bits,
        # pairs of them are added in 16. For these to suffice, the library halves the kernel, unless
        # the image is of uint8, whose levels end at 127.
        self.most_level = 127 if exact else 63
        self.name = f"oneDNN {v.major}.{v.minor}.{v.patch}, instruction set {isa:#x}"

    def set_verbose(self, level: int) -> None:
        """Let the library print every execution of a primitive and its time (1), or nothing (0)."""
        self._check(self._lib.dnnl_set_verbose(level), "verbose")

    def address(self, name: str) -> int:
        """Return the address of a function."""
        return int(ctypes.cast(getattr(self._lib, name), ctypes.c_void_p).value or 0)

    def threads(self) -> tuple[int, int, int] | None:
        """Return the addresses of `GOMP_parallel`, `omp_get_num_threads` and `omp_get_thread_num`
        in the library's OpenMP runtime; None if that does not have GNU's interface.
        """
        names = ("GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num")
        try:
            start, n, number = (self.address(name) for name in names)
        except AttributeError:
            return None
        return start, n, number

    def n_threads(self) -> int:
        """Return the most threads that run a primitive created by the current thread."""
        try:
            return int(self._lib.omp_get_max_threads())
        except AttributeError:
            return 1

    # --- memory descriptors ---

    def desc(
        self, dims: Sequence[int], strides: Sequence[int] | None = None, dtype: str = "float32"
    ) -> Desc:
        """Describe an array with these strides, in elements; row-major if None."""
        sizes, steps = _dims(dims), _dims(row_major(dims) if strides is None else strides)
        kind = _TYPES[dtype]
        return self._new("dnnl_memory_desc_create_with_strides", len(dims), sizes, kind, steps)

    def any_desc(self, dims: Sequence[int], dtype: str = "float32") -> Desc:
        """Describe an array whose layout the library is to choose."""
        kind = _TYPES[dtype]
        return self._new("dnnl_memory_desc_create_with_tag", len(dims), _dims(dims), kind, _ANY)

    def permuted(self, desc: Desc, order: Sequence[int]) -> Desc:
        """Describe the same memory with axis `order[i]` in place i, as by `lax.transpose`."""
        places = [order.index(i) for i in range(len(order))]
        return self._new(
            "dnnl_memory_desc_permute_axes", _at(desc), (ctypes.c_int * len(order))(*places)
        )

    def reshaped(self, desc: Desc, dims: Sequence[int]) -> Desc:
        """Describe the same memory in another shape, with the elements in row-major order.

        Raises:
          UnimplementedError: the layout has no strides for that.
        """
        return self._new("dnnl_memory_desc_reshape", _at(desc), len(dims), _dims(dims))

    def part(self, desc: Desc, dims: Sequence[int], start: Sequence[int]) -> Desc:
        """Describe a part of an array, in the array's memory."""
        return self._new("dnnl_memory_desc_create_submemory", _at(desc), _dims(dims), _dims(start))

    def strides(self, desc: Desc) -> tuple[int, ...] | None:
        """Return an array's strides in elements; None if it is in blocks or has an offset."""
        if self._asked(desc, _N_BLOCKS, ctypes.c_int) or self._asked(desc, _START, ctypes.c_int64):
            return None
        return self._listed(desc, _STRIDES, _RANK)

    def layout(self, desc: Desc) -> tuple[tuple[int, ...], ...]:
        """Return where an array's elements lie, as a value that is equal for equal layouts only."""
        axes = (self._listed(desc, what, _RANK) for what in (_PADDED, _STRIDES))
        blocks = (self._listed(desc, what, _N_BLOCKS) for what in (_BLOCKS, _BLOCKED))
        return (*axes, *blocks, (self._asked(desc, _START, ctypes.c_int64),))

    def dtype(self, desc: Desc) -> str:
        found = self._asked(desc, _TYPE, ctypes.c_int)
        return next(name for name, kind in _TYPES.items() if kind == found)

    def _asked(self, desc: Desc, what: int, kind: type[ctypes.c_int] | type[ctypes.c_int64]) -> int:
        found = kind()
        self._query(desc, what, found)
        return found.value

    def _listed(self, desc: Desc, what: int, length: int) -> tuple[int, ...]:
        found = ctypes.POINTER(ctypes.c_int64)()
        self._query(desc, what, found)
        return tuple(found[: self._asked(desc, length, ctypes.c_int)])

    def _query(self, desc: Desc, what: int, to: Any) -> None:
        status = self._lib.dnnl_memory_desc_query(_at(desc), what, ctypes.byref(to))
        self._check(status, "dnnl_memory_desc_query")

    def equal(self, a: Desc, b: Desc) -> bool:
        return bool(self._lib.dnnl_memory_desc_equal(_at(a), _at(b)))

    def nbytes(self, desc: Desc) -> int:
        return int(self._lib.dnnl_memory_desc_get_size(_at(desc)))

    # --- primitive descriptors ---

    def convolution(
        self,
        src: Desc,
        weights: Desc,
        bias: Desc | None,
        dst: Desc,
        stride: Sequence[int],
        dilation: Sequence[int],
        padding: Sequence[tuple[int, int]],
        post_ops: PostOps = NO_POST_OPS,
        scales: int | None = None,
    ) -> Prim:
        """Describe a convolution, N C spatial by (G) O I spatial; `dilation` 1 means none.

        Args:
          scales: the axes of the weights, as bits, along which their factors differ; the source
            then has one factor, and all are arguments of the primitive.
        """
        low, high = zip(*padding, strict=True)
        return self._prim(
            "dnnl_convolution_forward_primitive_desc_create",
            *(_INFERENCE, _DIRECT, _at(src), _at(weights), _at(bias), _at(dst)),
            *(_dims(stride), _dims([d - 1 for d in dilation]), _dims(low), _dims(high)),
            post_ops=post_ops,
            scales=scales,
        )

    def matmul(
        self,
        src: Desc,
        weights: Desc,
        bias: Desc | None,
        dst: Desc,
        post_ops: PostOps = NO_POST_OPS,
    ) -> Prim:
        """Describe the product [.., M, K] by [.., K, N]; the bias has the same rank."""
        return self._prim(
            "dnnl_matmul_primitive_desc_create",
            *(_at(src), _at(weights), _at(bias), _at(dst)),
            post_ops=post_ops,
        )

    def pool(
        self,
        kind: str,
        src: Desc,
        dst: Desc,
        window: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        post_ops: PostOps = NO_POST_OPS,
    ) -> Prim:
        """Describe pooling of N C spatial, "max" or "average", which includes the padding."""
        low, high = zip(*padding, strict=True)
        return self._prim(
            "dnnl_pooling_forward_primitive_desc_create",
            *(_INFERENCE, _POOLS[kind], _at(src), _at(dst), _dims(stride), _dims(window)),
            *(_dims([0] * len(window)), _dims(low), _dims(high)),
            post_ops=post_ops,
        )

    def concat(self, srcs: Sequence[Desc], axis: int, dst: Desc | None) -> Prim:
        array = (ctypes.c_void_p * len(srcs))(*srcs)
        # The reference kernel, for operands in different layouts, is a list of fast reorders.
        return self._prim(
            *("dnnl_concat_primitive_desc_create", _at(dst), len(srcs), axis, array),
            reference=True,
        )

    def binary(
        self, kind: str, a: Desc, b: Desc, dst: Desc, post_ops: PostOps = NO_POST_OPS
    ) -> Prim:
        """Describe an operator of `spec.BINARY`; axes of `b` may have size 1."""
        return self._prim(
            "dnnl_binary_primitive_desc_create",
            *(_BINARY[kind], _at(a), _at(b), _at(dst)),
            post_ops=post_ops,
        )

    def elementwise(self, src: Desc, dst: Desc, what: PostOps) -> Prim:
        """Describe the elementwise operation in `what`, which holds exactly one."""
        ((kind, a, b),) = what.elementwise
        return self._prim(
            "dnnl_eltwise_forward_primitive_desc_create",
            *(_INFERENCE, kind, _at(src), _at(dst), ctypes.c_float(a), ctypes.c_float(b)),
        )

    def reorder(self, src: Desc, dst: Desc) -> Prim:
        e, attributes = _at(self.engine), self._attributes(NO_POST_OPS)
        name = "dnnl_reorder_primitive_desc_create"
        return self._new(name, _at(src), e, _at(dst), e, attributes)

    def of(self, prim: Prim, what: str) -> Desc:
        """Return the descriptor of a primitive's "src", "weights", "dst" or "scratchpad"."""
        return int(self._lib.dnnl_primitive_desc_query_md(_at(prim), _QUERY[what], 0) or 0)

    def implementation(self, prim: Prim) -> str:
        name = ctypes.c_char_p()
        self._lib.dnnl_primitive_desc_query(_at(prim), _IMPLEMENTATION, 0, ctypes.byref(name))
        return (name.value or b"").decode()

    def primitive(self, prim: Prim) -> int:
        """Return the address of an executable primitive."""
        return self._new("dnnl_primitive_create", _at(prim))

    # --- inside ---

    def _prim(
        self,
        name: str,
        *args: object,
        post_ops: PostOps = NO_POST_OPS,
        reference: bool = False,
        scales: int | None = None,
    ) -> Prim:
        prim = self._new(name, _at(self.engine), *args, self._attributes(post_ops, scales))
        if not reference and self.implementation(prim).startswith("ref"):
            raise UnimplementedError(f"{name}: {self.implementation(prim)}")
        return prim

    def _attributes(self, post_ops: PostOps, scales: int | None = None) -> ctypes.c_void_p:
        attributes, chain = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._lib.dnnl_primitive_attr_create(ctypes.byref(attributes)), "attributes")
        self._check(
            self._lib.dnnl_primitive_attr_set_scratchpad_mode(attributes, _USER_SCRATCHPAD),
            "attributes",
        )
        for which, axes in () if scales is None else ((SRC, 0), (WEIGHTS, scales)):
            status = self._lib.dnnl_primitive_attr_set_scales_mask(attributes, which, axes)
            self._check(status, "scales")
        self._check(self._lib.dnnl_post_ops_create(ctypes.byref(chain)), "attributes")
        if post_ops.addend is not None:
            status = self._lib.dnnl_post_ops_append_binary(
                chain, _BINARY["add"], _at(post_ops.addend)
            )
            self._check(status, "sum")
        for kind, a, b in post_ops.elementwise:
            numbers = ctypes.c_float(a), ctypes.c_float(b)
            self._check(
                self._lib.dnnl_post_ops_append_eltwise(chain, kind, *numbers), "elementwise"
            )
        self._check(self._lib.dnnl_primitive_attr_set_post_ops(attributes, chain), "attributes")
        return attributes

    def _new(self, name: str, *args: object) -> int:
        made = ctypes.c_void_p()
        self._check(getattr(self._lib, name)(ctypes.byref(made), *args), name)
        return int(made.value or 0)

    def _check(self, status: int, what: str) -> None:
        if status:
            raise UnimplementedError(f"oneDNN: {what} returned status {status}")


ADDEND = _POST_OP | SRC_1  # argument of the first post-op
SRC_SCALE, WEIGHTS_SCALES = _SCALES | SRC, _SCALES | WEIGHTS


@functools.cache
def library() -> Library | None:
    """Return the library if it and `llvmlite` are installed and the CPU is the default backend, on
    x86 processors under Linux; else None. Warn once of an installed package that cannot be loaded.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    if jax.default_backend() != "cpu" or importlib.util.find_spec("llvmlite") is None:
        return None
    for path in packaged():
        try:
            return Library(path)
        except OSError as error:
            warnings.warn(
                f"xrl_jax: oneDNN's kernels are not used, because its package {PACKAGE} cannot be "
                f"loaded ({error}); it needs libgomp.so.1, which Linux systems call libgomp1 or "
                "libgomp",
                RuntimeWarning,
                stacklevel=2,
            )
    system = ctypes.util.find_library("dnnl")
    if system is not None:
        with contextlib.suppress(OSError):
            return Library(system)
    return None


def row_major(dims: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major array, in elements."""
    strides = [1]
    for d in reversed(dims[1:]):
        strides.append(strides[-1] * d)
    return tuple(reversed(strides[: len(dims)]))


def _at(address: int | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _dims(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
