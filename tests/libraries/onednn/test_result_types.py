"""Results that only convolutions in bfloat16 read are stored in bfloat16."""

from __future__ import annotations

from xrl_jax.libraries.onednn.result_types import result_types
from xrl_jax.libraries.onednn.spec import (
    RELU,
    Concat,
    Conv,
    Instruction,
    Op,
    Partition,
    Pool,
    Reshape,
    Transpose,
)

NARROW = Conv((1, 1), ((0, 0), (0, 0)), (1, 1), 1, right="bfloat16")
WIDE = Conv((1, 1), ((0, 0), (0, 0)), (1, 1), 1)
X, W = (1, 4, 4, 16), (1, 1, 16, 16)  # values 0 and 1


def types(*code: tuple[Op, tuple[int, ...]], outputs: tuple[int, ...]) -> dict[int, str]:
    instructions = tuple(Instruction(op, args, X) for op, args in code)
    return result_types(Partition((X, W), (False, True), instructions, outputs))


def test_a_chain_stays_narrow() -> None:
    found = types((NARROW, (0, 1)), (NARROW, (2, 1)), (NARROW, (3, 1)), outputs=(4,))
    assert found == {2: "bfloat16", 3: "bfloat16"}


def test_a_reshape_passes_on_what_reads_it() -> None:
    found = types((NARROW, (0, 1)), (Reshape(X), (2,)), (NARROW, (3, 1)), outputs=(4,))
    assert found == {2: "bfloat16"}


def test_operators_that_pick_elements_keep_the_type() -> None:
    largest = Pool("max", (1, 2, 2, 1), (1, 1, 1, 1), ((0, 0),) * 4)
    joined = (NARROW, (0, 1)), (NARROW, (0, 1)), (Concat(3), (2, 3))
    found = types(
        *joined, (largest, (4,)), (Transpose((0, 2, 1, 3)), (5,)), (NARROW, (6, 1)), outputs=(7,)
    )
    assert found == {2: "bfloat16", 3: "bfloat16"}


def test_a_wide_part_keeps_what_it_is_joined_with_wide() -> None:
    assert types((NARROW, (0, 1)), (Concat(3), (2, 0)), (NARROW, (3, 1)), outputs=(4,)) == {}


def test_an_average_stays_wide() -> None:
    average = Pool("sum", (1, 2, 2, 1), (1, 1, 1, 1), ((0, 0),) * 4, 0.25)
    assert types((NARROW, (0, 1)), (average, (2,)), (NARROW, (3, 1)), outputs=(4,)) == {}


def test_a_result_that_is_returned_stays_wide() -> None:
    assert types((NARROW, (0, 1)), (NARROW, (2, 1)), outputs=(2, 3)) == {}


def test_a_result_that_another_operator_reads_stays_wide() -> None:
    assert types((NARROW, (0, 1)), (NARROW, (2, 1)), (RELU, (2,)), outputs=(3, 4)) == {}
    assert types((NARROW, (0, 1)), (WIDE, (2, 1)), outputs=(3,)) == {}


def test_a_convolution_in_float32_writes_float32() -> None:
    assert types((WIDE, (0, 1)), (NARROW, (2, 1)), outputs=(3,)) == {}
