"""Optimise a network on this machine and report the gain.

Say what to optimise in one of three ways:

  python -m experiments.optimize --model=squeezenet --budget_seconds=120
  python -m experiments.optimize --model=bert --layers=2 --tokens=64 --search=greedy
  python -m experiments.optimize --onnx=net.onnx --input_shape=image:1,3,224,224
  python -m experiments.optimize --onnx=net.onnx --dim=batch:1 --constant=sample_rate:16000
  python -m experiments.optimize --fn=mypackage.net:example

--fn names a function without arguments that returns (fn, args) or (fn, args, weights), or an
attribute with such a value: a JAX function, a tuple of example arguments, and the positions of the
arguments that stay the same between calls. For instance, in mypackage/net.py:

  def example():
      return forward, (weights, image), (0,)

Ctrl-C ends the search; the best program found until then is checked, timed and reported. The
folder out/NAME, or --out, gets report.json, report.txt, program.txt, history.png and optimized.xrl.
The last is loaded by xrl_jax.load as a function that takes the arguments of the original; for an
ONNX file these are the file's inputs in their order, without those given by --constant.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

import xrl_jax
from experiments import models, targets
from experiments.onnx_flags import define_onnx_flags, open_inputs
from experiments.targets import ONNX_FLAGS, SHAPE_FLAGS, ConfigError, Target
from xrl_jax.backends.plain_data import SaveError
from xrl_jax.language.rule_files import load_rules
from xrl_jax.report.plots import plot_frontier, plot_history
from xrl_jax.report.text import Report
from xrl_jax.search.base import Strategy
from xrl_jax.strategies import SEARCHES, named


@dataclass(frozen=True)
class Config:
    """Configuration of one run, given by the flags.

    Attributes:
      model, onnx, fn: what to optimise; exactly one is not empty.
      shape: options of the model's constructor, by name.
      input_shapes: shapes of ONNX inputs that the file leaves open, by name.
      dimensions: sizes of the open dimensions of ONNX inputs, by their names in the file.
      constants: values of ONNX inputs that are always the same; one number or several.
      rules: names, families and rule files; empty for every rule.
      tolerance: as for `xrl_jax.optimize`, a number or the name of a type; empty for none.
      policy: file of a trained policy for the search xrlflow; empty for the shipped one.
      finetune: whether to train that policy on this network first.
      alone: whether to judge the search by its own results only (`xrl_jax.search.chain.alone`).
      out: folder for results; empty for none.
    """

    model: str = ""
    onnx: str = ""
    fn: str = ""
    shape: tuple[tuple[str, int | float], ...] = ()
    input_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    dimensions: tuple[tuple[str, int], ...] = ()
    constants: tuple[tuple[str, int | float | tuple[int | float, ...]], ...] = ()
    search: str = "taso"
    budget_seconds: float = 60.0
    budget_measurements: int | None = None
    seed: int = 0
    rules: tuple[str, ...] = ()
    tolerance: str = ""
    policy: str = ""
    finetune: bool = False
    alone: bool = False
    fold: bool = True
    out: str = ""
    cache_dir: str = ""
    progress: bool = True

    def __post_init__(self) -> None:
        given = [name for name in ("model", "onnx", "fn") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(f"--{name}" for name in given) or "none of them"
            raise ConfigError(f"give exactly one of --model, --onnx and --fn, not {found}")
        if self.shape and not self.model:
            raise ConfigError(f"--{self.shape[0][0]} is for --model only")
        for name, flag in ONNX_FLAGS.items():
            if getattr(self, name) and not self.onnx:
                raise ConfigError(f"--{flag} is for --onnx only")
        if self.policy and self.search != "xrlflow":
            raise ConfigError("--policy is for --search=xrlflow only")
        if self.finetune and self.search != "xrlflow":
            raise ConfigError("--finetune is for --search=xrlflow only")

    def command(self) -> str:
        """Return the command that repeats this run, without the folders of results and timings."""
        words = ["python", "-m", "experiments.optimize"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("out", "cache_dir", "progress") or value == field.default:
                continue
            if field.name == "shape":
                words += [f"--{name}={size:g}" for name, size in value]
            elif field.name in ONNX_FLAGS:
                words += [f"--{ONNX_FLAGS[field.name]}={n}:{_listed(of)}" for n, of in value]
            elif field.name == "fold":
                words.append("--nofold")
            else:
                text = ",".join(value) if isinstance(value, tuple) else value
                words.append(f"--{field.name}={text}")
        return shlex.join(words)


def _listed(value: Any) -> str:
    """Return a value as the text of a flag, several numbers separated by commas."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def define_flags(values: flags.FlagValues) -> None:
    """Add the flags of this command to `values`."""

    def text(name: str, default: str, meaning: str) -> None:
        flags.DEFINE_string(name, default, meaning, flag_values=values)

    text("model", "", f"Network to optimise: {', '.join(models.MODELS)}.")
    text("onnx", "", "ONNX file to optimise.")
    text("fn", "", "Function to optimise, as package.module:function (see above).")
    text("search", "taso", f"Search strategy: {', '.join(SEARCHES)}.")
    text("policy", "", "Policy file written by experiments.train, for --search=xrlflow.")
    flags.DEFINE_bool(
        "finetune",
        False,
        "For --search=xrlflow: train the policy on this network first, for half of the search. "
        "Compiling the training takes half a minute or more, so give the search some minutes.",
        flag_values=values,
    )
    text(
        "tolerance",
        "",
        "Largest error of a result, e.g. 1e-2 of its largest element, or bf16 or f16 for the error "
        "of the network in that type: narrower types are then used where they save time.",
    )
    flags.DEFINE_bool(
        "alone",
        False,
        "Run the search on its own: programs that are known without it are not timed beside its "
        "own, and the fastest program is not refined.",
        flag_values=values,
    )
    text("out", "", "Folder for the results, created if it is missing; empty: out/NAME.")
    text("cache_dir", "", "Folder of the timing store; empty: the user's cache folder.")
    flags.DEFINE_float(
        "budget_seconds",
        60.0,
        "Seconds to spend; 30 % are kept for the final check and timing, which may take longer.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "budget_measurements", None, "Most timings to make.", flag_values=values, lower_bound=0
    )
    flags.DEFINE_integer(
        "seed", 0, "Seed of the search and of a model's weights.", flag_values=values
    )
    flags.DEFINE_list(
        "rules",
        [],
        "Rules, families or .rules files, separated by commas (-name excludes one); empty: all.",
        flag_values=values,
    )
    define_onnx_flags(values)
    flags.DEFINE_bool("fold", True, "Treat equal repeated regions as one.", flag_values=values)
    flags.DEFINE_bool("progress", True, "Show a live display.", flag_values=values)
    for name in SHAPE_FLAGS:
        special = {"width": flags.DEFINE_float, "scan": flags.DEFINE_bool}
        define = special.get(name, flags.DEFINE_integer)
        define(name, None, f"Option {name} of --model, where it has one.", flag_values=values)


