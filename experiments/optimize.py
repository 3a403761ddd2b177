"""Optimise a network on this machine and report what was gained.

Say what to optimise in one of three ways:

  python -m experiments.optimize --model=squeezenet --budget_seconds=120 --out=out/squeezenet
  python -m experiments.optimize --model=bert --layers=2 --tokens=64 --search=greedy
  python -m experiments.optimize --onnx=net.onnx --input_shape=image:1,3,224,224 --out=out/net
  python -m experiments.optimize --fn=mypackage.net:example

--fn names a function without arguments, or an attribute, that gives (fn, args) or (fn, args, weights): a JAX function, a
tuple of example arguments, and the positions of those that stay the same between calls. For instance, in mypackage/net.py:

  def example():
      return forward, (weights, image), (0,)

Ctrl-C ends the search; the best program found until then is checked, timed and reported. With --out, the folder gets
report.json, report.txt, program.txt, history.png and optimized.xrl (for xrl_jax.load).
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

import xrl_jax
from experiments import models
from xrl_jax.frontends.onnx import load_onnx
from xrl_jax.report.plots import plot_history
from xrl_jax.report.text import Report
from xrl_jax.rewrite.library import load_rules

SHAPE_FLAGS = ("layers", "tokens", "image_size", "width", "batch")


class ConfigError(ValueError):
    """Flags that do not say what to do; the message names the flag."""


@dataclass(frozen=True)
class Config:
    """What one run does; a field for each flag.

    Attributes:
      model, onnx, fn: what to optimise; exactly one is not empty.
      shape: options of the model's constructor, by name.
      input_shapes: shapes of ONNX inputs that the file leaves open.
      rules: names, families and rule files; empty for every rule.
      out: folder for results; empty for none.
    """

    model: str = ""
    onnx: str = ""
    fn: str = ""
    shape: tuple[tuple[str, int | float], ...] = ()
    input_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    search: str = "taso"
    budget_seconds: float = 60.0
    budget_measurements: int | None = None
    seed: int = 0
    rules: tuple[str, ...] = ()
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
        if self.input_shapes and not self.onnx:
            raise ConfigError("--input_shape is for --onnx only")

    def command(self) -> str:
        """The command that repeats this run; where results and timings are kept is left out."""
        words = ["python", "-m", "experiments.optimize"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("out", "cache_dir", "progress") or value == field.default:
                continue
            if field.name == "shape":
                words += [f"--{name}={size:g}" for name, size in value]
            elif field.name == "input_shapes":
                words += [f"--input_shape={n}:{','.join(map(str, dims))}" for n, dims in value]
            elif field.name == "fold":
                words.append("--nofold")
            else:
                text = ",".join(value) if isinstance(value, tuple) else value
                words.append(f"--{field.name}={text}")
        return shlex.join(words)


@dataclass(frozen=True)
class Target:
    """A function to optimise, with example arguments; `weights` are positions among them."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    weights: tuple[int, ...]


