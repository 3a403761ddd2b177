"""The training command: flags, lines of the log, and resuming after kill -9."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from experiments.targets import ConfigError
from experiments.train_flags import Config, chosen, define_flags, settings_of
from experiments.training_log import TrainingLog, plot, row_of
from xrl_jax.language.table import compile_rules
from xrl_jax.rl.learn import Metrics
from xrl_jax.rl.policy import load_policy

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Config(
    preset="ours",
    networks=("squeezenet", "bert"),
    envs=4,
    updates=10,
    steps=8,
    horizon=16,
    slots=16,
    learning_rate=1e-3,
    seed=0,
    fold=True,
    devices=1,
    reward="model",
    model_updates=0,
    interval=4,
    noise=0.02,
    target="",
    predicted=False,
    timed_seconds=0.0,
    costs="",
    cost_spread=0.0,
    evaluate_every=0,
)
METRICS = Metrics(
    reward=jnp.float32(1.5),
    best=jnp.array([0.75, 0.5, 1.0, 0.875]),
    entropy=jnp.float32(2.0),
    value_loss=jnp.float32(0.25),
    kl=jnp.float32(0.0),
    terminated=jnp.float32(0.125),
    applied=jnp.float32(1.0),
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"costs": "costs.npz", "timed_seconds": 9.0}, "--costs reads a table"),
        ({"networks": ("bart",)}, "--networks: there is no bart .known: "),
        ({"predicted": True}, "--predicted needs --target"),
        ({"target": "h100x"}, "--target: there is no h100x .known: h100, h200"),
        ({"envs": 5}, "--envs=5 must be a multiple of the 2 networks"),
        (
            {"envs": 2, "steps": 1},
            "--steps=1 times the environments per device must be",
        ),
        ({"envs": 6, "devices": 4}, "--envs=6 must be a multiple of --devices=4"),
        ({"preset": "paper", "cost_spread": 0.3}, "--cost_spread is for --preset=ours"),
        ({"reward": "measured", "devices": 2}, "--reward=measured is for one device"),
        ({"reward": "measured", "interval": 3}, "--steps=8 must be a multiple of --interval=3"),
    ],
)
def test_invalid_configurations_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_the_papers_preset_sets_the_flags_that_were_not_given() -> None:
    values = flags.FlagValues()
    define_flags(values)
    left = values(["train", "--preset=paper", "--steps=50", "--networks=bert:tokens=64"])
    config = chosen(left, values)
    assert (config.envs, config.steps, config.learning_rate, config.interval) == (8, 50, 5e-4, 5)
    settings = settings_of(config, compile_rules(()))
    assert (settings.gamma, settings.bonus, settings.network.encoder) == (0.99, 0.1, "candidates")


def test_a_log_line_has_the_best_result_of_each_network() -> None:
    row = row_of(("squeezenet", "bert"), 3, 96, 12.345, METRICS)
    assert row["best"] == {"squeezenet": 0.5, "bert": 0.875}
    assert (row["update"], row["env_steps"], row["seconds"]) == (3, 96, 12.35)
    assert (row["reward"], row["entropy"], row["terminated"]) == (1.5, 2.0, 0.125)


def test_log_rows_after_the_last_checkpoint_are_dropped(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path, 0)
    rows = [row_of(("bert",), n, 10 * n, n, METRICS) for n in (1, 2, 3)]
    for row in rows:
        log.add(row)
    log.close()
    assert TrainingLog(tmp_path, 2).rows == rows[:2]
    texts = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(t)["update"] for t in texts] == [1, 2]
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    rows = [row_of(("bert",), n, n, n, METRICS) for n in (1, 2)]
    rows[1]["evaluated"] = {"bert": {"policy": 0.5, "greedy": 0.6, "chance": 0.9}}
    plot(rows, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_killed_training_resumes_to_the_same_weights(tmp_path: Path) -> None:
    def command(out: Path) -> list[str]:
        words = ["--networks=squeezenet", "--updates=10", "--envs=4", "--steps=8", "--slots=16"]
        words += ["--cost_spread=0.3", "--save_every=1", f"--out={out}"]
        return [sys.executable, "-m", "experiments.train", *words]

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(command(whole), cwd=ROOT, check=True, capture_output=True)
    with subprocess.Popen(command(parts), cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        while not (parts / "checkpoints" / "9").is_dir():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not (parts / "policy.msgpack").exists()
    subprocess.run(command(parts), cwd=ROOT, check=True, capture_output=True)
    once, twice = (load_policy(out / "policy.msgpack") for out in (whole, parts))
    jax.tree.map(np.testing.assert_array_equal, twice.weights, once.weights)
    # The text ends with the duration of the training, which differs.
    assert twice.trained.split(" in ")[0] == once.trained.split(" in ")[0]
    rows = [json.loads(line) for line in (parts / "metrics.jsonl").read_text().splitlines()]
    assert [r["update"] for r in rows] == [*range(1, 11)]
