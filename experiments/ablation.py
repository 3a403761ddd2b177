"""Ablation of the training settings, from X-RLflow's to ours, one improvement after the other.

  python -m experiments.ablation --networks=bert:layers=1,squeezenet --env_steps=8000

The ladder begins with the preset `paper` of experiments.train and ends with the preset `ours`. Each
rung trains a policy from scratch under predicted times, once for each of --seeds, until --env_steps
or --seconds is reached. The command prints, as means over networks and seeds, the least predicted
time met in training and the least that four rollouts reach afterwards, both relative to the
network's own; the environment steps per second, updates included; and, separately, the seconds of
the first update, which is compiled. The paper's policy network is slow: its rungs take minutes for
an update on two cores. --out gets ablation.json with a row for each training.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

from experiments.environments import params_of, program_of
from experiments.evaluation import Reached, evaluator
from experiments.targets import ConfigError
from experiments.train_flags import PRESETS
from xrl_jax.language.rule_files import available_rules, standard_rules
from xrl_jax.language.table import CompiledRules, compile_rules
from xrl_jax.rl.env import HORIZON, SLOTS, EnvParams
from xrl_jax.rl.train import training_of
from xrl_jax.rl.train_config import TrainConfig
from xrl_jax.runtime.engine_jit import engine_jit

FLAGS = flags.FLAGS


class Rung(NamedTuple):
    """One rung of the ladder: the settings of its trainings."""

    name: str
    settings: TrainConfig
    envs: int


def ladder() -> list[Rung]:
    """Return the rungs from X-RLflow's settings to ours. Each rung adopts the settings that its
    name says and keeps those adopted by the rungs before it.
    """
    paper, ours = PRESETS["paper"], PRESETS["ours"]
    end = ours.settings
    takes: dict[str, dict[str, Any]] = {
        "reward": {n: getattr(end, n) for n in ("reward_every", "bonus", "reward_scale")},
        "network": {
            "network": dataclasses.replace(end.network, prior_scale=0.0, macro_actions=False)
        },
        "optimisation": {
            n: getattr(end, n)
            for n in ("gamma", "learning_rate", "decays", "entropy_weight", "epochs")
        },
        "environments": {n: getattr(end, n) for n in ("steps", "minibatches")},
        "records": {"records": end.records},
        "macro-actions": {"network": dataclasses.replace(end.network, prior_scale=0.0)},
        "prior scale": {"network": end.network},
    }
    rungs = [Rung("paper", paper.settings, paper.envs)]
    for name, changes in takes.items():
        envs = ours.envs if name == "environments" else rungs[-1].envs
        settings = dataclasses.replace(rungs[-1].settings, **changes)
        rungs.append(Rung(f"+ {name}", settings, envs))
    return rungs


def trained(
    rung: Rung, params: EnvParams, names: Sequence[str], one_each: EnvParams
) -> Iterator[dict[str, Any]]:
    """Train a policy for each seed and yield its results; only the first training compiles."""
    per_update = rung.envs * rung.settings.steps
    config = dataclasses.replace(rung.settings, updates=max(FLAGS.env_steps // per_update, 1))
    training = training_of(config)
    init, update = engine_jit(training.init), engine_jit(training.update)
    evaluate = evaluator(config.network, one_each)
    for seed in range(FLAGS.seeds):
        began, ends = time.monotonic(), []
        state = init(jax.random.key(seed), params)
        while len(ends) < config.updates and (not ends or ends[-1] - began < FLAGS.seconds):
            state, metrics = jax.block_until_ready(update(state, params))
            ends.append(time.monotonic())
            best = np.asarray(metrics.best).reshape(len(names), -1).min(axis=1)
            print(f"{rung.name}, seed {seed}: update {len(ends)}", file=sys.stderr)
        after_first = ends[-1] - ends[0]
        yield {
            "rung": rung.name,
            "seed": seed,
            "env_steps": len(ends) * per_update,
            "first_seconds": ends[0] - began,
            "steps_per_second": (len(ends) - 1) * per_update / after_first if after_first else None,
            "best": dict(zip(names, map(float, best), strict=True)),
            "reached": evaluate(state.weights, jax.random.key(seed)).by_program(names),
        }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(
        "settings", "env steps", "steps/s", "first update, s", "best met", *Reached._fields
    )
    for name in dict.fromkeys(row["rung"] for row in rows):
        mine = [row for row in rows if row["rung"] == name]
        reached = [each for row in mine for each in row["reached"].values()]
        steps = np.mean([row["env_steps"] for row in mine])
        rates = [r["steps_per_second"] for r in mine if r["steps_per_second"] is not None]
        means = [np.mean([v for row in mine for v in row["best"].values()])]
        means += [np.mean([each[way] for each in reached]) for way in Reached._fields]
        table.add_row(
            name,
            f"{steps:.0f}",
            f"{np.mean(rates):.3g}" if rates else "-",
            f"{mine[0]['first_seconds']:.0f}",
            *(f"{m:.3f}" for m in means),
        )
    Console(width=120).print(table)


def define_flags() -> None:
    flags.DEFINE_list(
        "networks",
        ["squeezenet"],
        "Networks, as NAME or NAME:OPTION=NUMBER:..., separated by commas.",
    )
    flags.DEFINE_list("rungs", [], f"Rungs to train, of {[r.name for r in ladder()]}; empty: all.")
    flags.DEFINE_integer(
        "env_steps", 8000, "Most environment steps of each training.", lower_bound=1
    )
    flags.DEFINE_float("seconds", 600.0, "Most seconds of each training.")
    flags.DEFINE_integer(
        "seeds", 1, "Trainings of each rung, each with its own seed.", lower_bound=1
    )
    flags.DEFINE_integer("horizon", HORIZON, "Steps of an episode.", lower_bound=1)
    flags.DEFINE_integer(
        "slots", SLOTS, "Most candidates that the policy sees at a step.", lower_bound=1
    )
    flags.DEFINE_string("out", "out/ablation", "Folder of the results.")


def chosen(rules: CompiledRules) -> list[Rung]:
    """Return the rungs that the flags name, for these rules and --slots.

    Raises:
      ConfigError: a rung is unknown, or the networks do not divide its environments evenly.
    """
    known = {rung.name: rung for rung in ladder()}
    for name in FLAGS.rungs:
        if name not in known:
            raise ConfigError(f"--rungs: there is no {name!r} (known: {', '.join(known)})")
    found = []
    for rung in (known[n] for n in FLAGS.rungs or known):
        if rung.envs % len(FLAGS.networks):
            raise ConfigError(
                f"--networks: the {rung.envs} environments of {rung.name!r} cannot be divided "
                f"evenly among {len(FLAGS.networks)} networks"
            )
        sizes = dataclasses.replace(
            rung.settings.network, n_rules=len(rules.rules), slots=FLAGS.slots
        )
        found.append(rung._replace(settings=dataclasses.replace(rung.settings, network=sizes)))
    return found


def main(argv: Sequence[str]) -> int:
    """Run the ablation. The exit status is 2 for bad flags. Ctrl-C keeps the rows so far."""
    if not FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    names, rules = (
        FLAGS.networks,
        compile_rules(available_rules(standard_rules(), jax.default_backend())),
    )
    try:
        if len(argv) > 1:
            raise ConfigError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
        if not names:
            raise ConfigError("--networks is empty: name at least one network")
        rungs = chosen(rules)
        programs = [program_of(text, fold=True, seed=0) for text in names]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sizes = {"horizon": FLAGS.horizon, "slots": FLAGS.slots}
    one_each = params_of(programs, rules, envs=len(programs), **sizes)
    rows: list[dict[str, Any]] = []
    out = Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        for rung in rungs:
            params = params_of(programs, rules, envs=rung.envs, **sizes)
            for row in trained(rung, params, names, one_each):
                rows.append(row)
                text = json.dumps(rows, indent=1)
                (out / "ablation.json").write_text(text, encoding="utf-8")
    except KeyboardInterrupt:
        print(f"interrupted after {len(rows)} trainings", file=sys.stderr)
    if rows:
        show(rows)
        print(f"results are in {out}")
    return 0


if __name__ == "__main__":
    define_flags()
    app.run(main)
