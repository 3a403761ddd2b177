"""The image networks against independent plain NumPy (float64) implementations, at reduced size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from experiments.models import Model
from experiments.models.mobilenet import mobilenetv2
from experiments.models.nasnet import nasneta
from experiments.models.nasnet_taso import nasneta_taso
from experiments.models.resnet import resnet50
from experiments.models.vgg import vgg19
from tests.experiments.plain_networks import np_conv, np_pool

NETWORKS: dict[str, Callable[..., Model]] = {
    "resnet50": resnet50,
    "mobilenetv2": mobilenetv2,
    "vgg19": vgg19,
    "nasneta": nasneta,
    "nasneta_taso": nasneta_taso,
}
SMALL: dict[str, dict[str, Any]] = {
    "resnet50": {"image_size": 40, "width": 0.125, "classes": 10, "blocks": (2, 1, 1, 1)},
    "mobilenetv2": {"image_size": 40, "width": 0.25, "classes": 10},
    "vgg19": {"image_size": 64, "width": 0.0625, "classes": 10},
    "nasneta": {"image_size": 40, "cells": 1, "filters": 96, "stem": 4, "classes": 10},
    "nasneta_taso": {"image_size": 40, "cells": 2, "stages": 2, "filters": 4, "stem": 4},
}

# The cells of NASNet-A, sum by sum. Each operation is followed by the index of its operand: 0 is
# the current hidden state, 1 the earlier one, 2 the first sum, and so on.
NORMAL = "conv 0 + conv 1, conv 1 + conv 1, mean 0 + same 1, mean 1 + mean 1, conv 0 + same 0"
REDUCTION = "conv 0 + conv 1, max 0 + conv 1, mean 0 + conv 1, mean 2 + same 3, conv 2 + max 0"
TASO_NORMAL = "conv 0 + same 0, conv 1 + conv 0, mean 0 + same 1, mean 1 + mean 1, conv 1 + conv 1"
TASO_REDUCTION = "conv 1 + conv 0, max 0 + conv 1, mean 0 + conv 1, max 0 + conv 2, mean 2 + same 3"

Pads = Callable[[int, int, int], tuple[int, int]]


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def folded(kernel: np.ndarray, norm: Any, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the kernel and the bias of a convolution with the batch norm after it folded in."""
    slope = norm["scale"] / np.sqrt(norm["var"] + epsilon)
    return kernel * slope.reshape(-1, 1, 1, 1), norm["bias"] - slope * norm["mean"]


