"""Costs recorded on a GPU, on a machine without one: searches, trainings and benchmarks run under
its true costs.

`experiments.gpu_lab` writes the record. Operators that it measured cost what was measured; all
else costs what is predicted, times a factor for each kind of kernel that is fitted on what was
measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

from experiments.lab.fragments import FRAGMENT, regions
from experiments.lab.record import RECORDS, path_of, read_lines
from xrl_jax.cost.programs import base_options
from xrl_jax.cost.regions import region_job
from xrl_jax.measure.base import Measurer
from xrl_jax.measure.gpu.devices import gpu_of
from xrl_jax.measure.gpu.fit import Fit, Pair, fitted
from xrl_jax.measure.gpu.predictor import Predictor
from xrl_jax.measure.recorded import Recorded
from xrl_jax.measure.store import STORE_FILE, TimingStore
from xrl_jax.measure.timing import Timing
from xrl_jax.runtime.target_platform import making_for

_AT_ONCE = 20  # predictions between two writes of the store


class NoRecordError(ValueError):
    """Nothing was recorded on a GPU; the message says what to do."""


class Operators(NamedTuple):
    """The operators in a record.

    Attributes:
      timings: by the keys of regions.
      networks: that they are from.
    """

    timings: Mapping[str, Timing]
    networks: Sequence[str]


def operators_of(kind: str, folder: Path = RECORDS) -> Operators:
    """Return the operators recorded on a kind of GPU, each as it was measured last.

    Raises:
      NoRecordError: there is no record of this kind, or no operator in it.
      RecordError: the record is damaged.
    """
    name = gpu_of(kind).name
    path = path_of(name, folder)
    lines = sorted(read_lines(path), key=lambda v: v["date"]) if path.is_file() else []
    timings: dict[str, Timing] = {}
    networks: dict[str, None] = {}
    for line in lines:
        label, values = str(line["key"]), line.get("values")
        if label.startswith(f"{FRAGMENT}/") and values is not None:
            _, network, *_, key = label.split("/")
            timings[key] = Timing.from_dict(values["timing"])
            networks[network] = None
    if not timings:
        raise NoRecordError(
            f"no operator was recorded on an {name} yet ({path.name}): run `python -m "
            "experiments.gpu_lab` on one, or add --predicted"
        )
    return Operators(timings, [n for n in networks if n != "loop"])


def fit_of(operators: Operators, kind: str, folder: Path, shape: Mapping[str, int]) -> Fit:
    """Return factors for predictions, fitted on the operators of a record.

    Args:
      folder: keeps the predictions.
      shape: options of the networks' constructors.
    """
    options = base_options("gpu")
    known = regions(operators.networks, "gpu", shape=shape)
    wanted = {k: known[k][1] for k in operators.timings if k in known}
    with (
        making_for("gpu"),
        Predictor(kind) as predictor,
        TimingStore(folder / STORE_FILE, target=predictor.target) as store,
    ):
        predicted = store.get(wanted)
        todo = [k for k in wanted if k not in predicted]
        steps = range(0, len(todo), _AT_ONCE)
        for begin in track(steps, "predicting the record's operators", transient=True):
            keys = todo[begin : begin + _AT_ONCE]
            jobs = [region_job(wanted[k], options) for k in keys]
            found = dict(zip(keys, predictor.submit(jobs), strict=True))
            store.put(found)
            predicted |= found
    pairs = [
        Pair(p.kernels, p.seconds, operators.timings[k].seconds)
        for k, p in predicted.items()
        if p.ok and operators.timings[k].ok
    ]
    return fitted(pairs)


@contextlib.contextmanager
def recorded(
    kind: str, folder: Path, *, records: Path = RECORDS, shape: Mapping[str, int] | None = None
) -> Iterator[tuple[Measurer, Fit]]:
    """Return a measurer that answers from the record of a kind of GPU, and the fit of what it
    predicts beyond that.

    Raises:
      NoRecordError, RecordError: see `operators_of`.
    """
    operators = operators_of(kind, records)
    fit = fit_of(operators, kind, folder, shape or {})
    with Predictor(kind, fit.factors) as predictor:
        # XLA's hash of the code and the machine's load are of the other machine.
        timings = {
            k: dataclasses.replace(t, hlo_hash="", reference_seconds=None)
            for k, t in operators.timings.items()
        }
        yield Recorded(timings, predictor), fit
