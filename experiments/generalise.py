"""How well a trained policy generalises to other shapes and to networks it was not trained on.

  python -m experiments.generalise --policy=out/train/policy.msgpack \\
      --networks=bert:tokens=64,bert:tokens=256,squeezenet:image_size=160,mobilenetv2

For each network, with its options after colons, and for each of --seeds, the command compares the
least predicted time, relative to the network's own, that is reached by four rollouts of the policy,
four of an untrained policy of the same sizes, four random walks, and greedy search, all in the same
environment. Times are predicted under a cost table with the timings that taso makes when it first
searches each network for --timed_seconds. The command prints means and standard errors over the
seeds, and by how many standard errors the policy is ahead, for each network and for the geometric
mean of all. --out gets generalise.json.

  --at_home=out/t64/policy.msgpack,out/t256/policy.msgpack,,

names for each network a policy that was trained on it (or none), whose result is printed, too.

  --measured_seconds=100

optimises each network for so long by greedy search and by the policy's rollouts alone, which may
make a tenth of the timings that greedy search made, and times both results in turn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

from experiments.environments import params_of, program_of
from experiments.evaluation import Reached, evaluator
from experiments.few_timings import SearchFailedError, few_timings
from experiments.side_by_side import WrongResultError
from experiments.targets import ConfigError
from experiments.timed_costs import kept_costs, oracle_of
from xrl_jax.graph.graph import GraphError
from xrl_jax.language.rule_files import available_rules, standard_rules
from xrl_jax.language.table import compile_rules
from xrl_jax.rl.env import HORIZON, SLOTS
from xrl_jax.rl.policy import PolicyError, load_policy, shipped
from xrl_jax.rl.train import training_of
from xrl_jax.rl.train_config import TrainConfig
from xrl_jax.runtime.engine_jit import engine_jit

FLAGS = flags.FLAGS
HOME = "at home"
ALL = "geometric mean"  # of all networks
WAYS = ("policy", "untrained", "chance", "greedy", HOME)


Values = dict[str, list[float]]  # by way (see WAYS): one value for each seed


def values_of(
    trained: Sequence[Reached], untrained: Sequence[Reached], at_home: Sequence[Reached] = ()
) -> Values:
    """Return what each way reaches on one program, given the evaluations for each seed.

    Args:
      at_home: evaluations of a policy that was trained on this program.
    """
    values = {
        "policy": [float(r.policy[0]) for r in trained],
        "untrained": [float(r.policy[0]) for r in untrained],
        "chance": [float(r.chance[0]) for r in trained],
        "greedy": [float(r.greedy[0]) for r in trained],
    }
    return values | ({HOME: [float(r.policy[0]) for r in at_home]} if at_home else {})


def geometric_means(programs: Sequence[Values]) -> Values:
    """Return geometric means over programs, for each seed, of the ways that all programs have."""
    return {
        way: np.exp(np.mean(np.log([v[way] for v in programs]), axis=0)).tolist()
        for way in WAYS
        if all(way in v for v in programs)
    }


def row_of(values: Values) -> dict[str, Any]:
    """Return means and standard errors over seeds, and by how many standard errors the policy is
    ahead of the untrained policy and of chance.
    """
    means = {w: float(np.mean(v)) for w, v in values.items()}
    errors = {w: float(np.std(v, ddof=1) / np.sqrt(len(v))) for w, v in values.items()}
    ahead = {
        w: float((means[w] - means["policy"]) / max(np.hypot(errors[w], errors["policy"]), 1e-9))
        for w in ("untrained", "chance")
    }
    return {"mean": means, "standard_error": errors, "ahead": ahead}


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Print the table."""
    table = Table("network", *WAYS, "ahead of untrained", "ahead of chance", title_justify="left")
    for name, row in rows.items():
        cells = (
            f"{row['mean'][w]:.3f} ({row['standard_error'][w]:.3f})" if w in row["mean"] else "-"
            for w in WAYS
        )
        ahead = (f"{row['ahead'][w]:.1f}" for w in ("untrained", "chance"))
        table.add_row(name, *cells, *ahead)
    Console(width=120).print(table)


