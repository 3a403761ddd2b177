"""If, Loop and Scan of ONNX. Subgraph attributes are passed as functions of their inputs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import (
    Array,
    Node,
    OnnxError,
    Translation,
    UnknownValueError,
    Value,
    axis_of,
    canonical,
    device,
    is_host,
)

# Loops of up to this many known rounds are unrolled, so that loop counters stay known.
UNROLL_LIMIT = 32
# A loop that collects outputs needs to know how many; its body is traced once for each round.
MOST_COUNTED = 1024


def truth(value: Value) -> Value:
    """Return a condition as a rank-0 value; ONNX also allows one element of any shape."""
    return value.reshape(())


def if_(node: Node, condition: Value) -> list[Value] | tuple[Array, ...]:
    then, other = node.attributes["then_branch"], node.attributes["else_branch"]
    if is_host(condition):
        return then() if bool(truth(condition)) else other()
    kinds = [branch_kinds(node, name, condition) for name in ("then_branch", "else_branch")]
    if kinds[0] != kinds[1]:
        why = "its branches have different shapes or types"
        raise UnknownValueError(node, "a condition", condition, why)
    branches = [lambda f=f: tuple(device(value) for value in f()) for f in (then, other)]
    return lax.cond(truth(condition), *branches)


def branch_kinds(node: Node, name: str, condition: Value) -> list[tuple[Any, Any]]:
    """Return the shape and dtype of each result of a branch.

    A branch that does not fit the given shapes is often one that is never taken; the
    UnknownValueError raised then says on which inputs the condition depends.
    """
    branch = node.attributes[name]
    try:
        structs = jax.eval_shape(lambda: [device(value) for value in branch()])
    except OnnxError as error:
        why = f"the {name} fails ({error})"
        undecided = UnknownValueError(node, "a condition", condition, why)
        if isinstance(error, UnknownValueError):
            undecided.needs = error.needs
        raise undecided from error
    return [(struct.shape, struct.dtype) for struct in structs]


def loop(
    node: Node, trips: Value | None, condition: Value | None, *carried: Value
) -> list[Value] | tuple[Array, ...]:
    body = node.attributes["body"]
    go_on: Value = np.asarray(True) if condition is None else truth(condition)
    limit = None if trips is None else truth(trips)
    if is_host(go_on) and not bool(go_on):
        limit = np.asarray(0, np.int64)
    count = len(carried)
    if trips is not None and not is_host(trips):
        return while_loop(node, limit, go_on, carried, trips)
    if condition is not None and not is_host(condition):
        return while_loop(node, limit, go_on, carried, condition)

    # Unroll while the condition stays known.
    values, collected, round_ = list(carried), [], 0
    while limit is None or round_ < int(limit):
        if round_ == UNROLL_LIMIT:
            break
        results = body(np.asarray(round_, np.int64), np.asarray(True), *values)
        if not is_host(results[0]):
            return while_loop(node, limit, go_on, carried)
        values = results[1 : 1 + count]
        collected.append(results[1 + count :])
        round_ += 1
        if not bool(truth(results[0])):
            return [*values, *stack_rounds(node, collected)]
    if limit is not None and round_ == int(limit):
        return [*values, *stack_rounds(node, collected)]
    if not goes_on_always(node, carried):  # a condition of the round's number, such as i < 40
        rounds = known_rounds(node, limit, carried) if len(node.outputs) > count else None
        if rounds is None:
            return while_loop(node, limit, go_on, carried)
        return counted_loop(node, rounds, carried)
    if limit is None:
        raise node.unsupported("an endless loop")
    return counted_loop(node, int(limit), carried)


def goes_on_always(node: Node, carried: tuple[Value, ...]) -> bool:
    """Return whether the body's condition is true whatever the round and the carried values are."""
    condition = condition_after(node, canonical(np.int64).type(0), carried, is_known=False)
    return is_host(condition) and bool(truth(condition))


def known_rounds(node: Node, limit: Value | None, carried: tuple[Value, ...]) -> int | None:
    """Return the number of rounds if the condition depends on the round's number only; None if it
    depends on more, or if there are more than `MOST_COUNTED` rounds.
    """
    most = MOST_COUNTED if limit is None else int(limit)
    for round_ in range(min(most, MOST_COUNTED)):
        condition = condition_after(node, np.asarray(round_, np.int64), carried, is_known=True)
        if not is_host(condition):
            return None
        if not bool(truth(condition)):
            return round_ + 1
    return most if limit is not None and most <= MOST_COUNTED else None


