"""Host objects that nodes refer to: arguments, arrays, equations and calls of folded bodies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph.graph import Node


@dataclass(frozen=True)
class Input:
    """A flat argument of the graph (main or body) that contains the node."""

    position: int


@dataclass(frozen=True)
class Array:
    """A constant array, or an array the function closes over."""

    value: Any  # numpy or jax array, of the node's shape and dtype


@dataclass(frozen=True)
class Equation:
    """An equation the op table cannot express; it is bound again unchanged, operands in order."""

    primitive: Any
    params: dict[str, Any]
    n_outputs: int
    avals: tuple[Any, ...]  # a single result is the node itself, several are its `proj` nodes

    @property
    def name(self) -> str:
        return str(self.primitive.name)


# Parameters of control-flow primitives that hold their jaxprs, in the order of `Call.bodies`.
CONTROL_FLOW: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
)


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of constants and of carried values of a scan with these parameters."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since jax 0.12
    return len(consts), len(carry)


@dataclass(frozen=True)
class Call:
    """A call of folded bodies: inlined, or by the control flow of `equation` (scan, while, cond),
    whose jaxprs they replace.

    `kind` is "inline", "scan", "while" or "cond"; for the last three `bodies` are in the order of
    the equation's jaxprs (scan: the body; while: condition, body; cond: the branches).
    """

    kind: str
    bodies: tuple[int, ...]
    equation: Equation | None = None


Binding = Input | Array | Equation | Call


def binding_of(node: Node, bindings: Sequence[Binding]) -> Binding | None:
    """Return the binding that a node refers to; None if it has none."""
    return bindings[node.ref] if node.ref >= 0 else None


def position_of(node: Node, bindings: Sequence[Binding]) -> int | None:
    """Return the position of the flat argument that a node is; None for other nodes."""
    binding = binding_of(node, bindings)
    return binding.position if isinstance(binding, Input) else None


def call_of(node: Node, bindings: Sequence[Binding], kind: str = "") -> Call | None:
    """Return the call that a node is, or None; if `kind` is given, only calls of that kind."""
    call = binding_of(node, bindings)
    return call if isinstance(call, Call) and kind in ("", call.kind) else None


def is_only_inlined(bindings: Sequence[Binding], body: int) -> bool:
    """Return whether no control flow uses the body, since that would fix its inputs and outputs."""
    calls = [c for c in bindings if isinstance(c, Call) and body in c.bodies]
    return all(c.kind == "inline" for c in calls)


def digest(binding: Binding) -> np.ndarray:
    """Hash the content of a binding to two words of 32 bits."""
    h = hashlib.sha256()
    match binding:
        case Input(position):
            h.update(f"input {position}".encode())
        case Array(value):
            if jnp.issubdtype(value.dtype, jax.dtypes.extended):
                h.update(str(value.dtype).encode())
                value = jax.random.key_data(value)
            host = np.asarray(value)
            h.update(f"array {host.dtype} {host.shape}".encode())
            h.update(np.ascontiguousarray(host).tobytes())
        case Equation(_, params, _, avals):
            named = sorted((k, str(v)) for k, v in params.items())
            h.update(f"equation {binding.name} {named} {avals}".encode())
        case Call(kind, bodies, equation):
            h.update(f"call {kind} {bodies}".encode())
            if equation is not None:
                h.update(digest(equation).tobytes())
    return np.frombuffer(h.digest()[:8], np.uint32).copy()
