"""Train X-RLflow's policy with PPO on networks, with predicted or measured times as the reward.

  python -m experiments.train --networks=squeezenet,bert --updates=200 --seed=0
  python -m experiments.train --networks=squeezenet --reward=measured --model_updates=150

--reward=measured times the program of every environment each --interval steps and where an episode
ends, after --model_updates updates on predictions; the timings are kept and not made twice.

All networks are trained on at once, each in as many environments. Written to --out: policy.msgpack
(what `optimize --search=xrlflow --policy=...` takes), metrics.jsonl, events for TensorBoard,
curve.png, and a checkpoint every --save_every updates. The same command goes on from the last
checkpoint, also after kill -9, and ends with the same weights, bit for bit. Ctrl-C keeps what was
learned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import app, flags, logging
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import models, targets
from experiments.evaluation import Reached, evaluator
from experiments.targets import ConfigError
from experiments.training_log import TrainingLog, plot, row_of
from xrl_jax.backends.compile_cache import persistent_cache
from xrl_jax.cost import calibration, roofline
from xrl_jax.cost.model import Oracle
from xrl_jax.cost.store import STORE_FILE, TimingStore, default_cache_dir
from xrl_jax.cost.worker import Worker
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.engine_jit import engine_jit
from xrl_jax.graph.graph import bucket_for, n_live
from xrl_jax.graph.program import Program
from xrl_jax.rewrite.library import offered, standard_rules
from xrl_jax.rewrite.table import CompiledRules, compile_rules
from xrl_jax.rl.env import HORIZON, SLOTS, EnvParams, start_of
from xrl_jax.rl.measured import measured_update, timed_by
from xrl_jax.rl.networks import NetworkConfig
from xrl_jax.rl.policy import Policy
from xrl_jax.rl.train import Metrics, TrainConfig, Training, TrainState, spread, training_of


@dataclass(frozen=True)
class Config:
    """One training; a field for each flag that decides what comes of it."""

    networks: tuple[str, ...]
    envs: int
    updates: int
    steps: int
    horizon: int
    slots: int
    learning_rate: float
    seed: int
    fold: bool
    devices: int
    reward: str
    model_updates: int
    interval: int
    noise: float
    evaluate_every: int

    def __post_init__(self) -> None:
        if self.reward == "measured" and self.devices > 1:
            raise ConfigError("--reward=measured is for one device: timings disturb each other")
        if self.reward == "measured" and self.steps % self.interval:
            raise ConfigError(
                f"--steps={self.steps} must be a multiple of --interval={self.interval}"
            )
        targets.require_known("networks", self.networks, models.MODELS)
        if self.envs % len(self.networks):
            raise ConfigError(
                f"--envs={self.envs} must be a multiple of the {len(self.networks)} networks"
            )
        if self.envs % self.devices:
            raise ConfigError(f"--envs={self.envs} must be a multiple of --devices={self.devices}")
        parts = TrainConfig().minibatches
        if self.envs // self.devices * self.steps % parts:
            raise ConfigError(
                f"--steps={self.steps} times the environments of a device must be a multiple of "
                f"{parts}, the minibatches"
            )


def program_of(name: str, *, fold: bool, seed: int, **shape: int) -> Program:
    """A network at its full size, or with the options in `shape`."""
    target = targets.from_model(name, seed=seed, **shape)
    return from_jax(target.fn, *target.args, weights=target.weights, fold=fold)


def programs_of(config: Config) -> list[Program]:
    """The networks at their full sizes."""
    return [program_of(n, fold=config.fold, seed=config.seed) for n in config.networks]


def params_of(
    programs: Sequence[Program],
    rules: CompiledRules,
    *,
    envs: int,
    horizon: int = HORIZON,
    slots: int = SLOTS,
) -> EnvParams:
    """So many environments of all programs in one bucket, under a table that knows no timings yet:
    what forms take is what they usually take on this kind of machine.
    """
    usual = calibration.usual_forms(jax.default_backend())
    rates = calibration.calibrate([], roofline.DEFAULT_RATES, usual)
    costs = roofline.cost_table({}, rates)
    bucket = max(bucket_for(sum(int(n_live(g)) for g in p.graphs)) for p in programs)
    starts = [start_of(p, rules, costs, bucket=bucket) for p in programs]
    each = envs // len(starts)
    batch = jax.tree.map(lambda *v: jnp.repeat(jnp.stack(v), each, axis=0), *starts)
    return EnvParams(rules.table, costs, batch, horizon=horizon, slots=slots)


def _plain(state: TrainState) -> dict[str, Any]:
    """The state as a tree of plain arrays."""
    return state._replace(key=jax.random.key_data(state.key))._asdict()


class Checkpoints:
    """The last state of a training in a folder, written whole."""

    def __init__(self, folder: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, update: int, state: TrainState) -> None:
        """Keep the state after so many updates, if that is not kept already."""
        if self._manager.latest_step() == update:
            return
        self._manager.save(update, args=ocp.args.StandardSave(_plain(state)))
        self._manager.wait_until_finished()

    def last(self, like: TrainState) -> tuple[int, TrainState]:
        """Updates done and the state then; (0, `like`) where there is none."""
        update = self._manager.latest_step()
        if update is None:
            return 0, like
        found = self._manager.restore(update, args=ocp.args.StandardRestore(_plain(like)))
        values = TrainState(**found)
        key = jax.random.wrap_key_data(values.key)
        leaves = jax.tree.leaves(values._replace(key=key))
        return update, jax.tree.unflatten(jax.tree.structure(like), leaves)


Update = Callable[[TrainState, EnvParams], tuple[TrainState, Metrics]]


def train(
    config: Config,
    training: Training,
    params: EnvParams,
    out: Path,
    *,
    save_every: int,
    measured: Update | None = None,
    evaluate: Callable[[Any, jax.Array], Reached] | None = None,
) -> tuple[TrainState, int]:
    """Train to the end, or to Ctrl-C; metrics and checkpoints go to `out`.

    Args:
      measured: what updates on measured times, after those on predictions; None for none.
      evaluate: asked every `config.evaluate_every` updates, and after the last.

    Returns:
      The last state, and how many updates led to it.
    """
    init, predicted = engine_jit(training.init), engine_jit(training.update)
    print("compiling", file=sys.stderr)
    checkpoints = Checkpoints(out / "checkpoints")
    done, state = checkpoints.last(init(jax.random.key(config.seed), params))
    log = TrainingLog(out, done)
    before = log.rows[-1]["seconds"] if log.rows else 0.0
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("training", total=config.updates, completed=done)
            while done < config.updates:
                update = predicted
                if measured is not None and done >= config.model_updates:
                    update = measured
                after, metrics = jax.block_until_ready(update(state, params))
                n, seconds = done + 1, before + time.monotonic() - began
                env_steps = n * config.envs * config.steps
                row = row_of(config.networks, n, env_steps, seconds, metrics)
                last = n == config.updates
                if evaluate is not None and (last or n % config.evaluate_every == 0):
                    found = evaluate(after.weights, jax.random.key(n))
                    row["evaluated"] = found.of_each(config.networks)
                # Only now, so that Ctrl-C leaves a line for every update that counts.
                state, done = after, n
                log.add(row)
                best = " ".join(f"{n} {b:.3f}" for n, b in row["best"].items())
                progress.update(task, advance=1, description=f"best: {best}")
                if done % save_every == 0 or last:
                    checkpoints.save(done, state)
    except KeyboardInterrupt:
        print(f"interrupted after {done} updates", file=sys.stderr)
        checkpoints.save(done, state)
    log.close()
    if log.rows:
        plot(log.rows, out / "curve.png")
    return state, done


def define_flags() -> None:
    flags.DEFINE_list("networks", ["squeezenet"], f"Names among {', '.join(models.MODELS)}.")
    flags.DEFINE_integer("envs", 32, "Environments, of all networks together.", lower_bound=1)
    flags.DEFINE_integer("updates", 200, "Rollouts, each with its updates.", lower_bound=1)
    flags.DEFINE_integer("steps", 32, "Steps of each environment in a rollout.", lower_bound=1)
    flags.DEFINE_integer("horizon", HORIZON, "Steps of an episode.", lower_bound=1)
    flags.DEFINE_integer("slots", SLOTS, "Candidates seen at once in training.", lower_bound=1)
    flags.DEFINE_float("learning_rate", 3e-3, "Of Adam, at first.")
    flags.DEFINE_integer("seed", 0, "Seed of everything.")
    flags.DEFINE_integer(
        "devices", 1, "Devices to spread environments over; of a CPU, its cores.", lower_bound=1
    )
    flags.DEFINE_enum(
        "reward", "model", ["model", "measured"], "Predicted times, or times of compiled programs."
    )
    flags.DEFINE_integer(
        "model_updates", 0, "First updates of --reward=measured on predictions.", lower_bound=0
    )
    flags.DEFINE_integer("interval", 4, "Steps between two measurements.", lower_bound=1)
    flags.DEFINE_float(
        "noise", 0.02, "Relative change below which two timings are alike.", lower_bound=0.0
    )
    flags.DEFINE_bool("fold", True, "Treat equal repeated regions as one.")
    flags.DEFINE_integer(
        "evaluate_every",
        50,
        "Updates between evaluations beside greedy search and chance; 0: none.",
        lower_bound=0,
    )
    flags.DEFINE_integer("save_every", 20, "Updates between checkpoints.", lower_bound=1)
    flags.DEFINE_string("out", "out/train", "Folder of the results.")


def main(argv: Sequence[str]) -> int:
    """The exit status is 2 for bad flags."""
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    values = flags.FLAGS
    out = Path(values.out)
    try:
        if len(argv) > 1:
            raise ConfigError(f"{argv[1]!r} is no flag: flags are written --name=value")
        given: dict[str, Any] = {f.name: values[f.name].value for f in dataclasses.fields(Config)}
        given["networks"] = tuple(values.networks)
        config = Config(**given)
        written = out / "config.json"
        chosen = json.dumps(dataclasses.asdict(config), indent=1)
        if written.is_file() and written.read_text(encoding="utf-8") != chosen:
            raise ConfigError(
                f"{out} holds a training with other flags (config.json): choose another --out, or "
                "remove it"
            )
        jax.config.update("jax_num_cpu_devices", config.devices)
        if len(jax.devices()) < config.devices:
            raise ConfigError(f"--devices={config.devices}: there are {len(jax.devices())} here")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    written.write_text(chosen, encoding="utf-8")
    rules = compile_rules(offered(standard_rules()))
    network = NetworkConfig(n_rules=len(rules.rules))
    settings = TrainConfig(
        network=network,
        updates=config.updates,
        steps=config.steps,
        learning_rate=config.learning_rate,
    )
    training = training_of(settings)
    if config.devices > 1:
        training = spread(settings, jax.devices()[: config.devices])
    with contextlib.ExitStack() as stack:
        stack.enter_context(persistent_cache(os.path.join(default_cache_dir(), "compiled")))
        programs = programs_of(config)
        params = params_of(
            programs, rules, envs=config.envs, horizon=config.horizon, slots=config.slots
        )
        measured = None
        if config.reward == "measured":
            store = stack.enter_context(TimingStore(os.path.join(out, STORE_FILE)))
            oracle = Oracle(store, stack.enter_context(Worker()))
            each = config.envs // len(programs)
            clock = timed_by(oracle, [p for p in programs for _ in range(each)])
            measured = measured_update(
                settings, clock, interval=config.interval, noise=config.noise
            )
        evaluate = None
        if config.evaluate_every:
            one_each = params_of(
                programs, rules, envs=len(programs), horizon=config.horizon, slots=config.slots
            )
            evaluate = evaluator(network, one_each, n_steps=config.horizon)
        state, done = train(
            config,
            training,
            params,
            out,
            save_every=values.save_every,
            measured=measured,
            evaluate=evaluate,
        )
    trained = f"{', '.join(config.networks)}: {done} updates of "
    trained += f"{config.envs * config.steps} steps, seed {config.seed}"
    names = tuple(r.name for r in rules.rules)
    Policy(network, state.weights, names, trained=trained).save(out / "policy.msgpack")
    print(f"results are in {out}")
    return 0


if __name__ == "__main__":
    define_flags()
    app.run(main)