def condition_after(
    node: Node, round_: Any, carried: tuple[Value, ...], *, is_known: bool
) -> Value:
    """Return the body's condition after a round, the carried values being unknown.

    Args:
      is_known: whether the body is given the round's number as a known value.
    """
    conditions: list[Value] = []

    def step(unknown: Any, state: tuple[Array, ...]) -> None:
        given = round_ if is_known else unknown
        conditions.append(node.attributes["body"](given, np.asarray(True), *state)[0])

    jax.eval_shape(step, round_, tuple(device(value) for value in carried))
    return conditions[0]


def stack_rounds(node: Node, collected: list[list[Value]]) -> list[Value]:
    scans = len(node.outputs) - (len(node.inputs) - 2)
    if scans <= 0:
        return []
    if not collected:
        raise node.unsupported("collecting the outputs of zero iterations")
    return [
        jnp.stack([device(value) for value in column]) for column in zip(*collected, strict=True)
    ]


def counted_loop(node: Node, limit: int, carried: tuple[Value, ...]) -> tuple[Array, ...]:
    """Run a known number of rounds, in which the condition is always true, as lax.scan."""
    body, count = node.attributes["body"], len(carried)

    def step(state, round_):
        results = body(round_, np.asarray(True), *state)
        outputs = [device(value) for value in results[1:]]
        return tuple(outputs[:count]), tuple(outputs[count:])

    first = tuple(device(value) for value in carried)
    rounds = np.arange(limit, dtype=canonical(np.int64))
    last, collected = lax.scan(step, first, rounds)
    return (*last, *collected)


def while_loop(
    node: Node,
    limit: Value | None,
    go_on: Value,
    carried: tuple[Value, ...],
    unknown: Value | None = None,
) -> tuple[Array, ...]:
    """Run a number of rounds that depends on data as lax.while_loop, which cannot stack outputs."""
    body, count = node.attributes["body"], len(carried)
    if len(node.outputs) > count and unknown is not None:
        raise UnknownValueError(
            node, "the number of iterations of a loop with collected outputs", unknown
        )
    if len(node.outputs) > count:
        raise node.unsupported(
            "collecting outputs over a number of iterations that depends on data"
        )
    counter = canonical(np.int64)

    def proceed(state):
        round_, live, _ = state
        if limit is None:
            return live
        return lax.bitwise_and(live, lax.lt(round_, device(limit).astype(counter)))

    def step(state):
        round_, live, values = state
        results = [device(value) for value in body(round_, live, *values)]
        return round_ + counter.type(1), truth(results[0]), tuple(results[1 : 1 + count])

    first = (
        jnp.zeros((), counter),
        device(go_on),
        tuple(device(value) for value in carried),
    )
    return lax.while_loop(proceed, step, first)[2]


def scan(node: Node, *values: Value) -> tuple[Array, ...]:
    """Translate Scan from opset 9 on; `values` are the states, then the inputs to scan over."""
    if node.opset < 9:
        raise node.unsupported("the batched form before opset 9")
    body, scanned = node.attributes["body"], node.attributes["num_scan_inputs"]
    count = len(values) - scanned
    outputs = len(node.outputs) - count
    axes = node.get("scan_input_axes", (0,) * scanned)
    directions = node.get("scan_input_directions", (0,) * scanned)
    inputs = []
    for value, axis, backwards in zip(values[count:], axes, directions, strict=True):
        moved = jnp.moveaxis(device(value), axis_of(axis, value.ndim), 0)
        inputs.append(lax.rev(moved, (0,)) if backwards else moved)

    def step(state, slices):
        results = [device(value) for value in body(*state, *slices)]
        return tuple(results[:count]), tuple(results[count:])

    first = tuple(device(value) for value in values[:count])
    last, collected = lax.scan(step, first, tuple(inputs))
    made = []
    out_axes = node.get("scan_output_axes", (0,) * outputs)
    out_directions = node.get("scan_output_directions", (0,) * outputs)
    for value, axis, backwards in zip(collected, out_axes, out_directions, strict=True):
        value = lax.rev(value, (0,)) if backwards else value
        made.append(jnp.moveaxis(value, 0, axis_of(axis, value.ndim)))
    return (*last, *made)


TRANSLATIONS: dict[str, Translation] = {"If": if_, "Loop": loop, "Scan": scan}
