"""Post-ops: what the library applies to a result before it is written."""

from __future__ import annotations

import math
from typing import NamedTuple

from xrl_jax.libraries.onednn.spec import RELU, Clip

_RELU, _LINEAR, _CLIP = 0x20, 0x26, 0x2F  # the library's codes of the operations


class PostOps(NamedTuple):
    """Add an array of layout `addend`, multiply by `scale`, then clip.

    Attributes:
      overflow: whether values above half the largest float32 become infinite before scaling, which
        sets the processor's overflow flag.
    """

    addend: int | None = None
    scale: float = 1.0
    clip: Clip | None = None
    overflow: bool = False

    @property
    def elementwise(self) -> list[tuple[int, float, float]]:
        """The library's code and the two parameters of each elementwise operation."""
        found: list[tuple[int, float, float]] = []
        if self.overflow:
            found += [(_LINEAR, 2.0, 0.0), (_LINEAR, 0.5, 0.0)]
        if self.scale != 1:
            found.append((_LINEAR, self.scale, 0.0))
        if self.clip == RELU:
            found.append((_RELU, 0.0, 0.0))
        elif self.clip is not None:
            low = -math.inf if self.clip.low is None else self.clip.low
            high = math.inf if self.clip.high is None else self.clip.high
            found.append((_CLIP, low, high))
        return found


NO_POST_OPS = PostOps()
