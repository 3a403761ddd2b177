"""Layout of the memory for values between the steps of a call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrl_jax.libraries.onednn.builder import Block, Builder, Value, assign_offsets
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.native import Place

blocks = st.lists(
    st.tuples(st.integers(1, 300), st.integers(0, 9), st.integers(0, 4)).map(
        lambda t: Block(t[0], t[1], t[1] + t[2])
    ),
    max_size=12,
)


@given(blocks)
def test_blocks_in_use_at_the_same_time_do_not_overlap(given_blocks: list[Block]) -> None:
    offsets, total = assign_offsets(given_blocks)
    placed = list(zip(given_blocks, offsets, strict=True))
    for i, (a, at) in enumerate(placed):
        assert at % 64 == 0 and at + a.nbytes <= total
        for b, bt in placed[:i]:
            together = a.first <= b.last and b.first <= a.last
            assert not together or at + a.nbytes <= bt or bt + b.nbytes <= at


def test_memory_is_reused() -> None:
    """A chain of three values needs memory for two at a time."""
    chain = [Block(64, 0, 1), Block(64, 1, 2), Block(64, 2, 3)]
    assert assign_offsets(chain) == ([0, 64, 0], 128)


@pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
def test_readers_of_a_value_in_another_layout_share_the_copy() -> None:
    lib = library()
    assert lib is not None
    by_rows, by_columns = lib.desc((4, 6)), lib.desc((4, 6), (1, 4))
    b = Builder(lib)
    x, z = (Value(by_rows, Place.argument(i)) for i in range(2))
    copy = b.to_layout(x, by_columns)
    assert b.to_layout(x, by_columns).place is copy.place and len(b.steps) == 1
    assert b.to_layout(z, by_columns).place is not copy.place and len(b.steps) == 2
    b.forget_steps(0)
    assert b.to_layout(x, by_columns).place is not copy.place and len(b.steps) == 1
