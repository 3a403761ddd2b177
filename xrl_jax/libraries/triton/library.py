"""Kernels that Pallas writes and Triton compiles, for NVIDIA GPUs: attention, and products of
matrices with what follows them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node
from xrl_jax.libraries.base import CallCosts, Calls, CustomCall, Library, Lowering
from xrl_jax.libraries.triton import partition
from xrl_jax.libraries.triton.product import product
from xrl_jax.libraries.xla.dot import dot_lowering
from xrl_jax.libraries.xla.plain import accumulator, dot, dot_dims, number
from xrl_jax.runtime.target_platform import target_platform

_NAME = "triton"
_CODE_VERSION = 2  # version of the kernels, to be raised where their timings change
_TARGETS = ["__gpu$xla.gpu.triton", "triton_kernel_call_ffi"]  # of versions of jaxlib
# Operators that a kernel computes on the scores between two products.
_JOINING = (
    "add sub mul div max min neg abs square exp tanh logistic sqrt rsqrt integer_pow select eq ne "
    "gt ge lt le erf erfc cast broadcast softmax reduce_sum reduce_max reduce_min"
).split()
_JOINS = np.array([n in _JOINING for n in ops.OP_NAMES])


def _dot(node: Node, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Compute a product that may become part of a kernel."""
    if target_platform() != "gpu":
        return dot(node, lhs, rhs)
    return product(
        lhs,
        rhs,
        dimension_numbers=dot_dims(node),
        precision=ops.decode_precision(number(node, "precision")),
        preferred_element_type=accumulator(node, lhs, rhs),
    )


def _can_join(f: Any) -> jax.Array:
    return jnp.asarray(_JOINS)[f.op] & (f.lowering == 0)


class _Calls(Calls):
    # What is between the products stays in registers.
    costs = CallCosts(_can_join, frozenset(_JOINING), enter=0.0, leave=0.0, joined=0.0, in_loop=0.0)

    def partitioned(self, closed: Any, known: Sequence[bool]) -> Any:
        return partition.partitioned(closed)

    def pair(
        self, node: Node, lowered: Callable[..., jax.Array], *arrays: jax.Array
    ) -> jax.Array | None:
        """Multiply the result [.., M, N] by the right argument [.., K, N] again; a product without
        a batch is a kernel on its own.
        """
        if not dot_dims(node)[1][0]:
            return None
        result, (_, rhs) = lowered(*arrays), arrays
        (_, summed), (_, batch) = dot_dims(node)
        free = tuple(d for d in range(rhs.ndim) if d not in (*summed, *batch))
        last = tuple(range(result.ndim - len(free), result.ndim))
        return product(
            result,
            rhs,
            dimension_numbers=((last, free), (tuple(range(len(batch))), batch)),
            precision=ops.decode_precision(number(node, "precision")),
            preferred_element_type=accumulator(node, result, rhs),
        )

    def exporting(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def custom_calls_in(self, module: bytes) -> list[CustomCall]:
        return [CustomCall(_NAME, (t,)) for t in _TARGETS if t.encode() in module]

    def register_calls(self, custom_calls: Sequence[CustomCall]) -> None:
        return None  # XLA knows them

    def only_time(self) -> None:
        return None


CALLS = _Calls()


class Triton(Library):
    """Triton, as far as JAX contains it."""

    name = _NAME
    platforms = ("gpu",)

    def version(self) -> str:
        return f"{_NAME} {_CODE_VERSION}"

    def lowerings(self) -> Mapping[str, tuple[Lowering, ...]]:
        attention = dot_lowering(
            _NAME,
            _dot,
            lambda d: ~d.without_batch,
            platforms=self.platforms,
            source="FlashAttention (Dao et al. 2022)",
        )
        matrices = dot_lowering(
            f"{_NAME}_matrices",
            _dot,
            "without_batch",
            platforms=self.platforms,
            source="XLA gap: GELU is a kernel of its own",
            alone=True,
        )
        return {"dot": (attention, matrices)}

    def preferred(self, node: Node, args: Sequence[Node]) -> Sequence[str]:
        return (_NAME,)

    def priors(self, platform: str) -> Mapping[tuple[str, int], str]:
        return {("dot", 0): f"{_NAME}_matrices 0.9"} if platform == "gpu" else {}

    def calls(self) -> Calls | None:
        return CALLS

    def custom_call_names(self) -> list[str]:
        return _TARGETS

    def bound_to_jaxlib(self, module: bytes) -> bool:
        return any(name.encode() in module for name in _TARGETS)


LIBRARY = Triton()
