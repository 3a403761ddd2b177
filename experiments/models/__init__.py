"""The networks of the experiments, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.models.base import Model
from experiments.models.bert import bert
from experiments.models.dalle import dalle
from experiments.models.gpt2 import gpt2
from experiments.models.inception import inceptionv3
from experiments.models.llama import llama
from experiments.models.mobilenet import mobilenetv2
from experiments.models.nasnet import nasneta
from experiments.models.nasnet_taso import nasneta_taso
from experiments.models.nasrnn import nasrnn, nasrnn_taso
from experiments.models.resnet import resnet50, resnext50
from experiments.models.squeezenet import squeezenet
from experiments.models.transformers_taso import bert_taso, dalle_taso, tt_taso, vit_taso
from experiments.models.tt import tt
from experiments.models.variants import bf16, variant
from experiments.models.vgg import vgg19
from experiments.models.vit import vit

# The networks of X-RLflow's evaluation, as real networks.
SEVEN: dict[str, Callable[..., Model]] = {
    "bert": bert,
    "vit": vit,
    "dalle": dalle,
    "tt": tt,
    "inceptionv3": inceptionv3,
    "squeezenet": squeezenet,
    "resnext50": resnext50,
}
# These and networks of the evaluations of TASO, Tensat and related work.
TWELVE: dict[str, Callable[..., Model]] = SEVEN | {
    "resnet50": resnet50,
    "mobilenetv2": mobilenetv2,
    "nasneta": nasneta,
    "nasrnn": nasrnn,
    "vgg19": vgg19,
}
# Language models that continue a text, with a cache of the keys and values of earlier tokens.
# The `_token` variants read one token, after 512 others.
DECODERS: dict[str, Callable[..., Model]] = {
    "gpt2": gpt2,
    "gpt2_token": variant("gpt2_token", gpt2, tokens=1, past=512),
    "llama": llama,
    "llama_token": variant("llama_token", llama, tokens=1, past=512),
}
BF16: dict[str, Callable[..., Model]] = {
    f"{name}_bf16": bf16(f"{name}_bf16", build)
    for name, build in {"bert": bert, "vit": vit, **DECODERS}.items()
}
# Graphs as those papers built them, without softmax and with dead code: for comparison with
# published figures only.
AS_PUBLISHED: dict[str, Callable[..., Model]] = {
    "bert_taso": bert_taso,
    "vit_taso": vit_taso,
    "dalle_taso": dalle_taso,
    "tt_taso": tt_taso,
    "nasneta_taso": nasneta_taso,
    "nasrnn_taso": nasrnn_taso,
}
MODELS: dict[str, Callable[..., Model]] = TWELVE | DECODERS | BF16 | AS_PUBLISHED

__all__ = ["AS_PUBLISHED", "BF16", "DECODERS", "MODELS", "SEVEN", "TWELVE", "Model", "get"]


def get(name: str, **options: Any) -> Model:
    """Return the model called `name`, built with its constructor's `options`.

    Raises:
      ValueError: the name is unknown.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(sorted(MODELS))}")
    return MODELS[name](**options)
