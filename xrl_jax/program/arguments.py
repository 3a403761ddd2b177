"""Function arguments as a flat list of arrays and a tree structure that holds everything else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """An argument leaf that is part of the tree structure instead of the leaves.

    It is not an array (a string, a function), or it is a Python scalar whose value the function
    needs while it is traced.
    """

    value: Any


def is_array_like(leaf: Any) -> bool:
    """Return whether JAX traces this leaf: a Python scalar, or anything with shape and dtype."""
    if isinstance(leaf, (type, np.dtype)):  # NumPy's scalar types have both attributes too
        return False
    return isinstance(leaf, (bool, int, float, complex)) or (
        hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    )


def flatten_args(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Flatten `(args, kwargs)` into array leaves and a tree structure.

    The structure holds every other leaf as a `Static`. It is that of `Program.in_tree`; two calls
    have the same structure only if their static leaves are equal.
    """
    wrapped = jax.tree.map(lambda x: x if is_array_like(x) else Static(x), (args, kwargs))
    return jax.tree.flatten(wrapped)


def flatten_as(tree: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Flatten as `flatten_args`, with those scalars static that are static in `tree`."""
    return flatten_args(*wrap_static(static_scalars(tree), args, kwargs))


def static_scalars(tree: Any) -> frozenset[int]:
    """Return the positions of the scalars that an argument structure holds as static.

    Positions count all leaves that the arguments have in JAX.
    """
    wrapped = jax.tree.unflatten(tree, [object()] * tree.num_leaves)
    leaves = jax.tree.leaves(wrapped, is_leaf=lambda x: isinstance(x, Static))
    return frozenset(
        i for i, x in enumerate(leaves) if isinstance(x, Static) and is_array_like(x.value)
    )


def wrap_static(
    places: Collection[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the leaves at these positions wrapped as `Static`."""
    if not places:
        return args, kwargs
    leaves, tree = jax.tree.flatten((args, kwargs))
    held = [Static(x) if i in places else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, held)


def unflatten_args(tree: Any, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `(args, kwargs)` from the result of `flatten_args`."""
    wrapped = jax.tree.unflatten(tree, leaves)
    return jax.tree.map(
        lambda x: x.value if isinstance(x, Static) else x,
        wrapped,
        is_leaf=lambda x: isinstance(x, Static),
    )