def config_of(values: flags.FlagValues) -> Config:
    """Return the configuration given by parsed flags; raise ConfigError if they are invalid."""
    given: dict[str, Any] = values.flag_values_dict()
    fields = {f.name: given[f.name] for f in dataclasses.fields(Config) if f.name in given}
    shape = tuple((name, given[name]) for name in SHAPE_FLAGS if given[name] is not None)
    fields |= {"rules": tuple(given["rules"]), "shape": shape}
    fields |= open_inputs(values)
    name = given["model"] or Path(given["onnx"]).stem or given["fn"].replace(":", ".")
    fields["out"] = given["out"] or f"out/{name}"
    return Config(**fields)


def target_of(config: Config) -> Target:
    """Build or load the function to optimise; raise ConfigError, or OnnxError for a bad file."""
    if config.model:
        return targets.from_model(config.model, seed=config.seed, **dict(config.shape))
    if config.onnx:
        given = {name: dict(getattr(config, name)) for name in ONNX_FLAGS}
        return targets.from_onnx_file(config.onnx, **given)
    return targets.from_attribute(config.fn)


def tolerance_of(text: str) -> float | str | None:
    """Return the tolerance for `optimize`: a number, the name of a type, or None if empty."""
    try:
        return float(text) if text else None
    except ValueError:
        return text


