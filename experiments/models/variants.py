"""Variants of networks: with other defaults, or with weights and activations in bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.base import Model

Build = Callable[..., Model]


def variant(name: str, build: Build, **defaults: Any) -> Build:
    """Return the constructor of a network of this name, which is another one with these options."""
    return _renamed(name, functools.partial(build, **defaults), lambda model: model)


def bf16(name: str, build: Build) -> Build:
    """Return the constructor of a network of this name, which is another one in bfloat16."""
    return _renamed(name, build, in_bfloat16)


def in_bfloat16(model: Model) -> Model:
    """Return the model with its float32 weights and inputs rounded to bfloat16."""

    def cast(x: np.ndarray) -> np.ndarray:
        return x.astype(jnp.bfloat16) if x.dtype == np.float32 else x

    weights, inputs = jax.tree.map(cast, (model.weights, model.inputs))
    return replace(model, weights=weights, inputs=inputs)


def _renamed(name: str, build: Build, change: Callable[[Model], Model]) -> Build:
    @functools.wraps(build, assigned=())  # keeps the signature, from which options are read
    def built(*args: Any, **options: Any) -> Model:
        return replace(change(build(*args, **options)), name=name)

    return built
