"""Translations of the ONNX operators to JAX, one dict entry per operator, one module per family.

The keys are names for standard operators, domain and name for others (see `Node.key`). Operators
that are missing here but have a function body in ONNX are expanded to that body
(`onnx.expand_functions`).
"""

from __future__ import annotations

from xrl_jax.frontends.onnx_ops import (
    activation,
    attention,
    contributed,
    control,
    convolution,
    elementwise,
    indexing,
    linalg,
    normalisation,
    pooling,
    qlinear,
    quantise,
    recurrent,
    reduce,
    resize,
    sampling,
    shape,
    signal,
)
from xrl_jax.frontends.onnx_ops.base import Translation

TRANSLATIONS: dict[str, Translation] = {
    **activation.TRANSLATIONS,
    **attention.TRANSLATIONS,
    **contributed.TRANSLATIONS,
    **control.TRANSLATIONS,
    **convolution.TRANSLATIONS,
    **elementwise.TRANSLATIONS,
    **indexing.TRANSLATIONS,
    **linalg.TRANSLATIONS,
    **normalisation.TRANSLATIONS,
    **pooling.TRANSLATIONS,
    **qlinear.TRANSLATIONS,
    **quantise.TRANSLATIONS,
    **recurrent.TRANSLATIONS,
    **reduce.TRANSLATIONS,
    **resize.TRANSLATIONS,
    **sampling.TRANSLATIONS,
    **shape.TRANSLATIONS,
    **signal.TRANSLATIONS,
}