def rules_of(names: Sequence[str]) -> tuple[Any, ...] | None:
    """Return the rules for `optimize`: the names, and the rules loaded from files; None for all."""
    files = [name for name in names if name.endswith(".rules")]
    loaded = [rule for name in files for rule in load_rules(Path(name))]
    return (*(name for name in names if name not in files), *loaded) or None


def search_of(config: Config) -> str | Strategy:
    """Return the configured search; raise ValueError, or OSError for the file of a policy."""
    search = named(config.search)  # an unknown name is reported before anything is loaded
    if config.policy or config.finetune:
        from xrl_jax.rl.finetune import FineTune
        from xrl_jax.rl.policy import load_policy
        from xrl_jax.rl.strategy import XRLflow

        policy = load_policy(config.policy or None)
        follow = XRLflow(policy, FineTune() if config.finetune else None)
        search = search._replace(search=lambda: follow)
    return search.without_stages() if config.alone else search.strategy()


def run(config: Config) -> Report:
    """Optimise, write the results where `config.out` says, and return the report.

    Raises:
      ConfigError, ValueError, OSError: the run cannot be done; the message says why.
      KeyboardInterrupt: Ctrl-C came before there was anything to report.
    """
    search = search_of(config)
    rules = rules_of(config.rules)
    target = target_of(config)
    if config.out:  # before the search, which would be lost if the folder could not be made
        Path(config.out).mkdir(parents=True, exist_ok=True)
    budget = xrl_jax.Budget(seconds=config.budget_seconds, measurements=config.budget_measurements)
    fn: Any = target.fn
    if not config.fold:
        fn = xrl_jax.from_jax(fn, *target.args, weights=target.weights, fold=False)
    fast = xrl_jax.optimize(
        fn,
        *target.args,
        weights=target.weights,
        search=search,
        rules=rules,
        budget=budget,
        key=jax.random.key(config.seed),
        cache_dir=config.cache_dir or None,
        tolerance=tolerance_of(config.tolerance),
        progress=config.progress,
    )
    report = dataclasses.replace(
        fast.report, name=target.name, search=config.search, seed=config.seed
    )
    if config.out:
        write_results(Path(config.out), config, fast, report)
    return report


def write_results(out: Path, config: Config, fast: Any, report: Report) -> None:
    """Write report.json, report.txt, program.txt, history.png, optimized.xrl and, with a tolerance,
    frontier.png into `out`.
    """
    values = {"command": config.command(), **report.as_dict()}
    (out / "report.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    (out / "report.txt").write_text(f"{report}\n", encoding="utf-8")
    (out / "program.txt").write_text(f"{fast.program}\n", encoding="utf-8")
    try:
        plot_history(report, out / "history.png")
        if report.frontier:
            plot_frontier(report, out / "frontier.png")
    except ModuleNotFoundError as error:  # matplotlib is optional; report.json has the numbers
        print(f"no plots are written: {error}", file=sys.stderr)
    try:
        fast.save(out / "optimized.xrl")
    except SaveError as error:
        print(f"optimized.xrl is not written: {error}", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """Run with the parsed flags; the exit status is 2 for bad flags and input, 130 for Ctrl-C."""
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # else JAX logs every backend that is missing
    try:
        if len(argv) > 1:
            raise ConfigError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
        config = config_of(flags.FLAGS)
        report = run(config)
    except KeyboardInterrupt:
        print("interrupted before there was a result", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        logging.debug("the error came from here", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        if not isinstance(error, ConfigError):
            print("(--verbosity=1 shows where it came from)", file=sys.stderr)
        return 2
    print(report)
    if config.out:
        print(f"\nresults are in {config.out}")
    return 0


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
