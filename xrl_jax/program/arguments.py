"""Arguments of functions as flat arrays and a structure that holds all else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """An argument leaf that is no array (a string, a function), or a number that the function must
    know while it is traced: part of the tree structure, not of the leaves.
    """

    value: Any


def is_array_like(leaf: Any) -> bool:
    """Whether JAX traces this leaf: an array, what has a shape and a dtype, or a number."""
    if isinstance(leaf, (type, np.dtype)):  # NumPy's scalar types have both attributes, too
        return False
    return isinstance(leaf, (bool, int, float, complex)) or (
        hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    )


def flatten_args(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Array leaves of `(args, kwargs)` and the tree structure, which holds every other leaf as a
    `Static`.

    The structure is the one of `Program.in_tree`; two calls agree in it only when their static
    leaves are equal.
    """
    wrapped = jax.tree.map(lambda x: x if is_array_like(x) else Static(x), (args, kwargs))
    return jax.tree.flatten(wrapped)


def flatten_as(tree: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """`flatten_args`, numbers held static where the structure `tree` of such arguments has them
    so.
    """
    return flatten_args(*hold_static(static_numbers(tree), args, kwargs))


def static_numbers(tree: Any) -> frozenset[int]:
    """The places of the numbers that a structure of arguments holds static, among all leaves that
    the arguments have for JAX.
    """
    wrapped = jax.tree.unflatten(tree, [object()] * tree.num_leaves)
    leaves = jax.tree.leaves(wrapped, is_leaf=lambda x: isinstance(x, Static))
    return frozenset(
        i for i, x in enumerate(leaves) if isinstance(x, Static) and is_array_like(x.value)
    )


def hold_static(
    places: Collection[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the leaves at these places static."""
    if not places:
        return args, kwargs
    leaves, tree = jax.tree.flatten((args, kwargs))
    held = [Static(x) if i in places else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, held)


def unflatten_args(tree: Any, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` from what `flatten_args` returned."""
    wrapped = jax.tree.unflatten(tree, leaves)
    return jax.tree.map(
        lambda x: x.value if isinstance(x, Static) else x,
        wrapped,
        is_leaf=lambda x: isinstance(x, Static),
    )
