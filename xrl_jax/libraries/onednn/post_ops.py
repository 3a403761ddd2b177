"""What the library computes with a result before it is written."""

from __future__ import annotations

import math
from typing import NamedTuple

from xrl_jax.libraries.onednn.spec import RELU, Clip

_RELU, _LINEAR, _CLIP = 0x20, 0x26, 0x2F  # the library's names


class PostOps(NamedTuple):
    """An array of this layout is added, all is multiplied by a number, and clipped.

    Attributes:
      overflow: whether numbers of more than half the largest one become infinite first, with the
        processor's flag for that.
    """

    addend: int | None = None
    scale: float = 1.0
    clip: Clip | None = None
    overflow: bool = False

    @property
    def elementwise(self) -> list[tuple[int, float, float]]:
        """The library's name and two numbers of each elementwise operation."""
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
