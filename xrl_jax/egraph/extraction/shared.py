"""Local search by sharing: classes switch together to e-nodes that read the same class."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from xrl_jax.egraph.extraction.instance import Choice, Instance, valued


def shared(
    instance: Instance,
    full: np.ndarray,
    going: Callable[[], bool] = lambda: True,
    tell: Callable[[Choice], None] = lambda _: None,
) -> tuple[np.ndarray, Choice]:
    """Improve a choice until no class is worth sharing more.

    For each class, all needed classes that can read it switch to e-nodes that do, at once, then one
    by one; what lowers the cost is kept.

    Args:
      full: [C], an e-node for every class that has one, acyclic; what is not needed now may be
        later.
      going: whether to go on.
      tell: called with each better choice.

    Returns:
      The same for the improved choice, and the choice itself.
    """
    best = valued(instance, full)
    better = True
    while better and going():
        better = False
        for y in range(instance.n_classes):
            switches = _switches(instance, best, y)
            if not switches or not going():
                continue
            together = [switches] if len(switches) > 1 else []
            for change in (*together, *([s] for s in switches)):
                trial = full.copy()
                for c, n in change:
                    trial[c] = n
                found = valued(instance, trial)
                if found.cost < best.cost - 1e-12 * abs(best.cost):
                    full, best, better = trial, found, True
                    tell(best)
    return full, best


def _switches(instance: Instance, best: Choice, y: int) -> list[tuple[int, int]]:
    """Return the needed classes that read class `y` in another e-node only, and the cheapest such
    e-node of each.
    """
    found: dict[int, int] = {}
    for n in instance.readers[y]:
        c = int(instance.owner[n])
        now = best.node[c]
        if now < 0 or y in instance.children[now]:
            continue
        if c not in found or instance.cost[n] < instance.cost[found[c]]:
            found[c] = n
    return list(found.items())
