"""Whole networks under jax.jit with various options, and the programs that searches found."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import targets
from experiments.lab.items import Item, timed_in_turn
from experiments.targets import Target
from xrl_jax.accept.accuracy import relative_error
from xrl_jax.backends.fast import Fast
from xrl_jax.cost.programs import Options, option_sets
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.measure.target import target_here
from xrl_jax.measure.worker_process import option_value
from xrl_jax.program.program import Program
from xrl_jax.program.text import parse_program
from xrl_jax.transform.start import start_of

Call = Callable[[], Any]


def networks(
    names: Sequence[str], programs: Path, *, seconds: float, shape: Mapping[str, Any]
) -> Iterator[Item]:
    """Yield two items for each network: its variants in turn, and its kernels.

    Args:
      programs: folder of programs that searches found, NAME.txt.
      shape: options of the networks' constructors.
    """
    for name in names:
        about = functools.partial(targets.from_model, name, **shape)
        found = programs / f"{name}.txt"
        yield Item(
            f"network/{name}",
            20 * seconds,
            functools.partial(variants_in_turn, about, found, seconds),
        )
        yield Item(f"kernels/{name}", 10 * seconds, functools.partial(kernels, about))


def variants_in_turn(about: Callable[[], Target], found: Path, seconds: float) -> dict[str, Any]:
    """Time all variants of a network in turn; return timings and errors against float64."""
    target = about()
    exact = in_float64(target)
    calls: dict[str, Call] = {}
    values: dict[str, Any] = {"errors": {}, "failed": {}}
    for name, make in variants(target, found):
        try:
            call = make()
            results = [np.asarray(leaf) for leaf in jax.tree.leaves(call())]
        except Exception as error:  # an option that this version refuses, or too little memory
            values["failed"][name] = f"{type(error).__name__}: {error}"[:300]
            continue
        values["errors"][name] = max(map(relative_error, results, exact))
        calls[name] = call
    if calls:
        calls["A/A control"] = calls[next(iter(calls))]
        values["timings"] = timed_in_turn(calls, seconds * len(calls))
    return values


def variants(target: Target, found: Path) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Yield the name of each variant, and a function that compiles it."""
    weights, inputs = target.args[0], target.args[1:]

    def jitted(options: Options, closed: bool) -> Call:
        chosen: dict[str, str | bool] = {k: option_value(v) for k, v in options}
        if closed:
            fn = jax.jit(lambda *xs: target.fn(weights, *xs))
            return functools.partial(fn.lower(*inputs).compile(compiler_options=chosen), *inputs)
        compiled = jax.jit(target.fn).lower(*target.args).compile(compiler_options=chosen)
        return functools.partial(compiled, *target.args)

    sets = option_sets(target_here())
    for closed in (False, True):
        for n, options in enumerate(sets):
            kind = "closed over" if closed else "arguments"
            yield f"jit, {kind}, options {n}", functools.partial(jitted, options, closed)
    if found.is_file():
        for n, options in enumerate(sets):
            yield f"found, options {n}", functools.partial(_found, target, found, options)


def _found(target: Target, path: Path, options: Options) -> Call:
    original = from_jax(target.fn, *target.args, weights=target.weights)
    program: Program = parse_program(
        path.read_text(encoding="utf-8"), like=start_of(original, target_here().platform)
    )
    fast = Fast(program, original.fn, options=options)
    return functools.partial(fast, *target.args)


def in_float64(target: Target) -> list[np.ndarray]:
    """Return the network's results in float64, computed on the host."""

    def wide(x: Any) -> Any:
        x = np.asarray(x)
        return x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x

    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        results = jax.jit(target.fn)(*jax.tree.map(wide, target.args))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(results)]


def kernels(about: Callable[[], Target]) -> dict[str, Any]:
    """Return the mean microseconds of each kernel of a network, as the profiler sees them.

    Empty where there is no GPU.
    """
    target = about()
    run = jax.jit(target.fn).lower(*target.args).compile()
    call = functools.partial(run, *target.args)
    for _ in range(5):
        jax.block_until_ready(call())
    with tempfile.TemporaryDirectory(prefix="xrl_jax-") as folder:
        with jax.profiler.trace(folder):
            for _ in range(5):
                jax.block_until_ready(call())
        found: dict[str, list[float]] = {}
        with contextlib.suppress(AttributeError):  # versions of JAX without a reader
            for path in Path(folder).rglob("*.xplane.pb"):
                _add_kernels(found, jax.profiler.ProfileData.from_file(str(path)))
    return {"us": {name: [len(t), round(float(np.mean(t)), 3)] for name, t in found.items()}}


def _add_kernels(found: dict[str, list[float]], data: Any) -> None:
    for plane in data.planes:
        if "GPU" in plane.name:
            for line in plane.lines:
                for event in line.events if "Stream" in line.name else ():
                    found.setdefault(event.name, []).append(event.duration_ns / 1e3)
