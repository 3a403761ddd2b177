"""Merging of kernels into calls: which ones are merged, and that calls compute what lax does."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.libraries.onednn.calls import (
    IMAGE,
    KERNEL,
    POINTWISE,
    RNG,
    SAME,
    assert_computes,
    average,
    conv,
    equations,
    hoisted,
    in_lax,
    pool,
)
from xrl_jax.backends import loading
from xrl_jax.backends.fast import Fast
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.libraries import registry
from xrl_jax.libraries.onednn import calls as onednn
from xrl_jax.libraries.onednn import kernels, partition
from xrl_jax.libraries.onednn.c_api import Library, library
from xrl_jax.libraries.onednn.kernels import kernel_p
from xrl_jax.libraries.onednn.spec import RELU, Conv, Dot, Epilogue, Instruction, Partition

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")


def fire(w1, w2, w3, x):
    """Compute SqueezeNet's fire module."""
    s = conv(x, w1)
    return pool(jnp.concatenate([conv(s, w2), conv(s, w3)], axis=-1))


def test_kernels_and_the_operators_between_them_are_one_call() -> None:
    args = (POINTWISE, POINTWISE, KERNEL, IMAGE)
    assert equations(hoisted(fire, *args, weights=3), IMAGE) == ["Conv+Conv+Conv+Concat+Pool"]
    assert_computes(fire, *args, weights=3)


def test_an_operator_that_the_library_lacks_splits_the_call() -> None:
    fn = lambda w, x: conv(jnp.sin(conv(x, w)), w)  # noqa: E731
    assert equations(hoisted(fn, POINTWISE, IMAGE, weights=1), IMAGE) == ["Conv", "sin", "Conv"]
    assert_computes(fn, POINTWISE, IMAGE, weights=1)


def test_a_call_does_not_wait_for_operators_that_need_its_results() -> None:
    """conv(first) needs only `first`, so the first call has both and does not wait for the sine.
    The sum needs both branches; it is part of the last convolution.
    """

    def fn(w, x):
        first = conv(x, w)
        return conv(jnp.sin(first), w) + conv(first, w)

    found = equations(hoisted(fn, POINTWISE, IMAGE, weights=1), IMAGE)
    assert found == ["Conv+Conv", "sin", "Conv"]
    assert_computes(fn, POINTWISE, IMAGE, weights=1)


def test_values_used_outside_the_call_are_returned_too() -> None:
    fn = lambda w, x: [jnp.sin(y := conv(x, w)), conv(y, w), y]  # noqa: E731
    parts = hoisted(fn, POINTWISE, IMAGE, weights=1)
    assert equations(parts, IMAGE) == ["Conv+Conv", "sin"]
    assert_computes(fn, POINTWISE, IMAGE, weights=1)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_kernel_may_be_computed_and_transposed(groups: int) -> None:
    """As in the derivative of a convolution with respect to its kernel: the kernel has the layout
    of another operator's result.
    """
    op = Conv((1, 1), ((1, 1), (1, 1)), (1, 1), groups)

    def fn(w, x, made):
        y = conv(made, w)  # [1, 8, 8, 16]
        kernel = y.reshape(8, 8, 16, 1).transpose(1, 0, 3, 2)  # [8, 8, 1, 16]
        return kernel_p.bind(x, kernel, op=op)

    x = jnp.asarray(RNG.standard_normal((1, 9, 9, groups)), jnp.float32)
    assert_computes(fn, POINTWISE, x, IMAGE, weights=1)


def test_equal_results_are_all_written() -> None:
    """Two loops that compute the same become one, whose value is written to two results of the
    call.
    """

    def fn(w, x):
        y = conv(x, w)
        return jnp.clip(y + 3, 0, 6), jnp.clip(y + 3, 0, 6)

    assert_computes(fn, POINTWISE, IMAGE, weights=1)


