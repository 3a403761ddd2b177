"""Rollouts of a policy from a program, and the programs that they reach."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost.roofline import CostTable
from xrl_jax.language.table import CompiledRules
from xrl_jax.measure.target import usable_cores
from xrl_jax.rl.actions import Logits
from xrl_jax.rl.agent import agent_of
from xrl_jax.rl.decode import Best, Rollout, Trail, begin, by_network, follow
from xrl_jax.rl.env import EnvParams, EnvState, Start
from xrl_jax.rl.networks import NetworkConfig
from xrl_jax.rl.overrides import Override, Overrides, RolloutOutcome, choices, overridden, packed
from xrl_jax.runtime.kept_trace import kept_trace
from xrl_jax.runtime.settings import under_own_settings
from xrl_jax.search.base import Found, Step
from xrl_jax.search.states import place_text
from xrl_jax.transform.union import split_union

_TRAIL = Trail._make(range(len(Trail._fields)))  # a tree with the structure of a Trail


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Hyperparameters of the rollouts of a round.

    Attributes:
      nodes: node slots of all rollouts at once, so that small graphs get more rollouts.
      fewest, most: bounds on the number of rollouts at once; multiples of `batch`.
      batch: rollouts that are computed together; batches run in parallel, one on each core.
      bucket_share: rewrites of a macro-action in one step, as a share of the bucket's slots,
        because a larger graph has more places.
      least_rewrites, most_rewrites: bounds on the rewrites in one step.
      steps: of a rollout, at most.
      horizon: actions of a rollout, at most.
      check_every: steps between two checks of the clock.
      patience: checks without a better state after which all rollouts end.
      few_slots, some_slots, most_slots: numbers of candidates that the policy may see; the first
        that suffices at the start is used, else the last.

    Raises:
      ValueError: a value is not positive, or values do not fit each other; the message names them.
    """

    nodes: int = 4096
    fewest: int = 8
    most: int = 16
    batch: int = 4
    bucket_share: float = 1 / 64
    least_rewrites: int = 8
    most_rewrites: int = 32
    steps: int = 256
    horizon: int = 64
    check_every: int = 16
    patience: int = 4
    few_slots: int = 16
    some_slots: int = 64
    most_slots: int = 128

    def __post_init__(self) -> None:
        low = [f.name for f in dataclasses.fields(self) if not getattr(self, f.name) > 0]
        if low:
            raise ValueError(f"of RolloutConfig, {', '.join(low)} must be positive")
        if self.fewest % self.batch or self.most % self.batch or self.fewest > self.most:
            raise ValueError(
                f"RolloutConfig.fewest ({self.fewest}) and most ({self.most}) must be multiples of"
                f" batch ({self.batch}), and fewest not more than most"
            )
        if self.steps < self.check_every:
            raise ValueError(
                f"RolloutConfig.steps ({self.steps}) must be at least check_every"
                f" ({self.check_every})"
            )

    def rollouts(self, bucket: int) -> int:
        """Return how many rollouts run at once on graphs in this bucket; a multiple of `batch`."""
        fit = self.nodes // bucket // self.batch * self.batch
        return max(self.fewest, min(self.most, fit))

    def rewrites(self, bucket: int) -> int:
        """Return how many rewrites of a macro-action are made in one step, at most."""
        of_bucket = int(self.bucket_share * bucket)
        return min(max(of_bucket, self.least_rewrites), self.most_rewrites)

    def slots(self, candidates: int) -> int:
        """Return how many candidates the policy sees, given how many there are."""
        sizes = (self.few_slots, self.some_slots)
        return next((s for s in sizes if s >= candidates), self.most_slots)


