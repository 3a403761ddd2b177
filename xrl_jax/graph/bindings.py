"""What nodes refer to on the host: arguments, arrays, equations and calls of folded bodies."""

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
    """A flat argument of the graph (main or body) that holds the node."""

    position: int


@dataclass(frozen=True)
class Array:
    """A constant array, or an array the function closes over."""

    value: Any  # numpy or jax array, of the node's shape and dtype


@dataclass(frozen=True)
class Equation:
    """An equation the op table cannot say: bound again as it was, with its operands in order."""

    primitive: Any
    params: dict[str, Any]
    n_outputs: int
    avals: tuple[Any, ...]  # of the results; one result: the node itself, several: its projections

    @property
    def name(self) -> str:
        return str(self.primitive.name)


# Parameters of control flow that hold its jaxprs, in the order of `Call.bodies`.
CONTROL_FLOW: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
)


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many constants a scan with these parameters has, and how many values it carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since jax 0.12
    return len(consts), len(carry)


@dataclass(frozen=True)
class Call:
    """A run of folded bodies: inlined, or as the control flow of `equation` (scan, while, cond)
    with the bodies put in.

    `kind` is "inline", "scan", "while" or "cond"; for the last three `bodies` are in the order of
    the equation's jaxprs (scan: the body; while: condition, body; cond: the branches).
    """

    kind: str
    bodies: tuple[int, ...]
    equation: Equation | None = None


Binding = Input | Array | Equation | Call


def binding_of(node: Node, bindings: Sequence[Binding]) -> Binding | None:
    """What a node refers to; None where that is nothing."""
    return bindings[node.ref] if node.ref >= 0 else None


def position_of(node: Node, bindings: Sequence[Binding]) -> int | None:
    """Which flat argument of its graph a node is; None where it is none."""
    binding = binding_of(node, bindings)
    return binding.position if isinstance(binding, Input) else None


def call_of(node: Node, bindings: Sequence[Binding], kind: str = "") -> Call | None:
    """The call that a node is, of this kind if it is given; None where it is none."""
    call = binding_of(node, bindings)
    return call if isinstance(call, Call) and kind in ("", call.kind) else None


def digest(binding: Binding) -> np.ndarray:
    """The content of a binding as two words of 32 bits."""
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
