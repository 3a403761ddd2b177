"""Small networks from the documentation of Flax NNX and Equinox."""

# pyright: reportMissingImports=false
from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def nnx_cnn() -> Any:
    """Return the convolutional network of Flax's first tutorial, with a batch of 16 digits."""
    from flax import nnx

    class CNN(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
            self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
            self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
            self.linear1 = nnx.Linear(3136, 256, rngs=rngs)
            self.linear2 = nnx.Linear(256, 10, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.avg_pool(nnx.relu(self.conv1(x)))
            x = self.avg_pool(nnx.relu(self.conv2(x)))
            x = x.reshape(x.shape[0], -1)
            return self.linear2(nnx.relu(self.linear1(x)))

    return _of_nnx(CNN(rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (16, 28, 28, 1)))


def nnx_decoder() -> Any:
    """Return a decoder with NNX's own attention and a causal mask, for 256 tokens."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, size: int, heads: int, *, rngs: nnx.Rngs) -> None:
            self.norm1 = nnx.LayerNorm(size, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(heads, size, decode=False, rngs=rngs)
            self.norm2 = nnx.LayerNorm(size, rngs=rngs)
            self.up = nnx.Linear(size, 4 * size, rngs=rngs)
            self.down = nnx.Linear(4 * size, size, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + self.attention(self.norm1(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class Decoder(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(1000, 512, rngs=rngs)
            self.blocks = nnx.List([Block(512, 8, rngs=rngs) for _ in range(4)])
            self.norm = nnx.LayerNorm(512, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.embed.attend(self.norm(x))

    tokens = jax.random.randint(jax.random.key(1), (1, 256), 0, 1000)
    return _of_nnx(Decoder(rngs=nnx.Rngs(0)), tokens)


def _of_nnx(model: Any, example: jax.Array) -> Any:
    from flax import nnx

    structure, state = nnx.split(model)

    def call(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(structure, state)(x)

    return call, (nnx.to_pure_dict(state), example), (0,)


def equinox_cnn() -> Any:
    """Return the convolutional network of Equinox's first example, with a batch of 16 digits."""
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 4)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(1728, 512, key=keys[1]),
            eqx.nn.Lambda(jax.nn.sigmoid),
            eqx.nn.Linear(512, 64, key=keys[2]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Linear(64, 10, key=keys[3]),
            eqx.nn.Lambda(jax.nn.log_softmax),
        ]
    )
    return _of_equinox(model, jax.random.normal(jax.random.key(1), (16, 1, 28, 28)))


def equinox_mlp() -> Any:
    """Return Equinox's MLP, with a batch of 64 rows."""
    import equinox as eqx

    model = eqx.nn.MLP(128, 64, width_size=512, depth=3, key=jax.random.key(0))
    return _of_equinox(model, jax.random.normal(jax.random.key(1), (64, 128)))


def _of_equinox(model: Any, batch: jax.Array) -> Any:
    import equinox as eqx

    arrays, rest = eqx.partition(model, eqx.is_array)

    def call(arrays: Any, batch: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(arrays, rest))(batch)

    return call, (arrays, batch), (0,)


OF_FLAX, OF_EQUINOX = (nnx_cnn, nnx_decoder), (equinox_cnn, equinox_mlp)