def test_an_input_may_be_a_result_too() -> None:
    part = Partition(((2, 3),), (False,), (Instruction(RELU, (0,), (2, 3)),), (0, 1, 0))
    x = jnp.asarray([[-1.0, 2, -3], [4, -5, 6]])
    relu = np.maximum(x, 0)
    np.testing.assert_array_equal(kernels.run(part, x), [x, relu, x])


def test_transposes_and_reshapes_at_the_end_are_left_to_xla() -> None:
    fn = lambda w, x: jnp.transpose(conv(x, w), (0, 3, 1, 2)).reshape(16, 64)  # noqa: E731
    found = equations(hoisted(fn, POINTWISE, IMAGE, weights=1), IMAGE)
    assert found == ["Conv", "transpose", "reshape"]


def test_transposes_and_slices_inside_become_layouts() -> None:
    def fn(w, x):
        first = jnp.transpose(conv(x, w), (0, 3, 1, 2))[:, :, ::2, ::2]
        return conv(jnp.transpose(first, (0, 2, 3, 1)), w)

    found = equations(hoisted(fn, POINTWISE, IMAGE, weights=1), IMAGE)
    assert found == ["Conv+Transpose+Slice+Transpose+Conv"]
    assert_computes(fn, POINTWISE, IMAGE, weights=1)


def test_clips_and_factors_of_averages_are_merged_into_kernels() -> None:
    """As in MobileNet and NASNet; the factor of an average is merged into its pooling."""

    def fn(w, x):
        y = conv(x, w)
        y = lax.min(lax.max(y, lax.full_like(y, 0.0)), lax.full_like(y, 0.75))
        return conv(average(y), w)

    found = equations(hoisted(fn, POINTWISE, IMAGE, weights=1), IMAGE)
    assert found == ["Conv+Pool+Conv"]
    assert_computes(fn, POINTWISE, IMAGE, weights=1)


def test_a_quotient_of_literals_counts_as_a_literal() -> None:
    """The rule `div-to-mul` leaves averages like this."""

    def fn(w, x):
        edges = ((0, 0), (1, 1), (1, 1), (0, 0))
        y = lax.reduce_window(conv(x, w), 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), edges)
        return conv(y * lax.div(jnp.float32(1), jnp.float32(9)), w)

    found = equations(hoisted(fn, POINTWISE, IMAGE, weights=1), IMAGE)
    assert found[-1] == "Conv+Pool+Conv"
    assert_computes(fn, POINTWISE, IMAGE, weights=1)


def test_very_small_factors_are_not_lost() -> None:
    """Small factors are not lost, neither multiplied by the size of a window nor as 1 / 3e38, which
    is subnormal.
    """

    def total(x):
        edges = ((0, 0), (1, 1), (1, 1), (0, 0))
        return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), edges)

    for fn, same in (
        (lambda w, x: conv(total(conv(x, w)) * 1e-13, w) * 1e13, lambda x: total(x)),
        (lambda w, x: conv(conv(x, w) * 1e30 / 3e38, w) * 3e8, lambda x: x),
    ):
        parts = hoisted(fn, POINTWISE, IMAGE, weights=1)
        (got,) = jax.jit(parts.call)(parts.prepare([POINTWISE]), [IMAGE])
        (expected,) = in_lax(lambda w, x, same=same: conv(same(conv(x, w)), w), POINTWISE, IMAGE)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


def test_an_average_may_exclude_the_padding() -> None:
    """As in InceptionV3: sums of windows are divided by an array, the number of values in each
    window that are no padding.
    """
    ones = jnp.ones((1, 8, 8, 1))

    def fn(w, x):
        edges = ((0, 0), (1, 1), (1, 1), (0, 0))
        window = (1, 3, 3, 1), (1, 1, 1, 1), edges
        total, count = (lax.reduce_window(v, 0.0, lax.add, *window) for v in (conv(x, w), ones))
        return conv(total / count, w)

    found = equations(hoisted(fn, POINTWISE, IMAGE, weights=1), IMAGE)
    assert found[-1] == "Conv+Pool+Binary+Conv"
    assert_computes(fn, POINTWISE, IMAGE, weights=1)


