"""Typical inputs: those for the choice of precisions, and others to check the result on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.measure.inputs import random_input
from xrl_jax.program.arguments import flatten_as
from xrl_jax.program.program import Program, weakened


def calibration_inputs(
    program: Program, leaves: Sequence[Any], batches: Sequence[Sequence[Any]]
) -> list[list[Any]]:
    """Return the user's batches as flat argument lists.

    Args:
      leaves: flat example arguments, whose weights are used.
      batches: for each, the positional arguments that are not weights.

    Raises:
      ValueError: a batch does not have the structure, shapes and dtypes of the example; the message
        names the batch.
    """
    args, kwargs = jax.tree.unflatten(program.in_tree, range(len(leaves)))
    found = []
    for n, batch in enumerate(batches):
        if not isinstance(batch, tuple | list):
            raise ValueError(
                f"calibration[{n}] is of type {type(batch).__name__}: give a tuple of the "
                "arguments that are not weights"
            )
        given = iter(batch)
        whole = [a if _is_weight(program, a) else next(given, None) for a in args]
        if list(given) or any(
            w is None and a is not None for w, a in zip(whole, args, strict=True)
        ):
            wanted = sum(not _is_weight(program, a) for a in args)
            raise ValueError(
                f"calibration[{n}] has {len(batch)} arguments, not the {wanted} without weights"
            )
        filled, tree = flatten_as(program.in_tree, tuple(whole), kwargs)
        if tree != program.in_tree:
            raise ValueError(f"calibration[{n}] has another structure than the example: {tree}")
        found.append(
            [
                own if is_weight else _like(x, own, f"calibration[{n}]")
                for x, own, is_weight in zip(filled, leaves, program.weights, strict=True)
            ]
        )
    return found


def _is_weight(program: Program, arg: Any) -> bool:
    """Return whether all leaves of an argument, given as their positions, are weights."""
    positions = jax.tree.leaves(arg)
    return bool(positions) and all(program.weights[i] for i in positions)


def _like(x: Any, own: Any, name: str) -> Any:
    """Return a leaf of a batch as an array of the example's type."""
    x = np.asarray(x)
    if x.shape != own.shape or not np.can_cast(x.dtype, own.dtype, "same_kind"):
        raise ValueError(
            f"{name} has an array {x.dtype}{list(x.shape)} where the example has "
            f"{own.dtype}{list(own.shape)}"
        )
    leaf = jnp.asarray(x, own.dtype)
    return weakened(leaf) if getattr(own, "weak_type", False) else leaf


def drawn_inputs(
    program: Program, known: Sequence[Sequence[Any]], count: int, *, seed: int
) -> list[list[Any]]:
    """Draw argument lists like the known ones: each element of an input is one of the elements that
    this input has there, or uniform in [-1, 1] where these are real and all equal.
    """
    rng = np.random.default_rng(seed)
    return [
        [
            x if is_weight else _drawn([list(each)[i] for each in known], rng)
            for i, (x, is_weight) in enumerate(zip(known[0], program.weights, strict=True))
        ]
        for _ in range(count)
    ]


def _drawn(values: Sequence[Any], rng: np.random.Generator) -> Any:
    """Draw an array from the elements of arrays of one shape."""
    like = values[0]
    if jnp.issubdtype(like.dtype, jax.dtypes.extended) or not like.size:
        return like
    each = np.stack([np.asarray(v) for v in values])
    if jnp.issubdtype(like.dtype, jnp.floating) and (each == each.reshape(-1)[0]).all():
        aval = jax.ShapeDtypeStruct(like.shape, like.dtype)
        leaf = random_input(aval, seed=int(rng.integers(1 << 31)))
    else:
        elements = each.reshape(-1)
        leaf = jnp.asarray(elements[rng.integers(elements.size, size=like.shape)])
    return weakened(leaf) if getattr(like, "weak_type", False) else leaf
