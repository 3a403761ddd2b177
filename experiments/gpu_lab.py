"""Measures on a GPU what only a GPU can tell, within a time limit, and keeps it in a record.

  python -m experiments.gpu_lab --seconds=540

The items, most wanted first: what the device reaches at most (copies, products by type, launches, a
function against itself); the networks under jax.jit with all sets of compile options, and the
programs that searches found (--programs), in turn, with errors against float64; the durations of
the networks' kernels; then single operators in every lowering. --queue names a file of patterns of
keys, one in a line, whose items come first. What the record has already is left out, so that the
same command goes on where the last run ended; it is written every 20 seconds and at Ctrl-C.

The record is experiments/records/DEVICE.jsonl.gz, one JSON object in a line. --dry_run measures a
small version of everything on any machine, to try the command itself, into a record in out/.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from absl import app, flags, logging

from experiments import models
from experiments.lab.fragments import fragments
from experiments.lab.items import Item, ceilings, ordered
from experiments.lab.networks import networks
from experiments.lab.record import RECORDS, Record, RecordError, path_of
from experiments.targets import ConfigError, require_known
from xrl_jax.measure.timing import error_text
from xrl_jax.measure.worker import Worker

_DRY_NETWORK, _DRY_SHAPE = "squeezenet", {"image_size": 64}
_DRY_RECORD = Path("out") / "gpu_lab_dry_run.jsonl.gz"
_INTERRUPTED = 130


def versions() -> str:
    """Return what timings depend on besides the device: jax, and the platform's versions."""
    client = jax.devices()[0].client
    return f"jax {jax.__version__} {' '.join(str(client.platform_version).split())}"


def items(names: Sequence[str], programs: Path, worker: Worker, *, dry: bool) -> Iterator[Item]:
    """Yield all items in the order in which they are wanted."""
    each, size = (0.02, 128) if dry else (0.5, 8192)
    names, shape = ([_DRY_NETWORK], _DRY_SHAPE) if dry else (names, {})
    yield from ceilings(size=size, seconds=each)
    yield from networks(names, programs, seconds=each, shape=shape)
    of_networks = fragments(names, worker, seconds=each / 5, shape=shape)
    yield from one_of_each(of_networks) if dry else of_networks


def one_of_each(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the first item of each kind: those whose keys differ before the last slash."""
    kinds: set[str] = set()
    for item in items:
        kind = item.key.rpartition("/")[0]
        if kind not in kinds:
            kinds.add(kind)
            yield item


def measured(wanted: Sequence[Item], record: Record, deadline: float) -> int:
    """Measure items until the deadline; return the exit status.

    Args:
      deadline: of `time.monotonic`.
    """
    try:
        for n, item in enumerate(wanted, start=1):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if record.has(item.key) or item.seconds > left:
                continue
            print(f"[{n}/{len(wanted)}, {left:.0f} s left] {item.key}", file=sys.stderr)
            try:
                record.add(item.key, {"values": item.measure()})
            except Exception as error:  # one item must not end the run
                record.add(item.key, {"error": error_text(error, limit=400)})
                print(f"  {error_text(error, limit=200)}", file=sys.stderr)
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        record.write()
    return 0


def define_flags() -> None:
    flags.DEFINE_float("seconds", 540.0, "Seconds of the whole run.", lower_bound=1.0)
    flags.DEFINE_list("networks", list(models.TWELVE), "Networks of experiments.models.")
    flags.DEFINE_string("record", "", f"File of the record; by default in {RECORDS.name}/.")
    flags.DEFINE_string("queue", "", "File of patterns of keys, most wanted first.")
    flags.DEFINE_string("programs", "", "Folder of programs found, NETWORK.txt.")
    flags.DEFINE_bool("dry_run", False, f"Try the command: a small {_DRY_NETWORK}, short timings.")


def main(argv: Sequence[str]) -> int:
    """Run the lab. Exit status: 2 for bad flags or files, 130 after Ctrl-C."""
    begin, values = time.monotonic(), flags.FLAGS
    logging.set_verbosity(logging.ERROR)
    try:
        if len(argv) > 1:
            raise ValueError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
        require_known("networks", values.networks, models.MODELS)
        queue = Path(values.queue).read_text(encoding="utf-8").split("\n") if values.queue else []
        default = _DRY_RECORD if values.dry_run else path_of(jax.devices()[0].device_kind)
        path = Path(values.record or default)
        record = Record.opened(path, versions())
    except (ValueError, ConfigError, RecordError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    patterns = [line.strip() for line in queue if line.strip() and not line.startswith("#")]
    with Worker() as worker:
        found = list(items(values.networks, Path(values.programs), worker, dry=values.dry_run))
        status = measured(ordered(found, patterns), record, begin + values.seconds)
    done = sum(record.has(item.key) for item in found)
    print(f"{done} of {len(found)} items are in {path}")
    return status


if __name__ == "__main__":
    define_flags()
    app.run(main)
