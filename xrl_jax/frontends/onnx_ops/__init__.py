"""The ONNX operators as JAX translations, one dict entry per operator, split by family.

Standard operators go by their name, others by domain and name (see `Node.key`). Those that are
missing here and have a function body in ONNX become what the body says (`onnx.expand_functions`).
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
    **quantise.TRANSLATIONS,
    **recurrent.TRANSLATIONS,
    **reduce.TRANSLATIONS,
    **resize.TRANSLATIONS,
    **sampling.TRANSLATIONS,
    **shape.TRANSLATIONS,
    **signal.TRANSLATIONS,
}
