"""RNN, GRU and LSTM of ONNX as lax.scan over time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.activation import TRANSLATIONS as OPERATORS
from xrl_jax.frontends.onnx_ops.base import Array, Node, Translation, like, on_device

Gate = Callable[[Array], Array]
State = tuple[Array, ...]


# Activations by lower-case name, because ONNX does not distinguish case here; most are operators.
PARAMETRIC: dict[str, Callable[[Node, Array], Any]] = {
    "affine": lambda node, x: x * like(x, node.get("alpha", 1.0)) + like(x, node.get("beta", 0.0)),
    "scaledtanh": lambda node, x: (
        lax.tanh(x * like(x, node.get("beta", 1.0))) * like(x, node.get("alpha", 1.0))
    ),
    **{
        name.lower(): OPERATORS[name]
        for name in ("Elu", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Softplus", "Softsign")
    },
    **{name.lower(): OPERATORS[name] for name in ("Tanh", "ThresholdedRelu")},
}


def activation(node: Node, name: str, alpha: float | None, beta: float | None) -> Gate:
    """Return an activation by its ONNX name; None for a parameter means the operator's default.

    Raises UnsupportedOnnxError for an unknown name.
    """
    translate = PARAMETRIC.get(name.lower())
    if translate is None:
        raise node.unsupported(f"activation {name}")
    given = {k: v for k, v in (("alpha", alpha), ("beta", beta)) if v is not None}
    return functools.partial(translate, dataclasses.replace(node, attributes=given))


def activations(node: Node, defaults: Sequence[str], directions: int) -> list[list[Gate]]:
    """Return the activations of each direction."""
    names = list(node.get("activations", tuple(defaults) * directions))
    alphas = list(node.get("activation_alpha", ()))
    betas = list(node.get("activation_beta", ()))
    gates = [
        activation(
            node, name, alphas[i] if i < len(alphas) else None, betas[i] if i < len(betas) else None
        )
        for i, name in enumerate(names)
    ]
    each = len(defaults)
    return [gates[i * each : (i + 1) * each] for i in range(directions)]


def clipped(node: Node, x: Array) -> Array:
    limit = node.get("clip", None)
    return x if limit is None else lax.clamp(like(x, -limit), x, like(x, limit))


def project(x: Array, weight: Array) -> Array:
    """Multiply x [..., I] by the transpose of weight [O, I]."""
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


def recurrent(
    gates: int, states: int, defaults: Sequence[str], make_cell: Callable[..., Callable]
) -> Translation:
    """Return the translation of a recurrent operator.

    `make_cell(node, activations, R, recurrence bias, peepholes)` returns a function of the
    projected input [B, gates * H] and the state that returns the next state, output first.
    """

    def translate(
        node: Node,
        x: Array,
        w: Array,
        r: Array,
        b: Array | None = None,
        lengths: Array | None = None,
        *initial: Array | None,
    ) -> tuple[Array, ...]:
        batch_first = bool(node.get("layout", 0))
        if batch_first:
            x = jnp.swapaxes(x, 0, 1)
        directions, hidden = r.shape[0], r.shape[2]
        batch = x.shape[1]
        functions = activations(node, defaults, directions)
        peepholes = initial[states] if len(initial) > states else None
        results = []
        for d in range(directions):
            bias = None if b is None else b[d]
            first = []
            for i in range(states):
                given = initial[i] if i < len(initial) else None
                if given is None:
                    first.append(jnp.zeros((batch, hidden), x.dtype))
                else:
                    first.append(given[:, d] if batch_first else given[d])
            projected = project(x, w[d])
            if bias is not None:
                projected = projected + bias[: gates * hidden]
            cell = make_cell(
                node,
                functions[d],
                r[d],
                jnp.zeros(gates * hidden, x.dtype) if bias is None else bias[gates * hidden :],
                None if peepholes is None else peepholes[d],
            )
            backwards = d == 1 or node.get("direction", "forward") == "reverse"
            results.append(run(cell, projected, tuple(first), lengths, backwards))
        outputs = jnp.stack([output for output, _ in results], axis=1)
        last = [jnp.stack([state[i] for _, state in results]) for i in range(states)]
        if batch_first:
            outputs = lax.transpose(outputs, (2, 0, 1, 3))
            last = [jnp.swapaxes(state, 0, 1) for state in last]
        return (outputs, *last)

    return translate


def run(
    cell: Callable[[Array, State], State],
    projected: Array,
    first: State,
    lengths: Array | None,
    backwards: bool,
) -> tuple[Array, State]:
    """Scan a cell over time; returns the outputs [T, B, H] and the last state.

    After the end of a sequence its state does not change and its output is zero.
    """
    steps = projected.shape[0]
    limit = None if lengths is None else lax.convert_element_type(lengths, np.int32)

    def step(state: State, inputs: tuple[Array, Array]) -> tuple[State, Array]:
        values, time = inputs
        new = cell(values, state)
        if limit is None:
            return new, new[0]
        live = lax.broadcast_in_dim(lax.lt(time, limit), new[0].shape, (0,))
        kept = tuple(lax.select(live, n, o) for n, o in zip(new, state, strict=True))
        return kept, lax.select(live, new[0], lax.full_like(new[0], 0))

    clock = lax.iota(np.int32, steps)
    last, outputs = lax.scan(step, first, (projected, clock), reverse=backwards)
    return outputs, last


def rnn_cell(node: Node, functions: list[Gate], r: Array, bias: Array, _: object):
    def cell(projected: Array, state: State) -> State:
        return (functions[0](clipped(node, projected + project(state[0], r) + bias)),)

    return cell


def lstm_cell(node: Node, functions: list[Gate], r: Array, bias: Array, peepholes: Array | None):
    """Return an LSTM cell; its gates are in the order input, output, forget, cell."""
    gate, squash, emit = functions
    hidden = r.shape[1]
    if peepholes is None:
        peep = None
    else:
        peep = [peepholes[i * hidden : (i + 1) * hidden] for i in range(3)]

    def cell(projected: Array, state: State) -> State:
        h, c = state
        i, o, f, g = jnp.split(projected + project(h, r) + bias, 4, axis=1)
        if peep is not None:
            i, f = i + peep[0] * c, f + peep[2] * c
        i = gate(clipped(node, i))
        f = like(i, 1) - i if node.get("input_forget", 0) else gate(clipped(node, f))
        c = f * c + i * squash(clipped(node, g))
        o = gate(clipped(node, o if peep is None else o + peep[1] * c))
        return o * emit(c), c

    return cell


def gru_cell(node: Node, functions: list[Gate], r: Array, bias: Array, _: object):
    """Return a GRU cell; its gates are in the order update, reset, hidden."""
    gate, squash = functions
    hidden = r.shape[1]
    after = node.get("linear_before_reset", 0)

    def cell(projected: Array, state: State) -> State:
        h = state[0]
        own = project(h, r[: 2 * hidden]) + bias[: 2 * hidden]
        z, reset = jnp.split(gate(clipped(node, projected[:, : 2 * hidden] + own)), 2, axis=1)
        weight, offset = r[2 * hidden :], bias[2 * hidden :]
        if after:
            inner = reset * (project(h, weight) + offset)
        else:
            inner = project(reset * h, weight) + offset
        candidate = squash(clipped(node, projected[:, 2 * hidden :] + inner))
        return ((like(z, 1) - z) * candidate + z * h,)

    return cell


TRANSLATIONS = on_device(
    {
        "GRU": recurrent(3, 1, ("Sigmoid", "Tanh"), gru_cell),
        "LSTM": recurrent(4, 2, ("Sigmoid", "Tanh", "Tanh"), lstm_cell),
        "RNN": recurrent(1, 1, ("Tanh",), rnn_cell),
    }
)
