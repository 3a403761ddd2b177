"""Tree structures, types, arrays and signatures as plain JSON values and bytes, and back.

Reading never imports a module that a file names: a named tuple gets its class only from modules
that are loaded already, else a new class of the same name and fields.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.program.arguments import Static

_SIMPLE = (str, bool, int, float, type(None))


class SaveError(ValueError):
    """A function that cannot be saved; the message names the part that has no plain form."""


# Tree structures.


class Other:
    """A container of another class in a file's arguments: its class name, its auxiliary data as
    text, and its children.
    """

    def __init__(self, name: str, text: str, children: Sequence[Any]) -> None:
        self.name, self.text, self.children = name, text, tuple(children)


jax.tree_util.register_pytree_node(
    Other, lambda o: (o.children, (o.name, o.text)), lambda about, inner: Other(*about, inner)
)


def pack_tree(tree: Any, what: str, *, others: bool = False) -> Any:
    """Return a tree structure as JSON: "*" is a leaf, `{"tuple": [...]}` and so on are containers.

    Args:
      what: "the arguments" or "the result", for the message.
      others: allow containers of any class, which are compared and never constructed again.

    Raises:
      SaveError: a container that is no dict, list, tuple, named tuple or None; says of which type.
    """
    node = tree.node_data()
    if node is None:
        return "*"
    kind, data = node
    children = [pack_tree(c, what, others=others) for c in tree.children()]
    if kind is type(None):
        return None
    if kind in (tuple, list):
        return {kind.__name__: children}
    if kind is dict:
        for key in data:
            if not isinstance(key, _SIMPLE):
                raise SaveError(
                    f"{what}: a dict has the key {key!r}; only strings and numbers can be saved"
                )
        return {"dict": [[k, c] for k, c in zip(data, children, strict=True)]}
    if kind is Static:
        if not isinstance(data.value, _SIMPLE):
            raise SaveError(
                f"{what}: {data.value!r} is neither an array nor a string: bind it before "
                "optimising, for example with functools.partial"
            )
        return {"static": data.value}
    fields = getattr(kind, "_fields", None)
    if issubclass(kind, tuple) and fields is not None:
        return {
            "namedtuple": [
                kind.__module__,
                kind.__qualname__,
                list(fields),
                children,
            ]
        }
    if kind is Other:
        return {"other": [*data, children]}
    if others:
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(data))
        return {"other": [f"{kind.__module__}.{kind.__qualname__}", text, children]}
    raise SaveError(
        f"{what}: a {kind.__module__}.{kind.__qualname__} cannot be saved; dicts, lists, tuples, "
        "named tuples and None can: wrap the function so that it takes or returns those"
    )


def unpack_tree(packed: Any) -> Any:
    """Return the tree structure that `pack_tree` was given.

    Raises:
      ValueError, TypeError or KeyError: this is no packed structure.
    """
    return jax.tree.structure(_skeleton(packed))


@functools.lru_cache(maxsize=64)
def _as_saved(tree: Any) -> Any:
    return unpack_tree(pack_tree(tree, "the arguments", others=True))


def as_saved(args: Any) -> Any:
    """Return arguments as a file has them: `Other` in place of containers of other classes."""
    leaves, tree = jax.tree.flatten(args)
    return jax.tree.unflatten(_as_saved(tree), leaves)


def _skeleton(packed: Any) -> Any:
    if packed == "*":
        return 0
    if packed is None:
        return None
    (kind, data), *more = packed.items()
    if more:
        raise ValueError("a container of two kinds")
    match kind:
        case "tuple":
            return tuple(map(_skeleton, data))
        case "list":
            return list(map(_skeleton, data))
        case "dict":
            return {key: _skeleton(child) for key, child in data}
        case "static":
            return Static(data)
        case "namedtuple":
            module, name, fields, children = data
            return _namedtuple(module, name, fields)(*map(_skeleton, children))
        case "other":
            name, text, children = data
            return Other(name, text, list(map(_skeleton, children)))
    raise ValueError(f"unknown container {kind!r}")


def _namedtuple(module: str, name: str, fields: Sequence[str]) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    is_class = isinstance(found, type) and issubclass(found, tuple)
    if is_class and getattr(found, "_fields", None) == tuple(fields):
        return found
    return namedtuple(name.rpartition(".")[2], list(fields))


# Types and arrays.


_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def _key_dtype(implementation: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype


def _dtype(name: str) -> Any:
    return _key_dtype(name[4:]) if name.startswith("key:") else jnp.dtype(name)


def _dtype_name(dtype: Any) -> str:
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        return str(dtype)
    for implementation in _KEY_IMPLEMENTATIONS:
        if _key_dtype(implementation) == dtype:
            return f"key:{implementation}"
    raise SaveError(f"an array of {dtype} cannot be saved")


def pack_aval(aval: Any) -> list[Any]:
    """Return shape, dtype and weak type (None: not stated)."""
    return [list(aval.shape), _dtype_name(aval.dtype), getattr(aval, "weak_type", None)]


def unpack_aval(packed: Any) -> jax.ShapeDtypeStruct:
    """Return the type that `pack_aval` was given.

    Raises:
      ValueError or TypeError: this is no packed type.
    """
    shape, dtype, weak = packed
    return jax.ShapeDtypeStruct([int(d) for d in shape], _dtype(dtype), weak_type=bool(weak))


def pack_array(value: Any) -> tuple[list[Any], bytes]:
    """Return the shape and dtype as plain values, and the bytes."""
    name = _dtype_name(value.dtype)
    if name.startswith("key:"):
        value = jax.random.key_data(value)
    host = np.asarray(value)
    return [list(host.shape), name], np.ascontiguousarray(host).tobytes()


def unpack_array(packed: Any, data: bytes) -> jax.Array:
    """Return the array that `pack_array` was given, on the default device.

    Raises:
      ValueError or TypeError: the bytes do not fit the type.
    """
    shape, name = packed
    if name.startswith("key:"):
        host = np.frombuffer(data, np.uint32).reshape(shape)
        return jax.random.wrap_key_data(jnp.asarray(host), impl=name[4:])
    return jnp.asarray(np.frombuffer(data, _dtype(name)).reshape(shape))


# Signatures.


def pack_signature(fn: Callable[..., Any] | None) -> list[list[Any]] | None:
    """Return names, kinds and plain defaults of the parameters; None if `fn` has no signature."""
    try:
        parameters = inspect.signature(fn).parameters.values() if fn is not None else None
    except (TypeError, ValueError):
        return None
    if parameters is None:
        return None
    return [[p.name, p.kind.name, *_default(p.default)] for p in parameters]


def _default(value: Any) -> list[Any]:
    """Return the default as saved: nothing, `["plain", value]` or `["other"]`."""
    if value is inspect.Parameter.empty:
        return []
    if isinstance(value, _SIMPLE) and (not isinstance(value, float) or math.isfinite(value)):
        return ["plain", value]
    return ["other"]


def unpack_signature(packed: Sequence[Sequence[Any]]) -> inspect.Signature:
    """Return the signature that `pack_signature` was given; defaults that were not plain become
    `...`.

    Raises:
      ValueError, TypeError or KeyError: this is no packed signature.
    """
    parameters = []
    for name, kind, *default in packed:
        value = inspect.Parameter.empty if not default else default[1] if default[1:] else ...
        parameters.append(inspect.Parameter(name, _KINDS[kind], default=value))
    return inspect.Signature(parameters)


_KINDS = {
    kind.name: kind
    for kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    )
}
