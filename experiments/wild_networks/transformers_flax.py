"""Flax modules of the package transformers, with random weights."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp


def _called(model: Any, example: jax.Array) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """Return a model's usual call as a function of parameters and input, with its arguments."""

    def call(params: Any, x: jax.Array) -> jax.Array:
        return model(x, params=params, train=False).last_hidden_state

    return call, (model.params, example), (0,)


def _tokens(n: int, vocabulary: int) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (1, n), 0, vocabulary)


def gpt2() -> Any:
    """Return GPT-2 (124 million parameters), for 128 tokens."""
    from transformers import FlaxGPT2Model, GPT2Config

    config = GPT2Config()
    model = FlaxGPT2Model(config, seed=0, input_shape=(1, 128))
    return _called(model, _tokens(128, config.vocab_size))


def bert() -> Any:
    """Return four layers of BERT, for 512 tokens."""
    from transformers import BertConfig, FlaxBertModel

    config = BertConfig(num_hidden_layers=4)
    model = FlaxBertModel(config, seed=0, input_shape=(1, 512))
    return _called(model, _tokens(512, config.vocab_size))


def vit() -> Any:
    """Return ViT-B/16, for one image."""
    from transformers import FlaxViTModel, ViTConfig

    image = jax.random.normal(jax.random.key(1), (1, 3, 224, 224))
    return _called(FlaxViTModel(ViTConfig(), seed=0), image)


def t5_encoder() -> Any:
    """Return the encoder of T5 small, for 128 tokens."""
    from transformers import FlaxT5EncoderModel, T5Config

    config = T5Config()
    with _older_clip():
        model = FlaxT5EncoderModel(config, seed=0, input_shape=(1, 128))
    call, args, weights = _called(model, _tokens(128, config.vocab_size))

    def called(*given: Any) -> jax.Array:
        with _older_clip():
            return call(*given)

    return called, args, weights


@contextmanager
def _older_clip() -> Iterator[None]:
    """Give `jnp.clip` the argument names that T5 uses and JAX has removed, in this context."""
    clip = jnp.clip

    def older(x: Any, a_min: Any = None, a_max: Any = None) -> jax.Array:
        return clip(x, min=a_min, max=a_max)

    jnp.clip = older
    try:
        yield
    finally:
        jnp.clip = clip


NETWORKS = (gpt2, bert, vit, t5_encoder)