def np_resnet50(weights: Any, x: np.ndarray) -> np.ndarray:
    def conv(kernel: np.ndarray, norm: Any, x: np.ndarray, stride: int = 1) -> np.ndarray:
        kernel, bias = folded(kernel, norm, 1e-5)
        return np_conv(x, kernel, stride, kernel.shape[2] // 2) + bias.reshape(-1, 1, 1)

    stem = weights["stem"]
    x = np_pool(relu(conv(stem["conv"], stem["norm"], x, 2)), 1)
    for number, (first, *others) in enumerate(weights["stages"]):
        stride = 2 if number else 1
        y = relu(conv(first["conv1"], first["norm1"], x))
        y = relu(conv(first["conv2"], first["norm2"], y, stride))
        shortcut = conv(first["shortcut"], first["shortcut_norm"], x, stride)
        x = relu(shortcut + conv(first["conv3"], first["norm3"], y))
        for layer in others:
            y = relu(conv(layer["conv1"], layer["norm1"], x))
            y = relu(conv(layer["conv2"], layer["norm2"], y))
            x = relu(x + conv(layer["conv3"], layer["norm3"], y))
    return x.mean(axis=(2, 3)) @ weights["head"]["kernel"] + weights["head"]["bias"]


def np_mobilenetv2(weights: Any, x: np.ndarray) -> np.ndarray:
    def linear(layer: Any, x: np.ndarray) -> np.ndarray:
        kernel, bias = folded(layer["kernel"], layer["norm"], 1e-5)
        return np.einsum("nchw,oc->nohw", x, kernel[:, :, 0, 0]) + bias.reshape(-1, 1, 1)

    def depthwise(layer: Any, x: np.ndarray, stride: int) -> np.ndarray:
        kernel, bias = folded(layer["kernel"], layer["norm"], 1e-5)
        x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
        y = np.einsum("nchwij,cij->nchw", windows[:, :, ::stride, ::stride], kernel[:, 0])
        return np.clip(y + bias.reshape(-1, 1, 1), 0, 6)

    kernel, bias = folded(weights["stem"]["kernel"], weights["stem"]["norm"], 1e-5)
    x = np.clip(np_conv(x, kernel, 2, 1) + bias.reshape(-1, 1, 1), 0, 6)
    first, *others = weights["blocks"]
    x = linear(first["project"], depthwise(first["depthwise"], x, 1))
    halving, unequal = (1, 3, 6, 13), (1, 3, 6, 10, 13, 16)  # indices of blocks
    for number, layer in enumerate(others, start=1):
        y = np.clip(linear(layer["expand"], x), 0, 6)
        y = linear(layer["project"], depthwise(layer["depthwise"], y, 1 + (number in halving)))
        x = y if number in unequal else x + y
    x = np.clip(linear(weights["last"], x), 0, 6).mean(axis=(2, 3))
    return x @ weights["head"]["kernel"] + weights["head"]["bias"]


def np_vgg19(weights: Any, x: np.ndarray) -> np.ndarray:
    for stage in weights["stages"]:
        for layer in stage:
            rows, cols = x.shape[2:]
            x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
            x = layer["bias"].reshape(-1, 1, 1) + sum(
                np.einsum("nchw,oc->nohw", x[:, :, i : i + rows, j : j + cols], kernel)
                for (i, j), kernel in ((ij, layer["kernel"][:, :, *ij]) for ij in np.ndindex(3, 3))
            )
            x = relu(x)
        x = x.reshape(*x.shape[:2], x.shape[2] // 2, 2, x.shape[3] // 2, 2).max(axis=(3, 5))
    first, second = weights["hidden"]
    kernel = first["kernel"].reshape(*x.shape[1:], -1)
    x = relu(np.einsum("nchw,chwo->no", x, kernel) + first["bias"])
    x = relu(x @ second["kernel"] + second["bias"])
    return x @ weights["head"]["kernel"] + weights["head"]["bias"]


def pads_late(pixels: int, size: int, stride: int) -> tuple[int, int]:
    """Return the padding for pixels / stride results (rounded up); an odd remainder goes to the
    end.
    """
    total = max((-(-pixels // stride) - 1) * stride + size - pixels, 0)
    return total // 2, total - total // 2


def pads_evenly(pixels: int, size: int, stride: int) -> tuple[int, int]:
    return size // 2, size // 2


def np_conv_padded(x: np.ndarray, kernel: np.ndarray, stride: int, pads: Pads) -> np.ndarray:
    padding = [pads(pixels, kernel.shape[2], stride) for pixels in x.shape[2:]]
    return np_conv(np.pad(x, ((0, 0), (0, 0), *padding)), kernel, stride, 0)


def np_pool_inside(x: np.ndarray, stride: int, pads: Pads, reduce: Any) -> np.ndarray:
    """Apply 3x3 pooling to the pixels inside the image, without the padding."""
    (top, _), (left, _) = (pads(pixels, 3, stride) for pixels in x.shape[2:])
    rows, cols = (-(-pixels // stride) for pixels in x.shape[2:])
    y = np.zeros((*x.shape[:2], rows, cols))
    for i, j in np.ndindex(rows, cols):
        up, to_left = i * stride - top, j * stride - left
        window = x[:, :, max(up, 0) : up + 3, max(to_left, 0) : to_left + 3]
        y[:, :, i, j] = reduce(window, axis=(2, 3))
    return y


def np_cell(
    table: str,
    states: Sequence[np.ndarray],
    layers: Any,
    separable: Callable[[Any, np.ndarray, int], np.ndarray],
    stride: int,
    pads: Pads,
) -> list[np.ndarray]:
    """Return the two hidden states and the five sums of a table. Only operations on the hidden
    states are strided.
    """
    states, layers = list(states), iter(layers)
    for entry in table.split(","):
        total = np.float64(0)
        for term in entry.split("+"):
            kind, number = term.split()
            x, step = states[int(number)], stride if int(number) < 2 else 1
            if kind == "conv":
                x = separable(next(layers), x, step)
            elif kind != "same":
                x = np_pool_inside(x, step, pads, {"max": np.max, "mean": np.mean}[kind])
            total = total + x
        states.append(np.asarray(total))
    return states


def np_nasneta(weights: Any, x: np.ndarray) -> np.ndarray:
    def conv(kernel: np.ndarray, norm: Any, x: np.ndarray, stride: int = 1) -> np.ndarray:
        kernel, bias = folded(kernel, norm, 1e-3)
        return np_conv_padded(x, kernel, stride, pads_late) + bias.reshape(-1, 1, 1)

    def separable(layers: Any, x: np.ndarray, stride: int) -> np.ndarray:
        """Compute each depthwise convolution and the 1x1 after it as one full convolution."""
        for layer, step in zip(layers, (stride, 1), strict=True):
            kernel = np.einsum("ocij,chw->ochw", layer["pointwise"], layer["depthwise"][:, 0])
            x = conv(kernel, layer["norm"], relu(x), step)
        return x

    def adjust(layer: Any, x: np.ndarray) -> np.ndarray:
        if "shifted" not in layer:
            return conv(layer["conv"], layer["norm"], relu(x)) if layer else x
        # One 2x2 convolution: the corners of its kernel are the two 1x1 convolutions.
        count, channels = layer["conv"].shape[:2]
        kernel = np.zeros((2 * count, channels, 2, 2))
        kernel[:count, :, 0, 0] = layer["conv"][:, :, 0, 0]
        kernel[count:, :, 1, 1] = layer["shifted"][:, :, 0, 0]
        kernel, bias = folded(kernel, layer["norm"], 1e-3)
        x = np.pad(relu(x), ((0, 0), (0, 0), (0, 1), (0, 1)))
        return np_conv(x, kernel, 2, 0) + bias.reshape(-1, 1, 1)

    stem = weights["stem"]
    kernel, bias = folded(stem["conv"], stem["norm"], 1e-3)
    x = earlier = np_conv(x, kernel, 2, 0) + bias.reshape(-1, 1, 1)
    for kind, layer in zip("rrnrnrn", weights["cells"], strict=True):
        squeeze = layer["squeeze"]
        states = [conv(squeeze["conv"], squeeze["norm"], relu(x)), adjust(layer["adjust"], earlier)]
        table, stride = (NORMAL, 1) if kind == "n" else (REDUCTION, 2)
        states = np_cell(table, states, layer["separable"], separable, stride, pads_late)
        # The states that no sum of the cell uses, and in the normal cell also the earlier one.
        unused = states[1:] if kind == "n" else states[3:]
        earlier, x = x, np.concatenate(unused, axis=1)
    return relu(x).mean(axis=(2, 3)) @ weights["head"]["kernel"] + weights["head"]["bias"]


def np_nasneta_taso(weights: Any, x: np.ndarray) -> np.ndarray:
    def separable(layer: Any, x: np.ndarray, stride: int) -> np.ndarray:
        kernel = np.einsum("ocij,chw->ochw", layer["pointwise"], layer["depthwise"][:, 0])
        return np_conv_padded(x, kernel, stride, pads_evenly)

    x = np_pool(relu(np_conv(x, weights["stem"], 2, 3)), 1)
    for layers in weights["stages"]:
        earlier = x
        for layer in layers:
            states = [
                relu(np_conv(x, layer["current"], 1, 0)),
                relu(np_conv(earlier, layer["previous"], 1, 0)),
            ]
            table, stride = (TASO_REDUCTION, 2) if layer is layers[-1] else (TASO_NORMAL, 1)
            _, _, *sums = np_cell(table, states, layer["separable"], separable, stride, pads_evenly)
            earlier, x = x, np.concatenate(sums, axis=1)
    return x


REFERENCES = {
    "resnet50": np_resnet50,
    "mobilenetv2": np_mobilenetv2,
    "vgg19": np_vgg19,
    "nasneta": np_nasneta,
    "nasneta_taso": np_nasneta_taso,
}


def dead_equations(fn: Callable[..., Any], *args: Any) -> int:
    """Return the number of unused equations and unused arguments of a function's jaxpr."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    live, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return len(jaxpr.eqns) - len(live.eqns) + used.count(False)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_network_agrees_with_plain_numpy(name: str) -> None:
    model = NETWORKS[name](seed=3, **SMALL[name])
    got = jax.jit(model.fn)(model.weights, *model.inputs)
    weights, inputs = jax.tree.map(np.float64, (model.weights, model.inputs))
    want = REFERENCES[name](weights, *inputs)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_outputs_are_finite_and_depend_on_the_inputs(name: str) -> None:
    model = NETWORKS[name](seed=3, **SMALL[name])
    other = NETWORKS[name](seed=4, **SMALL[name])
    fn = jax.jit(model.fn)
    a, b = fn(model.weights, *model.inputs), fn(model.weights, *other.inputs)
    assert np.isfinite(a).all()
    assert np.std(a) > 0.02
    assert np.std(a - b) > 0.05 * np.std(a)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_networks_have_no_dead_code(name: str) -> None:
    model = NETWORKS[name](seed=3, **SMALL[name])
    assert dead_equations(model.fn, model.weights, *model.inputs) == 0


def test_dead_code_is_detected() -> None:
    model = vgg19(seed=3, **SMALL["vgg19"])

    def wasteful(weights: Any, x: jax.Array) -> jax.Array:
        jnp.tanh(x)
        return model.fn(weights, x)

    assert dead_equations(wasteful, model.weights, *model.inputs) == 1


def test_full_sizes_are_the_published_ones() -> None:
    def parameters(network: Callable[..., Model]) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(network().weights))

    # Trained parameters, and a stored mean and variance for each normalised channel.
    assert parameters(resnet50) == 25_557_032 + 2 * 26_560
    assert parameters(mobilenetv2) == 3_504_872 + 2 * 17_056
    # Keras counts 5,326,716 for the mobile network, 36,738 of them not trained.
    assert parameters(nasneta) == 5_289_978 + 2 * 18_369
    # Without batch norm, with the biases.
    assert parameters(vgg19) == 143_667_240


def test_tasos_nasnet_has_the_kernels_of_its_example() -> None:
    model = nasneta_taso()
    result = jax.eval_shape(model.fn, model.weights, *model.inputs)
    assert result.shape == (1, 5120, 7, 7)
    # No figure is published; this is the sum over the example's `new_weight` calls.
    assert sum(leaf.size for leaf in jax.tree.leaves(model.weights)) == 39_838_528


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_too_small_an_image_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: image_size 31 is too small, use at least 32"):
        NETWORKS[name](image_size=31)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_the_smallest_image_works(name: str) -> None:
    model = NETWORKS[name](**(SMALL[name] | {"image_size": 32}))
    result = jax.eval_shape(model.fn, model.weights, *model.inputs)
    assert result.size > 0


@pytest.mark.parametrize(
    ("network", "options", "complaint"),
    [
        (nasneta, {"filters": 100}, "nasneta: filters 100 is not a positive multiple of 96"),
        (nasneta, {"cells": 0}, "nasneta: cells is 0, use at least 1"),
        (nasneta_taso, {"cells": 0}, "nasneta_taso: cells is 0, use at least 1"),
        (nasneta_taso, {"stages": 0}, "nasneta_taso: stages is 0, use at least 1"),
    ],
)
def test_unusable_options_are_refused_by_name(
    network: Callable[..., Model], options: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        network(**options)
