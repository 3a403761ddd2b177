"""Attention as one operator: which partitions contain it, and what the generated code computes."""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.libraries.onednn.partitions import called
from xrl_jax.libraries.onednn.attend import with_attention
from xrl_jax.libraries.onednn.attention import Attended, kernel_of
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.loops import looped
from xrl_jax.libraries.onednn.machine_code import addresses, module
from xrl_jax.libraries.onednn.plan import plan
from xrl_jax.libraries.onednn.spec import (
    RELU,
    Attention,
    Binary,
    Dot,
    Epilogue,
    Instruction,
    Map,
    Partition,
    Reduce,
    Reshape,
    Scale,
    Transpose,
)
from xrl_jax.libraries.onednn.spec_text import partition, text_of

needs_library = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
PLAIN = Dot(False, False)
EXP, SUM, MAX = Map("exp", (None,)), Reduce("sum"), Reduce("max")
SUB, DIV = Binary("sub"), Binary("div")


def attention(
    batch: int = 2,
    m: int = 9,
    n: int = 20,
    k: int = 5,
    d: int = 18,
    *,
    first: Dot = PLAIN,
    last: Dot = PLAIN,
    scores_too: bool = False,
    outer: tuple[int, ...] = (),
) -> Partition:
    """Return a partition of softmax((a b [+ c]) / 2) v, with the softmax over the last axis. The
    scores get the further leading axes `outer`.
    """
    left = (batch, k, m) if first.left_transposed else (batch, m, k)
    right = (batch, n, k) if first.right_transposed else (batch, k, n)
    values = (batch, d, n) if last.right_transposed else (batch, n, d)
    inputs = [left, right, values]
    operands = (0, 1)
    scores = (batch, m, n)
    if first.after.addend:
        inputs.append(scores)
        operands = (0, 1, 3)
    at = len(inputs)
    many, rows, one = (*outer, batch, m, n), (*outer, batch, m), (*outer, batch, m, 1)
    code = (
        Instruction(first, operands, scores),
        Instruction(Reshape(many), (at,), many),
        Instruction(Scale(0.5), (at + 1,), many),
        Instruction(MAX, (at + 2,), rows),
        Instruction(Reshape(one), (at + 3,), one),
        Instruction(SUB, (at + 2, at + 4), many),
        Instruction(EXP, (at + 5,), many),
        Instruction(SUM, (at + 6,), rows),
        Instruction(Reshape(one), (at + 7,), one),
        Instruction(DIV, (at + 6, at + 8), many),
        Instruction(Reshape(scores), (at + 9,), scores),
        Instruction(last, (at + 10, 2), (batch, m, d)),
    )
    outputs = (at + 11, at) if scores_too else (at + 11,)
    return looped(Partition(tuple(inputs), (False,) * len(inputs), code, outputs))


def operators(part: Partition) -> list[str]:
    return [type(i.op).__name__ for i in with_attention(part).code]


def numbers(part: Partition) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in part.inputs]


# --- which partitions contain it ---


def test_two_products_with_a_softmax_between_become_one_operator() -> None:
    assert operators(attention()) == ["Attention"]


def test_an_attention_is_read_back_from_its_text() -> None:
    part = with_attention(attention())
    assert partition(text_of(part)) == part


@pytest.mark.parametrize(
    "part",
    [
        attention(scores_too=True),
        attention(m=7),
        attention(last=Dot(False, False, Epilogue(clip=RELU))),
        attention(first=Dot(False, False, Epilogue(clip=RELU))),
        attention(n=3000, k=60, d=60),
        attention(n=4, k=20000),
    ],
    ids=[
        "scores are returned",
        "few rows",
        "bounded results",
        "bounded scores",
        "much to keep",
        "cut strips",
    ],
)
def test_unsuitable_patterns_do_not_become_an_attention(part: Partition) -> None:
    assert "Attention" not in operators(part)


# --- results ---


def check(part: Partition) -> None:
    part = with_attention(part)
    assert any(isinstance(i.op, Attention) for i in part.code)
    given = numbers(part)
    with jax.enable_x64(True):
        (want,) = part(*(jnp.asarray(x, jnp.float64) for x in given))
    (found,) = called(part, *given)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@needs_library
@pytest.mark.parametrize(
    ("batch", "m", "n", "k", "d"),
    [
        (2, 9, 20, 5, 18),  # partial tiles, strips and sums
        (3, 12, 32, 8, 16),  # none that is partial
        (1, 200, 130, 64, 64),  # more than one group of tiles
        (1, 8, 1, 1, 1),
        (1, 20000, 1, 300, 1),  # long rows with few scores
    ],
)
def test_the_attention_kernel_equals_its_parts(batch: int, m: int, n: int, k: int, d: int) -> None:
    check(attention(batch, m, n, k, d))


