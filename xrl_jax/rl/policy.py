"""Trained policies as files: weights, sizes, and what the rows of their tables stand for.

Operators, forms and rules come and go; a policy keeps their names, and its tables are put in the
order of those that there are now. What it has never met gets the mean of what it has.
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
from xrl_jax.runtime.files import replacing

FORMAT = 4
SHIPPED = Path(__file__).parent / "policy.msgpack"
_SEEN = (N_NODE, N_CANDIDATE, N_GLOBAL)  # numbers that the weights multiply


class PolicyError(ValueError):
    """A policy file that cannot be used; the message names it and says why."""


@dataclass(frozen=True)
class Policy:
    """Weights of a `PolicyNetwork` and the names of its tables' rows.

    Attributes:
      trained: how, in one line: networks, steps, seed.
    """

    config: NetworkConfig
    weights: Any
    rules: tuple[str, ...]
    lowerings: tuple[str, ...] = LOWERING_NAMES
    operators: tuple[str, ...] = tuple(ops.OP_NAMES)
    trained: str = ""

    def fitted(self, rules: CompiledRules) -> tuple[NetworkConfig, Any]:
        """Sizes and weights for the rules, forms and operators that there are now. The weights are
        NumPy's: those of a training over several devices would have all of them do the same.
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
        """Write the policy, replacing a file that is there; raises OSError."""
        values = {
            "format": FORMAT,
            "seen": list(_SEEN),
            "config": dataclasses.asdict(self.config),
            "weights": jax.tree.map(np.asarray, self.weights),
            **{n: list(getattr(self, n)) for n in ("rules", "lowerings", "operators")},
            "trained": self.trained,
        }
        with replacing(Path(path)) as file:
            file.write(serialization.msgpack_serialize(values))


def load_policy(path: str | os.PathLike[str] = SHIPPED) -> Policy:
    """The policy in a file; by default the one that comes with the package.

    Raises:
      PolicyError: the file is damaged, of another kind, or of another version.
      OSError: it cannot be read.
    """
    values: Any
    try:
        values = serialization.msgpack_restore(Path(path).read_bytes())
        version, seen = values["format"], tuple(values["seen"])
    except OSError:
        raise
    except Exception as error:  # whatever msgpack makes of bytes that are not its own
        raise PolicyError(f"{path} is damaged or no policy: {error}") from error
    if version != FORMAT or seen != _SEEN:
        raise PolicyError(
            f"{path} is of another version of xrl_jax (format {version}, features {seen}; here "
            f"{FORMAT}, {_SEEN}): train it again with experiments.train"
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
    """Rows [len(new), D] of a table by name; the mean of the named ones for what is new."""
    place = {name: i for i, name in enumerate(old)}
    unknown = kernel[: len(old)].mean(axis=0)
    return np.stack([kernel[place[n]] if n in place else unknown for n in new])