def define_flags() -> None:
    flags.DEFINE_string("policy", "", "Policy file; the shipped one by default.")
    flags.DEFINE_list(
        "networks",
        ["squeezenet"],
        "Networks, as NAME or NAME:OPTION=NUMBER:..., separated by commas.",
    )
    flags.DEFINE_integer(
        "seeds", 5, "Number of seeds, of rollouts and of untrained policies.", lower_bound=2
    )
    flags.DEFINE_integer("horizon", HORIZON, "Steps of a rollout.", lower_bound=1)
    flags.DEFINE_integer(
        "slots", SLOTS, "Most candidates that the policy sees at a step.", lower_bound=1
    )
    flags.DEFINE_list(
        "at_home", [], "Policy files, one trained on each network, in their order; may be empty."
    )
    flags.DEFINE_float(
        "timed_seconds",
        0.0,
        "Seconds in which the search taso first times each network's operators; 0: skip this.",
    )
    flags.DEFINE_float(
        "measured_seconds",
        0.0,
        "Seconds each for greedy search and for the policy with a tenth of its timings, whose "
        "results are then timed; 0: skip this.",
    )
    flags.DEFINE_float("compare_seconds", 15.0, "Seconds to time these results in turn.")
    flags.DEFINE_string("out", "out/generalise", "Folder of the results.")


def at_home(names: Sequence[str], files: Sequence[str]) -> dict[str, Path]:
    """Return, by network, the file of the policy trained on it; networks may have none.

    Raises:
      ConfigError: `files` is not empty and does not have one item for each network.
    """
    if files and len(files) != len(names):
        raise ConfigError(
            f"--at_home names {len(files)} policies for {len(names)} networks: name one for each"
        )
    return {name: Path(file) for name, file in zip(names, files, strict=False) if file}


def main(argv: Sequence[str]) -> int:
    """Run the comparison. The exit status is 2 for bad flags."""
    if not FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    try:
        if len(argv) > 1:
            raise ConfigError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
        if FLAGS.measured_seconds and any(":" in text for text in FLAGS.networks):
            raise ConfigError("--measured_seconds is for --networks without options only")
        policy = load_policy(FLAGS.policy or None)
        homes = {n: load_policy(f) for n, f in at_home(FLAGS.networks, FLAGS.at_home).items()}
        rules = compile_rules(available_rules(standard_rules(), jax.default_backend()))
        programs = {text: program_of(text, fold=True, seed=0) for text in FLAGS.networks}
        out = Path(FLAGS.out)
        out.mkdir(parents=True, exist_ok=True)
        sizes: dict[str, Any] = {"horizon": FLAGS.horizon, "slots": FLAGS.slots}
        if FLAGS.timed_seconds:
            sizes["costs"] = kept_costs(
                programs, rules, out, lambda: oracle_of(out), seconds=FLAGS.timed_seconds, seed=0
            )
    except (ConfigError, PolicyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    network, weights = policy.fitted(rules)
    print(f"{FLAGS.policy or shipped()}: {policy.trained}")
    rows: dict[str, dict[str, Any]] = {}
    values: dict[str, Values] = {}
    keys, blank = jax.random.split(jax.random.key(0), FLAGS.seeds), []
    for text, program in programs.items():
        try:
            params = params_of([program], rules, envs=1, **sizes)
        except GraphError as error:
            print(f"{text}: {error}", file=sys.stderr)
            continue
        if not blank:  # the weights fit graphs of any size
            init = engine_jit(training_of(TrainConfig(network=network)).init)
            blank = [init(key, params).weights for key in keys]
        evaluate = evaluator(network, params)
        trained = [evaluate(weights, key) for key in keys]
        untrained = [evaluate(w, key) for w, key in zip(blank, keys, strict=True)]
        home = []
        if text in homes:
            of_home, its_weights = homes[text].fitted(rules)
            evaluate = evaluator(of_home, params)
            home = [evaluate(its_weights, key) for key in keys]
        values[text] = values_of(trained, untrained, home)
        rows[text] = row_of(values[text])
        show(rows)
    if len(values) > 1:
        rows[ALL] = row_of(geometric_means(list(values.values())))
        show({ALL: rows[ALL]})
    result = {"policy": FLAGS.policy, "trained": policy.trained, "rows": rows}
    if FLAGS.measured_seconds:
        result["measured"] = measured(list(programs), out)
    (out / "generalise.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"results are in {out}")
    return 0


def measured(names: Sequence[str], out: Path) -> dict[str, Any]:
    """Compare greedy search with a policy that makes a tenth of its timings, on each network."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            row = few_timings(
                name,
                Path(FLAGS.policy),
                out / name,
                seconds=FLAGS.measured_seconds,
                compare_seconds=FLAGS.compare_seconds,
            )
        except (SearchFailedError, WrongResultError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        found[name] = row
        (ratio, low, high), made, speedup = (
            row[k] for k in ("greedy_over_policy", "measurements", "speedup")
        )
        print(
            f"{name}: speed-up {speedup['greedy']:.2f} by greedy search with {made['greedy']} "
            f"timings, {speedup['policy']:.2f} by the policy with {made['policy']}; time of greedy "
            f"search's result / of the policy's {ratio:.2f} ({low:.2f} to {high:.2f})"
        )
    return found


if __name__ == "__main__":
    define_flags()
    app.run(main)
