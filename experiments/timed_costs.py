"""Cost tables with timings of operators, for training and evaluating policies."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.predicted import costs_of
from experiments.targets import ConfigError
from xrl_jax.cost.calibration import pessimistic_costs
from xrl_jax.cost.model import Oracle
from xrl_jax.cost.roofline import CostTable, cost_table
from xrl_jax.language.table import CompiledRules
from xrl_jax.measure.store import STORE_FILE, TimingStore
from xrl_jax.measure.worker import Worker
from xrl_jax.program.program import Program
from xrl_jax.runtime.files import atomic_write
from xrl_jax.search.backtracking import Taso
from xrl_jax.search.base import Budget, Problem

COSTS_FILE = "costs.npz"
# The fields that are saved: measurements, and how optimistic the multiples are. The others describe
# the lowerings on the machine at hand.
_FIELDS = "keys timed flop_rate bandwidth overhead pass_overhead scale multiple optimistic".split()


def timed_costs(
    programs: Mapping[str, Program],
    rules: CompiledRules,
    oracle: Oracle,
    *,
    seconds: float,
    seed: int,
) -> CostTable:
    """Return one table with the timings that taso makes in `seconds` of search on each program."""
    oracle.measure_loops()
    keys = jax.random.split(jax.random.key(seed), len(programs))
    for key, (name, program) in zip(keys, programs.items(), strict=True):
        print(f"timing the operators of {name}", file=sys.stderr)
        Taso()(Problem(program, rules, oracle), Budget(seconds=seconds), key)
    return oracle.costs


@contextlib.contextmanager
def oracle_of(out: Path, gpu: str = "", *, from_record: bool = False) -> Iterator[Oracle]:
    """Return an oracle whose store is in the folder `out`.

    Args:
      gpu: the kind of GPU that costs are of, see `predicted.costs_of`; "" for this machine.

    Raises:
      ValueError: there is no such GPU, or nothing was recorded on one.
    """
    out.mkdir(parents=True, exist_ok=True)
    if not gpu:
        with TimingStore(out / STORE_FILE) as store, Worker() as worker:
            yield Oracle(store, worker)
        return
    with costs_of(gpu, out, from_record=from_record) as costs:
        print(costs.about, file=sys.stderr)
        with TimingStore(out / STORE_FILE, target=costs.measurer.target) as store:
            yield Oracle(store, costs.measurer, options=costs.options)


def kept_costs(
    programs: Mapping[str, Program],
    rules: CompiledRules,
    out: Path,
    oracle: Callable[[], AbstractContextManager[Oracle]],
    *,
    seconds: float,
    seed: int,
) -> CostTable:
    """Return `timed_costs`, made once and kept in the folder `out`. Untimed lowerings get
    pessimistic estimates, or a policy would learn to seek them.

    Args:
      oracle: makes timings, see `oracle_of`; used only if nothing is kept.

    Raises:
      ConfigError: an existing file cannot be read.
    """
    kept = out / COSTS_FILE
    if not kept.is_file():
        with oracle() as timer:
            save_costs(timed_costs(programs, rules, timer, seconds=seconds, seed=seed), kept)
    return pessimistic_costs(load_costs(kept))


def save_costs(table: CostTable, path: Path) -> None:
    """Write a table, replacing an existing file; raise OSError if that fails."""
    with atomic_write(path) as file:
        arrays: dict[str, Any] = {name: np.asarray(getattr(table, name)) for name in _FIELDS}
        np.savez(file, **arrays)


def load_costs(path: Path) -> CostTable:
    """Return the table in a file.

    Raises:
      ConfigError: the file cannot be read, holds no table, or one of a version with other operators
        or corrections; the message names the file.
    """
    empty = cost_table({})
    try:
        with np.load(path) as found:
            table = dataclasses.replace(
                empty, **{name: jnp.asarray(found[name]) for name in _FIELDS}
            )
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is damaged or not a cost table: remove it ({error})") from error
    for name in _FIELDS:
        has, fits = getattr(table, name).shape, getattr(empty, name).shape
        if name not in ("keys", "timed") and has != fits:  # these grow with the timings
            raise ConfigError(
                f"{path} was written by another version: remove it (its {name!r} has shape {has}, "
                f"not {fits})"
            )
    return table
