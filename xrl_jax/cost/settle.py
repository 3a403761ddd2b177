"""The last word on a result: is it right, and is it faster than the strongest form of the original?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from xrl_jax.backends.accuracy import Accuracy, assess
from xrl_jax.backends.baselines import baselines, flat_original
from xrl_jax.backends.fast import Fast
from xrl_jax.cost.inputs import random_input
from xrl_jax.cost.programs import Options, Timed
from xrl_jax.cost.timing import Ratio, Timing, compare
from xrl_jax.graph.program import Program, unflatten_args

OPTIMISED = "optimised"
CONTROL = "A/A control"


@dataclass(frozen=True)
class Settled:
    """What is returned to the user and why.

    Attributes:
      program, options: of the candidate that was settled on.
      index: of the program among the search's results.
      used: whether the candidate is returned; else the original is.
      reason: why, in a sentence.
      accuracy: of the candidate.
      baselines: timings of the original's forms by name; `baseline` names the strongest.
      optimised: timing of the candidate.
      speedup: strongest baseline / candidate.
      noise: strongest baseline / itself compiled again.
      weight_bytes_added: by prepared weights.
    """

    program: Program
    options: Options
    index: int
    used: bool
    reason: str
    accuracy: Accuracy
    baselines: dict[str, Timing]
    baseline: str
    optimised: Timing
    speedup: Ratio
    noise: Ratio
    weight_bytes_added: int


def concrete(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """Flat arguments as device arrays, random where only a shape is known."""
    leaves = []
    for given, aval in zip(arguments, program.in_avals, strict=True):
        known = not isinstance(given, jax.ShapeDtypeStruct) and hasattr(given, "shape")
        if known or isinstance(given, (bool, int, float, complex)):
            leaves.append(jax.device_put(given) if known else jnp.asarray(given, aval.dtype))
        else:
            leaves.append(random_input(aval))
    return leaves


def samples(program: Program, leaves: Sequence[Any]) -> list[list[Any]]:
    """Argument lists to check on: the example, and the example with its real inputs drawn again at their own scale."""
    again = []
    for i, (x, w) in enumerate(zip(leaves, program.weights, strict=True)):
        if w or not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
            again.append(x)
            continue
        scale = jnp.std(x.astype(jnp.float32)) if x.size > 1 else jnp.float32(0)
        scale = jnp.where(jnp.isfinite(scale) & (scale > 0), scale, 1.0).astype(x.dtype)
        middle = jnp.mean(x.astype(jnp.float32)).astype(x.dtype)
        again.append(
            middle + scale * random_input(jax.ShapeDtypeStruct(x.shape, x.dtype), seed=i + 1)
        )
    return [list(leaves), again]


def settle(
    program: Program,
    finalists: Sequence[Timed],
    arguments: Sequence[Any],
    *,
    tolerance: float | None,
    seconds: float,
    seed: int = 0,
    tell: Callable[[str], Any] = lambda _: None,
) -> Settled:
    """Check the finalists in order until one is right, time it in turn with the original's forms, and decide.

    Args:
      program: the original.
      finalists: rewritten programs, fastest first; not empty.
      arguments: flat example arguments.
      tolerance: relative error allowed; None for the default.
      seconds: for the final timing.
    """
    leaves = concrete(program, arguments)
    checks = samples(program, leaves)
    original = flat_original(program)
    tell("checking against float64")
    before = jax.jit(original)
    chosen, accuracy, fast = finalists[0], None, None
    for chosen in finalists:
        fast = Fast(chosen.program, program.fn, options=chosen.options)
        accuracy = assess(before, flat_call(fast), original, checks, tolerance=tolerance)
        if accuracy.ok:
            break
    assert accuracy is not None and fast is not None
    tell("timing against jax.jit")
    forms = baselines(program, leaves)
    first = compare(
        forms, seconds=0.1 * seconds, min_rounds=3, baseline=next(iter(forms)), seed=seed
    )
    strongest = min(first.samples, key=lambda n: first.timings[n].seconds)
    entrants = dict(forms)
    if chosen.options:
        entrants |= {
            n: f
            for n, f in baselines(program, leaves, chosen.options).items()
            if n.startswith(strongest)
        }
    entrants[CONTROL] = baselines(program, leaves)[strongest]
    args, kwargs = unflatten_args(program.in_tree, leaves)
    entrants[OPTIMISED] = lambda: fast(*args, **kwargs)
    comparison = compare(entrants, seconds=seconds, min_rounds=7, baseline=strongest, seed=seed)
    rivals = {n: t for n, t in comparison.timings.items() if n not in (CONTROL, OPTIMISED)}
    baseline = min(rivals, key=lambda n: rivals[n].seconds)
    noise = comparison.ratio(strongest, CONTROL)
    optimised = comparison.timings[OPTIMISED]
    speedup = comparison.ratio(baseline, OPTIMISED) if optimised.ok else Ratio(0.0, 0.0, 0.0)
    threshold = max(1.0, noise.value, 1.0 / noise.value)
    faster = speedup.low > 1.0 and speedup.value > threshold
    if not accuracy.ok:
        reason = f"the original is returned: {accuracy.reason}"
    elif not optimised.ok:
        reason = f"the original is returned: the result could not be run ({optimised.error})"
    elif not faster:
        reason = "the original is returned: nothing found is faster beyond noise"
    else:
        reason = "the optimised function is returned: it is right and faster beyond noise"
    return Settled(
        chosen.program, chosen.options, chosen.index, accuracy.ok and faster, reason, accuracy, rivals, baseline,
        optimised, speedup, noise, fast.weight_bytes_added,
    )  # fmt: skip


def flat_call(fast: Fast) -> Callable[..., list[Any]]:
    """`fast` on flat leaves, called as a user would call it."""

    def run(*leaves: Any) -> list[Any]:
        args, kwargs = unflatten_args(fast.program.in_tree, leaves)
        return jax.tree.leaves(fast(*args, **kwargs))

    return run
