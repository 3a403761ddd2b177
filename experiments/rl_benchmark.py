"""Speed of X-RLflow's environment and training.

  python -m experiments.rl_benchmark --networks=bert,inceptionv3 --batches=1,16,128

The command prints for each network, folded and unfolded, the environment steps per second of all
environments together, with random actions and with those of an untrained policy; the training steps
per second, updates included; and, separately, the seconds of compilation and the peak memory (on a
GPU, that of the GPU). Each row is measured in a process of its own. Its environments are spread
over --devices (on a CPU, its cores), or over fewer if they cannot be shared out evenly. --out gets
rl_benchmark.json.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

from experiments import children, models, targets
from experiments.environments import params_of, program_of
from experiments.memory import peak_bytes
from xrl_jax.language.rule_files import available_rules, standard_rules
from xrl_jax.language.table import compile_rules
from xrl_jax.rl.actions import draw
from xrl_jax.rl.decode import Choice, by_chance, by_network
from xrl_jax.rl.env import EnvParams, EnvState, batch_axes, batch_specs, step
from xrl_jax.rl.networks import NetworkConfig
from xrl_jax.rl.train import spread
from xrl_jax.rl.train_config import TrainConfig
from xrl_jax.runtime.engine_jit import engine_jit

FLAGS = flags.FLAGS
_RUNS = 3  # number of timed runs


def walk(
    choose: Choice, params: EnvParams, state: EnvState, key: jax.Array, n_steps: int
) -> EnvState:
    """Advance an environment by `n_steps` steps; when an episode ends, the next begins."""

    def one(state: EnvState, key: jax.Array) -> tuple[EnvState, None]:
        act_key, step_key = jax.random.split(key)
        action = draw(act_key, choose(state, params))
        return step(step_key, state, action, params)[0], None

    return jax.lax.scan(one, state, jax.random.split(key, n_steps))[0]


def rate(advance: Callable[[Any, int], Any], state: Any, *, n: int) -> tuple[float, float]:
    """Return the median steps per second, and the seconds of compilation.

    Each run continues from the state after the last one, because at the start all environments are
    equal, and the engine processes equal ones only once.

    Args:
      advance: (state, number of the run) -> the state `n` steps later.
    """
    seconds = []
    for i in range(1 + _RUNS):
        began = time.perf_counter()
        state = jax.block_until_ready(advance(state, i))
        seconds.append(time.perf_counter() - began)
    usual = statistics.median(seconds[1:])
    return n / usual, max(seconds[0] - usual, 0.0)


def printed(name: str, found: tuple[float, float]) -> tuple[float, float]:
    """Return the result of `rate` after printing it, because a row can take many minutes."""
    print(f"{name}: {found[0]:,.0f} steps a second, compiled in {found[1]:.0f} s", flush=True)
    return found


def measure(network: str, *, fold: bool, batch: int) -> dict[str, Any]:
    """Measure one row of the table."""
    rules = compile_rules(available_rules(standard_rules(), jax.default_backend()))
    program = program_of(network, fold=fold, seed=0)
    params = params_of([program], rules, envs=batch, slots=FLAGS.slots)
    axes, n = batch_axes(params), batch * FLAGS.steps
    sizes = NetworkConfig(n_rules=len(rules.rules))
    settings = TrainConfig(network=sizes, steps=FLAGS.steps)
    devices = jax.devices()[: math.gcd(batch, FLAGS.devices)]
    mesh = jax.sharding.Mesh(np.asarray(devices), ("environments",))
    each, same = jax.P("environments"), jax.P()
    training = spread(settings, devices)
    first = engine_jit(training.init)(jax.random.key(0), params)

    def rate_of(name: str, choose: Choice) -> tuple[float, float]:
        of_all = jax.vmap(lambda p, s, k: walk(choose, p, s, k, FLAGS.steps), in_axes=(axes, 0, 0))
        if len(devices) > 1:
            ins = (batch_specs(params, each, same), each, each)
            of_all = jax.shard_map(of_all, mesh=mesh, in_specs=ins, out_specs=each, check_vma=False)
        steps = engine_jit(of_all)

        def advance(states: EnvState, run: int) -> EnvState:
            return steps(params, states, jax.random.split(jax.random.key(run), batch))

        return printed(name, rate(advance, first.envs, n=n))

    chance, chance_compile = rate_of("random", by_chance)
    policy_choice = by_network(sizes, jax.device_get(first.weights))
    policy, policy_compile = rate_of("policy", policy_choice)
    row: dict[str, Any] = {
        "network": network,
        "fold": fold,
        "device": devices[0].device_kind,
        "bucket": params.start.graph.nodes.op.shape[1],
        "batch": batch,
        "devices": len(devices),
        "random": chance,
        "policy": policy,
        "compile_seconds": {"random": chance_compile, "policy": policy_compile},
    }
    if n // len(devices) % settings.minibatches == 0:
        update = engine_jit(training.update)
        trained = rate(lambda s, _: update(s, params)[0], first, n=n)
        row["training"], compiling = printed("training", trained)
        row["compile_seconds"]["training"] = compiling
    return row | {"peak_bytes": peak_bytes()}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    names = ("network", "bucket", "batch", "devices", "random", "policy", "training")
    table = Table(*names, "compiling, s", "GiB", title="steps per second", title_justify="left")
    for r in rows:
        table.add_row(
            r["network"] + (" folded" if r["fold"] else ""),
            str(r["bucket"]),
            str(r["batch"]),
            str(r["devices"]),
            *(f"{r[n]:,.0f}" if n in r else "-" for n in ("random", "policy", "training")),
            " / ".join(f"{s:.0f}" for s in r["compile_seconds"].values()),
            f"{r['peak_bytes'] / 2**30:.2f}",
        )
    Console(width=110).print(table)


def define_flags() -> None:
    flags.DEFINE_list("networks", ["bert", "inceptionv3"], "Names of networks.")
    flags.DEFINE_list("batches", ["1", "16", "128"], "Numbers of environments that run at once.")
    flags.DEFINE_list("folds", ["1", "0"], "1 for folded networks, 0 for unfolded ones.")
    flags.DEFINE_integer("steps", 16, "Steps of each environment that are timed.", lower_bound=1)
    flags.DEFINE_integer(
        "slots", 64, "Most candidates that the policy sees at a step.", lower_bound=1
    )
    flags.DEFINE_integer(
        "devices", os.cpu_count() or 1, "Devices to spread environments over.", lower_bound=1
    )
    flags.DEFINE_string("row", "", "Internal: the file for the row of a process that this starts.")
    flags.DEFINE_string("out", "out/rl_benchmark", "Folder of the results.")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. The exit status is 2 for bad flags, 1 if a row failed."""
    if not FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    try:
        if len(argv) > 1:
            raise targets.ConfigError(
                f"unexpected argument {argv[1]!r}: flags are written --name=value"
            )
        targets.require_known("networks", FLAGS.networks, models.MODELS)
        batches = [int(b) for b in FLAGS.batches]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out = Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    if FLAGS.row:
        jax.config.update("jax_num_cpu_devices", FLAGS.devices)
        row = measure(FLAGS.networks[0], fold=FLAGS.folds == ["1"], batch=batches[0])
        (out / FLAGS.row).write_text(json.dumps(row), encoding="utf-8")
        return 0
    rows, status = [], 0
    for network, fold, batch in itertools.product(FLAGS.networks, FLAGS.folds, batches):
        print(f"{network}, fold {fold}, batch {batch}", file=sys.stderr)
        command = [sys.executable, "-m", "experiments.rl_benchmark", "--row=row.json"]
        command += [f"--networks={network}", f"--folds={fold}", f"--batches={batch}"]
        command += [f"--steps={FLAGS.steps}", f"--slots={FLAGS.slots}", f"--out={out}"]
        command += [f"--devices={FLAGS.devices}"]
        ended = children.run(command, log=out / "log.txt")
        if ended.interrupted:
            break
        if ended.status:
            print(f"failed: see {out / 'log.txt'}", file=sys.stderr)
            status = 1
            continue
        row = json.loads((out / "row.json").read_text(encoding="utf-8"))
        rows.append(row)
        (out / "rl_benchmark.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    show(rows)
    return status


if __name__ == "__main__":
    define_flags()
    app.run(main)
