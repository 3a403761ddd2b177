"""Train X-RLflow's policy with PPO on networks, with predicted or measured times as the reward.

  python -m experiments.train --networks=squeezenet,bert --updates=200 --seed=0
  python -m experiments.train --networks=squeezenet --reward=measured --model_updates=150
  python -m experiments.train --networks=nasrnn --preset=paper --updates=10

--preset=paper uses the settings of X-RLflow's own code: its variant of the policy network, which
encodes the graph of every candidate (slow: some steps a second), its reward and its PPO.

--reward=measured times the program of every environment every --interval steps and at the end of an
episode, after --model_updates updates on predictions; the timings are kept and not repeated.

--timed_seconds=60 first lets taso search each network for that long, so that predictions use its
timings of operators. --costs uses the table that another run has kept in this way.

--target=h200 trains for a GPU that need not be here: operators cost what experiments.gpu_lab
recorded on such a GPU, all else what is predicted; with --predicted nothing is taken from a record.
This needs the compiler for CUDA: python -m xrl_jax.measure.gpu.install

--cost_spread=0.3 changes the corrections of costs every few updates, as another machine might have
them.

All networks are trained on at once, each in the same number of environments. --out gets
policy.msgpack (for `optimize --search=xrlflow --policy=...`), metrics.jsonl, events for
TensorBoard, curve.png, and a checkpoint every --save_every updates. The same command continues from
the last checkpoint, also after kill -9, and ends with the same weights, bit for bit. Ctrl-C keeps
what was learned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import app, flags, logging
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.environments import devices, params_of, program_of
from experiments.evaluation import Reached, evaluator
from experiments.memory import peak_bytes
from experiments.targets import ConfigError
from experiments.timed_costs import kept_costs, load_costs, oracle_of
from experiments.train_flags import Config, chosen, define_flags, settings_of
from experiments.training_log import TrainingLog, plot, row_of
from xrl_jax.cost.calibration import pessimistic_costs, varied
from xrl_jax.language.rule_files import available_rules, standard_rules
from xrl_jax.language.table import compile_rules
from xrl_jax.measure.store import default_cache_dir
from xrl_jax.rl.collect import TrainState
from xrl_jax.rl.env import EnvParams, with_costs
from xrl_jax.rl.learn import Metrics
from xrl_jax.rl.measured import measured_update, timed_by
from xrl_jax.rl.policy import Policy
from xrl_jax.rl.train import Training, restarted, spread
from xrl_jax.runtime.compile_cache import COMPILED, persistent_cache
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.runtime.target_platform import making_for, target_platform

_VARIED_EVERY = 8  # updates between changes of the costs under --cost_spread


def _plain(state: TrainState) -> dict[str, Any]:
    """Return the state as a tree of plain arrays."""
    return state._replace(key=jax.random.key_data(state.key))._asdict()


class Checkpoints:
    """The last state of a training, kept in a folder and written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, update: int, state: TrainState) -> None:
        """Save the state after `update` updates, unless it is saved already."""
        if self._manager.latest_step() == update:
            return
        self._manager.save(update, args=ocp.args.StandardSave(_plain(state)))
        self._manager.wait_until_finished()

    def last(self, like: TrainState) -> tuple[int, TrainState]:
        """Return the number of updates done and the state then; (0, `like`) if none is saved."""
        update = self._manager.latest_step()
        if update is None:
            return 0, like
        found = self._manager.restore(update, args=ocp.args.StandardRestore(_plain(like)))
        values = TrainState(**found)
        key = jax.random.wrap_key_data(values.key)
        leaves = jax.tree.leaves(values._replace(key=key))
        return update, jax.tree.unflatten(jax.tree.structure(like), leaves)


