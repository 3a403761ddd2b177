"""keras.applications on its JAX backend, with random weights."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from typing import Any

import jax


def _called(name: str) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """Return a model as a function of its variables and an image, without its state updates."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(weights=None)
    variables = (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
    )

    def call(variables: Any, image: jax.Array) -> jax.Array:
        return model.stateless_call(*variables, image, training=False)[0]

    return call, (variables, jax.random.normal(jax.random.key(1), (1, 224, 224, 3))), (0,)


def convnext_tiny() -> Any:
    return _called("ConvNeXtTiny")


def efficientnet_b0() -> Any:
    return _called("EfficientNetB0")


def mobilenet_v3_small() -> Any:
    return _called("MobileNetV3Small")


NETWORKS = (convnext_tiny, efficientnet_b0, mobilenet_v3_small)
