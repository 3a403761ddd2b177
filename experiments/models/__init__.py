"""The networks of the experiments, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.models.base import Model
from experiments.models.bert import bert
from experiments.models.inception import inception
from experiments.models.resnet import resnext50
from experiments.models.squeezenet import squeezenet

MODELS: dict[str, Callable[..., Model]] = {
    "squeezenet": squeezenet,
    "resnext50": resnext50,
    "bert": bert,
    "inception": inception,
}

__all__ = ["MODELS", "Model", "get"]


def get(name: str, **options: Any) -> Model:
    """The model called `name`, built with its constructor's `options`.

    Raises ValueError for an unknown name.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(sorted(MODELS))}")
    return MODELS[name](**options)
