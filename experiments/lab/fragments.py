"""Fragments of networks: each distinct operator in every lowering, as regions of the cost model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from experiments import targets
from experiments.lab.items import Item
from experiments.priors import lowered, regions_of
from xrl_jax.cost.programs import base_options
from xrl_jax.cost.regions import Region, loops, region_job, region_key
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.lower.table import name_of
from xrl_jax.measure.worker import Worker
from xrl_jax.runtime.target_platform import making_for
from xrl_jax.transform.start import start_of

FRAGMENT = "fragment"  # first part of the keys of operators


def fragments(
    names: Sequence[str], worker: Worker, *, seconds: float, shape: Mapping[str, Any]
) -> Iterator[Item]:
    """Yield the operators of the networks in every lowering, and loops of several sizes.

    Their keys end in the keys that a search's store has for them, so that a record can serve as
    one.
    """
    for key, (name, region) in regions(names, jax.default_backend(), shape=shape).items():
        label = f"{FRAGMENT}/{name}/{region.node.op}/{name_of(region.node)}/{key}"
        yield Item(label, 4 * seconds + 2.0, functools.partial(_timed, worker, region, seconds))


def regions(
    names: Sequence[str], platform: str, *, shape: Mapping[str, Any]
) -> dict[str, tuple[str, Region]]:
    """Return the operators of the networks in every lowering, and loops, by the keys that a store
    has for them, each with its network or "loop".
    """
    options = base_options(platform)
    found = {region_key(r, options): ("loop", r) for r in loops(platform)}
    with making_for(platform):
        for name in names:
            target = targets.from_model(name, **shape)
            original = from_jax(target.fn, *target.args, weights=target.weights)
            for plain in regions_of([start_of(original, platform)]):
                for region in lowered(plain):
                    found.setdefault(region_key(region, options), (name, region))
    return found


def _timed(worker: Worker, region: Region, seconds: float) -> dict[str, Any]:
    job = region_job(region, base_options(region.platform))
    (timing,) = worker.submit([job], seconds_per_job=seconds, timeout=60.0)
    if not timing.ok:
        raise RuntimeError(timing.error)
    return {"timing": timing.as_dict(), "target": dataclasses.asdict(worker.target)}
