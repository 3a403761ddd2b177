"""Networks written by others, as their packages provide them; see `experiments.wild`.

Each is a function without arguments that returns (function, arguments, positions of weights), as
`experiments.optimize --fn` expects. Weights are random where a package has none; those of ONNX
files are trained. The packages are the extra `wild`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.wild_networks import (
    examples,
    keras_applications,
    onnx_files,
    plain,
    transformers_flax,
)

PLAIN = "_plain"  # suffix of the name of a network's twin (see `plain`)

Example = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


class Wild(NamedTuple):
    """A network written by others.

    Attributes:
      family: the package that it comes from.
      make: returns the function, its arguments and the positions of weights.
      file: for an ONNX file, its path and the arguments of `load_onnx`; None for other networks.
    """

    family: str
    make: Callable[[], Example]
    file: onnx_files.File | None = None


def _all() -> dict[str, Wild]:
    found: dict[str, Wild] = {}
    for family, makers in (
        ("transformers", transformers_flax.NETWORKS),
        ("keras", keras_applications.NETWORKS),
        ("flax", examples.OF_FLAX),
        ("equinox", examples.OF_EQUINOX),
    ):
        found |= {make.__name__: Wild(family, make) for make in makers}
    for name, file in onnx_files.FILES.items():
        found[name] = Wild(file.package, file.example, file)
    return found


NETWORKS: Mapping[str, Wild] = _all()


def __getattr__(name: str) -> Any:
    """Return the function that makes a network, by name, as an attribute for `--fn`."""
    if name in NETWORKS:
        return NETWORKS[name].make
    if name.endswith(PLAIN) and name.removesuffix(PLAIN) in plain.TWINS:
        return plain.TWINS[name.removesuffix(PLAIN)]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
