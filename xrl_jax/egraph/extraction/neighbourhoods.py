"""Large neighbourhood search (Shaw 1998): classes near each other are chosen anew together, by a
mixed-integer program; the others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from xrl_jax.egraph.extraction.instance import Choice, Instance, valued
from xrl_jax.egraph.extraction.programs import Program, solved
from xrl_jax.runtime.milp import MilpSolver

_CLASSES = 200  # of a neighbourhood
_SECONDS = 5.0  # for one


def improved(
    instance: Instance,
    full: np.ndarray,
    solver: MilpSolver,
    left: Callable[[], float],
    *,
    seed: int = 0,
    tell: Callable[[Choice], None] = lambda _: None,
) -> tuple[np.ndarray, Choice]:
    """Improve a choice until the time is over, or no needed class has a better neighbourhood.

    Args:
      full: [C], an e-node for every class that has one, acyclic.
      left: seconds left.
      tell: called with each better choice.
    """
    rng = np.random.default_rng(seed)
    best = valued(instance, full)
    near = _near(instance)
    waiting: list[int] = []
    failed = 0
    while left() > 0:
        used = np.flatnonzero(best.node >= 0)
        if failed >= 2 * len(used):
            break
        if not waiting:
            waiting = rng.permutation(used).tolist()
        start = waiting.pop()
        free = _ball(near, start, rng)
        program = Program(instance, full, free)
        chosen, _ = solved(program, best, solver, lambda: min(_SECONDS, left()))
        failed += 1
        if chosen is not None:
            found = valued(instance, chosen)
            if found.cost < best.cost - 1e-12 * abs(best.cost):
                full, best, failed, waiting = chosen, found, 0, []
                tell(best)
    return full, best


def _near(instance: Instance) -> list[list[int]]:
    """Return for each class the classes that its e-nodes read, and those that read it."""
    near: list[set[int]] = [set() for _ in range(instance.n_classes)]
    for n, children in enumerate(instance.children):
        c = int(instance.owner[n])
        for d in children:
            near[c].add(d)
            near[d].add(c)
    return [sorted(s) for s in near]


def _ball(near: list[list[int]], start: int, rng: np.random.Generator) -> set[int]:
    """Return the classes nearest to one, in random order where equally near."""
    seen, level = {start}, [start]
    while level and len(seen) < _CLASSES:
        following = []
        for c in rng.permutation(level).tolist():
            for d in near[c]:
                if d not in seen and len(seen) < _CLASSES:
                    seen.add(d)
                    following.append(d)
        level = following
    return seen
