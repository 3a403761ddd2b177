"""Results of products are written in the layout in which they will be read."""

from __future__ import annotations

import pytest

from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.plan import plan
from xrl_jax.libraries.onednn.spec import Dot, Epilogue, Instruction, Partition, Reshape, Transpose
from xrl_jax.libraries.onednn.strides import result_strides

PLAIN, BACK = Dot(False, False), Transpose((0, 2, 1, 3))
HEADS, TOKENS = (2, 3, 4), (3, 8)  # two heads of size 4 for each of three tokens


def attention(op: Dot = PLAIN, turn: Transpose = BACK, *, twice: bool = False) -> Partition:
    """Return weights [2, 3, 3] times values [2, 3, 4], with the heads concatenated, times a matrix
    [8, 8].
    """
    shape = tuple((1, *HEADS)[a] for a in turn.order)
    given = (0, 1, 3) if op.after.addend else (0, 1)
    code = (
        Instruction(op, given, HEADS),
        Instruction(Reshape((1, *HEADS)), (4,), (1, *HEADS)),
        Instruction(turn, (5,), shape),
        Instruction(Reshape(TOKENS), (6,), TOKENS),
        Instruction(PLAIN, (7, 2), TOKENS),
    )
    inputs = ((2, 3, 3), HEADS, (8, 8), HEADS)
    return Partition(inputs, (False, False, True, False), code, (8, 4) if twice else (8,))


def test_heads_are_written_interleaved() -> None:
    """The strides are 4 elements from head to head and 8 from token to token."""
    assert result_strides(attention()) == {4: (4, 8, 1)}


def test_a_value_with_another_use_is_row_major() -> None:
    assert result_strides(attention(twice=True)) == {}


def test_a_product_with_an_addend_keeps_the_addends_layout() -> None:
    assert result_strides(attention(Dot(False, False, Epilogue(addend=True)))) == {}


def test_elements_of_a_head_stay_adjacent() -> None:
    """The library has no fast kernel that writes adjacent elements with a stride."""
    assert result_strides(attention(turn=Transpose((0, 3, 1, 2)))) == {}


def test_an_operand_that_is_read_transposed_is_written_transposed() -> None:
    """Two heads of size 4, [2, 3, 4], are transposed to [2, 4, 3] and read as [8, 3]."""
    code = (
        Instruction(PLAIN, (0, 1), (2, 3, 4)),
        Instruction(Transpose((0, 2, 1)), (3,), (2, 4, 3)),
        Instruction(Reshape((8, 3)), (4,), (8, 3)),
        Instruction(Dot(True, False), (5, 2), (3, 5)),
    )
    inputs = ((2, 3, 6), (2, 6, 4), (8, 5))
    assert result_strides(Partition(inputs, (False, False, True), code, (6,))) == {3: (4, 8, 1)}


@pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
def test_heads_are_not_copied() -> None:
    lib = library()
    assert lib is not None
    assert len(plan(lib, attention()).steps) == 2
    assert len(plan(lib, attention(twice=True)).steps) == 3
