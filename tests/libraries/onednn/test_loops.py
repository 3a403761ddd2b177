"""Loops over the values between kernels: which values share a loop, and what loops compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from xrl_jax.backends.hoist import split
from xrl_jax.libraries.onednn import kernels
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.loops import looped
from xrl_jax.libraries.onednn.spec import (
    RELU,
    Binary,
    Concat,
    Dot,
    Instruction,
    Loop,
    Map,
    Op,
    Partition,
    Reduce,
    Reshape,
    Scale,
)
from xrl_jax.libraries.onednn.spec_text import partition, text_of

needs_library = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
RNG = np.random.default_rng(0)
ADD, SUB, MUL, DIV = (Binary(k) for k in ("add", "sub", "mul", "div"))
EXP = Map("exp", (None,))
SUM, MAX = Reduce("sum"), Reduce("max")
PRODUCT = Dot(False, False)


def program(*inputs, code, outputs) -> Partition:
    """Return a partition of operators, given with their arguments and their results' shapes."""
    listed = tuple(Instruction(op, args, shape) for op, args, shape in code)
    return Partition(inputs, (False,) * len(inputs), listed, outputs)


def names(part: Partition) -> list:
    """Return the names of the operators; a loop is the list of the operators inside it."""
    return [
        [type(j.op).__name__ for j in i.op.code] if isinstance(i.op, Loop) else type(i.op).__name__
        for i in part.code
    ]


SOFTMAX = program(
    (6, 20),
    code=[
        (MAX, (0,), (6,)),
        (Reshape((6, 1)), (1,), (6, 1)),
        (SUB, (0, 2), (6, 20)),
        (EXP, (3,), (6, 20)),
        (SUM, (4,), (6,)),
        (Reshape((6, 1)), (5,), (6, 1)),
        (DIV, (4, 6), (6, 20)),
    ],
    outputs=(7,),
)


def test_a_softmax_is_one_loop() -> None:
    assert names(looped(SOFTMAX)) == [
        ["Reduce", "Reshape", "Binary", "Map", "Reduce", "Reshape", "Binary"]
    ]


def test_a_kernel_between_two_loops_keeps_them_separate() -> None:
    """exp(exp(x) @ exp(x)): the product is not part of a loop."""
    square = (16, 16)
    code = [(EXP, (0,), square), (PRODUCT, (1, 1), square), (EXP, (2,), square)]
    assert names(looped(program(square, code=code, outputs=(3,)))) == [["Map"], "Dot", ["Map"]]


def test_a_loop_does_not_depend_on_its_own_results() -> None:
    """With y = exp(x), y * (y @ y) has the rows of y, but cannot be in the loop that computes y."""
    square = (16, 16)
    code = [
        (EXP, (0,), square),
        (PRODUCT, (1, 1), square),
        (MUL, (1, 2), square),
        (EXP, (3,), square),
    ]
    made = looped(program(square, code=code, outputs=(4,)))
    assert names(made) == [["Map"], "Dot", ["Binary", "Map"]]


def test_a_value_that_is_used_twice_gets_a_separate_loop() -> None:
    """y = exp(x) and exp(y) are both returned: the second loop takes y."""
    code = [(EXP, (0,), (4, 8)), (EXP, (1,), (4, 8))]
    made = looped(program((4, 8), code=code, outputs=(1, 2)))
    assert [(names(made)[k], i.args) for k, i in enumerate(made.code)] == [
        (["Map"], (0,)),
        (["Map"], (1,)),
    ]


def test_a_value_needed_in_several_shapes_is_computed_once() -> None:
    """exp(exp(x)) of shape [4, 8] is returned in this shape, as [4, 1, 8] (twice) and as [32]."""
    code = [
        (EXP, (0,), (4, 8)),
        (EXP, (1,), (4, 8)),
        (Reshape((4, 1, 8)), (2,), (4, 1, 8)),
        (Reshape((4, 1, 8)), (2,), (4, 1, 8)),
        (Reshape((32,)), (2,), (32,)),
    ]
    made = looped(program((4, 8), code=code, outputs=(2, 3, 4, 5)))
    assert names(made) == [["Map", "Map"], "Reshape", "Reshape"]
    assert made.outputs == (1, 2, 2, 3)


def test_operators_that_the_library_has_need_no_loop() -> None:
    code = [(ADD, (0, 0), (4, 8)), (RELU, (1,), (4, 8))]
    part = program((4, 8), code=code, outputs=(2,))
    assert looped(part) == part


def test_rows_of_another_length_need_a_separate_loop() -> None:
    """exp(x) of shape [4, 8] is reshaped to [8, 4] before the next exp."""
    code = [(EXP, (0,), (4, 8)), (Reshape((8, 4)), (1,), (8, 4)), (EXP, (2,), (8, 4))]
    made = looped(program((4, 8), code=code, outputs=(3,)))
    assert names(made) == [["Map"], "Reshape", ["Map"]]


