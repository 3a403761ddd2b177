"""Networks as environments, for the experiments with policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments import models, targets
from experiments.targets import ConfigError
from xrl_jax.cost import calibration, roofline
from xrl_jax.cost.rates import first_rates
from xrl_jax.cost.roofline import CostTable
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import with_room_for_outputs
from xrl_jax.language.table import CompiledRules
from xrl_jax.program.program import Program
from xrl_jax.rl import env
from xrl_jax.rl.env import HORIZON, SLOTS, EnvParams
from xrl_jax.runtime.target_platform import target_platform
from xrl_jax.transform.start import start_of
from xrl_jax.transform.union import united_bucket


def devices(n: int) -> list[Any]:
    """Return `n` devices for environments; on a CPU, its cores, if JAX was not asked for devices
    before.

    Raises:
      ConfigError: there are fewer than `n`.
    """
    jax.config.update("jax_num_cpu_devices", n)
    found = jax.devices()[:n]
    if len(found) < n:
        raise ConfigError(f"--devices={n}: only {len(found)} are available here")
    return found


Options = dict[str, int | tuple[int, ...]]


def parsed(text: str) -> tuple[str, Options]:
    """Parse NAME:OPTION=NUMBER:..., where 1-2-1 stands for several numbers, into the network's name
    and options.

    Raises:
      ConfigError: there is no such network, or an option is malformed.
    """
    name, *options = text.split(":")
    targets.require_known("networks", (name,), models.MODELS)
    found: Options = {}
    for option in options:
        key, _, value = option.partition("=")
        numbers = value.split("-")
        if not all(n.isdigit() for n in numbers):
            raise ConfigError(f"--networks: {option!r} of {text!r} must be OPTION=NUMBER")
        several = [int(n) for n in numbers]
        found[key] = tuple(several) if len(several) > 1 else several[0]
    return name, found


def program_of(text: str, *, fold: bool, seed: int) -> Program:
    """Return the program that searches of a network start from, at full size except for its options
    (see `parsed`).

    Raises:
      ConfigError: there is no such network or option, or its value does not fit.
    """
    name, options = parsed(text)
    target = targets.from_model(name, seed=seed, **options)
    traced = from_jax(target.fn, *target.args, weights=target.weights, fold=fold)
    return start_of(traced, target_platform())


def params_of(
    programs: Sequence[Program],
    rules: CompiledRules,
    *,
    envs: int,
    costs: CostTable | None = None,
    horizon: int = HORIZON,
    slots: int = SLOTS,
) -> EnvParams:
    """Return `envs` environments in one bucket, an equal number for each program.

    Args:
      costs: None for a table without timings, in which lowerings take what they usually take on
        this kind of machine (`calibration.priors`).
    """
    if costs is None:
        prior = calibration.priors(target_platform())
        rates = calibration.calibrate([], first_rates(target_platform()), prior)
        costs = roofline.cost_table({}, rates)
    bucket = max(united_bucket(p) for p in programs)
    starts = [env.start_of(p, rules, costs, bucket=bucket) for p in programs]
    results = max(len(s.graph.globals.outputs) for s in starts)
    starts = [s._replace(graph=with_room_for_outputs(s.graph, results)) for s in starts]
    each = envs // len(starts)
    batch = jax.tree.map(lambda *v: jnp.repeat(jnp.stack(v), each, axis=0), *starts)
    return EnvParams(rules.table, costs, batch, horizon=horizon, slots=slots)
