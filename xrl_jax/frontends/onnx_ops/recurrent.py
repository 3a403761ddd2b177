"""RNN, GRU and LSTM of ONNX as lax.scan over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.activation import relu, softplus, softsign
from xrl_jax.frontends.onnx_ops.base import Node, Translation, Value, device, like

Gate = Callable[[jax.Array], jax.Array]
State = tuple[jax.Array, ...]


def activation(node: Node, name: str, alpha: float | None, beta: float | None) -> Gate:
    """Return an activation by its ONNX name, which is not case-sensitive."""
    plain: dict[str, Gate] = {
        "sigmoid": lax.logistic,
        "tanh": lax.tanh,
        "relu": relu,
        "softplus": softplus,
        "softsign": softsign,
    }
    key = name.lower()
    if key in plain:
        return plain[key]

    def value(given: float | None, default: float) -> float:
        return default if given is None else given

    if key == "affine":
        return lambda x: x * like(x, value(alpha, 1.0)) + like(x, value(beta, 0.0))
    if key == "leakyrelu":
        slope = value(alpha, 0.01)
        return lambda x: lax.select(x >= like(x, 0), x, x * like(x, slope))
    if key == "thresholdedrelu":
        limit = value(alpha, 1.0)
        return lambda x: lax.select(x > like(x, limit), x, lax.full_like(x, 0))
    if key == "scaledtanh":
        return lambda x: lax.tanh(x * like(x, value(beta, 1.0))) * like(x, value(alpha, 1.0))
    if key == "hardsigmoid":
        return lambda x: lax.clamp(
            like(x, 0), x * like(x, value(alpha, 0.2)) + like(x, value(beta, 0.5)), like(x, 1)
        )
    if key == "elu":
        scale = value(alpha, 1.0)
        return lambda x: lax.select(
            x >= like(x, 0), x, lax.expm1(lax.min(x, like(x, 0))) * like(x, scale)
        )
    raise node.unsupported(f"activation {name}")


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


def clipped(node: Node, x: jax.Array) -> jax.Array:
    limit = node.get("clip", None)
    return x if limit is None else lax.clamp(like(x, -limit), x, like(x, limit))


def times(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., I] times the transpose of weight [O, I]."""
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
        x: Value,
        w: Value,
        r: Value,
        b: Value | None = None,
        lengths: Value | None = None,
        *initial: Value | None,
    ) -> tuple[jax.Array, ...]:
        x, w, r = device(x), device(w), device(r)
        batch_first = bool(node.get("layout", 0))
        if batch_first:
            x = jnp.swapaxes(x, 0, 1)
        directions, hidden = r.shape[0], r.shape[2]
        batch = x.shape[1]
        functions = activations(node, defaults, directions)
        peepholes = initial[states] if len(initial) > states else None
        results = []
        for d in range(directions):
            bias = None if b is None else device(b)[d]
            first = []
            for i in range(states):
                given = initial[i] if i < len(initial) else None
                if given is None:
                    first.append(jnp.zeros((batch, hidden), x.dtype))
                else:
                    first.append(device(given)[:, d] if batch_first else device(given)[d])
            projected = times(x, w[d])
            if bias is not None:
                projected = projected + bias[: gates * hidden]
            cell = make_cell(
                node,
                functions[d],
                r[d],
                jnp.zeros(gates * hidden, x.dtype) if bias is None else bias[gates * hidden :],
                None if peepholes is None else device(peepholes)[d],
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
    cell: Callable[[jax.Array, State], State],
    projected: jax.Array,
    first: State,
    lengths: Value | None,
    backwards: bool,
) -> tuple[jax.Array, State]:
    """Scan a cell over time; returns the outputs [T, B, H] and the last state.

    Past the length of a sequence the state stays and the output is zero.
    """
    steps = projected.shape[0]
    limit = None if lengths is None else lax.convert_element_type(device(lengths), np.int32)

    def step(state: State, inputs: tuple[jax.Array, jax.Array]) -> tuple[State, jax.Array]:
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


def rnn_cell(node: Node, functions: list[Gate], r: jax.Array, bias: jax.Array, _: object):
    def cell(projected: jax.Array, state: State) -> State:
        return (functions[0](clipped(node, projected + times(state[0], r) + bias)),)

    return cell


def lstm_cell(
    node: Node, functions: list[Gate], r: jax.Array, bias: jax.Array, peepholes: jax.Array | None
):
    """Gates in the order input, output, forget, cell."""
    gate, squash, emit = functions
    hidden = r.shape[1]
    if peepholes is None:
        peep = None
    else:
        peep = [peepholes[i * hidden : (i + 1) * hidden] for i in range(3)]

    def cell(projected: jax.Array, state: State) -> State:
        h, c = state
        i, o, f, g = jnp.split(projected + times(h, r) + bias, 4, axis=1)
        if peep is not None:
            i, f = i + peep[0] * c, f + peep[2] * c
        i = gate(clipped(node, i))
        f = like(i, 1) - i if node.get("input_forget", 0) else gate(clipped(node, f))
        c = f * c + i * squash(clipped(node, g))
        o = gate(clipped(node, o if peep is None else o + peep[1] * c))
        return o * emit(c), c

    return cell


def gru_cell(node: Node, functions: list[Gate], r: jax.Array, bias: jax.Array, _: object):
    """Gates in the order update, reset, hidden."""
    gate, squash = functions
    hidden = r.shape[1]
    after = node.get("linear_before_reset", 0)

    def cell(projected: jax.Array, state: State) -> State:
        h = state[0]
        own = times(h, r[: 2 * hidden]) + bias[: 2 * hidden]
        z, reset = jnp.split(gate(clipped(node, projected[:, : 2 * hidden] + own)), 2, axis=1)
        weight, offset = r[2 * hidden :], bias[2 * hidden :]
        if after:
            inner = reset * (times(h, weight) + offset)
        else:
            inner = times(reset * h, weight) + offset
        candidate = squash(clipped(node, projected[:, 2 * hidden :] + inner))
        return ((like(z, 1) - z) * candidate + z * h,)

    return cell


TRANSLATIONS: dict[str, Translation] = {
    "GRU": recurrent(3, 1, ("Sigmoid", "Tanh"), gru_cell),
    "LSTM": recurrent(4, 2, ("Sigmoid", "Tanh", "Tanh"), lstm_cell),
    "RNN": recurrent(1, 1, ("Tanh",), rnn_cell),
}
