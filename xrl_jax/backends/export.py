"""Saving an optimised function to a file, and loading it where the original does not exist.

The file (see `archive`) holds what runs as `jax.export` artefacts, that is StableHLO, because what
the op table cannot say has no other plain form: `prepare`, the work on weights; `call`, the rest;
`derivative`, the pullback of the original function, custom rules included. Beside them lie the
constants, the types, tree structures and options, the report, and the program as text.

Limits, all stated when they are met:
- The file runs on the platform it was saved on, and on one device; with kernels of oneDNN, under
  the jaxlib it was saved by, or with the same library on such a processor.
- JAX reads artefacts for six months after they were written, and those of older versions only.
- A loaded function has reverse derivatives of the first order (`jax.grad`, `jax.vjp`), no forward
  ones; `jax.vmap` runs it on one element after the other.
- It runs on the shapes it was made for: of the original the file has what runs outside of the
  result's domain, if it has one, and that takes the same shapes.
- Host callbacks and debug prints cannot be saved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.custom_batching import sequential_vmap
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from xrl_jax.backends.archive import LoadError, read_archive, write_archive
from xrl_jax.backends.fast import Fast, Flat, PreparedWeights
from xrl_jax.backends.hoist import Hoisted
from xrl_jax.backends.plain_data import (
    SaveError,
    as_saved,
    pack_array,
    pack_aval,
    pack_signature,
    pack_tree,
    unpack_array,
    unpack_aval,
    unpack_signature,
    unpack_tree,
)
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.program import flatten_as
from xrl_jax.libraries.onednn import calls as onednn
from xrl_jax.libraries.onednn import kernels
from xrl_jax.libraries.onednn.c_api import library

FORMAT = 3  # a file of another one is refused

_PROGRAM = "program.txt"
_LIFTED = 1024  # bytes from which a constant lies beside the artefacts, once for all of them


class LoadedFast(Fast):
    """A saved function; called as the `Fast` that was saved.

    Attributes:
      program: two opaque equations, the saved preparation and call.
      program_text: the optimised program as `str` showed it when it was saved.
      baseline: None; the original is not in the file.
    """

    def __init__(
        self,
        hoisted: Hoisted,
        pullback: Callable[..., tuple[Any, ...]],
        original: Flat | None,
        *,
        header: dict[str, Any],
        program_text: str,
        report: Any,
    ) -> None:
        in_avals = [unpack_aval(a) for a in header["inputs"]]
        mask = [bool(w) for w in header["weights"]]
        in_tree, out_tree = unpack_tree(header["arguments"]), unpack_tree(header["result"])

        def flat(*leaves: Any) -> list[Any]:
            weights = [x for x, w in zip(leaves, mask, strict=True) if w]
            inputs = [x for x, w in zip(leaves, mask, strict=True) if not w]
            return hoisted.call(hoisted.prepare(weights), inputs)

        def structured(*args: Any, **kwargs: Any) -> Any:
            return jax.tree.unflatten(out_tree, flat(*flatten_as(in_tree, args, kwargs)[0]))

        args, kwargs = jax.tree.unflatten(in_tree, in_avals)
        flags, _ = jax.tree.unflatten(in_tree, mask)
        places = [i for i, a in enumerate(flags) if any(jax.tree.leaves(a))]
        program = from_jax(structured, *args, weights=places, **kwargs)
        if program.weights != tuple(mask):
            raise ValueError("its weights are not whole arguments")
        super().__init__(
            program,
            None,
            options={str(k): v for k, v in header["options"]},
            report=report,
            close_over=bool(header["close_over"]),
            domain=None if header["domain"] is None else tuple(header["domain"]),
        )
        self._flat_outside = original
        self.program_text = program_text
        self.__name__, self.__doc__ = header["name"], header["doc"]
        if header["signature"] is not None:
            self.__signature__ = unpack_signature(header["signature"])
        self._hoisted = hoisted
        self._has_others = '"other"' in json.dumps(header["arguments"])
        self._forward = flat
        self._pullback = pullback

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._as_saved((args, kwargs))
        return super().__call__(*args, **kwargs)

    def prepare(self, *weights: Any) -> PreparedWeights:
        return super().prepare(*self._as_saved(weights))

    def call(self, prepared: PreparedWeights, *other_args: Any, **kwargs: Any) -> Any:
        other_args, kwargs = self._as_saved((other_args, kwargs))
        return super().call(prepared, *other_args, **kwargs)

    def _as_saved(self, args: Any) -> Any:
        return as_saved(args) if self._has_others else args

    def _flat(self, *leaves: Any) -> list[Any]:
        return self._forward(*leaves)

    @property
    def _flat_original(self) -> Flat:
        return self._with_derivative(self._flat)

    def _with_derivative(self, flat: Flat) -> Flat:
        fast = jax.custom_vjp(flat)
        fast.defvjp(lambda *leaves: (flat(*leaves), leaves), self._pullback)
        return fast


# Saving.


class _Constants:
    """Arrays kept once each, however many artefacts take them."""

    def __init__(self) -> None:
        self.types: list[Any] = []
        self.parts: dict[str, bytes] = {}
        self._seen: dict[Any, int] = {}

    def add(self, value: Any) -> int:
        """The number of an array among the constants."""
        kind, data = pack_array(value)
        seen = (str(kind), data)
        if seen not in self._seen:
            self._seen[seen] = len(self.types)
            self.parts[_constant(len(self.types))] = data
            self.types.append(kind)
        return self._seen[seen]


def _constant(number: int) -> str:
    return f"constants/{number}"


def _artefact(name: str) -> str:
    return f"{name}.stablehlo"


def save(fast: Fast, path: str | os.PathLike[str]) -> None:
    """Write an optimised function to a file that `load` reads, also where `fn` does not exist.

    A file that is there is replaced, in one step. What is in `fast` is not changed.

    Raises:
      SaveError: something has no plain form (a callback, a custom container), by name.
      OSError: the folder is missing, the disk is full.
    """
    program, hoisted, constants = fast.program, fast._hoisted, _Constants()
    weights, inputs = fast._arguments.divided(program.in_avals)
    artefacts: dict[str, list[int]] = {}
    parts: dict[str, bytes] = {}
    of_jaxlib: list[str] = []
    targets: dict[kernels.Target, None] = {}

    def keep(name: str, fn: Callable[..., Any], avals: Sequence[Any]) -> None:
        artefact, artefacts[name] = _exported(fn, avals, constants)
        parts[_artefact(name)] = bytes(artefact.serialize())
        of_jaxlib.extend([name] * onednn.is_in(artefact))
        targets.update(dict.fromkeys(onednn.targets(artefact)))

    sources, made = _sources(hoisted, weights, constants)
    if made:
        keep("prepare", lambda *ws: [hoisted.prepare(ws)[i] for i in made], weights)
    n = len(hoisted.avals)
    keep("call", lambda *vs: hoisted.call(vs[:n], vs[n:]), [*hoisted.avals, *inputs])
    if fast.domain is not None:
        assert fast._flat_outside is not None
        keep("original", fast._flat_outside, program.in_avals)
    out_avals = jax.eval_shape(fast._flat, *program.in_avals)
    try:
        keep("derivative", *_pullback(fast, out_avals))
        no_derivative = ""
    except Exception as error:  # whatever JAX says against a derivative; the call works without
        no_derivative = f"{type(error).__name__}: {error}"[:2000]
    report = fast.report
    header = {
        "written_by": ", ".join(f"{p} {_version(p)}" for p in ("xrl_jax", "jax", "jaxlib")),
        "platform": export.default_export_platform(),
        "jaxlib": _version("jaxlib") if of_jaxlib else None,
        "library": _library_name() if targets else None,
        "targets": list(targets),
        "name": str(getattr(fast, "__name__", "program")),
        "doc": getattr(fast, "__doc__", None),
        "signature": pack_signature(fast),
        "arguments": pack_tree(program.in_tree, "the arguments", others=True),
        "result": pack_tree(program.out_tree, "the result"),
        "inputs": [pack_aval(a) for a in program.in_avals],
        "outputs": [pack_aval(a) for a in out_avals],
        "weights": list(program.weights),
        "prepared": [pack_aval(a) for a in hoisted.avals],
        "prepared_from": sources,
        "options": [[k, v] for k, v in fast.options.items()],
        "close_over": fast._close_over,
        "domain": fast.domain,
        "bytes_added": hoisted.bytes_added,
        "n_hoisted": hoisted.n_hoisted,
        "artefacts": artefacts,
        "no_derivative": no_derivative,
        "constants": constants.types,
        "report": report.as_dict() if hasattr(report, "as_dict") else None,
    }
    text = getattr(fast, "program_text", None) or str(program)
    parts |= {_PROGRAM: text.encode(), **constants.parts}
    write_archive(path, FORMAT, header, parts)


def _sources(
    hoisted: Hoisted, weights: Sequence[Any], constants: _Constants
) -> tuple[list[tuple[str, int]], list[int]]:
    """Where each prepared value comes from, and which of them are made from weights.

    What is a weight itself is passed on, not copied; what weights have no part in is computed here.
    """
    if not weights:
        return [("constant", constants.add(v)) for v in hoisted.prepare(())], []
    closed = jax.make_jaxpr(lambda *ws: list(hoisted.prepare(ws)))(*weights)
    passed = {v: i for i, v in enumerate(closed.jaxpr.invars)}
    held = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    sources: list[tuple[str, int]] = []
    made: list[int] = []
    for place, v in enumerate(closed.jaxpr.outvars):
        if not isinstance(v, Literal) and v in passed:
            sources.append(("weight", passed[v]))
        elif not isinstance(v, Literal) and v in held:
            sources.append(("constant", constants.add(held[v])))
        else:
            sources.append(("made", len(made)))
            made.append(place)
    return sources, made


def _library_name() -> str:
    """Of the library whose layouts prepared weights may have."""
    lib = library()
    return lib.name if lib else "no oneDNN"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its folder
        return "(not installed)"


def _exported(
    fn: Callable[..., Any], avals: Sequence[Any], constants: _Constants
) -> tuple[export.Exported, list[int]]:
    """An artefact of a flat function, and the constants it takes before its arguments."""
    closed = jax.make_jaxpr(lambda *args: list(fn(*args)))(*avals)
    large = [i for i, c in enumerate(closed.consts) if getattr(c, "nbytes", 0) > _LIFTED]
    lifted = [closed.consts[i] for i in large]

    def run(*values: Any) -> list[Any]:
        consts = list(closed.consts)
        for i, v in zip(large, values, strict=False):
            consts[i] = v
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*values[len(large) :])

    shapes = [jax.ShapeDtypeStruct(c.shape, c.dtype) for c in lifted]
    try:
        artefact = onednn.exported(run, *shapes, *avals)
    except (NotImplementedError, ValueError) as error:
        raise SaveError(
            f"the function cannot be saved: {error}\nCallbacks, debug prints and kernels without "
            "a stable form have no place in a file; take them out before optimising."
        ) from error
    return artefact, [constants.add(c) for c in lifted]


def _inexact(avals: Sequence[Any]) -> list[int]:
    """Which values have derivatives."""
    return [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)]


def _pullback(fast: Fast, out_avals: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The pullback of the original, of (leaves, cotangents of inexact results), and its types."""
    original = fast._flat_original or fast._flat
    avals = list(fast.program.in_avals)
    active, results = _inexact(avals), _inexact(out_avals)

    def pullback(*values: Any) -> list[Any]:
        leaves, cotangents = list(values[: len(avals)]), values[len(avals) :]

        def of_active(*varied: Any) -> list[Any]:
            for i, x in zip(active, varied, strict=True):
                leaves[i] = x
            outputs = original(*leaves)
            return [outputs[i] for i in results]

        return list(jax.vjp(of_active, *(leaves[i] for i in active))[1](list(cotangents)))

    types = [jax.ShapeDtypeStruct(out_avals[i].shape, out_avals[i].dtype) for i in results]
    return pullback, [*avals, *types]