def test_a_factor_per_feature_is_not_broadcast_beforehand() -> None:
    """As in squeeze-and-excitation blocks."""

    def fn(w, s, x):
        return conv(conv(x, w) * s, w)

    s = jnp.linspace(0, 1, 16).reshape(1, 1, 1, 16)
    found = equations(hoisted(fn, POINTWISE, s, IMAGE, weights=1), s, IMAGE)
    assert found == ["Conv+Binary+Conv"]
    assert_computes(fn, POINTWISE, s, IMAGE, weights=1)


@pytest.mark.parametrize("shape", [(1, 8, 8, 16), (1, 1, 1, 16), (1, 8, 8, 1), (1, 8, 1, 16)])
@pytest.mark.parametrize("op", [lax.add, lax.sub, lax.mul, lax.div, lax.max, lax.min])
def test_binary_operations_equal_their_lax_code(op, shape: tuple[int, ...]) -> None:
    other = 1.5 + jnp.asarray(RNG.random(shape), jnp.float32)
    for transposed in (False, True):

        def fn(w, s, x, transposed=transposed):
            operands = conv(x, w), jnp.broadcast_to(s, IMAGE.shape)
            return conv(op(*(operands[::-1] if transposed else operands)), w)

        assert_computes(fn, POINTWISE, other, IMAGE + 3, weights=1)


def test_concatenation_of_values_in_different_layouts() -> None:
    """Values from outside the call are row-major, a convolution's result is not."""

    def fn(w, x):
        large = jnp.pad(x, ((0, 0), (8, 1), (8, 1), (0, 0)))
        return conv(jnp.concatenate([x, conv(x, w), pool(large)], -1)[..., ::3], w)

    parts = hoisted(fn, KERNEL, IMAGE, weights=1)
    assert "Conv+Concat+Slice+Conv" in equations(parts, IMAGE)
    assert_computes(fn, KERNEL, IMAGE, weights=1)


def test_a_pooled_result_is_returned_row_major() -> None:
    """The library's pooling reads and writes features in blocks."""
    fn = lambda w, x: pool(conv(x, w))  # noqa: E731
    found = equations(hoisted(fn, KERNEL, IMAGE, weights=1), IMAGE)
    assert found == ["Conv+Pool"]
    assert_computes(fn, KERNEL, IMAGE, weights=1)


def test_work_on_weights_alone_is_hoisted_out_of_the_call() -> None:
    """Two weights are multiplied once; the call takes their product, packed."""

    def fn(a, b, x):
        return Dot(False, False) and kernel_p.bind(
            x, kernel_p.bind(a, b, op=Dot(False, False)), op=Dot(False, False)
        )

    a = jnp.asarray(RNG.standard_normal((16, 16)), jnp.float32)
    x = jnp.asarray(RNG.standard_normal((4, 16)), jnp.float32)
    parts = hoisted(fn, a, a, x, weights=2)
    assert equations(parts, x) == ["Dot"]
    assert [v.ndim for v in parts.avals] == [1]
    assert_computes(fn, a, a, x, weights=2)


def test_products_of_inputs_are_not_packed() -> None:
    a = jnp.asarray(RNG.standard_normal((2, 3, 5)), jnp.float32)
    for op, right in ((Dot(False, True), a), (Dot(False, False), jnp.swapaxes(a, 1, 2))):
        fn = lambda x, y, op=op: kernel_p.bind(x, y, op=op)  # noqa: E731
        assert_computes(fn, a, right, weights=0)


@st.composite
def convolutions(draw):
    """Draw (operator, image shape, kernel shape) of a convolution whose result is not empty."""
    groups = draw(st.sampled_from([1, 1, 2, 4, 16, 32]))
    width, outs = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    size = [draw(st.integers(3, 9)) for _ in range(2)]
    kernel = [draw(st.integers(1, 3)) for _ in range(2)]
    op = Conv(
        tuple(draw(st.integers(1, 3)) for _ in range(2)),
        tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(2)),
        tuple(
            1 if k == 3 and n < 5 else draw(st.integers(1, 2))
            for k, n in zip(kernel, size, strict=True)
        ),
        groups,
        Epilogue(draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([None, RELU]))),
    )
    n = draw(st.integers(1, 2))
    return op, (n, *size, groups * width), (*kernel, width, groups * outs)


