"""Losses of ONNX. SoftmaxCrossEntropyLoss expands to log-softmax and this one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xrl_jax.frontends.onnx_ops.base import Node, Translation, Value, device
from xrl_jax.frontends.onnx_ops.indexing import gather_points, grid


def negative_log_likelihood(
    node: Node, x: Value, target: Value, weight: Value | None = None
) -> jax.Array:
    """-x[target] * weight[target]; x [N, C, ...], target [N, ...]; ignored targets count 0."""
    x, target = device(x), device(target)
    ignored = node.get("ignore_index", None)
    live = None
    if ignored is not None:
        live = lax.ne(target, target.dtype.type(ignored))
        target = lax.select(live, target, lax.full_like(target, 0))
    shape = (x.shape[0], 1, *x.shape[2:])
    places = jnp.stack(grid(shape, 1, lax.expand_dims(target, (1,))), axis=-1)
    loss = -lax.squeeze(gather_points(x, places), (1,))
    factor = None
    if weight is not None:
        factor = gather_points(device(weight), lax.expand_dims(target, (target.ndim,)))
    if live is not None:
        counted = lax.convert_element_type(live, x.dtype)
        factor = counted if factor is None else factor * counted
    if factor is not None:
        loss = loss * factor
    reduction = node.get("reduction", "mean")
    if reduction == "none":
        return loss
    if reduction == "sum":
        return jnp.sum(loss)
    return jnp.mean(loss) if factor is None else jnp.sum(loss) / jnp.sum(factor)


TRANSLATIONS: dict[str, Translation] = {"NegativeLogLikelihoodLoss": negative_log_likelihood}
