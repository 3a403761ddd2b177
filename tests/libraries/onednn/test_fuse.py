"""Merging of sums and rectifiers into kernels, on partitions of a few operators."""

from __future__ import annotations

from xrl_jax.libraries.onednn.fuse import fused
from xrl_jax.libraries.onednn.spec import (
    RELU,
    Binary,
    Clip,
    Dot,
    Epilogue,
    Instruction,
    Op,
    Partition,
    Reshape,
    Shape,
    Transpose,
)

SQUARE = (4, 4)
PLAIN = Dot(False, False)


def dot(addend: bool = False, clip: Clip | None = None) -> Dot:
    return Dot(False, False, Epilogue(False, addend, clip))


def after(*code: tuple[Op, tuple[int, ...]], outputs: tuple[int, ...]) -> list[tuple]:
    """Fuse operators on inputs 0 and 1, all of shape [4, 4]; return the operators and outputs."""
    listed = tuple(Instruction(op, args, shape_of(op)) for op, args in code)
    part = fused(Partition((SQUARE, SQUARE), (False, True), listed, outputs))
    return [*((i.op, i.args) for i in part.code), (part.outputs, ())]


def shape_of(op: Op) -> Shape:
    return op.shape if isinstance(op, Reshape) else SQUARE


def test_a_sum_and_a_rectifier_are_merged_into_a_product() -> None:
    found = after((PLAIN, (0, 1)), (Binary("add"), (2, 0)), (RELU, (3,)), outputs=(4,))
    assert found == [(dot(addend=True, clip=RELU), (0, 1, 0)), ((2,), ())]


def test_a_reshape_between_is_undone_for_the_other_operand() -> None:
    flat = Reshape((16,))
    code = (PLAIN, (0, 1)), (flat, (2,)), (flat, (0,)), (Binary("add"), (3, 4))
    listed = [Instruction(op, args, shape_of(op)) for op, args in code]
    listed[-1] = Instruction(Binary("add"), (3, 4), (16,))
    part = fused(Partition((SQUARE, SQUARE), (False, True), tuple(listed), (5,)))
    assert [(i.op, i.args) for i in part.code] == [(dot(addend=True), (0, 1, 0)), (flat, (2,))]


def test_a_sum_of_two_products_is_merged_into_the_later_one() -> None:
    found = after((PLAIN, (0, 1)), (PLAIN, (0, 1)), (Binary("add"), (2, 3)), outputs=(4,))
    assert found == [(PLAIN, (0, 1)), (dot(addend=True), (0, 1, 2)), ((3,), ())]


def test_nothing_is_merged_into_a_product_that_is_used_twice() -> None:
    code = (PLAIN, (0, 1)), (RELU, (2,))
    assert after(*code, outputs=(3, 2)) == [*code, ((3, 2), ())]
    twice = (PLAIN, (0, 1)), (Binary("add"), (2, 2))
    assert after(*twice, outputs=(3,)) == [*twice, ((3,), ())]


def test_no_sum_is_merged_after_a_rectifier_or_another_sum() -> None:
    code = (PLAIN, (0, 1)), (RELU, (2,)), (Binary("add"), (3, 0))
    assert after(*code, outputs=(4,)) == [
        (dot(clip=RELU), (0, 1)),
        (Binary("add"), (2, 0)),
        ((3,), ()),
    ]
    sums = (PLAIN, (0, 1)), (Binary("add"), (2, 0)), (Binary("add"), (3, 0))
    assert after(*sums, outputs=(4,)) == [
        (dot(addend=True), (0, 1, 0)),
        (Binary("add"), (2, 0)),
        ((3,), ()),
    ]


def test_an_addend_computed_from_the_product_is_not_merged() -> None:
    """x @ w + relu(x @ w): the product has two uses."""
    code = (PLAIN, (0, 1)), (RELU, (2,)), (Binary("add"), (2, 3))
    assert after(*code, outputs=(4,)) == [*code, ((4,), ())]


def test_successive_clips_are_combined() -> None:
    """Clipping to at least 0, at most 6 and at least 1 becomes clipping to [1, 6]."""
    code = (PLAIN, (0, 1)), (RELU, (2,)), (Clip(high=6.0), (3,)), (Clip(low=1.0), (4,))
    assert after(*code, outputs=(5,)) == [(dot(clip=Clip(1.0, 6.0)), (0, 1)), ((2,), ())]
    assert Clip(high=-1.0).then(RELU) == Clip(0.0, 0.0)