class RolloutResults(NamedTuple):
    """The results of rollouts from a program."""

    found: list[Found]  # the best of each rollout that reached a cheaper program, cheapest first
    outcomes: list[RolloutOutcome]  # of each rollout with overrides
    candidates: int  # how many there were to choose from, in all states
    most_candidates: int  # in one state; the policy saw no more than there are slots


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Runs a policy under one rule table."""

    network: NetworkConfig
    weights: Any
    rules: CompiledRules
    config: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)

    def slots_for(self, start: Start) -> int:
        """Return how many candidates the policy is to see from this start."""
        n = int(np.bitwise_count(np.asarray(start.masks)).sum())
        return agent_of(self.network).slots or self.config.slots(n)

    def rollouts(
        self,
        begun: Found,
        start: Start,
        costs: CostTable,
        key: jax.Array,
        *,
        plan: Sequence[Sequence[Override]],
        slots: int,
        must_end: Callable[[], bool],
    ) -> RolloutResults:
        """Follow the policy from a program in several rollouts at once.

        Args:
          begun: the program, with the steps that led to it.
          start: of this program under these costs.
          plan: overrides of the first rollouts, which take the most probable actions; the others
            sample theirs.
          slots: how many candidates the policy sees; every new number has to be compiled.
          must_end: called every `check_every` steps; returns whether the rollouts must end.
        """
        config, bucket = self.config, len(start.masks)
        params = EnvParams(
            self.rules.table,
            costs,
            start,
            config.horizon,
            slots=slots,
            at_once=config.rewrites(bucket),
        )
        n = config.rollouts(bucket)
        first = jax.tree.map(lambda v: jnp.stack([v] * config.batch), begin(params))
        batches, parts, best = [first] * (n // config.batch), [], [float(start.seconds)]
        samples = np.arange(n) >= len(plan)
        temperatures = jnp.float32(samples).reshape(-1, config.batch)
        overrides = [packed(plan[i]) if i < len(plan) else packed(()) for i in range(n)]
        overrides = jax.tree.map(
            lambda *v: jnp.stack(v).reshape(-1, config.batch, len(v[0])), *overrides
        )
        advance = functools.partial(
            _make_advance(self.network, config.check_every), self.weights, params
        )
        run_batch = under_own_settings(_blocking(advance))  # settings are per thread
        with ThreadPoolExecutor(usable_cores()) as pool:
            for k in jax.random.split(key, config.steps // config.check_every):
                # All rollouts with overrides share a key, so that they see the same candidates
                # where only some are listed.
                keys = jax.random.split(k, n)[np.where(samples, np.arange(n), 0)]
                keys = keys.reshape(-1, config.batch)
                # The first time in one thread: several would compile the same function each.
                mapped = pool.map if parts else map
                each = (jax.tree.map(lambda v, i=i: v[i], overrides) for i in range(len(batches)))
                made = list(mapped(run_batch, batches, keys, temperatures, each))
                batches = [now for now, _ in made]
                parts.append(_concatenated([trail for _, trail in made]))
                best.append(min(float(now.best.seconds.min()) for now in batches))
                patience = len(best) > config.patience and best[-1] == best[-1 - config.patience]
                if must_end() or patience or all(bool(now.state.done.all()) for now in batches):
                    break
        trail = jax.tree.map(lambda *v: np.concatenate(v, axis=1), *parts)
        results = _concatenated([now.best for now in batches]), trail
        each_rollout = [jax.tree.map(lambda v, i=i: v[i], results) for i in range(n)]
        found = [
            _found(begun, start, self.rules, best, trail)
            for best, trail in each_rollout
            if best.steps
        ]
        outcomes = [
            _outcome(start, self.rules, best, trail) for best, trail in each_rollout[: len(plan)]
        ]
        most = int(trail.candidates.max(initial=0))
        cheapest_first = sorted(found, key=lambda f: f.seconds)
        return RolloutResults(cheapest_first, outcomes, int(trail.candidates.sum()), most)


@functools.cache
def _make_advance(config: NetworkConfig, n_steps: int) -> Any:
    """Return a function that advances a batch of rollouts by `n_steps` steps; it is traced and
    compiled once for each bucket.
    """

    def steps(
        weights: Any,
        params: EnvParams,
        rollouts: Rollout,
        keys: jax.Array,
        temperature: jax.Array,
        overrides: Overrides,
    ) -> tuple[Rollout, Trail]:
        def one(
            now: Rollout, key: jax.Array, temperature: jax.Array, overrides: Overrides
        ) -> tuple[Rollout, Trail]:
            logits_of = by_network(config, weights)

            def choose(state: EnvState, params: EnvParams) -> Logits:
                return overridden(logits_of(state, params), state, params, overrides)

            return follow(choose, params, now, key, temperature, n_steps)

        return jax.vmap(one)(rollouts, keys, temperature, overrides)

    return kept_trace(
        steps, settings=repr((config, n_steps)), like=lambda _w, _p, now, *_: (now, _TRAIL)
    )


def _blocking(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to wait for its arrays, so that a thread runs one batch at a time."""
    return lambda *args: jax.block_until_ready(fn(*args))


def _concatenated(batches: list[Any]) -> Any:
    """Concatenate batches [B, ...] as NumPy arrays."""
    return jax.tree.map(lambda *v: np.concatenate([np.asarray(x) for x in v]), *batches)


def _outcome(start: Start, rules: CompiledRules, best: Best, trail: Trail) -> RolloutOutcome:
    """Return the outcome of one rollout."""
    made = trail.variant >= 0
    rewrites = int(made[: int(best.steps)].sum())
    end = float(trail.seconds[-1]) if made.any() else math.inf
    alternatives = functools.partial(choices, start, rules, trail)
    return RolloutOutcome(float(best.seconds), rewrites, end, alternatives)


def _found(begun: Found, start: Start, rules: CompiledRules, best: Best, trail: Trail) -> Found:
    """Return the program of the cheapest state of one rollout."""
    rule_of = np.asarray(rules.table.variant_rule)
    seconds = [float(start.seconds), *map(float, trail.seconds)]
    steps = []
    for t in range(int(best.steps)):
        made = np.flatnonzero(trail.variant[t] >= 0)
        for k in made:
            at, graph = (t, k), int(trail.owner[t, k])
            of_root = (np.asarray(f)[at] for f in (trail.op, trail.shape, trail.rank))
            place = place_text(int(trail.root[at]), *of_root)
            gain = (seconds[t] - seconds[t + 1]) / len(made) / float(start.counts[graph])
            steps.append(Step(graph, rules.rules[rule_of[trail.variant[at]]].name, place, gain))
    program = split_union(begun.program, best.graph, best.owner)
    return Found(program, float(best.seconds), (*begun.steps, *steps))
