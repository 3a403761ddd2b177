"""Records of the programs that earlier searches ended with, where later ones of the same network
begin.

A record is a plain-text file in the cache folder, named after everything that decides whether it
can be used: the original in its text form, the rules, the machine and the versions. Its program is
parsed and checked like any other, timed like any result, and compared with the original before it
is returned; so a wrong record costs time and nothing else.
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
from xrl_jax.transform.layout import FEATURES_FIRST, FEATURES_LAST, convert_layout

FOLDER = "found"  # in the cache folder


def record_path(
    folder: str | os.PathLike[str], program: Program, rules: Sequence[Rule], target: Target
) -> Path:
    """Return the path of the record for this original."""
    names = sorted(r.name for r in rules)
    parts = [str(program), str(program.weights), *names, table.names(), str(target)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Path(folder) / FOLDER / f"{digest[:32]}.json"


def remember(path: Path, program: Program, steps: Sequence[Step]) -> None:
    """Save a result and the steps that led to it."""
    values = {"program": str(program), "steps": [asdict(s) for s in steps]}
    keep(path, json.dumps(values))


def recall(path: Path, program: Program) -> Found | None:
    """Return the recorded result for the original, with infinite seconds as they are not predicted
    yet; None where there is no usable record.
    """
    text = read_kept(path)
    if text is None:
        return None
    try:
        values = json.loads(text)
        written, steps = values["program"], tuple(Step(**s) for s in values["steps"])
    except (ValueError, TypeError, KeyError):
        return None
    lowerings = {op: len(rows) for op, rows in table.LOWERINGS.items()}
    for like in _interfaces(program):
        with contextlib.suppress(GraphError):
            found = parse_program(written, like=like)
            check_program(found, lowerings=lowerings)
            return Found(found, float("inf"), steps)
    return None


def _interfaces(program: Program) -> Iterator[Program]:
    """Yield the program, then the program with the inputs and outputs of its bodies in each layout
    that a search may have given them.
    """
    yield program
    for layout in (FEATURES_LAST, FEATURES_FIRST):
        yield convert_layout(program, layout)