def define_flags(values: flags.FlagValues) -> None:
    """Add the flags of this command to `values`."""

    def text(name: str, default: str, meaning: str) -> None:
        flags.DEFINE_string(name, default, meaning, flag_values=values)

    text("model", "", f"Network to optimise: {', '.join(models.MODELS)}.")
    text("onnx", "", "ONNX file to optimise.")
    text("fn", "", "What to optimise, as package.module:function (see above).")
    text("search", "taso", "Search strategy: random, local, greedy, taso.")
    text("out", "", "Folder for the results; made if it is missing.")
    text("cache_dir", "", "Folder of the timing store; empty: the user's cache folder.")
    flags.DEFINE_float("budget_seconds", 60.0, "Seconds to spend in all.", flag_values=values)
    flags.DEFINE_integer(
        "budget_measurements", None, "Timings to make at most.", flag_values=values, lower_bound=0
    )
    flags.DEFINE_integer("seed", 0, "Seed of the search.", flag_values=values)
    flags.DEFINE_list(
        "rules",
        [],
        "Rule names, families or .rules files, with commas; -name switches one off. Empty: all.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "input_shape", [], "NAME:1,3,224,224 for an ONNX input with open dimensions.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_bool("fold", True, "Treat equal repeated regions as one.", flag_values=values)
    flags.DEFINE_bool("progress", True, "Show a live display.", flag_values=values)
    for name in SHAPE_FLAGS:
        define = flags.DEFINE_float if name == "width" else flags.DEFINE_integer
        define(name, None, f"Option {name} of --model, where it has one.", flag_values=values)


def config_of(values: flags.FlagValues) -> Config:
    """The configuration that parsed flags amount to.

    Raises:
      ConfigError: the flags do not fit together.
    """
    shape = tuple((n, values[n].value) for n in SHAPE_FLAGS if values[n].value is not None)
    same = {f.name: values[f.name].value for f in dataclasses.fields(Config) if f.name in values}
    return Config(
        **{
            **same,
            "rules": tuple(values["rules"].value),
            "shape": shape,
            "input_shapes": tuple(_input_shape(text) for text in values["input_shape"].value),
        }
    )


def _input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, colon, dims = text.rpartition(":")
    try:
        return name, tuple(int(d) for d in dims.split(",")) if name and colon else _refuse()
    except ValueError:
        raise ConfigError(
            f"--input_shape={text} must be NAME:1,3,224,224: a name and its sizes"
        ) from None


def _refuse() -> tuple[int, ...]:
    raise ValueError


def target_of(config: Config) -> Target:
    """Build or load what is to be optimised.

    Raises:
      ConfigError: there is no such model, option, module or attribute.
      OnnxError: the file is no model that can be read.
    """
    if config.model:
        return _model_target(config)
    if config.onnx:
        if not Path(config.onnx).is_file():
            raise ConfigError(f"--onnx={config.onnx}: there is no such file")
        loaded = load_onnx(config.onnx, input_shapes=dict(config.input_shapes))
        args = (loaded.weights, *loaded.inputs)
        return Target(Path(config.onnx).stem, loaded.fn, args, (0,))
    return _function_target(config.fn)


def _model_target(config: Config) -> Target:
    if config.model not in models.MODELS:
        hint = _nearest(config.model, models.MODELS)
        known = ", ".join(models.MODELS)
        raise ConfigError(
            f"--model={config.model}: there is no such network{hint} (known: {known})"
        )
    options = inspect.signature(models.MODELS[config.model]).parameters
    for name, _ in config.shape:
        if name not in options:
            known = ", ".join(f"--{n}" for n in SHAPE_FLAGS if n in options)
            raise ConfigError(f"--model={config.model} has no option --{name} (it has: {known})")
    shape: dict[str, Any] = dict(config.shape)
    if "width" in shape and isinstance(options["width"].default, int):
        shape["width"] = int(shape["width"])
    try:
        model = models.get(config.model, seed=config.seed, **shape)
    except ValueError as error:
        raise ConfigError(f"--model={config.model}: {error}") from error
    # Weights on the device: host arrays would be copied in every call.
    weights = jax.tree.map(jax.numpy.asarray, model.weights)
    return Target(config.model, model.fn, (weights, *model.inputs), (0,))


def _function_target(spec: str) -> Target:
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"--fn={spec} must be package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        raise ConfigError(
            f"--fn={spec}: there is no module {error.name!r} here; run the command in the folder "
            "that holds it, or install its package"
        ) from error
    if not hasattr(module, attribute):
        hint = _nearest(attribute, (n for n in vars(module) if not n.startswith("_")))
        raise ConfigError(f"--fn={spec}: module {module_name!r} has no {attribute!r}{hint}")
    example = getattr(module, attribute)
    if callable(example):
        try:
            inspect.signature(example).bind()
        except TypeError:
            raise ConfigError(
                f"--fn={spec}: {attribute} takes arguments; name a function without any that "
                "returns (fn, args) or (fn, args, weights)"
            ) from None
        example = example()
    match example:
        case (fn, (tuple() | list()) as args) if callable(fn):
            return Target(attribute, fn, tuple(args), ())
        case (fn, (tuple() | list()) as args, weights) if callable(fn):
            positions = (weights,) if isinstance(weights, int) else tuple(weights)
            return Target(attribute, fn, tuple(args), positions)
    raise ConfigError(
        f"--fn={spec} must give (fn, args) or (fn, args, weights) with a tuple of arguments, "
        f"not {type(example).__name__}"
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def rules_of(names: Sequence[str]) -> tuple[Any, ...] | None:
    """What `optimize` takes as rules: names as they are, the rules of files; None for all."""
    files = [name for name in names if name.endswith(".rules")]
    loaded = [rule for name in files for rule in load_rules(Path(name))]
    return (*(name for name in names if name not in files), *loaded) or None


def run(config: Config) -> Report:
    """Optimise, write the results where `config.out` says, and return the report.

    Raises:
      ConfigError, ValueError, OSError: what was asked for cannot be done; the message says why.
      KeyboardInterrupt: before there was anything to report.
    """
    rules = rules_of(config.rules)
    if config.out:  # a folder that cannot be made is found out now, not after the search
        Path(config.out).mkdir(parents=True, exist_ok=True)
    budget = xrl_jax.Budget(seconds=config.budget_seconds, measurements=config.budget_measurements)
    target = target_of(config)
    fn: Any = target.fn
    if not config.fold:
        fn = xrl_jax.from_jax(fn, *target.args, weights=target.weights, fold=False)
    fast = xrl_jax.optimize(
        fn,
        *target.args,
        weights=target.weights,
        search=config.search,
        rules=rules,
        budget=budget,
        key=jax.random.key(config.seed),
        cache_dir=config.cache_dir or None,
        progress=config.progress,
    )
    report = dataclasses.replace(fast.report, name=target.name, seed=config.seed)
    if config.out:
        write_results(Path(config.out), config, fast, report)
    return report


def write_results(out: Path, config: Config, fast: Any, report: Report) -> None:
    """Write report.json, report.txt, program.txt, history.png and optimized.xrl into `out`."""
    values = {"command": config.command(), **report.as_dict()}
    (out / "report.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    (out / "report.txt").write_text(f"{report}\n", encoding="utf-8")
    (out / "program.txt").write_text(f"{fast.program}\n", encoding="utf-8")
    fast.save(out / "optimized.xrl")
    try:
        plot_history(report, out / "history.png")
    except ModuleNotFoundError as error:  # matplotlib is optional, and the numbers are written
        print(f"no history.png: {error}", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """Run with the parsed flags; the exit status is 2 for bad flags and input, 130 for Ctrl-C."""
    try:
        if len(argv) > 1:
            raise ConfigError(f"{argv[1]!r} is no flag: flags are written --name=value")
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
