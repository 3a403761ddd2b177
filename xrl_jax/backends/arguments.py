"""The arguments that an optimised function was made for, and checks of a call against them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.program.arguments import flatten_as, is_array_like, unflatten_args
from xrl_jax.program.program import Program

Kind = tuple[tuple[int, ...], Any, bool | None]  # shape, dtype, weak type (None: either)


class Arguments:
    """The arguments of a program: their structure, their types, and which are weights."""

    def __init__(self, program: Program) -> None:
        self.tree = program.in_tree
        self.avals = program.in_avals
        self.weights = program.weights

    def split(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the weights among `leaves`, and the other leaves."""
        return list(compress(leaves, self.weights)), list(compress(leaves, self._unweighted))

    def merge(self, weights: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Return all leaves in order, from weights and other leaves."""
        of = iter(weights), iter(inputs)
        return [next(of[0] if w else of[1]) for w in self.weights]

    def flatten(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Callable[..., Any]
    ) -> tuple[list[Any], Any]:
        """Return the leaves and their structure, if possible in the order of the example arguments,
        whichever arguments were passed by name.

        Args:
          signature: a callable with the signature that maps names to positions.
        """
        leaves, tree = flatten_as(self.tree, args, kwargs)
        if tree == self.tree:
            return leaves, tree
        try:
            bound = inspect.signature(signature)
            given = bound.bind(*args, **kwargs).arguments
        except (TypeError, ValueError):  # no signature, or it rejects these, as the original will
            return leaves, tree
        example_args, example_kwargs = unflatten_args(self.tree, self.avals)
        names = list(bound.parameters)[: len(example_args)]
        given = _match_defaults({*names, *example_kwargs}, given, bound)
        if set(given) != {*names, *example_kwargs}:
            return leaves, tree
        by_place = tuple(given[n] for n in names)
        return flatten_as(self.tree, by_place, {n: given[n] for n in example_kwargs})

    def difference(self, leaves: Sequence[Any], tree: Any) -> str | None:
        """Return how the arguments differ from those the program was made for, or None if they do
        not.
        """
        if tree != self.tree:
            return f"it was made for arguments of structure {self.tree}, got {tree}"
        for leaf, aval, kind in zip(leaves, self.avals, self.kinds, strict=True):
            if not fits(leaf, kind):
                return f"it was made for an argument {text(aval)}, got {text(leaf)}"
        return None

    @functools.cached_property
    def kinds(self) -> list[Kind]:
        """The kind of each leaf."""
        return [(tuple(a.shape), a.dtype, getattr(a, "weak_type", None)) for a in self.avals]

    @functools.cached_property
    def input_kinds(self) -> list[Kind]:
        """The kind of each leaf that is not a weight."""
        return self.split(self.kinds)[1]

    @functools.cached_property
    def trees(self) -> list[Any]:
        """The structure of each positional argument, as that of a call with this argument only."""
        args, _ = jax.tree.unflatten(self.tree, self.avals)
        return [jax.tree.structure(((a,), {})) for a in args]

    @functools.cached_property
    def are_weights(self) -> list[bool]:
        """For each positional argument, whether it is a weight."""
        args, _ = jax.tree.unflatten(self.tree, self.weights)
        return [any(jax.tree.leaves(a)) for a in args]

    @functools.cached_property
    def weight_tree(self) -> Any:
        """The structure of a call with the weight arguments only."""
        args, _ = jax.tree.unflatten(self.tree, self.avals)
        return jax.tree.structure((tuple(compress(args, self.are_weights)), {}))

    @functools.cached_property
    def _unweighted(self) -> list[bool]:
        return [not w for w in self.weights]


def of_leaves(fn: Callable[..., Any], tree: Any) -> Callable[..., Any]:
    """Return `fn` as a function of the leaves of its arguments."""

    def flat(*leaves: Any) -> Any:
        args, kwargs = unflatten_args(tree, leaves)
        return fn(*args, **kwargs)

    return flat


def _match_defaults(
    names: set[str], given: Mapping[str, Any], signature: inspect.Signature
) -> dict[str, Any]:
    """Return the given arguments with defaults added or left out, so that they have the names of
    the example's arguments.
    """
    defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not p.empty}
    same = {n for n, v in given.items() if n in defaults and _is_same(v, defaults[n])}
    added = {n: v for n, v in defaults.items() if n in names}
    return added | {n: v for n, v in given.items() if n in names or n not in same}


def _is_same(value: Any, default: Any) -> bool:
    """Return whether a value is the default; equal plain values count, since they may be other
    objects.
    """
    plain = type(value) is type(default) and isinstance(value, (bool, int, float, complex, str))
    return value is default or (plain and value == default)


def fits(leaf: Any, kind: Kind) -> bool:
    """Return whether a leaf has the shape, dtype and weak type that the program was made for."""
    shape, dtype, weak_type = kind
    if isinstance(leaf, jax.Array):
        weak = getattr(leaf, "weak_type", False)
        return (
            leaf.shape == shape and leaf.dtype == dtype and (weak_type is None or weak == weak_type)
        )
    if not is_array_like(leaf):
        return False
    given = getattr(leaf, "dtype", None)
    kind_of = jnp.result_type(leaf) if given is None else jax.dtypes.canonicalize_dtype(given)
    return (
        np.shape(leaf) == shape
        and kind_of == dtype
        and (weak_type is None or _is_weak(leaf) == weak_type)
    )


def text(leaf: Any) -> str:
    """Return a leaf's type for a message, weakness included: `float32[2, 3]`, `weak float32[]`."""
    dtype = jnp.result_type(leaf) if is_array_like(leaf) else type(leaf).__name__
    return f"{'weak ' if _is_weak(leaf) else ''}{dtype}{list(np.shape(leaf))}"


def _is_weak(leaf: Any) -> bool:
    """Return whether JAX gives the leaf a weak type, as it does to Python scalars except bool."""
    if hasattr(leaf, "dtype"):
        return bool(getattr(leaf, "weak_type", False))
    return isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)
