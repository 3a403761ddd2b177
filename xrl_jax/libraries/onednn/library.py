"""oneDNN as a library of xrl_jax: several operators in one call, weights in its layouts.

Source: oneDNN (github.com/uxlfoundation/oneDNN).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from xrl_jax.graph.graph import Node
from xrl_jax.libraries.base import Calls, CustomCall, Library, Lowering
from xrl_jax.libraries.onednn import calls, kernels, native, partition, winograd
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.costs import COSTS
from xrl_jax.libraries.onednn.lowerings import LOWERINGS
from xrl_jax.libraries.xla.plain import conv_layouts

_CODE_VERSION = 3  # version of the generated code, to be raised where its timings change
# With at least so many tiles, the matrices are large enough for fast products. The largest tiles
# come first, because they take the fewest products.
_LEAST_TILES = 25
_TILES = tuple(sorted(winograd.TILES, reverse=True))
# The least number of products for each element of a tile, because with few features moving tiles
# costs more than they save; twice as many where the tiles do not fit into a cache.
_LEAST_PRODUCTS, _CACHED_BYTES = 10, 6 << 20
# Times relative to the plain lowering, through XLA's calls, over the regions of ResNeXt-50,
# SqueezeNet and BERT.
_THROUGH_XLA: Mapping[tuple[str, int], str] = {
    ("conv", 0): "onednn 0.69 winograd4 0.84 winograd3 0.95 winograd2 1.3",
    ("conv", 1): "onednn_matmul 0.72 onednn_matmul_transposed 0.75 onednn 0.86",
    ("conv", 2): "onednn 0.26",
    ("dot", 0): "onednn 1.08 onednn_transposed 1.32",
    ("dot", 1): "onednn 0.9 onednn_transposed 0.93",
}
# The same by the library, over squeezenet and mobilenetv2; grouped convolutions lie between those
# of the two (depthwise, 0.03) and ResNeXt-50's, products are as in BERT. In int8 kernels are twice
# as fast, and the array is rounded; in bfloat16 2.2 to 2.7 times, with instructions for it.
_BY_LIBRARY: Mapping[tuple[str, int], str] = {
    ("conv", 0): "winograd4 0.2 winograd3 0.22 winograd2 0.27 onednn 0.41 onednn_int8 0.22 "
    "onednn_bfloat16 0.2 onednn_uint8 0.22",
    ("conv", 1): "onednn_matmul 0.35 onednn_matmul_transposed 0.35 onednn 0.38 onednn_int8 0.22 "
    "onednn_bfloat16 0.2 onednn_uint8 0.22 onednn_int16 0.3",
    ("conv", 2): "onednn 0.1 onednn_int8 0.1 onednn_bfloat16 0.1 onednn_uint8 0.1",
    ("dot", 0): "onednn 0.9 onednn_transposed 0.9 onednn_int8 0.5 onednn_uint8 0.5 "
    "onednn_bfloat16 0.4 onednn_int16 0.6",
}


class _Calls(Calls):
    costs = COSTS

    def partitioned(self, closed: Any, known: Sequence[bool]) -> Any:
        return partition.partitioned(closed, known)

    def exporting(self) -> contextlib.AbstractContextManager[Any]:
        return kernels.exporting_targets()

    def custom_calls_in(self, module: bytes) -> list[CustomCall]:
        return [CustomCall("onednn", tuple(t)) for t in kernels.targets_in(module)]

    def register_calls(self, custom_calls: Sequence[CustomCall]) -> None:
        kernels.register_targets([kernels.Target(*t.data) for t in custom_calls])

    def only_time(self) -> None:
        native.only_time()


CALLS = _Calls()


class OneDnn(Library):
    """oneDNN: from its package, from the system, or as far as XLA contains it."""

    name = "onednn"
    install = "pip install 'xrl_jax[onednn]'"
    platforms = ("cpu",)

    def available(self) -> bool:
        return calls.available()

    def version(self) -> str:
        lib = library()
        return f"{lib.name} ours {_CODE_VERSION}" if lib else ""

    def lowerings(self) -> Mapping[str, tuple[Lowering, ...]]:
        return LOWERINGS

    def preferred(self, node: Node, args: Sequence[Node]) -> Sequence[str]:
        """Return Winograd's lowerings first where images are large enough for their tiles."""
        if node.op not in LOWERINGS:
            return ()
        if node.op != "conv":
            return (self.name,)
        image, _, result = conv_layouts(node)
        batch, c_out, *spatial = (node.shape[d] for d in result)
        c_in = args[0].shape[image[1]]
        found = []
        for m in _TILES:
            tiles = batch * math.prod(-(-n // m) for n in spatial)
            tile_bytes = 4 * tiles * (m + winograd.KERNEL - 1) ** 2 * (c_in + c_out)
            least = _LEAST_PRODUCTS * (1 if tile_bytes <= _CACHED_BYTES else 2)
            if tiles >= _LEAST_TILES and c_in * c_out >= least * (c_in + c_out):
                found.append(f"winograd{m}")
        return (*found, self.name)

    def is_fast(self, row: Lowering, node: Node, args: Sequence[Node]) -> bool:
        """Whether the library multiplies the type faster, and has a kernel."""
        lib = library()
        if lib is None or row not in LOWERINGS.get(node.op, ()) or row.rounds is None:
            return False
        is_type = row.rounds.dtype in lib.operand_types
        return is_type and kernels.has_kernels(functools.partial(row.fn, node), args)

    def priors(self, platform: str) -> Mapping[tuple[str, int], str]:
        if platform != "cpu":
            return {}
        return _THROUGH_XLA if library() is None else {**_THROUGH_XLA, **_merged()}

    def calls(self) -> Calls | None:
        return CALLS if library() is not None else None

    def custom_call_names(self) -> list[str]:
        return [*calls.xla_names(), *kernels.names()]

    def bound_to_jaxlib(self, module: bytes) -> bool:
        return calls.is_in(module)


def _merged() -> Mapping[tuple[str, int], str]:
    """Return the priors through XLA followed by those by the library: the last one counts."""
    keys = (*_THROUGH_XLA, *_BY_LIBRARY)
    return {k: f"{_THROUGH_XLA.get(k, '')} {_BY_LIBRARY.get(k, '')}".strip() for k in keys}


LIBRARY = OneDnn()
