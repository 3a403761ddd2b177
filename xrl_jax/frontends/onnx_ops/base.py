"""Common parts of the ONNX translations: errors, the parsed node and graph, array helpers.

A value is either a NumPy array, called a host value, which is known while tracing and can therefore
decide shapes, or a JAX array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

if TYPE_CHECKING:
    import onnx

Array = jax.Array
Value = np.ndarray | Array
Result = Value | tuple[Value | None, ...] | list[Value]
Translation = Callable[..., Result]


class OnnxError(ValueError):
    """The model is damaged or cannot be read; the message names the faulty part."""


class UnsupportedOnnxError(OnnxError):
    """The model is valid, but uses something that has no translation.

    `names` holds one short name per problem, such as "NonZero" or "Cast to FLOAT8E5M2".
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names


class UnknownValueError(UnsupportedOnnxError):
    """A value must be known while tracing, but is not; `needs` holds its name in the model.

    As the error propagates, `run_graph` replaces that name by the names of the values from which
    the value is computed.
    """

    def __init__(self, node: Node, what: str, value: Value, why: str = "") -> None:
        reason = f" where {why}" if why else ""
        super().__init__(
            f"{node}: {what} that is not known while tracing is not supported{reason}",
            (f"{node.op} with unknown {what}",),
        )
        self.value = value
        self.needs: frozenset[str] = frozenset()

    def name_inputs(self, inputs: tuple[str, ...]) -> None:
        """Add to the message which model inputs decide the value, and how to specify theirs."""
        found = [name for name in inputs if name in self.needs]
        if found:
            listing = ", ".join(f"'{name}'" for name in found)
            ways = ", ".join(f"'{name}': ..." for name in found)
            self.args = (
                f"{self}: that depends on the input {listing} (if it is always the same, give its "
                f"value with constants={{{ways}}})",
            )


def operator_key(domain: str, op: str) -> str:
    """Return the name of a standard operator, or the domain and name of any other operator."""
    return op if domain in ("", "ai.onnx") else f"{domain}.{op}"


@dataclass(frozen=True)
class Node:
    """One ONNX node; subgraph attributes are `Graph`s, and callables when it is evaluated."""

    op: str
    domain: str
    name: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    proto: onnx.NodeProto = field(repr=False)

    def __str__(self) -> str:
        label = f"'{self.name}'" if self.name else f"that makes {', '.join(self.outputs)!r}"
        return f"node {label} ({self.domain or 'ai.onnx'}.{self.op}, opset {self.opset})"

    @property
    def key(self) -> str:
        """The key of the operator in `TRANSLATIONS`."""
        return operator_key(self.domain, self.op)

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute, or `default` (its default in ONNX) where it is absent."""
        return self.attributes.get(name, default)

    def unsupported(self, reason: str) -> UnsupportedOnnxError:
        return UnsupportedOnnxError(f"{self}: {reason} is not supported", (f"{self.op}: {reason}",))

    def host(self, value: Value, what: str) -> np.ndarray:
        """Return a value that must be known while tracing, e.g. because it decides a shape."""
        if not is_host(value):
            raise UnknownValueError(self, what, value)
        return np.asarray(value)

    def ints(self, value: Value, what: str) -> tuple[int, ...]:
        return tuple(int(item) for item in self.host(value, what).reshape(-1))


@dataclass(frozen=True)
class Graph:
    """An ONNX graph, its nodes in topological order; Constant nodes count as initialisers."""

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initialisers: Mapping[str, np.ndarray]


def is_host(value: Value | None) -> bool:
    return isinstance(value, np.ndarray | np.generic)


def canonical(dtype: Any) -> np.dtype:
    """Return the dtype that JAX uses for this one: 64 bits become 32 unless x64 is enabled."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def device(value: Value) -> Array:
    """Turn a host value into a JAX constant."""
    if isinstance(value, Array):
        return value
    return jnp.asarray(np.asarray(value).astype(canonical(value.dtype)))


def is_float(value: Value) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def like(value: Value, number: float) -> Any:
    """Return a NumPy scalar of the value's dtype, which lax takes as a literal."""
    return np.dtype(value.dtype).type(number)


def literal(value: Value, rank: int) -> Value:
    """Turn a host array of one element into a scalar, so that graphs show its value."""
    if is_host(value) and value.size == 1 and value.ndim <= rank:
        return np.asarray(value).reshape(())[()]
    return value


def align(*values: Value) -> list[Value]:
    """Prepare values for a broadcasting elementwise operation; at least one becomes a JAX array."""
    rank = max(value.ndim for value in values)
    if all(is_host(value) for value in values):
        return [device(value) for value in values]
    traced_rank = max(value.ndim for value in values if not is_host(value))
    return [literal(value, min(rank, traced_rank)) for value in values]


def broadcast(*values: Value) -> list[Array]:
    """Broadcast values to their common shape."""
    shape = np.broadcast_shapes(*(value.shape for value in values))
    return [jnp.broadcast_to(device(value), shape) for value in values]


def select(condition: Value, chosen: Value, other: Value) -> Array:
    """Return jnp.where(condition, chosen, other), without the nested jit of jnp.where."""
    condition, chosen, other = broadcast(condition, chosen, other)
    return lax.select(condition, chosen, other)


def axis_of(axis: int, rank: int) -> int:
    """Return a non-negative axis."""
    if not -rank <= axis < max(rank, 1):
        raise OnnxError(f"axis {axis} is out of range for rank {rank}")
    return axis + rank if axis < 0 else axis


def on_device(translations: Mapping[str, Translation]) -> dict[str, Translation]:
    """Wrap translations so that they receive all inputs as JAX arrays."""

    def taking_arrays(translate: Translation) -> Translation:
        def call(node: Node, *inputs: Value | None) -> Result:
            return translate(node, *(None if x is None else device(x) for x in inputs))

        return call

    return {name: taking_arrays(translate) for name, translate in translations.items()}
