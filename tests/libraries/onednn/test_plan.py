"""Text form of partitions, and plans of steps that run them."""

from __future__ import annotations

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.libraries.onednn.calls import equations, hoisted
from xrl_jax.libraries.onednn.c_api import DST, SRC, UnimplementedError, library
from xrl_jax.libraries.onednn.kernels import kernel_p, pack, run
from xrl_jax.libraries.onednn.native import Place, Step, register
from xrl_jax.libraries.onednn.plan import plan
from xrl_jax.libraries.onednn.products import kernel_layout
from xrl_jax.libraries.onednn.spec import (
    RELU,
    Binary,
    Concat,
    Conv,
    Dot,
    Epilogue,
    Instruction,
    Loop,
    Map,
    Partition,
    Pool,
    Slice,
    Transpose,
)
from xrl_jax.libraries.onednn.spec_text import name_of, partition, text_of

needs_library = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
PART = Partition(
    ((1, 4, 4, 8), (1, 1, 8, 8), (8,)),
    (False, True, False),
    (
        Instruction(
            Conv((1, 1), ((0, 0), (0, 0)), (1, 1), 1, Epilogue(bias=True)), (0, 1, 2), (1, 4, 4, 8)
        ),
        Instruction(Pool("max", (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4), (3,), (1, 2, 2, 8)),
        Instruction(Slice((0, 0, 0, 0), (1, 2, 2, 8), (1, 2, 1, 1)), (4,), (1, 1, 2, 8)),
        Instruction(Concat(3), (5, 5), (1, 1, 2, 16)),
        Instruction(RELU, (6,), (1, 1, 2, 16)),
    ),
    (7, 3),
)


def test_a_partition_is_read_back_from_its_text() -> None:
    read = partition(text_of(PART))
    assert (read, hash(read)) == (PART, hash(PART))


@needs_library
def test_strides_of_axes_of_size_one_are_ignored() -> None:
    """Moving the features past an axis of size 1 leaves an array row-major, except for the stride
    of that axis. This stride must not matter, because the library has no fast sum for it.
    """
    transposed = Instruction(Transpose((1, 0, 2, 3)), (0,), (1, 40, 11, 11))
    added = Instruction(Binary("add"), (2, 1), (1, 40, 11, 11))
    part = Partition(((40, 1, 11, 11), (1, 40, 1, 1)), (False, False), (transposed, added), (3,))
    lib = library()
    assert lib is not None and len(plan(lib, part).steps) == 1


@pytest.mark.parametrize(
    "text", ["[]", "{}", "[1, 2, 3, 4]", '[[], [], [[["Conk"], [0], [1]]], []]']
)
def test_text_that_is_no_partition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the text of a partition"):
        partition(text)


def test_names_differ_by_partition_and_place() -> None:
    other = Partition(PART.inputs, PART.packed, PART.code, (7,))
    assert len({name_of(PART, "here"), name_of(PART, "there"), name_of(other, "here")}) == 3


def test_kernel_strides_are_given_in_the_librarys_axis_order() -> None:
    lies = (96, 32, 8, 1)
    assert kernel_layout((3, 3, 4, 8), lies, 1, (1, 2)) == ([8, 4, 3, 3], [1, 8, 96, 32])
    assert kernel_layout((3, 3, 4, 8), lies, 2, (1, 2)) == ([2, 4, 4, 3, 3], [4, 1, 8, 96, 32])
    column = (32, 32, 8, 1)
    assert kernel_layout((5, 1, 4, 8), column, 1, (2, 1)) == ([8, 4, 1, 5], [1, 8, 32, 32])


def test_strides_of_a_kernel_that_is_stored_features_first() -> None:
    """A kernel [3, 3, 4, 8] that is stored as [8, 3, 3, 4], i.e. a transpose of that array."""
    transposed = (12, 4, 1, 36)
    assert kernel_layout((3, 3, 4, 8), transposed, 1, (1, 2)) == ([8, 4, 3, 3], [36, 1, 12, 4])
    assert kernel_layout((3, 3, 4, 8), transposed, 2, (1, 2)) == (
        [2, 4, 4, 3, 3],
        [144, 36, 1, 12, 4],
    )


@needs_library
def test_only_weights_are_packed() -> None:
    lib = library()
    assert lib is not None
    assert list(plan(lib, PART).weights) == [1]


@needs_library
def test_affinities_of_other_threads_are_unchanged() -> None:
    """OpenMP binds its own threads to processors, and no others; with one processor the affinities
    do not differ.
    """
    code = """
import os
allowed = os.sched_getaffinity(0)
import jax, jax.numpy as jnp
from xrl_jax.libraries.onednn.kernels import kernel
from xrl_jax.libraries.onednn.spec import Dot
a = jnp.ones((256, 256))
assert jax.jit(lambda a: kernel(Dot(False, False), a, a))(a)[0, 0] == 256
assert os.sched_getaffinity(0) == allowed
tasks = [os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")]
print(sum(t != allowed for t in tasks) in (len(allowed), 0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@needs_library
def test_a_failing_primitive_raises_a_jax_error() -> None:
    """Other calls of the process still work afterwards."""
    lib = library()
    assert lib is not None
    desc = lib.desc((4,))
    copy = lib.primitive(lib.reorder(desc, desc))
    good = Step(copy, ((SRC, desc, Place.argument(0)), (DST, desc, Place.result(0))))
    register(lib, "xrl_jax.test.good", [good])
    register(lib, "xrl_jax.test.bad", [Step(copy, good.args[:1])])

    def run(name: str) -> np.ndarray:
        call = jax.ffi.ffi_call(f"xrl_jax.test.{name}", jax.ShapeDtypeStruct((4,), jnp.float32))
        return np.asarray(jax.jit(lambda x: call(x))(jnp.arange(4.0)))

    with pytest.raises(jax.errors.JaxRuntimeError, match="a primitive of oneDNN has failed"):
        run("bad")
    np.testing.assert_array_equal(run("good"), [0, 1, 2, 3])


def test_a_product_and_its_epilogue_evaluated_as_lax_code() -> None:
    a, b = jnp.array([[1.0, 2.0]]), jnp.array([[3.0], [4.0]])
    after = Epilogue(bias=True, addend=True, clip=RELU)
    y = Dot(False, False, after)(a, b, jnp.array([[-20.0]]), jnp.array([[8.0]]))
    np.testing.assert_array_equal(y, [[0.0]])
    np.testing.assert_array_equal(Dot(True, True)(a.T, b.T), [[11.0]])


@needs_library
def test_a_loop_without_sums_needs_no_layout_conversion() -> None:
    """x * sigmoid(x) between grouped convolutions, which have layouts of the library's own, adds
    only one step.
    """
    lib = library()
    assert lib is not None
    image, kernel = (1, 8, 8, 32), (3, 3, 4, 32)
    grouped = Conv((1, 1), ((1, 1), (1, 1)), (1, 1), 8)
    swish = (
        Instruction(Map("logistic", (None,)), (0,), image),
        Instruction(Binary("mul"), (0, 1), image),
    )
    loop = Loop(64, 32, (image,), swish)

    def n_steps(*between: Instruction) -> int:
        first = Instruction(grouped, (0, 1), image)
        last = Instruction(grouped, (3 + len(between), 2), image)
        code = (first, *between, last)
        part = Partition((image, kernel, kernel), (False, True, True), code, (4 + len(between),))
        return len(plan(lib, part).steps)

    assert n_steps(Instruction(loop, (3,), image)) == n_steps() + 1


@needs_library
def test_a_loop_follows_the_memory_order_of_the_axes() -> None:
    """A scale for each feature, written features-first, of an image that is stored features-last: a
    row of the loop is a pixel.
    """
    lib = library()
    assert lib is not None
    last, first, pointwise = (1, 4, 4, 16), (1, 16, 4, 4), (1, 1, 16, 16)
    scale = Loop(64, 4, (first, (1, 16, 1, 1)), (Instruction(Binary("mul"), (0, 1), first),))
    conv = Conv((1, 1), ((0, 0), (0, 0)), (1, 1), 1)
    code = (
        Instruction(conv, (0, 1), last),
        Instruction(Transpose((0, 3, 1, 2)), (3,), first),
        Instruction(scale, (4, 2), first),
        Instruction(Transpose((0, 2, 3, 1)), (5,), last),
        Instruction(conv, (6, 1), last),
    )
    part = Partition((last, pointwise, (1, 16, 1, 1)), (False, True, False), code, (7,))
    _, loop, _ = (s.primitive for s in plan(lib, part).steps)
    assert isinstance(loop, Loop)
    assert (loop.rows, loop.columns, loop.inputs) == (16, 16, (last, (1, 1, 1, 16)))
    x = jnp.arange(256.0).reshape(last)
    w, by = 2 * jnp.eye(16).reshape(pointwise), jnp.arange(16.0).reshape(1, 16, 1, 1)
    (y,) = jax.jit(lambda *a: run(part, *a))(x, pack(part, 1, w), by)
    np.testing.assert_array_equal(y, 4 * x * np.arange(16.0))


@needs_library
def test_windows_of_images_with_features_first_are_computed_with_features_last() -> None:
    lib = library()
    assert lib is not None
    pool = Pool("max", (1, 1, 2, 2), (1, 1, 2, 2), ((0, 0),) * 4)
    part = Partition(((1, 8, 4, 4),), (False,), (Instruction(pool, (0,), (1, 8, 2, 2)),), (1,))
    steps = plan(lib, part).steps
    if len(steps) > 1:  # with AVX-512 the library has a kernel for either layout
        (source,) = (desc for which, desc, _ in steps[1].args if which == SRC)
        assert lib.strides(source) == (128, 1, 32, 8)
    x = jnp.arange(128.0).reshape(1, 8, 4, 4)
    (y,) = jax.jit(lambda a: run(part, a))(x)
    np.testing.assert_array_equal(y, x[:, :, 1::2, 1::2])


@needs_library
@pytest.mark.parametrize("kind", ["max", "sum"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((2, 8, 6, 9), 3), ((2, 8, 6, 9), 2), ((2, 6, 9, 8), 1), ((1, 8, 9), 2), ((1, 9, 8), 1)],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_windows_along_one_axis(
    shape: tuple[int, ...], axis: int, kind: str, transposed: bool
) -> None:
    """Windows of three elements with stride 2 and one element of padding at the front, on an array
    in row-major layout and on one that is stored with its second axis last.
    """

    def along(number: int, others: int) -> tuple[int, ...]:
        return tuple(number if a == axis else others for a in range(len(shape)))

    padding = tuple((1, 0) if a == axis else (0, 0) for a in range(len(shape)))
    pool = Pool(kind, along(3, 1), along(2, 1), padding)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[0, 1] = np.nan
    edge = -np.inf if kind == "max" else 0.0
    padded = np.pad(x, padding, constant_values=edge)
    count = (padded.shape[axis] - 3) // 2 + 1
    parts = [np.take(padded, range(i, i + 2 * count - 1, 2), axis) for i in range(3)]
    want = functools.reduce(np.maximum if kind == "max" else np.add, parts)
    order = (0, *range(2, len(shape)), 1)
    back = tuple(order.index(a) for a in range(len(shape)))
    given = x.transpose(order) if transposed else x
    code = [Instruction(Transpose(back), (0,), shape)] if transposed else []
    code.append(Instruction(pool, (len(code),), want.shape))
    part = Partition((given.shape,), (False,), tuple(code), (len(code),))
    (found,) = jax.jit(lambda a: run(part, a))(jnp.asarray(given))
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)


@needs_library
def test_pooling_of_a_sequence_does_not_split_a_call() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        conv = Conv((1,), ((1, 1),), (1,), 1)
        y = kernel_p.bind(x, w, op=conv)
        y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), "VALID")
        return kernel_p.bind(y, w, op=conv)

    args = jnp.ones((1, 12, 8)), jnp.ones((3, 8, 8))
    parts = hoisted(lambda w, x: fn(x, w), args[1], args[0], weights=1)
    assert equations(parts, args[0]) == ["Conv+Pool+Conv"]


@needs_library
def test_a_primitive_of_too_many_arguments_has_no_plan() -> None:
    """A call holds up to 64 arguments of a primitive; such a part is left to XLA."""

    def concatenation(n: int) -> Partition:
        shapes = ((2, 8),) * n
        code = (Instruction(Concat(1), tuple(range(n)), (2, 8 * n)),)
        return Partition(shapes, (False,) * n, code, (n,))

    lib = library()
    assert lib is not None
    assert plan(lib, concatenation(60)).steps
    with pytest.raises(UnimplementedError, match="arguments"):
        plan(lib, concatenation(70))