# Loading.


def load(
    path: str | os.PathLike[str], *, read_report: Callable[[dict[str, Any]], Any] = dict
) -> LoadedFast:
    """The function that `save` wrote.

    Nothing in the file is run before the function is called, and it is code for XLA alone.

    Args:
      read_report: makes a report of the plain values of one.

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
    except Exception as error:  # the checksums hold: made by other means, or for another JAX
        raise LoadError(
            f"{path} cannot be read by jax {jax.__version__}; it was written by "
            f"{header.get('written_by', 'an unknown version')}: {type(error).__name__}: {error}"
        ) from error


def _check_surroundings(path: str | os.PathLike[str], header: dict[str, Any]) -> None:
    here = export.default_export_platform()
    if header["platform"] != here:
        raise LoadError(
            f"{path} was saved for the platform {header['platform']!r}, the default device here is "
            f"of {here!r}: save it there, or choose the platform with JAX_PLATFORMS"
        )
    if header["jaxlib"] not in (None, _version("jaxlib")):
        raise LoadError(
            f"{path} calls kernels of jaxlib {header['jaxlib']}, here is {_version('jaxlib')}: "
            "install that version, or optimise the function again"
        )
    if header["library"] not in (None, _library_name()):
        raise LoadError(
            f"{path} calls kernels of {header['library']}, here is {_library_name()}: "
            "save it here, or install that version (pip install 'xrl_jax[onednn]')"
        )
    types = {kind for _, kind, *_ in (*header["inputs"], *header["outputs"])}
    wide = sorted(types & {"float64", "int64", "uint64", "complex128"})
    if wide and not jax.config.read("jax_enable_x64"):
        raise LoadError(
            f"{path} takes or returns {', '.join(wide)}: switch it on first, with "
            "jax.config.update('jax_enable_x64', True)"
        )


def _assembled(
    header: dict[str, Any], parts: dict[str, bytes], read_report: Callable[..., Any]
) -> LoadedFast:
    kernels.make_known([kernels.Target(*t) for t in header["targets"]])
    constants = [
        unpack_array(kind, parts[_constant(i)]) for i, kind in enumerate(header["constants"])
    ]

    def artefact(name: str) -> Callable[..., list[Any]]:
        exported = export.deserialize(bytearray(parts[_artefact(name)]))
        held = [constants[i] for i in header["artefacts"][name]]
        # JAX has no batching rule for artefacts: one element after the other.
        each = jax.custom_jvp(sequential_vmap(lambda *args: list(exported.call(*held, *args))))

        @each.defjvp
        def refuse(*_: Any) -> Any:
            raise TypeError(
                f"{header['name']}: a loaded function has first derivatives in reverse mode "
                "(jax.grad, jax.vjp) and no others"
            )

        return each

    call = artefact("call")
    # Jitted, for it may be called where JAX has no current trace (`Fast._keep`).
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
    derivative = artefact("derivative") if "derivative" in header["artefacts"] else None
    active = _inexact([unpack_aval(a) for a in header["inputs"]])
    results = _inexact([unpack_aval(a) for a in header["outputs"]])

    def pullback(leaves: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        if derivative is None:
            raise TypeError(f"{header['name']} has no derivative: {header['no_derivative']}")
        found = iter(derivative(*leaves, *(cotangents[i] for i in results)))
        return tuple(next(found) if i in active else None for i in range(len(leaves)))

    report = None if header["report"] is None else read_report(header["report"])
    text = parts[_PROGRAM].decode()
    original = artefact("original") if "original" in header["artefacts"] else None
    return LoadedFast(hoisted, pullback, original, header=header, program_text=text, report=report)
