"""Networks that others wrote, as their packages give them; see `experiments.wild`.

Each is a function without arguments that returns (function, arguments, positions of weights), as
`experiments.optimize --fn` takes it. Weights are random where a package has none; those of files
are trained. The packages are the extra `wild`.
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

PLAIN = "_plain"  # ends the name of a network's twin

Example = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


class Wild(NamedTuple):
    """A network that somebody else wrote.

    Attributes:
      family: the package that it comes from.
      make: gives the function, its arguments and the positions of weights.
      file: of an ONNX file, its path and the arguments of `load_onnx`; None where it is none.
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
    """The function that makes a network, by name: what `--fn` asks a module for."""
    if name in NETWORKS:
        return NETWORKS[name].make
    if name.endswith(PLAIN) and name.removesuffix(PLAIN) in plain.TWINS:
        return plain.TWINS[name.removesuffix(PLAIN)]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
