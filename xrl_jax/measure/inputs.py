"""Hashes that identify compiled functions, and the random inputs that these are timed with."""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SOURCE_TABLES = re.compile(
    r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*", re.MULTILINE
)
_METADATA = re.compile(r',? ?metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_MODULE_NAME = re.compile(r"^HloModule [^,\s]+", re.MULTILINE)
_PARAMETER_NAME = re.compile(r"[\w.\-]+: (?=\(|\w+\[)")
_NAME = re.compile(r"%[\w.\-]+")


def hlo_hash(text: str) -> str:
    """Return a hash of an HLO module's text, 32 hex digits, that ignores metadata (source lines, op
    names) and the choice of names.
    """
    for pattern in (_SOURCE_TABLES, _METADATA, _PARAMETER_NAME):
        text = pattern.sub("", text)
    text = _MODULE_NAME.sub("HloModule", text)
    numbers: dict[str, str] = {}
    text = _NAME.sub(lambda match: numbers.setdefault(match.group(), f"%{len(numbers)}"), text)
    lines = (line.strip() for line in text.splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()[:32]


def random_input(aval: Any, *, seed: int = 0) -> jax.Array:
    """Return an array of `aval`'s shape and dtype to time with: floats uniform in [-1, 1], booleans
    random, integers zero (valid as indices whatever they index), PRNG keys from zero data.
    """
    shape, dtype = tuple(aval.shape), aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        zeros = np.zeros(data.shape, data.dtype)
        return jax.random.wrap_key_data(jnp.asarray(zeros), impl=_key_implementation(dtype))
    rng = np.random.default_rng(seed)
    size = math.prod(shape)

    def uniform() -> np.ndarray:
        # A block of values is repeated: for hundreds of megabytes of weights the generator would
        # take longer than the timing.
        block = rng.random(min(size, 1 << 20), dtype=np.float32) * 2.0 - 1.0
        copies = -(-size // max(block.size, 1))
        return np.tile(block, copies)[:size].reshape(shape)

    if dtype == np.bool_:
        values = uniform() < 0.0
    elif jnp.issubdtype(dtype, np.complexfloating):
        values = uniform() + 1j * uniform()
    elif jnp.issubdtype(dtype, np.floating):
        values = uniform()
    else:
        values = np.zeros(shape)
    return jax.device_put(np.asarray(values, dtype))


def _key_implementation(dtype: Any) -> str:
    """Return the implementation name that `wrap_key_data` takes for a key dtype; JAX has no public
    function for this.
    """
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        if jax.eval_shape(lambda name=name: jax.random.key(0, impl=name)).dtype == dtype:
            return name
    raise ValueError(
        f"random inputs of dtype {dtype} cannot be made: its implementation is not one of JAX's own"
    )
