"""Networks that are not defined in this repository, optimised through the public API: those of the
onnx package, with random weights.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xrl_jax
from tests.frontends.test_onnx_networks import with_random_weights
from xrl_jax.frontends.onnx import load_onnx
from xrl_jax.measure.comparison import compare


@pytest.mark.slow
@pytest.mark.parametrize("name", ["densenet121", "shufflenet", "inception_v2"])
def test_an_unseen_network_is_correct_and_not_slower(
    name: str, tmp_path: Path, record_property
) -> None:
    loaded = load_onnx(with_random_weights(name))
    weights = jax.tree.map(jnp.asarray, loaded.weights)
    shape = loaded.inputs[0].shape
    image = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)
    fast = xrl_jax.optimize(
        loaded.fn,
        weights,
        image,
        weights=0,
        budget=xrl_jax.Budget(seconds=60),
        cache_dir=tmp_path,
        progress=False,
    )
    plain, again = (jax.jit(lambda x: loaded.fn(weights, x)) for _ in range(2))
    expected = np.asarray(plain(image))
    error = np.abs(np.asarray(fast(weights, image)) - expected).max()
    assert error <= 1e-3 * np.abs(expected).max()
    calls = {
        "jit": lambda: plain(image),
        "jit again": lambda: again(image),
        "optimised": lambda: fast(weights, image),
    }
    timed = compare(calls, seconds=6.0, min_rounds=7, baseline="jit", seed=0)
    noise, gain = timed.ratio("jit", "jit again"), timed.ratio("jit", "optimised")
    interval = f"{gain.value:.2f} ({gain.low:.2f} to {gain.high:.2f})"
    record_property("figure", f"{name}, never seen: {interval} times as fast as jax.jit")
    assert gain.high >= min(noise.low, 1.0)
