"""The cost model's facts about the library's calls: the operators that a call can contain besides
its kernels, and the cost of entering a call.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.libraries.base import CallCosts

_JOINING = "transpose concat window_max window_sum min sub mul div add max".split()
_FUSED = (
    "broadcast exp tanh logistic erf erfc sqrt rsqrt neg abs square floor ceil integer_pow select "
    "softmax slice eq ne ge gt le lt reduce_sum reduce_max reduce_min"
).split()
# Over the last axis only; a sum may also be over two axes of an image.
_OF_LAST_AXIS = ("softmax", "reduce_sum", "reduce_max", "reduce_min")
_IMAGE_AXES = tuple((1 << a) + (1 << b) for a in range(4) for b in range(a))
_JOINS = np.array([n in (*_JOINING, *_FUSED) for n in ops.OP_NAMES])
_IS_OF_LAST_AXIS = np.array([n in _OF_LAST_AXIS for n in ops.OP_NAMES])


def _can_join(f: Any) -> jax.Array:
    # The first attribute is a mask of axes. `rank` is the result's, which in reductions is one less
    # than the operand's.
    last = f.rank - (f.op == ops.OPS["softmax"].code)
    axes = f.attrs[..., 0]
    of_image = (f.op == ops.OPS["reduce_sum"].code) & (f.rank == 2)
    of_image &= jnp.isin(axes, jnp.asarray(_IMAGE_AXES))
    fits = ~jnp.asarray(_IS_OF_LAST_AXIS)[f.op] | (axes == 1 << last) | of_image
    return jnp.asarray(_JOINS)[f.op] & (f.lowering == 0) & fits


# Entering a call wakes threads, creates descriptors and needs row-major arrays; and XLA's next call
# that uses threads of its own is slower while the library's threads still spin. Measured with
# experiments/cost_model.py: of 20 rewritings of SqueezeNet those with n kernels of the library
# between XLA's took 0.5 ms n longer than without this; BERT with one product of each layer by XLA
# took 1.1 ms longer for each than with none.
COSTS = CallCosts(
    can_join=_can_join,
    fused=frozenset(_FUSED),
    enter=1e-4,
    leave=6e-4,
    joined=0.4,
    in_loop=0.1,
)