def test_a_concatenation_is_not_part_of_a_loop() -> None:
    code = [(EXP, (0,), (4, 8)), (Concat(0), (1, 1), (8, 8)), (EXP, (2,), (8, 8))]
    made = looped(program((4, 8), code=code, outputs=(3,)))
    assert names(made) == [["Map"], "Concat", ["Map"]]


def test_a_partition_with_loops_is_read_back_from_its_text() -> None:
    part = looped(SOFTMAX)
    assert partition(text_of(part)) == part


# --- results ---


def computed(part: Partition, *arrays) -> list[np.ndarray]:
    return [np.asarray(y) for y in kernels.run(looped(part), *arrays)]


def array(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


@needs_library
@pytest.mark.parametrize("columns", [1, 7, 16, 20, 100])
def test_a_softmax_of_rows_of_any_length(columns: int) -> None:
    shape = (6, columns)
    code = [
        Instruction(i.op, i.args, (*i.shape[:-1], columns) if i.shape[-1] == 20 else i.shape)
        for i in SOFTMAX.code
    ]
    x = array(*shape)
    (y,) = computed(Partition((shape,), (False,), tuple(code), (7,)), x)
    np.testing.assert_allclose(y, jax.nn.softmax(x, axis=-1), rtol=0, atol=1e-6)


@needs_library
@pytest.mark.parametrize(
    "other", [(1, 1, 1), (1, 1, 20), (1, 5, 1), (3, 1, 20), (1, 5, 20), (3, 1, 1), (3, 5, 1)]
)
def test_an_operand_may_be_broadcast_along_any_axes(other: tuple[int, ...]) -> None:
    x, y = array(3, 5, 20), array(*other)
    code = [(ADD, (0, 1), (3, 5, 20)), (Map("square", (None,)), (2,), (3, 5, 20))]
    (got,) = computed(program(x.shape, other, code=code, outputs=(3,)), x, y)
    np.testing.assert_allclose(got, (x + y) ** 2, rtol=1e-6)


@needs_library
def test_a_loop_can_return_one_number_per_row() -> None:
    """2 sum exp(x) of each row is the only result of the loop."""
    x = array(6, 20)
    code = [(EXP, (0,), (6, 20)), (SUM, (1,), (6,)), (Scale(2.0), (2,), (6,))]
    (got,) = computed(program((6, 20), code=code, outputs=(3,)), x)
    np.testing.assert_allclose(got, 2 * jnp.exp(x).sum(axis=-1), rtol=1e-6)


@needs_library
@pytest.mark.parametrize("op", [PRODUCT, MUL, Map("mul", (None, None))])
def test_subnormal_numbers_are_zeros_on_every_thread(op: Op) -> None:
    """As in XLA. Without this, a product with a softmax took many times as long."""
    tiny, large = (jnp.asarray(np.full((256, 256), n, np.float32)) for n in (1e-40, 1e30))
    part = program((256, 256), (256, 256), code=[(op, (0, 1), (256, 256))], outputs=(2,))
    (got,) = computed(part, tiny, large)
    np.testing.assert_array_equal(got, 0)


@needs_library
def test_nan_and_infinity_propagate_as_in_lax() -> None:
    x = jnp.asarray([[np.nan, 1.0, -np.inf], [np.inf, 2.0, -1.0], [-np.inf, 3.0, 0.0]], jnp.float32)
    for kind in ("max", "min"):
        code = [(Reduce(kind), (0,), (3,))]
        (got,) = computed(program((3, 3), code=code, outputs=(1,)), x)
        np.testing.assert_array_equal(got, getattr(jnp, kind)(x, axis=-1))
    for kind in ("exp", "tanh", "logistic", "erf", "erfc"):
        code = [(Map(kind, (None,)), (0,), (3, 3))]
        (got,) = computed(program((3, 3), code=code, outputs=(1,)), x)
        np.testing.assert_allclose(got, getattr(lax, kind)(x), rtol=1e-6)


ELEMENTWISE: list[Op] = [
    *(Map(k, (None,)) for k in ("exp", "tanh", "logistic", "erf", "erfc", "neg", "abs", "square")),
    *(Map(k, (None,)) for k in ("floor", "ceil")),
    Map("integer_pow", (None, 3.0)),
    Map("gt", (None, 0.25)),
    Map("ne", (0.0, None)),
    Map("sub", (1.0, None)),
    Map("max", (None, -np.inf)),
    Scale(0.5),
    RELU,
]


OPERATIONS = st.sampled_from([ADD, SUB, MUL, Binary("max"), Binary("min")])


@st.composite
def loops(draw) -> tuple[Partition, int]:
    """Draw a few operators on rows, each on values that exist, and the seed of the arguments."""
    lead = draw(st.sampled_from([(1,), (3,), (2, 3)]))
    shape = (*lead, draw(st.sampled_from([1, 2, 15, 16, 17, 33])))
    one, once = (*lead, 1), (*(1,) * len(lead), shape[-1])
    other = tuple(draw(st.sampled_from([n, 1])) for n in shape)
    inputs = (shape, one, once, other)
    code: list[tuple] = []
    whole, rows = [0], []  # indices of values of this shape, and with one element per row
    for _ in range(draw(st.integers(1, 8))):
        number = len(inputs) + len(code)
        kind = draw(st.sampled_from(["map", "binary", "column", "reduce", "row", "select"]))
        x = draw(st.sampled_from(whole))
        if kind == "map":
            code.append((draw(st.sampled_from(ELEMENTWISE)), (x,), shape))
        elif kind == "binary":
            code.append((draw(OPERATIONS), (x, draw(st.sampled_from(whole))), shape))
        elif kind == "column":
            # The library need not have a kernel for every broadcast: `members` makes these maps.
            op, column = draw(OPERATIONS), draw(st.sampled_from([1, 2, 3]))
            code.append((Map(op.kind, (None, None)), (x, column), shape))
        elif kind == "select":
            test = Map("select_n", (None, None, 0.25))
            code.append((test, (draw(st.sampled_from(whole)), x), shape))
        elif kind == "row" and rows:
            op, row = draw(OPERATIONS), draw(st.sampled_from(rows))
            code.append((Map(op.kind, (None, None)), (x, row), shape))
        else:
            code.append((Reduce(draw(st.sampled_from(["sum", "max", "min"]))), (x,), lead))
            code.append((Reshape(one), (number,), one))
            code.append((draw(OPERATIONS), (number + 1, 1), one))
            rows.append(number + 2)
            continue
        whole.append(number)
    last = len(inputs) + len(code) - 1
    outputs = (last, draw(st.integers(0, last)))
    return program(*inputs, code=code, outputs=outputs), draw(st.integers(0, 2**31))


@needs_library
@settings(max_examples=40, deadline=None)
@given(loops())
def test_random_loops_equal_their_lax_code(case: tuple[Partition, int]) -> None:
    part, seed = case
    rng = np.random.default_rng(seed)
    arrays = [jnp.asarray(rng.uniform(-1, 1, s), jnp.float32) for s in part.inputs]
    for got, want in zip(computed(part, *arrays), part(*arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * (1 + np.abs(want).max()))


# --- in programs ---


@needs_library
def test_a_transformer_layer_is_one_call() -> None:
    """The call has the attention, including softmax and boolean mask, and all that follows it."""
    from xrl_jax.libraries.onednn.calls import dot_general

    tokens, width, heads = 8, 32, 2
    matrix = (((1,), (0,)), ((), ()))

    def norm(x):
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)

    def layer(wq, wk, wv, wo, w1, w2, mask, x):
        def of_heads(w):
            return dot_general(x, w, matrix).reshape(tokens, heads, -1).transpose(1, 0, 2)

        q, k, v = (of_heads(w) for w in (wq, wk, wv))
        scores = dot_general(q, k, (((2,), (2,)), ((0,), (0,)))) / 4
        shares = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        mixed = dot_general(shares, v, (((2,), (1,)), ((0,), (0,))))
        x = norm(x + dot_general(mixed.transpose(1, 0, 2).reshape(tokens, width), wo, matrix))
        hidden = jax.nn.gelu(dot_general(x, w1, matrix), approximate=False)
        return [norm(x + dot_general(hidden, w2, matrix)) @ jnp.ones((width, 2))]

    weights = [array(width, width) / 4 for _ in range(4)]
    weights += [array(width, 64) / 4, array(64, width) / 4]
    mask = jnp.tril(jnp.ones((tokens, tokens), bool))
    args = [*weights, mask, array(tokens, width)]
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    parts = split(layer, avals, [True] * 7 + [False])
    found = jax.make_jaxpr(parts.call)(parts.avals, [args[-1]]).eqns
    assert [e.primitive.name for e in found].count("onednn_partition") == 1
    got = jax.jit(parts.call)(parts.prepare(args[:-1]), [args[-1]])[0]
    np.testing.assert_allclose(got, layer(*args)[0], rtol=0, atol=1e-4)


@needs_library
def test_a_loop_has_the_derivative_of_its_lax_code() -> None:
    x, direction = array(6, 20), array(6, 20)
    ours = jax.jvp(lambda x: kernels.run(looped(SOFTMAX), x)[0], (x,), (direction,))
    lax_code = jax.jvp(lambda x: jax.nn.softmax(x, axis=-1), (x,), (direction,))
    for got, want in zip(ours, lax_code, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    back = jax.grad(lambda x: jnp.vdot(kernels.run(looped(SOFTMAX), x)[0], direction))(x)
    want = jax.grad(lambda x: jnp.vdot(jax.nn.softmax(x, axis=-1), direction))(x)
    np.testing.assert_allclose(back, want, rtol=0, atol=1e-6)