def _varied(params: EnvParams, key: jax.Array, spread: float) -> EnvParams:
    """Return the environments with varied corrections of the costs."""
    return with_costs(params, varied(params.costs, key, spread=spread))


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
) -> tuple[TrainState, int, float]:
    """Train to the end, or until Ctrl-C, writing metrics and checkpoints to `out`.

    Args:
      measured: the update on measured times, for the updates after those on predictions; None if
        there are none.
      evaluate: called every `config.evaluate_every` updates, and after the last.

    Returns:
      The last state, how many updates led to it, and how many seconds these took.
    """
    init, predicted = engine_jit(training.init), engine_jit(training.update)
    print("compiling", file=sys.stderr)
    checkpoints = Checkpoints(out / "checkpoints")
    key, plain, part, vary = jax.random.key(config.seed), params, None, engine_jit(_varied)
    done, state = checkpoints.last(init(key, params))
    log = TrainingLog(out, done)
    before = log.rows[-1]["seconds"] if log.rows else 0.0
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("training", total=config.updates, completed=done)
            while done < config.updates:
                if config.cost_spread and done // _VARIED_EVERY != part:
                    part = done // _VARIED_EVERY
                    params = vary(plain, jax.random.fold_in(key, part), config.cost_spread)
                    # Not when a training that was killed continues with the costs that it had.
                    if done % _VARIED_EVERY == 0:
                        state = restarted(state)
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
                    row["evaluated"] = found.by_program(config.networks)
                # Only now, so that after Ctrl-C every update that counts has its line.
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
    return state, done, log.rows[-1]["seconds"] if log.rows else 0.0


def main(argv: Sequence[str]) -> int:
    """Train and save the policy. The exit status is 2 for bad flags."""
    with making_for("gpu") if flags.FLAGS.target else contextlib.nullcontext():
        return _main(argv)


def _main(argv: Sequence[str]) -> int:
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    values = flags.FLAGS
    out = Path(values.out)
    try:
        config = chosen(argv, values)
        written, text = out / "config.json", json.dumps(dataclasses.asdict(config), indent=1)
        if written.is_file() and written.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"{out} holds a training with other flags (config.json): choose another --out, or "
                "remove it"
            )
        over = devices(config.devices)
        programs = [program_of(n, fold=config.fold, seed=config.seed) for n in config.networks]
        costs = pessimistic_costs(load_costs(Path(config.costs))) if config.costs else None
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    written.write_text(text, encoding="utf-8")
    platform = target_platform()
    # On GPUs networks of convolutions are searched with these rules, too (`domain.rules_for`).
    library = standard_rules(bounded=platform == "gpu")
    rules = compile_rules(available_rules(library, platform))
    settings = settings_of(config, rules)
    network = settings.network
    training = spread(settings, over)
    from_record = not config.predicted
    oracle = functools.partial(oracle_of, out, config.target, from_record=from_record)
    with contextlib.ExitStack() as stack:
        stack.enter_context(persistent_cache(os.path.join(default_cache_dir(), COMPILED)))
        if config.timed_seconds:
            named = dict(zip(config.networks, programs, strict=True))
            try:
                costs = kept_costs(
                    named, rules, out, oracle, seconds=config.timed_seconds, seed=config.seed
                )
            except ValueError as error:  # nothing was recorded on such a GPU, or a damaged file
                print(f"error: {error}", file=sys.stderr)
                return 2
        sizes = {"horizon": config.horizon, "slots": config.slots, "costs": costs}
        params = params_of(programs, rules, envs=config.envs, **sizes)
        measured = None
        if config.reward == "measured":
            each = config.envs // len(programs)
            clock = timed_by(
                stack.enter_context(oracle()), [p for p in programs for _ in range(each)]
            )
            measured = measured_update(
                settings, clock, interval=config.interval, noise=config.noise
            )
        evaluate = None
        if config.evaluate_every:
            one_each = params_of(programs, rules, envs=len(programs), **sizes)
            evaluate = evaluator(network, one_each)
        state, done, seconds = train(
            config,
            training,
            params,
            out,
            save_every=values.save_every,
            measured=measured,
            evaluate=evaluate,
        )
    trained = f"{', '.join(config.networks)}: {done} updates of "
    trained += f"{config.envs * config.steps} steps in {seconds / 60:.0f} min, seed {config.seed}"
    if config.target:
        trained += (
            f", under {'predicted' if config.predicted else 'recorded'} costs of {config.target}"
        )
    names = tuple(r.name for r in rules.rules)
    Policy(network, state.weights, names, trained=trained).save(out / "policy.msgpack")
    print(f"results are in {out}; peak memory {peak_bytes() / 2**30:.2f} GiB")
    return 0


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
