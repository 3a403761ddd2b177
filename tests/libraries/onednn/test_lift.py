"""Weight-only work of a partition is moved before its calls."""

from __future__ import annotations

from xrl_jax.libraries.onednn.lift import Lifted, lifted
from xrl_jax.libraries.onednn.spec import Binary, Dot, Epilogue, Instruction, Partition, Reshape

ADD, ROW, SQUARE = Binary("add"), (1, 4), (4, 4)
BIASED = Dot(False, False, Epilogue(bias=True))


def test_a_sum_of_two_biases_is_computed_before_the_call() -> None:
    """x @ w + (b + c): the call takes x, w and the sum."""
    code = Instruction(ADD, (2, 3), ROW), Instruction(BIASED, (0, 1, 4), SQUARE)
    whole = Partition((SQUARE, SQUARE, ROW, ROW), (False, True, False, False), code, (5,))
    assert lifted(whole, [False, True, True, True]) == Lifted(
        Partition(
            (SQUARE, SQUARE, ROW),
            (False, True, False),
            (Instruction(BIASED, (0, 1, 2), SQUARE),),
            (3,),
        ),
        (0, 1),
        Partition((ROW, ROW), (False, False), (Instruction(ADD, (0, 1), ROW),), (2,)),
        (2, 3),
    )


def test_a_sum_with_an_operand_that_is_no_weight_stays_in_the_call() -> None:
    code = Instruction(ADD, (2, 3), ROW), Instruction(BIASED, (0, 1, 4), SQUARE)
    whole = Partition((SQUARE, SQUARE, ROW, ROW), (False, True, False, False), code, (5,))
    for known in ([False, True, True, False], [False, True, False, True]):
        assert lifted(whole, known) == Lifted(whole, (0, 1, 2, 3), None, ())


def test_a_reshape_of_a_weight_is_not_lifted() -> None:
    code = Instruction(Reshape(ROW), (2,), ROW), Instruction(BIASED, (0, 1, 3), SQUARE)
    whole = Partition((SQUARE, SQUARE, (4,)), (False, True, False), code, (4,))
    assert lifted(whole, [False, True, True]).before is None


def test_a_reshaped_sum_of_weights_is_computed_before_the_call() -> None:
    """x @ w + (b + c), where the sum of two vectors becomes a row; the call uses b as well."""
    code = (
        Instruction(ADD, (2, 3), (4,)),
        Instruction(Reshape(ROW), (4,), ROW),
        Instruction(BIASED, (0, 1, 5), SQUARE),
        Instruction(Binary("mul"), (6, 2), SQUARE),
    )
    whole = Partition((SQUARE, SQUARE, (4,), (4,)), (False, True, False, False), code, (7,))
    part, taken, before, needs = lifted(whole, [False, True, True, True])
    assert (taken, needs) == ((0, 1, 2), (2, 3))
    assert before is not None
    assert before.code == (Instruction(ADD, (0, 1), (4,)), Instruction(Reshape(ROW), (2,), ROW))
    assert part.code == (
        Instruction(BIASED, (0, 1, 3), SQUARE),
        Instruction(Binary("mul"), (4, 2), SQUARE),
    )
