"""Trained policies as files: weights, configuration, and the names of their tables' rows.

Operators, lowerings and rules differ between versions. A policy therefore stores their names, and
its tables are reordered to match the current ones. A name it does not have gets the mean row.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import serialization

from xrl_jax.graph import ops
from xrl_jax.language.table import CompiledRules
from xrl_jax.rl.features import LOWERING_NAMES, N_CANDIDATE, N_GLOBAL, N_NODE
from xrl_jax.rl.networks import NetworkConfig
from xrl_jax.runtime.files import atomic_write
from xrl_jax.runtime.target_platform import target_platform

FORMAT = 4
_FEATURE_COUNTS = (N_NODE, N_CANDIDATE, N_GLOBAL)  # numbers of features that the weights multiply


class PolicyError(ValueError):
    """A policy file that cannot be used; the message names it and says why."""


@dataclass(frozen=True)
class Policy:
    """Weights of a `PolicyNetwork` and the names of its tables' rows.

    Attributes:
      trained: how it was trained, in one line: networks, steps, seed.
    """

    config: NetworkConfig
    weights: Any
    rules: tuple[str, ...]
    lowerings: tuple[str, ...] = LOWERING_NAMES
    operators: tuple[str, ...] = tuple(ops.OP_NAMES)
    trained: str = ""

    def fitted(self, rules: CompiledRules) -> tuple[NetworkConfig, Any]:
        """Return configuration and weights for the current rules, lowerings and operators. The
        weights are NumPy arrays: JAX arrays from a training over several devices would make all of
        these repeat the same work.
        """
        names = [r.name for r in rules.rules]
        config = dataclasses.replace(self.config, n_rules=max(len(names), 1))
        tables = {
            "lowerings": (self.lowerings, LOWERING_NAMES),
            "makes": (self.operators, ops.OP_NAMES),
            "rules": (self.rules, names),
        }

        def fit(weights: Mapping[str, Any], table: tuple[Any, Any] | None = None) -> dict[str, Any]:
            return {
                name: fit(value, tables.get(name, table))
                if isinstance(value, Mapping)
                else (_rows(np.asarray(value), *table) if table else np.asarray(value))
                for name, value in weights.items()
            }

        return config, fit(self.weights)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy, replacing an existing file; raises OSError."""
        values = {
            "format": FORMAT,
            "seen": list(_FEATURE_COUNTS),
            "config": dataclasses.asdict(self.config),
            "weights": jax.tree.map(np.asarray, self.weights),
            **{n: list(getattr(self, n)) for n in ("rules", "lowerings", "operators")},
            "trained": self.trained,
        }
        with atomic_write(Path(path)) as file:
            file.write(serialization.msgpack_serialize(values))


def shipped(platform: str | None = None) -> Path:
    """Return the file of the policy that comes with the package.

    Args:
      platform: JAX's name of the platform whose costs it was trained under; None for
        `target_platform()`.
    """
    name = "policy_gpu" if (platform or target_platform()) == "gpu" else "policy"
    return Path(__file__).parent / f"{name}.msgpack"


def load_policy(path: str | os.PathLike[str] | None = None) -> Policy:
    """Load a policy from a file, by default `shipped()`.

    Raises:
      PolicyError: the file is damaged, of another kind, or of another version.
      OSError: it cannot be read.
    """
    path = path or shipped()
    try:
        values: Any = serialization.msgpack_restore(Path(path).read_bytes())
        version, seen = values["format"], tuple(values["seen"])
    except OSError:
        raise
    except Exception as error:  # msgpack raises various errors on other bytes
        raise PolicyError(f"{path} is damaged or not a policy: {error}") from error
    if version != FORMAT or seen != _FEATURE_COUNTS:
        raise PolicyError(
            f"{path} is from another version of xrl_jax (format {version}, features {seen}; here "
            f"{FORMAT}, {_FEATURE_COUNTS}): train it again with experiments.train"
        )
    try:
        return Policy(
            NetworkConfig(**values["config"]),
            values["weights"],
            **{n: tuple(values[n]) for n in ("rules", "lowerings", "operators")},
            trained=values["trained"],
        )
    except (KeyError, TypeError) as error:
        raise PolicyError(f"{path} is damaged: {error}") from error


def _rows(kernel: np.ndarray, old: Sequence[str], new: Sequence[str]) -> np.ndarray:
    """Return the rows [len(new), D] of a table by name; unknown names get the mean of the old."""
    place = {name: i for i, name in enumerate(old)}
    unknown = kernel[: len(old)].mean(axis=0)
    return np.stack([kernel[place[n]] if n in place else unknown for n in new])
