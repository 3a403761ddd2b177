"""A convolution is timed alone, with its features last, as it is inside of the library's calls."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import Node
from xrl_jax.libraries.xla.plain import conv_layouts
from xrl_jax.lower.table import lower
from xrl_jax.precision.gains import features_last
from xrl_jax.program.host import disassemble

RNG = np.random.default_rng(0)


def convolution(x: jax.Array, w: jax.Array, layout: tuple[str, str, str]) -> jax.Array:
    """Two groups, a stride, and padding that differs by side and axis."""
    return lax.conv_general_dilated(
        x,
        w,
        (2, 1),
        ((1, 0), (2, 1)),
        rhs_dilation=(1, 2),
        dimension_numbers=layout,
        feature_group_count=2,
    )


@pytest.mark.parametrize("layout", [("NCHW", "OIHW", "NCHW"), ("CNHW", "HWIO", "NHWC")])
def test_it_computes_the_same_in_another_layout(layout: tuple[str, str, str]) -> None:
    last = ("NHWC", "HWIO", "NHWC")
    image, kernel = (jnp.asarray(RNG.normal(size=s)) for s in ((2, 9, 7, 4), (3, 2, 2, 6)))
    x, w = (
        jnp.transpose(a, [l.index(c) for c in n])
        for a, l, n in ((image, last[0], layout[0]), (kernel, last[1], layout[1]))
    )
    traced = disassemble(from_jax(lambda w, x: convolution(x, w, layout), w, x, weights=0))
    nodes: tuple[Node, ...] = traced.main.nodes
    node = replace(next(n for n in nodes if n.op == "conv"), lowering=3)
    program, site = features_last(node, [nodes[a] for a in node.args])
    alone = disassemble(program).main.nodes[site.index]
    assert alone.lowering == 3
    assert conv_layouts(alone) == ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
    plain = replace(alone, lowering=0)
    found = lower(plain, image, kernel)
    expected = jnp.transpose(convolution(x, w, layout), [layout[2].index(c) for c in last[2]])
    assert alone.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5)