@needs_library
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("values", [False, True])
def test_operands_may_be_transposed(left: bool, right: bool, values: bool) -> None:
    check(attention(first=Dot(left, right), last=Dot(False, values)))


@needs_library
@pytest.mark.parametrize("values_transposed", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["in the product", "apart"])
def test_weights_may_be_on_the_right(values_transposed: bool, apart: bool) -> None:
    """v' p' = (p v)', where p is transposed by the product or before it."""
    whole = attention(last=Dot(False, not values_transposed))
    before = whole.code[:-1]
    at = len(whole.inputs) + len(before)
    turn = Instruction(Transpose((0, 2, 1)), (at - 1,), (2, 20, 9))
    p = at if apart else at - 1
    op = Dot(values_transposed, not apart)
    product = Instruction(op, (2, p), (2, 18, 9))
    code = (*before, *([turn] if apart else []), product)
    n = len(whole.inputs) + len(code)
    part = Partition(whole.inputs, whole.packed, code, (n - 1,))
    assert operators(part) == ["Attention"]
    check(part)


@needs_library
@pytest.mark.parametrize("outer", [(), (1,)])
def test_an_addend_of_the_scores_is_added_in_the_loop(outer: tuple[int, ...]) -> None:
    check(attention(first=Dot(False, False, Epilogue(addend=True)), outer=outer))


@needs_library
def test_interleaved_heads_are_read_and_written_without_copies() -> None:
    """With eight tokens and two heads, nothing is copied but the value that is returned."""
    tokens, heads, size = 8, 2, 4
    apart, turn = (heads, tokens, size), Transpose((1, 0, 2))
    inner = attention(heads, tokens, tokens, size, size, first=Dot(False, True))
    n = len(inner.inputs)
    transposed = tuple(Instruction(turn, (i,), apart) for i in range(n))
    moved = tuple(
        Instruction(i.op, tuple(a + n for a in i.args), i.shape) for i in with_attention(inner).code
    )
    back = Instruction(turn, (2 * n,), (tokens, heads, size))
    part = Partition(
        ((tokens, heads, size),) * n, (False,) * n, (*transposed, *moved, back), (2 * n + 1,)
    )
    lib = library()
    assert lib is not None
    first, copy = plan(lib, part).steps
    assert isinstance(first.primitive, Attended) and isinstance(copy.primitive, int)
    assert first.primitive.strides == ((4, 8, 1), (4, 1, 8), (4, 8, 1), (4, 8, 1))
    given = numbers(part)
    (found,) = called(part, *given)
    np.testing.assert_allclose(found, part(*map(jnp.asarray, given))[0], rtol=1e-5, atol=1e-5)


@needs_library
def test_nan_and_infinities_stay_in_their_rows() -> None:
    part = with_attention(attention())
    a, b, v = numbers(part)
    a[1, 3, 2], a[0, 8, 0] = np.nan, np.inf
    (found,) = called(part, a, b, v)
    (want,) = part(*map(jnp.asarray, (a, b, v)))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    assert np.isnan(found).any(axis=-1).sum() == 2
    v[1, 19, 17] = np.inf
    (found,) = called(part, *numbers(part)[:2], v)
    assert np.isinf(found[1, :, 17]).all() and np.isinf(found).sum() == 9


def test_tiles_of_wide_registers_compute_the_same() -> None:
    """Registers of 16 elements, which this processor may lack; the compiler then uses two registers
    for each.
    """
    part = with_attention(attention(2, 31, 40, 12, 20))
    (made,) = part.code
    assert isinstance(made.op, Attention)
    a, b, v = numbers(part)
    y = np.full((2, 31, 20), np.nan, np.float32)
    strides = (31 * 12, 12, 1), (12 * 40, 40, 1), (40 * 20, 20, 1), (31 * 20, 20, 1)
    what = Attended(2, 31, 12, 40, 20, strides, made.op.loop, made.op.at, lanes=16)
    (address,) = addresses(module(kernel_of, what, "wide_attention", None), "wide_attention")
    table = (ctypes.c_void_p * 4)(*(x.ctypes.data for x in (a, b, v, y)))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(table)
    np.testing.assert_allclose(y, part(*map(jnp.asarray, (a, b, v)))[0], rtol=1e-5, atol=1e-5)
