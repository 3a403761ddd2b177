"""Saving an optimised function to a file, which can be loaded where the original does not exist.

The file (see `archive`) holds the code as `jax.export` artefacts, that is StableHLO, because
equations that the op table cannot express have no other plain form: `prepare`, the weight-only
work; `call`, the rest; `derivative`, the pullback of the original function, custom rules included.
It also holds the constants, the types, tree structures and options, the report, and the program as
text.

Limits, each stated when it is met:
- The file runs on the platform it was saved on, and on one device; with library kernels, under the
  jaxlib it was saved by, or with the same library on the same kind of processor.
- On another kind of GPU or driver it runs, but was not chosen for it; loading warns.
- JAX reads artefacts for six months after they were written, and those of older versions only.
- A loaded function has reverse derivatives of the first order (`jax.grad`, `jax.vjp`), no forward
  ones; `jax.vmap` runs it on one element after the other.
- It runs on the shapes it was made for: of the original, the file has only what runs outside of the
  program's domain, if it has one, and that takes the same shapes.
- Host callbacks and debug prints cannot be saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from xrl_jax.backends.archive import write_archive
from xrl_jax.backends.arguments import Arguments
from xrl_jax.backends.domain import Bounds
from xrl_jax.backends.hoist import Hoisted
from xrl_jax.backends.plain_data import SaveError, pack_array, pack_aval, pack_tree
from xrl_jax.backends.runnable import Runnable
from xrl_jax.libraries import registry
from xrl_jax.libraries.base import CustomCall
from xrl_jax.program.program import Program

FORMAT = 5  # files of another format are refused
PROGRAM = "program.txt"
_LIFTED = 1024  # bytes above which constants are stored apart, once for all artefacts


class _Constants:
    """Arrays that are stored once each, however many artefacts use them."""

    def __init__(self) -> None:
        self.types: list[Any] = []
        self.parts: dict[str, bytes] = {}
        self._seen: dict[Any, int] = {}

    def add(self, value: Any) -> int:
        """Return the index of an array among the constants, adding it if it is new."""
        kind, data = pack_array(value)
        seen = (str(kind), data)
        if seen not in self._seen:
            self._seen[seen] = len(self.types)
            self.parts[constant_name(len(self.types))] = data
            self.types.append(kind)
        return self._seen[seen]


def constant_name(number: int) -> str:
    return f"constants/{number}"


def artefact_name(name: str) -> str:
    return f"{name}.stablehlo"


def save(
    path: str | os.PathLike[str],
    program: Program,
    runnable: Runnable,
    *,
    domain: Bounds | None,
    options: Mapping[str, Any],
    report: Mapping[str, Any] | None,
    program_text: str,
    **more: Any,
) -> None:
    """Write an optimised function to a file that `loading.load` can read even where the original
    does not exist.

    An existing file is replaced atomically.

    Args:
      program: has the types and tree structures of the function.
      more: entries of the header that the function is rebuilt from.

    Raises:
      SaveError: something has no plain form (a callback, a custom container); says what.
      OSError: the folder is missing, the disk is full.
    """
    hoisted, constants = runnable.hoisted, _Constants()
    weights, inputs = Arguments(program).split(program.in_avals)
    artefacts: dict[str, list[int]] = {}
    parts: dict[str, bytes] = {}
    of_jaxlib: list[str] = []
    targets: dict[CustomCall, None] = {}

    def keep(name: str, fn: Callable[..., Any], avals: Sequence[Any]) -> None:
        artefact, artefacts[name] = _exported(fn, avals, constants)
        parts[artefact_name(name)] = bytes(artefact.serialize())
        of_jaxlib.extend([name] * registry.bound_to_jaxlib(artefact))
        targets.update(dict.fromkeys(registry.custom_calls(artefact)))

    sources, made = _sources(hoisted, weights, constants)
    if made:
        keep("prepare", lambda *ws: [hoisted.prepare(ws)[i] for i in made], weights)
    n = len(hoisted.avals)
    keep("call", lambda *vs: hoisted.call(vs[:n], vs[n:]), [*hoisted.avals, *inputs])
    if domain is not None:
        assert runnable.outside is not None
        keep("original", runnable.outside, program.in_avals)
    out_avals = jax.eval_shape(runnable.whole, *program.in_avals)
    try:
        keep("derivative", *_pullback(runnable, program.in_avals, out_avals))
        no_derivative = ""
    except Exception as error:  # JAX may refuse the derivative in many ways; the call works without
        no_derivative = f"{type(error).__name__}: {error}"[:2000]
    header = {
        "written_by": ", ".join(f"{p} {version_of(p)}" for p in ("xrl_jax", "jax", "jaxlib")),
        "platform": export.default_export_platform(),
        "device": device_text(),
        "jaxlib": version_of("jaxlib") if of_jaxlib else None,
        "libraries": {t.library: registry.by_name(t.library).version() for t in targets},
        "custom_calls": list(targets),
        "arguments": pack_tree(program.in_tree, "the arguments", others=True),
        "result": pack_tree(program.out_tree, "the result"),
        "inputs": [pack_aval(a) for a in program.in_avals],
        "outputs": [pack_aval(a) for a in out_avals],
        "weights": list(program.weights),
        "prepared": [pack_aval(a) for a in hoisted.avals],
        "prepared_from": sources,
        "options": [[k, v] for k, v in options.items()],
        "domain": domain,
        "bytes_added": hoisted.bytes_added,
        "n_hoisted": hoisted.n_hoisted,
        "artefacts": artefacts,
        "no_derivative": no_derivative,
        "constants": constants.types,
        "report": report,
        **more,
    }
    parts |= {PROGRAM: program_text.encode(), **constants.parts}
    write_archive(path, FORMAT, header, parts)


def _sources(
    hoisted: Hoisted, weights: Sequence[Any], constants: _Constants
) -> tuple[list[tuple[str, int]], list[int]]:
    """Return where each prepared value comes from, and the indices of those computed from weights.

    A value that is itself a weight is passed on, not copied; one that depends on no weight is
    computed here.
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


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source folder
        return "(not installed)"


def device_text() -> str:
    """Return the kind of device that code runs on here, of a GPU also its versions."""
    device = jax.devices()[0]
    versions = "" if device.platform == "cpu" else f" ({device.client.platform_version})"
    return " ".join(f"{device.device_kind}{versions}".split())


def _exported(
    fn: Callable[..., Any], avals: Sequence[Any], constants: _Constants
) -> tuple[export.Exported, list[int]]:
    """Return an artefact of a flat function, and the constants it takes before its arguments."""
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
        artefact = registry.exported(run, *shapes, *avals)
    except (NotImplementedError, ValueError) as error:
        raise SaveError(
            f"the function cannot be saved: {error}\nCallbacks, debug prints and kernels without "
            "a stable form cannot be saved; remove them before optimising."
        ) from error
    return artefact, [constants.add(c) for c in lifted]


def inexact(avals: Sequence[Any]) -> list[int]:
    """Return the indices of the values that have derivatives."""
    return [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)]


def _pullback(
    runnable: Runnable, in_avals: Sequence[Any], out_avals: Sequence[Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """Return the pullback of the original, a function of (leaves, cotangents of inexact results),
    and the types of its arguments.
    """
    original = runnable.original or runnable.whole
    avals = list(in_avals)
    active, results = inexact(avals), inexact(out_avals)

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