@settings(max_examples=60, deadline=None)
@given(convolutions(), st.integers(0, 100))
def test_convolutions_of_all_kinds(case, seed: int) -> None:
    op, image, kernel = case
    rng = np.random.default_rng(seed)
    make = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.float32)  # noqa: E731
    x, w, bias = make(*image), make(*kernel), make(kernel[-1])
    plain = Conv(op.stride, op.padding, op.dilation, op.groups)
    y = jax.eval_shape(plain, x, w)
    more = [bias] * op.after.bias + [make(*y.shape)] * op.after.addend
    assert_computes(lambda w, *a: kernel_p.bind(a[0], w, *a[1:], op=op), w, x, *more, weights=1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=2, max_size=7), st.integers(0, 100))
def test_random_chains_of_mergeable_operators(kinds: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    grouped = jnp.asarray(rng.standard_normal((3, 3, 4, 16)) / 6, jnp.float32)
    groups = Conv((1, 1), ((1, 1), (1, 1)), (1, 1), 4)
    steps = [
        lambda x: kernel_p.bind(x, grouped, op=groups),
        lambda x: x + conv(x, POINTWISE),
        lambda x: lax.max(x, jnp.float32(0)),
        lambda x: conv(jnp.concatenate([x, x], -1)[..., ::2], KERNEL),
        lambda x: jnp.transpose(jnp.transpose(x, (0, 3, 1, 2)), (0, 2, 3, 1)),
        lambda x: pool(jnp.pad(x, ((0, 0), (2, 1), (2, 1), (0, 0)))),
        lambda x: average(x),
        lambda x: lax.min(lax.max(conv(x, POINTWISE), jnp.float32(0)), jnp.float32(0.5)),
    ]

    def fn(x):
        y = conv(x, POINTWISE)
        for k in kinds:
            y = steps[k](y)
        return conv(y, POINTWISE)

    assert_computes(fn, IMAGE, weights=0)


def test_weights_of_a_scan_are_packed_before_the_scan() -> None:
    w = jnp.stack([jnp.eye(4), 2 * jnp.eye(4)])

    def fn(w, x):
        return lax.scan(lambda c, v: (kernel_p.bind(c, v, op=Dot(False, False)), None), x, w)[0]

    x = jnp.ones((2, 4))
    parts = hoisted(fn, w, x, weights=1)
    text = str(jax.make_jaxpr(parts.call)(parts.avals, [x]))
    assert "onednn_partition" in text and "onednn_pack[" not in text
    (y,) = jax.jit(parts.call)(parts.prepare([w]), [x])
    np.testing.assert_array_equal(y, np.full((2, 4), 2.0))


def test_derivative_and_vmap_of_a_call() -> None:
    parts = hoisted(fire, POINTWISE, POINTWISE, KERNEL, IMAGE, weights=3)

    def whole(w1, w2, w3, x):
        return parts.call(parts.prepare([w1, w2, w3]), [x])[0].sum()

    def plain(*args):
        return in_lax(fire, *args)[0].sum()

    args = (POINTWISE, POINTWISE, KERNEL, IMAGE)
    for got, expected in zip(
        jax.grad(whole, (0, 2, 3))(*args), jax.grad(plain, (0, 2, 3))(*args), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
    images = jnp.stack([IMAGE, 2 * IMAGE, -IMAGE])
    got = jax.jit(jax.vmap(lambda x: whole(*args[:3], x)))(images)
    np.testing.assert_allclose(got, [plain(*args[:3], x) for x in images], rtol=1e-4)


def test_two_threads_at_once() -> None:
    """The library's primitives are shared; the memory that they work on belongs to one call."""
    parts = hoisted(fire, POINTWISE, POINTWISE, KERNEL, IMAGE, weights=3)
    prepared, call = parts.prepare([POINTWISE, POINTWISE, KERNEL]), jax.jit(parts.call)
    images = [IMAGE * k for k in range(4)]
    expected = [np.asarray(call(prepared, [x])[0]) for x in images]
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(50):
            if not np.array_equal(call(prepared, [images[k]])[0], expected[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def a_saved_function(path: Path) -> None:
    def fn(w, x):
        return onednn.convolution(
            x, w, stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1), groups=1
        )

    Fast(from_jax(fn, KERNEL, IMAGE, weights=(0,)), None).save(path)


def test_a_saved_function_is_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    a_saved_function(tmp_path / "f.xrl")
    np.savez(tmp_path / "a.npz", w=KERNEL, x=IMAGE, y=SAME(IMAGE, KERNEL))
    code = f"""
import numpy as np, xrl_jax
a = np.load({str(tmp_path / "a.npz")!r})
y = xrl_jax.load({str(tmp_path / "f.xrl")!r})(a["w"], a["x"])
print(float(np.abs(y - a["y"]).max()) < 1e-4)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "True\n"


def test_a_file_is_refused_where_the_library_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_saved_function(tmp_path / "f.xrl")
    monkeypatch.setattr("xrl_jax.libraries.onednn.library.library", lambda: None)
    with pytest.raises(
        loading.LoadError, match=r"kernels of oneDNN 3.*, but no onednn is available here: "
    ):
        loading.load(tmp_path / "f.xrl")


def test_a_file_with_weights_in_another_packing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of xrl_jax may pack weights in another layout, which does not fit the file's
    calls.
    """
    a_saved_function(tmp_path / "f.xrl")
    without_cache = kernels._register_target.__wrapped__
    monkeypatch.setattr(kernels, "_register_target", without_cache)
    assert loading.load(tmp_path / "f.xrl")(KERNEL, IMAGE).shape == IMAGE.shape
    monkeypatch.setattr(Library, "layout", lambda lib, desc: ("other",))
    with pytest.raises(
        loading.LoadError, match="packed in another layout .*: optimise the function"
    ):
        loading.load(tmp_path / "f.xrl")


def test_exporting_a_call_by_jax_says_what_to_do_instead() -> None:
    op = Conv((2, 2), ((1, 1), (1, 1)), (1, 1), 1)
    fn = jax.jit(lambda x, w: kernel_p.bind(x, w, op=op))
    with pytest.warns(UserWarning, match=r"fast\.save\(path\)"), pytest.raises(ValueError):
        jax.export.export(fn)(IMAGE, KERNEL)


def test_an_exported_artefact_allows_only_its_own_custom_calls() -> None:
    def allowed(op: Conv) -> list[str]:
        fn = lambda x, w: kernel_p.bind(x, w, op=op)  # noqa: E731
        checks = registry.exported(fn, IMAGE, KERNEL).disabled_safety_checks
        return [str(check) for check in checks]

    first = allowed(Conv((2, 2), ((1, 1), (1, 1)), (1, 1), 1))
    second = allowed(Conv((3, 3), ((1, 1), (1, 1)), (1, 1), 1))
    assert len(first) == len(second) == 2  # the call, and the packing of its kernel
    assert not set(first) & set(second)


def test_squeeze_and_excitation_is_one_call() -> None:
    """The pooled value is reshaped and broadcast; the broadcast is part of the multiplication."""

    def fn(w, x):
        y = conv(x, w)
        total = lax.reduce_window(y, 0.0, lax.add, (1, 8, 8, 1), (1, 8, 8, 1), "VALID")
        factor = lax.broadcast_in_dim(total.reshape(16) / 64, y.shape, (3,))
        return conv(y * factor, w)

    parts = hoisted(fn, POINTWISE, IMAGE, weights=1)
    assert len(equations(parts, IMAGE)) == 1
    assert_computes(fn, POINTWISE, IMAGE, weights=1)


def test_a_scalar_that_is_no_literal_becomes_an_operand() -> None:
    """It is broadcast to an array, and its value is known only when the call runs."""
    fn = lambda w, s, x: conv(jnp.exp(conv(x, w) * s) - s, w)  # noqa: E731
    args = (POINTWISE, jnp.float32(-0.5), IMAGE)
    (found,) = equations(hoisted(fn, *args, weights=1), *args[1:])[-1:]
    assert found == "Conv+Reshape+Loop+Conv"
    assert_computes(fn, *args, weights=1)


def test_where_a_call_is_impossible_its_broadcasts_are_explicit(monkeypatch) -> None:
    monkeypatch.setattr(partition.kernels, "is_possible", lambda part: len(part.code) == 1)
    fn = lambda w, b, x: conv(jnp.exp(conv(x, w) - b[None, None, None, :]), w)  # noqa: E731
    assert_computes(fn, POINTWISE, jnp.arange(16.0, dtype=jnp.float32) / 9, IMAGE, weights=1)


def test_the_mean_of_an_image_becomes_a_pooling() -> None:
    """Squeeze and excitation: features are multiplied by a function of their means."""

    def fn(w, dense, x):
        y = conv(x, w)
        shares = jax.nn.sigmoid(kernel_p.bind(y.mean((1, 2)), dense, op=Dot(False, False)))
        return conv(y * shares[:, None, None, :], w)

    dense = jnp.asarray(RNG.standard_normal((16, 16)) / 4, jnp.float32)
    args = (POINTWISE, dense, IMAGE)
    (found,) = equations(hoisted(fn, *args, weights=2), IMAGE)
    assert found.split("+")[:4] == ["Conv", "Pool", "Reshape", "Scale"]
    assert_computes(fn, *args, weights=2)


def test_one_number_per_row_is_added_by_a_loop() -> None:
    """The library broadcasts arrays along their last axes only."""
    x = jnp.asarray(RNG.standard_normal((16, 16)), jnp.float32)

    def fn(w, b, x):
        y = kernel_p.bind(w, x, op=Dot(False, False)).reshape(16, 1, 16) + b[:, None, None]
        return kernel_p.bind(w, y.reshape(16, 16), op=Dot(False, False))

    args = (POINTWISE[0, 0], jnp.arange(16.0, dtype=jnp.float32), x)
    (*_, found) = equations(hoisted(fn, *args, weights=2), x)
    assert found == "Dot+Reshape+Reshape+Loop+Reshape+Dot"
    assert_computes(fn, *args, weights=2)


def test_a_sum_of_a_broadcast_value_stays_in_the_loop() -> None:
    """Rewriting of variances leaves a sum of the mean, broadcast to the shape of its row."""

    def fn(w, x):
        y = kernel_p.bind(x, w, op=Dot(False, False))
        mean = lax.broadcast_in_dim(jnp.max(y, axis=-1), y.shape, (0,))
        again = jnp.sum(mean, axis=-1)
        return kernel_p.bind(y - again[:, None], w, op=Dot(False, False))

    args = (POINTWISE[0, 0], jnp.asarray(RNG.standard_normal((16, 16)), jnp.float32))
    (found,) = equations(hoisted(fn, *args, weights=1), args[1])
    assert found == "Dot+Loop+Dot"
    assert_computes(fn, *args, weights=1)


def test_selects_by_comparison_stay_in_the_loop() -> None:
    """A leaky rectifier, whose comparison is returned too, as booleans."""

    def fn(w, x):
        y = conv(x, w)
        leaks = y < 0
        return [conv(jnp.where(leaks, 0.1 * y, y), w), leaks]

    assert equations(hoisted(fn, POINTWISE, IMAGE, weights=1), IMAGE)[0] == "Conv+Loop+Loop+Conv"
    assert_computes(fn, POINTWISE, IMAGE, weights=1)
