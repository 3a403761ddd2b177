"""Loading a saved function together with its report."""

from __future__ import annotations

import os

from xrl_jax.backends import loading
from xrl_jax.backends.fast import Fast
from xrl_jax.report.text import Report


def load(path: str | os.PathLike[str]) -> Fast:
    """Return the optimised function that `fast.save(path)` wrote, with its report.

    Raises:
      LoadError: the file is damaged, or needs another version, platform or setting; the message
        says which.
      OSError: the file is missing or cannot be read.

    >>> budget = xrl_jax.Budget(seconds=1.0)
    >>> xrl_jax.optimize(jnp.tanh, jnp.ones(3), budget=budget, progress=False).save("tanh.xrl")
    >>> xrl_jax.load("tanh.xrl")(jnp.zeros(3)).tolist()
    [0.0, 0.0, 0.0]
    """
    return loading.load(path, read_report=Report.from_dict)
