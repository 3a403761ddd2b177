"""Configuration of a training of a policy: flags, presets, and checks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from absl import flags

from experiments import environments, models
from experiments.targets import ConfigError, require_known
from xrl_jax.language.table import CompiledRules
from xrl_jax.measure.gpu.devices import GPUS
from xrl_jax.rl.env import HORIZON, SLOTS
from xrl_jax.rl.train_config import PAPER, TrainConfig


class Preset(NamedTuple):
    """Settings of a training, and defaults for flags that are not given."""

    settings: TrainConfig
    envs: int
    interval: int

    def flag(self, name: str) -> Any:
        """Return the default of a flag."""
        return getattr(self if name in self._fields else self.settings, name)


PRESETS = {"ours": Preset(TrainConfig(), 32, 4), "paper": Preset(PAPER, 8, 5)}


@dataclass(frozen=True)
class Config:
    """Configuration of one training; a field for each flag that affects its result."""

    preset: str
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
    target: str
    predicted: bool
    timed_seconds: float
    costs: str
    cost_spread: float
    evaluate_every: int

    def __post_init__(self) -> None:
        if self.target:
            require_known("target", (self.target,), GPUS)
        elif self.predicted:
            raise ConfigError("--predicted needs --target")
        if self.costs and self.timed_seconds:
            raise ConfigError(
                "--costs reads a table and --timed_seconds makes one: give only one of them"
            )
        if self.cost_spread and (self.preset == "paper" or self.reward == "measured"):
            raise ConfigError(
                "--cost_spread is for --preset=ours and --reward=model: others use one cost table"
            )
        if self.reward == "measured" and self.devices > 1:
            raise ConfigError("--reward=measured is for one device: timings disturb each other")
        if self.reward == "measured" and self.steps % self.interval:
            raise ConfigError(
                f"--steps={self.steps} must be a multiple of --interval={self.interval}"
            )
        if not self.networks:
            raise ConfigError("--networks is empty: name at least one network")
        for text in self.networks:
            environments.parsed(text)
        if self.envs % len(self.networks):
            raise ConfigError(
                f"--envs={self.envs} must be a multiple of the {len(self.networks)} networks"
            )
        if self.envs % self.devices:
            raise ConfigError(f"--envs={self.envs} must be a multiple of --devices={self.devices}")
        parts = PRESETS[self.preset].settings.minibatches
        if self.envs // self.devices * self.steps % parts:
            raise ConfigError(
                f"--steps={self.steps} times the environments per device must be a multiple of "
                f"the {parts} minibatches"
            )


def chosen(argv: Sequence[str], values: flags.FlagValues) -> Config:
    """Return the configuration given by the flags.

    Args:
      argv: the command line without the flags.

    Raises:
      ConfigError: the flags are invalid.
    """
    if len(argv) > 1:
        raise ConfigError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
    preset = PRESETS[values.preset]
    given = {f.name: values[f.name].value for f in dataclasses.fields(Config)}
    given = {n: preset.flag(n) if v is None else v for n, v in given.items()}
    return Config(**{**given, "networks": tuple(given["networks"])})


def settings_of(config: Config, rules: CompiledRules) -> TrainConfig:
    """Return the preset's settings with the values of the flags."""
    usual = PRESETS[config.preset].settings
    return dataclasses.replace(
        usual,
        network=dataclasses.replace(usual.network, n_rules=len(rules.rules), slots=config.slots),
        updates=config.updates,
        steps=config.steps,
        learning_rate=config.learning_rate,
        reward_every=config.interval if usual.reward_every > 1 else 1,
    )


def define_flags(values: flags.FlagValues) -> None:
    """Define the flags of `Config`, and those for checkpoints and results."""
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    number = functools.partial(flags.DEFINE_integer, flag_values=values)
    real = functools.partial(flags.DEFINE_float, flag_values=values)
    choice = functools.partial(flags.DEFINE_enum, flag_values=values)

    def usual(name: str) -> str:
        return ", ".join(f"{preset}: {given.flag(name)}" for preset, given in PRESETS.items())

    choice("preset", "ours", list(PRESETS), "Preset of all settings; other flags override it.")
    flags.DEFINE_list(
        "networks",
        ["squeezenet"],
        "Networks, as NAME or NAME:OPTION=NUMBER:..., separated by commas; known are "
        f"{', '.join(models.MODELS)}.",
        flag_values=values,
    )
    number("envs", None, f"Environments, of all networks together; {usual('envs')}.", lower_bound=1)
    number("updates", 200, "Number of rollouts, each followed by learning from it.", lower_bound=1)
    number(
        "steps", None, f"Steps of each environment in a rollout; {usual('steps')}.", lower_bound=1
    )
    number("horizon", HORIZON, "Steps of an episode.", lower_bound=1)
    number("slots", SLOTS, "Most candidates that the policy sees at a step.", lower_bound=1)
    real("learning_rate", None, f"Initial learning rate of Adam; {usual('learning_rate')}.")
    number("seed", 0, "Seed of all random choices.")
    number("devices", 1, "Devices to spread environments over; of a CPU, its cores.", lower_bound=1)
    choice(
        "reward",
        "model",
        ["model", "measured"],
        "Reward by predicted times, or by timings of compiled programs.",
    )
    number(
        "model_updates",
        0,
        "First updates of --reward=measured that use predictions.",
        lower_bound=0,
    )
    number(
        "interval",
        None,
        f"Steps between two measurements, also of the paper's reward; {usual('interval')}.",
        lower_bound=1,
    )
    real("noise", 0.02, "Relative change below which two timings count as equal.", lower_bound=0.0)
    text("target", "", f"Another target than this machine: {', '.join(GPUS)}.")
    flags.DEFINE_bool(
        "predicted",
        False,
        "Predict all times on --target, without a record of experiments.gpu_lab.",
        flag_values=values,
    )
    real(
        "timed_seconds",
        0.0,
        "Seconds in which the search taso first searches each network, so that predictions use "
        "its timings. 0: predictions use the usual costs of lowerings.",
        lower_bound=0.0,
    )
    text("costs", "", "costs.npz of another run with --timed_seconds, to use its timings.")
    real(
        "cost_spread",
        0.0,
        "Standard deviation of the log-normal factors by which corrections of costs are multiplied "
        "from time to time, so that the policy learns to use them. 0: costs stay the same.",
        lower_bound=0.0,
    )
    flags.DEFINE_bool("fold", True, "Treat equal repeated regions as one.", flag_values=values)
    number(
        "evaluate_every",
        50,
        "Updates between evaluations against greedy search and chance; 0: no evaluations.",
        lower_bound=0,
    )
    number("save_every", 20, "Updates between checkpoints.", lower_bound=1)
    text("out", "out/train", "Folder of the results.")
