"""Programs that earlier searches have ended with: where the next one of the same network begins.

A record is a file of plain text in the cache folder, named after all that decides whether it can be
used: the original in its text form, the rules, the machine and the versions. What it holds is
parsed and checked as any program is, timed as any result, and compared with the original before it
is returned; so a record that is wrong costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from xrl_jax.graph.graph import GraphError
from xrl_jax.language.rule import Rule
from xrl_jax.lower import table
from xrl_jax.measure.store_files import keep, read_kept
from xrl_jax.measure.target import Target
from xrl_jax.program.check import check_program
from xrl_jax.program.program import Program
from xrl_jax.program.text import parse_program
from xrl_jax.search.base import Found, Step
from xrl_jax.transform.layout import FEATURES_FIRST, FEATURES_LAST, laid_out

FOLDER = "found"  # in the cache folder


def record_path(
    folder: str | os.PathLike[str], program: Program, rules: Sequence[Rule], target: Target
) -> Path:
    """Where the record of this original is kept."""
    names = sorted(r.name for r in rules)
    parts = [str(program), str(program.weights), *names, table.names(), str(target)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Path(folder) / FOLDER / f"{digest[:32]}.json"


def remember(path: Path, program: Program, steps: Sequence[Step]) -> None:
    """Keep a result and the steps that led to it."""
    values = {"program": str(program), "steps": [asdict(s) for s in steps]}
    keep(path, json.dumps(values))


def recall(path: Path, program: Program) -> Found | None:
    """What was found for the original before, its seconds yet to be predicted; None where there is
    nothing of use.
    """
    text = read_kept(path)
    if text is None:
        return None
    try:
        values = json.loads(text)
        written, steps = values["program"], tuple(Step(**s) for s in values["steps"])
    except (ValueError, TypeError, KeyError):
        return None
    lowerings = {op: len(forms) for op, forms in table.LOWERINGS.items()}
    for like in _interfaces(program):
        with contextlib.suppress(GraphError):
            found = parse_program(written, like=like)
            check_program(found, lowerings=lowerings)
            return Found(found, float("inf"), steps)
    return None


def _interfaces(program: Program) -> Iterator[Program]:
    """The program with what enters and leaves its bodies as a search may have laid it out."""
    yield program
    for layout in (FEATURES_LAST, FEATURES_FIRST):
        yield laid_out(program, layout)
