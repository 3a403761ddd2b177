"""Log of a training: lines of JSON, TensorBoard events, and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xrl_jax.rl.learn import Metrics

_SCALARS = ("reward", "entropy", "value_loss", "kl", "terminated", "applied")
Row = Mapping[str, Any]


def row_of(
    networks: Sequence[str], update: int, env_steps: int, seconds: float, metrics: Metrics
) -> dict[str, Any]:
    """Return a line of metrics.jsonl; `seconds` count from the first update's start, compilation
    included.
    """
    best = np.asarray(metrics.best).reshape(len(networks), -1)
    return {
        "update": update,
        "env_steps": env_steps,
        "seconds": round(seconds, 2),
        **{n: float(getattr(metrics, n)) for n in _SCALARS},
        "best": dict(zip(networks, best.min(axis=1).tolist(), strict=True)),
    }


class TrainingLog:
    """The rows of a training, in metrics.jsonl and for TensorBoard.

    Args:
      folder: holds both; rows after `done` updates are dropped, as these updates will be repeated.
    """

    def __init__(self, folder: Path, done: int) -> None:
        from tensorboardX import SummaryWriter

        self._lines = folder / "metrics.jsonl"
        texts = self._lines.read_text(encoding="utf-8").splitlines() if done else []
        rows = [json.loads(text) for text in texts]
        self.rows: list[Row] = [r for r in rows if r["update"] <= done]
        text = "".join(json.dumps(r) + "\n" for r in self.rows)
        self._lines.write_text(text, encoding="utf-8")
        step = self.rows[-1]["env_steps"] + 1 if self.rows else None
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def add(self, row: Row) -> None:
        """Append a row."""
        self.rows.append(row)
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        named = {name: row[name] for name in _SCALARS}
        named |= {f"best/{network}": least for network, least in row["best"].items()}
        for network, found in row.get("evaluated", {}).items():
            named |= {f"{way}/{network}": least for way, least in found.items()}
        for name, value in named.items():
            self._events.add_scalar(name, value, row["env_steps"])
        self._events.flush()

    def close(self) -> None:
        """Close the log."""
        self._events.close()


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot the reward, the best predicted time and, where the policy was evaluated, the times that
    it, greedy search and chance reach.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rewards, best, reached = figure.subplots(1, 3)
    steps = [r["env_steps"] for r in rows]
    rewards.plot(steps, [r["reward"] for r in rows])
    rewards.set(xlabel="environment steps", ylabel="reward of a step, percent")
    colours = {name: f"C{i}" for i, name in enumerate(rows[-1]["best"])}
    for name, colour in colours.items():
        best.plot(steps, [r["best"][name] for r in rows], colour, label=name)
    best.set(xlabel="environment steps", ylabel="least predicted time met / the network's own")
    best.legend()
    evaluated = [r for r in rows if "evaluated" in r]
    styles = {"policy": "-", "greedy": "--", "chance": ":"}
    for name, colour in colours.items():
        for way, style in styles.items():
            values = [r["evaluated"][name][way] for r in evaluated]
            reached.plot([r["env_steps"] for r in evaluated], values, colour + style)
    reached.set(
        xlabel="environment steps", ylabel="time reached / the network's own (-- greedy, : chance)"
    )
    figure.savefig(path, dpi=150)
