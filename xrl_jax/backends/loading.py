"""Loading of saved functions where the original does not exist; see `saving` for the limits."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export
from jax.custom_batching import sequential_vmap

from xrl_jax.backends.archive import LoadError, read_archive
from xrl_jax.backends.fast import Fast
from xrl_jax.backends.hoist import Hoisted
from xrl_jax.backends.layouts import in_wanted_layouts
from xrl_jax.backends.plain_data import (
    as_saved,
    unpack_array,
    unpack_aval,
    unpack_signature,
    unpack_tree,
)
from xrl_jax.backends.runnable import Flat
from xrl_jax.backends.saving import (
    FORMAT,
    PROGRAM,
    artefact_name,
    constant_name,
    device_text,
    inexact,
    version_of,
)
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.libraries import registry
from xrl_jax.libraries.base import CustomCall
from xrl_jax.program.arguments import flatten_as


def load(
    path: str | os.PathLike[str], *, read_report: Callable[[dict[str, Any]], Any] = dict
) -> Fast:
    """Return the function that `save` wrote to `path`.

    Nothing in the file is run before the function is called, and all code in it is for XLA.

    Args:
      read_report: makes a report from its plain values.

    Raises:
      LoadError: the file is damaged, or needs another version, platform or setting; says which.
      OSError: it is missing or cannot be read.
    """
    header, parts = read_archive(path, FORMAT)
    try:
        _check_surroundings(path, header)
        return _assembled(header, parts, read_report)
    except LoadError:
        raise
    except Exception as error:  # the checksums hold: written by another program, or for another JAX
        raise LoadError(
            f"{path} cannot be read by jax {jax.__version__}; it was written by "
            f"{header.get('written_by', 'an unknown version')}: {type(error).__name__}: {error}"
        ) from error


def _check_surroundings(path: str | os.PathLike[str], header: dict[str, Any]) -> None:
    here = export.default_export_platform()
    if header["platform"] != here:
        raise LoadError(
            f"{path} was saved for the platform {header['platform']!r}, but the default platform "
            f"here is {here!r}: save it on this platform, or choose the other with JAX_PLATFORMS"
        )
    if header["jaxlib"] not in (None, version_of("jaxlib")):
        raise LoadError(
            f"{path} calls kernels of jaxlib {header['jaxlib']}, but {version_of('jaxlib')} is "
            "installed: install the version it calls, or optimise the function again"
        )
    for name, wanted in header["libraries"].items():
        library = {lib.name: lib for lib in registry.libraries()}.get(name)
        here = library.version() if library is not None else ""
        if here != wanted:
            hint = f" ({library.install})" if library is not None and library.install else ""
            raise LoadError(
                f"{path} calls kernels of {wanted}, but {here or f'no {name}'} is available here: "
                f"save it on this machine, or install the version it calls{hint}"
            )
    device = device_text()
    if header["device"] != device:
        warnings.warn(
            f"{path} was optimised on {header['device']}, and this is {device}: it is right here, "
            "but something else may be faster; optimise the function here to find out",
            stacklevel=3,
        )
    types = {kind for _, kind, *_ in (*header["inputs"], *header["outputs"])}
    wide = sorted(types & {"float64", "int64", "uint64", "complex128"})
    if wide and not jax.config.read("jax_enable_x64"):
        raise LoadError(
            f"{path} takes or returns {', '.join(wide)}: enable 64-bit types first, with "
            "jax.config.update('jax_enable_x64', True)"
        )


def _assembled(
    header: dict[str, Any], parts: dict[str, bytes], read_report: Callable[..., Any]
) -> Fast:
    registry.register_calls(
        [CustomCall(name, tuple(data)) for name, data in header["custom_calls"]]
    )
    constants = [
        unpack_array(kind, parts[constant_name(i)]) for i, kind in enumerate(header["constants"])
    ]

    def artefact(name: str) -> Callable[..., list[Any]]:
        exported = export.deserialize(bytearray(parts[artefact_name(name)]))
        held = [constants[i] for i in header["artefacts"][name]]
        # JAX has no batching rule for artefacts: run one element after the other.
        each = jax.custom_jvp(sequential_vmap(lambda *args: list(exported.call(*held, *args))))

        @each.defjvp
        def refuse(*_: Any) -> Any:
            raise TypeError(
                f"{header['name']}: a loaded function has only first derivatives in reverse mode "
                "(jax.grad, jax.vjp)"
            )

        return each

    call = artefact("call")
    # Jitted, because it may be called where JAX has no current trace (`Fast._prepared_weights`).
    make = jax.jit(artefact("prepare")) if "prepare" in header["artefacts"] else lambda *_: []

    def prepare(weights: Sequence[Any]) -> tuple[Any, ...]:
        values = {"constant": constants, "weight": weights, "made": make(*weights)}
        return tuple(values[kind][i] for kind, i in header["prepared_from"])

    hoisted = Hoisted(
        prepare,
        lambda prepared, inputs: call(*prepared, *inputs),
        tuple(unpack_aval(a) for a in header["prepared"]),
        int(header["bytes_added"]),
        int(header["n_hoisted"]),
    )
    avals, are_weights = [unpack_aval(a) for a in header["inputs"]], header["weights"]
    inputs = [a for a, is_weight in zip(avals, are_weights, strict=True) if not is_weight]
    hoisted = in_wanted_layouts(hoisted, inputs)
    derivative = artefact("derivative") if "derivative" in header["artefacts"] else None
    active = inexact(avals)
    results = inexact([unpack_aval(a) for a in header["outputs"]])

    def pullback(leaves: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        if derivative is None:
            raise TypeError(f"{header['name']} has no derivative: {header['no_derivative']}")
        found = iter(derivative(*leaves, *(cotangents[i] for i in results)))
        return tuple(next(found) if i in active else None for i in range(len(leaves)))

    report = None if header["report"] is None else read_report(header["report"])
    text = parts[PROGRAM].decode()
    original = artefact("original") if "original" in header["artefacts"] else None
    return _fast(
        LoadedRunnable(hoisted, pullback, original, header["weights"]), header, text, report
    )


def _fast(runnable: LoadedRunnable, header: dict[str, Any], text: str, report: Any) -> Fast:
    in_avals = [unpack_aval(a) for a in header["inputs"]]
    mask = tuple(bool(w) for w in header["weights"])
    in_tree, out_tree = unpack_tree(header["arguments"]), unpack_tree(header["result"])

    def structured(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.unflatten(out_tree, runnable.whole(*flatten_as(in_tree, args, kwargs)[0]))

    args, kwargs = jax.tree.unflatten(in_tree, in_avals)
    flags, _ = jax.tree.unflatten(in_tree, mask)
    places = [i for i, a in enumerate(flags) if any(jax.tree.leaves(a))]
    program = from_jax(structured, *args, weights=places, **kwargs)
    if program.weights != mask:
        raise ValueError("its weights are only parts of arguments")
    has_others = '"other"' in json.dumps(header["arguments"])
    fast = Fast(
        program,
        None,
        options={str(k): v for k, v in header["options"]},
        report=report,
        close_over=bool(header["close_over"]),
        domain=None if header["domain"] is None else tuple(header["domain"]),
        program_text=text,
        converted=as_saved if has_others else None,
        runnable=runnable,
    )
    named = {"__name__": header["name"], "__doc__": header["doc"]}
    if header["signature"] is not None:
        named["__signature__"] = unpack_signature(header["signature"])
    vars(fast).update(named)
    return fast


class LoadedRunnable:
    """The contents of a file as functions of flat arguments; see `runnable.Runnable`.

    Args:
      pullback: function of (leaves, cotangents of the results).
      outside: the function to run outside of the domain.
      weights: for each flat argument, whether it is a weight.
    """

    def __init__(
        self,
        hoisted: Hoisted,
        pullback: Callable[..., tuple[Any, ...]],
        outside: Flat | None,
        weights: Sequence[bool],
    ) -> None:
        self.hoisted, self.outside = hoisted, outside
        self._pullback, self._weights = pullback, weights

    def whole(self, *leaves: Any) -> list[Any]:
        weights = [x for x, w in zip(leaves, self._weights, strict=True) if w]
        inputs = [x for x, w in zip(leaves, self._weights, strict=True) if not w]
        return self.hoisted.call(self.hoisted.prepare(weights), inputs)

    unprepared = whole

    @property
    def original(self) -> Flat:
        return self.with_derivative(self.whole)

    def with_derivative(self, flat: Flat) -> Flat:
        fast = jax.custom_vjp(flat)
        fast.defvjp(lambda *leaves: (flat(*leaves), leaves), self._pullback)
        return fast
