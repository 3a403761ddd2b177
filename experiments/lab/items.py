"""What the lab can measure: items with a key, and the ceilings of a device."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.measure.comparison import interleave
from xrl_jax.measure.timing import paired_ratio, timing_of

MIN_ROUNDS, MAX_ROUNDS = 7, 51


@dataclass(frozen=True)
class Item:
    """Something to measure.

    Attributes:
      key: its name in the record, such as "network/bert".
      seconds: that it takes, about; not begun if fewer are left.
      measure: returns plain values for JSON.
    """

    key: str
    seconds: float
    measure: Callable[[], Mapping[str, Any]]


def ordered(items: Sequence[Item], queue: Sequence[str]) -> list[Item]:
    """Return the items in the order of the first patterns that match their keys, the rest last.

    >>> items = [Item(k, 1.0, dict) for k in ("ceiling/copy", "network/vit", "network/bert")]
    >>> [i.key for i in ordered(items, ["network/b*", "network/*"])]
    ['network/bert', 'network/vit', 'ceiling/copy']
    """

    def rank(item: Item) -> int:
        return next((n for n, p in enumerate(queue) if fnmatch.fnmatch(item.key, p)), len(queue))

    return sorted(items, key=rank)


def timed_in_turn(
    calls: Mapping[str, Callable[[], Any]], seconds: float
) -> dict[str, dict[str, Any]]:
    """Return timings of functions that were timed in turn, in microseconds.

    Each turn is several calls in a row, with one wait at its end, as in a user's loop.
    """

    def row(call: Callable[[], Any], n: int) -> Any:
        for _ in range(n - 1):
            call()
        return call()

    in_a_row = {}
    for name, call in calls.items():
        for _ in range(12):  # CUDA graphs are captured, and updated, in the first calls
            jax.block_until_ready(call())
        begin = interleave({"": call}, {"": 1}, **_rounds(0.0, 3))[""]
        in_a_row[name] = max(1, min(200, round(2e-3 / max(float(np.median(begin)), 1e-6))))
    rows = {n: functools.partial(row, call, in_a_row[n]) for n, call in calls.items()}
    samples = interleave(rows, dict.fromkeys(rows, 1), **_rounds(seconds, MIN_ROUNDS))
    first = next(iter(samples))
    found = {}
    for name, each in samples.items():
        per_call = [s / in_a_row[name] for s in each]
        timing = timing_of(per_call)
        ratio = paired_ratio(
            [s / in_a_row[first] for s in samples[first]], per_call, rng=np.random.default_rng(0)
        )
        found[name] = {
            "us": [round(1e6 * t, 3) for t in (timing.seconds, timing.low, timing.high)],
            "over_first": [round(r, 4) for r in (ratio.value, ratio.low, ratio.high)],
            "calls": in_a_row[name],
        }
    return found


def _rounds(seconds: float, least: int) -> dict[str, Any]:
    return dict(
        seconds=seconds,
        min_rounds=least,
        max_rounds=MAX_ROUNDS,
        rng=np.random.default_rng(0),
        warm_caches=False,
    )


def ceilings(*, size: int, seconds: float) -> Iterator[Item]:
    """Yield items that measure what the device reaches at most.

    Args:
      size: of square matrices.
      seconds: of each.
    """

    def product(dtype: str, precision: str | None) -> dict[str, Any]:
        x = jnp.ones((size, size), dtype) / size
        run = jax.jit(functools.partial(jnp.matmul, precision=precision)).lower(x, x).compile()
        timed = timed_in_turn({"product": lambda: run(x, x)}, seconds)["product"]
        return {"flops_per_second": 2 * size**3 / (1e-6 * timed["us"][0]), **timed}

    def copy() -> dict[str, Any]:
        x = jnp.ones(16 * size * size, jnp.float32)
        run = jax.jit(lambda x: -x).lower(x).compile()
        timed = timed_in_turn({"copy": lambda: run(x)}, seconds)["copy"]
        return {"bytes_per_second": 2 * x.nbytes / (1e-6 * timed["us"][0]), **timed}

    def launches(options: dict[str, str | bool]) -> dict[str, Any]:
        """Time programs of few and of many tiny kernels: the slope is one launch."""
        x = jnp.ones(256, jnp.float32)

        def kernels(n: int, x: jax.Array) -> jax.Array:
            for _ in range(n):
                x = jax.lax.optimization_barrier(x + 1.0)
            return x

        runs = {
            n: jax.jit(functools.partial(kernels, n)).lower(x).compile(compiler_options=options)
            for n in (20, 100)
        }
        timed = timed_in_turn(
            {str(n): functools.partial(run, x) for n, run in runs.items()}, seconds
        )
        slope = (timed["100"]["us"][0] - timed["20"]["us"][0]) / 80
        return {"us_per_kernel": slope, "us_of_20": timed["20"]["us"][0]}

    def again() -> dict[str, Any]:
        """Time one function against itself, compiled twice."""
        x = jnp.ones((size // 4, size // 4), jnp.float32)
        one, two = (jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile() for _ in range(2))
        return timed_in_turn({"A": lambda: one(x), "again": lambda: two(x)}, 2 * seconds)

    budget = seconds + 4.0
    yield Item("ceiling/copy", budget, copy)
    for name, dtype, precision in (
        ("float32", "float32", "highest"),
        ("tf32", "float32", None),
        ("float16", "float16", None),
        ("bfloat16", "bfloat16", None),
    ):
        yield Item(f"ceiling/product {name}", budget, functools.partial(product, dtype, precision))
    yield Item("ceiling/A against A", 2 * budget, again)
    if jax.default_backend() == "gpu":
        alone: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}
        yield Item("ceiling/launch in a graph", budget, functools.partial(launches, {}))
        yield Item("ceiling/launch by the host", budget, functools.partial(launches, alone))
    else:
        yield Item("ceiling/launch", budget, functools.partial(launches, {}))