def test_one_element_per_feature_is_a_bias() -> None:
    """An array with one element per row is no bias."""
    for shape, ops in (
        ((1, 4), [Dot(False, False, Epilogue(bias=True))]),
        ((4, 1), [PLAIN, Binary("add")]),
    ):
        code = Instruction(PLAIN, (0, 1), SQUARE), Instruction(Binary("add"), (3, 2), SQUARE)
        found = fused(Partition((SQUARE, SQUARE, shape), (False, True, False), code, (4,)))
        assert [i.op for i in found.code] == ops
        assert found.code[-1].args == ((0, 1, 2) if len(ops) == 1 else (3, 2))


def test_a_bias_may_follow_another_sum_or_bias() -> None:
    """x @ w + x + b + c: the two biases become one, which the kernel adds first."""
    inputs = SQUARE, SQUARE, (1, 4), (1, 4)
    add = Binary("add")
    code = (
        Instruction(PLAIN, (0, 1), SQUARE),
        Instruction(add, (4, 0), SQUARE),
        Instruction(add, (5, 2), SQUARE),
        Instruction(add, (3, 6), SQUARE),
    )
    found = fused(Partition(inputs, (False, True, False, False), code, (7,)))
    both = Dot(False, False, Epilogue(bias=True, addend=True))
    assert found.code == (
        Instruction(add, (2, 3), (1, 4)),
        Instruction(both, (0, 1, 4, 0), SQUARE),
    )


def test_a_bias_of_the_addend_is_merged_into_the_product() -> None:
    """x @ w + (y + b), where y and b have one more axis: both sums are merged into the product."""
    inputs, shape = ((2, 4), (4, 4), (4,), (1, 2, 4)), (2, 4)
    code = (
        Instruction(Reshape((1, 1, 4)), (2,), (1, 1, 4)),
        Instruction(Binary("add"), (3, 4), (1, 2, 4)),
        Instruction(PLAIN, (0, 1), shape),
        Instruction(Reshape(shape), (5,), shape),
        Instruction(Binary("add"), (6, 7), shape),
    )
    found = fused(Partition(inputs, (False, True, False, False), code, (8,)))
    both = Dot(False, False, Epilogue(bias=True, addend=True))
    assert found.code == (
        Instruction(Reshape((1, 4)), (2,), (1, 4)),
        Instruction(Reshape(shape), (3,), shape),
        Instruction(both, (0, 1, 4, 5), shape),
    )


def test_a_second_addend_is_added_to_the_first_where_both_are_weights() -> None:
    """x @ w + a + b becomes x @ w + (a + b)."""
    add = Binary("add")
    code = (
        Instruction(PLAIN, (0, 1), SQUARE),
        Instruction(add, (4, 2), SQUARE),
        Instruction(add, (5, 3), SQUARE),
    )
    part = Partition((SQUARE,) * 4, (False, True, False, False), code, (6,))
    assert fused(part, [False, True, True, True]).code == (
        Instruction(add, (2, 3), SQUARE),
        Instruction(dot(addend=True), (0, 1, 4), SQUARE),
    )
    assert [i.op for i in fused(part, [False, True, True, False]).code] == [dot(addend=True), add]


def test_a_transposed_product_becomes_a_product_of_swapped_operands() -> None:
    """(a b')' becomes b a', unless b is packed. (a b)' stays, because both operands of b' a' would
    be read transposed.
    """
    for packed, right_transposed, ops in (
        (False, True, [(Dot(False, True), (1, 0))]),
        (True, True, [(Dot(False, True), (0, 1)), (Transpose((1, 0)), (2,))]),
        (False, False, [(PLAIN, (0, 1)), (Transpose((1, 0)), (2,))]),
    ):
        op = Dot(False, right_transposed)
        code = Instruction(op, (0, 1), SQUARE), Instruction(Transpose((1, 0)), (2,), SQUARE)
        found = fused(Partition((SQUARE, SQUARE), (False, packed), code, (3,)))
        assert [(i.op, i.args) for i in found.code] == ops


def test_transposes_of_batched_products_are_merged_within_a_batch_element() -> None:
    """A product [3, 2, 2] is reshaped to [1, 3, 2, 2]. Swapping the last two axes is merged into
    it; swapping images and rows is not.
    """
    inputs, more = ((3, 2, 4), (3, 2, 4)), (1, 3, 2, 2)
    for order, op in (((0, 1, 3, 2), Reshape(more)), ((0, 2, 1, 3), Transpose((0, 2, 1, 3)))):
        code = (
            Instruction(Dot(False, True), (0, 1), (3, 2, 2)),
            Instruction(Reshape(more), (2,), more),
            Instruction(Transpose(order), (3,), tuple(more[a] for a in order)),
        )
        assert fused(Partition(inputs, (False, False), code, (4,))).code[-1].op == op
