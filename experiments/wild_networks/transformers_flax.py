"""Transformers' Flax modules, with random weights."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import jax


def _called(model: Any, example: jax.Array) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """A model as one calls it, its parameters an argument."""

    def call(params: Any, x: jax.Array) -> jax.Array:
        return model(x, params=params, train=False).last_hidden_state

    return call, (model.params, example), (0,)


def _tokens(n: int, vocabulary: int) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (1, n), 0, vocabulary)


def gpt2() -> Any:
    """GPT-2 (124 million parameters), 128 tokens."""
    from transformers import FlaxGPT2Model, GPT2Config

    config = GPT2Config()
    model = FlaxGPT2Model(config, seed=0, input_shape=(1, 128))
    return _called(model, _tokens(128, config.vocab_size))


def bert() -> Any:
    """Four layers of BERT, 512 tokens."""
    from transformers import BertConfig, FlaxBertModel

    config = BertConfig(num_hidden_layers=4)
    model = FlaxBertModel(config, seed=0, input_shape=(1, 512))
    return _called(model, _tokens(512, config.vocab_size))


def vit() -> Any:
    """ViT-B/16, one image."""
    from transformers import FlaxViTModel, ViTConfig

    image = jax.random.normal(jax.random.key(1), (1, 3, 224, 224))
    return _called(FlaxViTModel(ViTConfig(), seed=0), image)


def t5_encoder() -> Any:
    """The encoder of T5 small, 128 tokens."""
    from transformers import FlaxT5EncoderModel, T5Config

    config = T5Config()
    model = FlaxT5EncoderModel(config, seed=0, input_shape=(1, 128))
    return _called(model, _tokens(128, config.vocab_size))


NETWORKS = (gpt2, bert, vit, t5_encoder)
