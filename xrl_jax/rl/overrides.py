"""Overrides: rollouts that deviate from the policy at one place or about one rule.

A policy's most probable actions are right at most places and wrong at some, and which these are is
known only at the end of a rollout. Sampled actions err a little everywhere, so that in a network of
many blocks a sampled rollout is hardly ever right in all of them. An override leaves all decisions
to the policy but one: a rule is not applied, or not at one node, or it is applied at a node where
it was not. Overrides that each save something on their own are combined. If a policy accepts a loss
at several places that never repay it, no single override may make up for all of them. A rollout
that reached nothing better than its start is therefore judged by its last state, so that each of
these overrides counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.language.table import CompiledRules
from xrl_jax.rl.actions import Logits
from xrl_jax.rl.decode import Trail
from xrl_jax.rl.env import EnvParams, EnvState, Start, rules_of

ANYWHERE = -1  # in place of a root
_SLOTS = 64  # overrides that a rollout has room for
_BAR, _TAKE_FIRST = -1e4, 1e4  # added to logits, to bar an action or to take it first
_LEAST_SAVING = 1e-4  # a difference above this share of the time is more than rounding
# Decisions at single nodes to be tried, at most; if there are more, only whole rules are tried.
_MOST_SINGLE = 512


class Override(NamedTuple):
    """A bias added to the logits of a rule's candidates at one root, or `ANYWHERE`."""

    rule: int  # index
    root: int  # slot
    bias: float


class Overrides(NamedTuple):
    """The overrides of one rollout as arrays [E]; the rule is -1 in unused entries."""

    rule: jax.Array  # int32
    root: jax.Array  # int32
    bias: jax.Array  # float32


class RolloutOutcome(NamedTuple):
    """The outcome of a rollout with overrides."""

    seconds: float  # of its cheapest state
    rewrites: int  # how many led there
    end: float  # seconds at its end; infinite if it rewrote nothing
    # See `choices`; computed on demand, because a round needs them of one rollout only.
    choices: Callable[[], tuple[Override, ...]]


def packed(overrides: Sequence[Override]) -> Overrides:
    """Return overrides as arrays of a fixed size; the last are dropped if there are too many."""
    rows = [*overrides[:_SLOTS], *[Override(-1, ANYWHERE, 0.0)] * (_SLOTS - len(overrides))]
    rule, root, bias = (np.array(column) for column in zip(*rows, strict=True))
    return Overrides(jnp.int32(rule), jnp.int32(root), jnp.float32(bias))


def overridden(logits: Logits, state: EnvState, params: EnvParams, overrides: Overrides) -> Logits:
    """Return the logits with these overrides added. A rule that is barred from one root may still
    be taken as a macro-action, which skips that root.
    """
    candidates = state.candidates
    of_rule = rules_of(candidates, params.table)[:, None] == overrides.rule
    anywhere = of_rule & (overrides.root == ANYWHERE)
    here = anywhere | (of_rule & (candidates.root[:, None] == overrides.root))
    once, macro = (jnp.sum(jnp.where(at, overrides.bias, 0.0), axis=1) for at in (here, anywhere))
    index = logits.index + jnp.concatenate([once, macro, jnp.zeros(1)])
    return Logits(index, logits.mask + once)


def choices(start: Start, rules: CompiledRules, trail: Trail) -> tuple[Override, ...]:
    """Return the overrides that change one decision of a rollout [T, ...].

    Some bar, everywhere, a rule that fired. Others bar it from one node of the start's graph, or
    first take a match of that graph that did not fire; these are left out if there are too many.
    """
    table, live = rules.table, np.asarray(start.graph.nodes.op) > 0
    rule_of = np.asarray(table.variant_rule)
    made = np.asarray(trail.variant) >= 0
    fired = zip(rule_of[np.asarray(trail.variant)[made]], np.asarray(trail.root)[made], strict=True)
    done = {(int(rule), int(root)) for rule, root in fired}
    words = np.asarray(start.masks)
    matched = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(bool)
    roots, rows = np.nonzero(matched & (np.asarray(table.tree_root) == 0))
    of_trees = rule_of[np.asarray(table.tree_variant)[rows]]
    there = {(int(rule), int(root)) for rule, root in zip(of_trees, roots, strict=True)}
    each = [
        *(Override(rule, root, _BAR) for rule, root in sorted(done) if live[root]),
        *(Override(rule, root, _TAKE_FIRST) for rule, root in sorted(there - done)),
    ]
    whole_rules = [Override(rule, ANYWHERE, _BAR) for rule in sorted({rule for rule, _ in done})]
    return (*whole_rules, *(each if len(each) <= _MOST_SINGLE else ()))


@dataclasses.dataclass
class OverrideSearch:
    """A search for overrides that save something, for rollouts from one program.

    Of the overrides that save something in a round, the best is kept, or all of them if together
    they save more, until none saves anything more. The result depends on which override was kept
    first, so the search then begins again and keeps another one first.

    Attributes:
      rng: shuffles the overrides to try.
      restarts_left: how often the search may still begin again.
      kept: the overrides that are kept.
      contenders: sets of overrides of which the best becomes `kept`; the first is `kept`.
      untried: overrides to try in addition to `kept`, one by one; None before the first rollout.
      changed: whether `kept` has changed since `untried` was filled.
      firsts: the override that was kept first each time.
    """

    rng: np.random.Generator
    restarts_left: int = 3
    kept: tuple[Override, ...] = ()
    contenders: tuple[tuple[Override, ...], ...] = ((),)
    untried: tuple[Override, ...] | None = None
    changed: bool = False
    firsts: tuple[Override, ...] = ()

    @property
    def pending(self) -> bool:
        """Whether any override is left to try."""
        return self.untried is None or bool(self.untried) or len(self.contenders) > 1

    def plan(self, n: int) -> list[tuple[Override, ...]]:
        """Return the overrides of up to `n` rollouts, which take the most probable actions."""
        room = max(n - len(self.contenders), 0)
        trying = (self.untried or ())[:room]
        self.untried = self.untried and self.untried[room:]
        return [*self.contenders, *((*self.kept, override) for override in trying)]

    def learn(
        self, plan: Sequence[tuple[Override, ...]], outcomes: Sequence[RolloutOutcome]
    ) -> None:
        """Update the search by the outcomes of the last plan's rollouts."""
        n = len(self.contenders)
        best = min(range(n), key=lambda i: outcomes[i][:3])
        base, now = outcomes[best], self.contenders[best]
        saves = sorted(
            (other[:3], tried[-1])
            for tried, other in zip(plan[n:], outcomes[n:], strict=True)
            if _better(other, base)
        )
        if now and not self.kept:
            self.firsts += now[:1]
        self.changed |= now != self.kept
        self.kept, self.contenders = now, (now,)
        if best == 0 and not now:
            saves = [each for each in saves if each[1] not in self.firsts]
        if best == 0 and saves:
            every = (*now, *(override for _, override in saves))
            self.contenders = tuple(dict.fromkeys((now, (*now, saves[0][1]), every)))
        if self.untried is None or (not self.untried and self.changed):
            self.untried, self.changed = self._shuffled(base.choices()), False
        elif not self.pending and self.kept and self.restarts_left:
            self.restarts_left -= 1
            self.kept, self.contenders, self.untried = (), ((),), None

    def _shuffled(self, found: Sequence[Override]) -> tuple[Override, ...]:
        """Return overrides of whole rules first, then the others in random order."""
        wide = [override for override in found if override.root == ANYWHERE]
        narrow = [override for override in found if override.root != ANYWHERE]
        return (*wide, *(narrow[i] for i in self.rng.permutation(len(narrow))))


def _better(one: RolloutOutcome, other: RolloutOutcome) -> bool:
    """Return whether `one` takes less time than `other`, or the same after fewer rewrites, because
    rewrites without predicted gain may have costs that predictions miss. If neither reached
    anything better than its start, the one that ended lower is better.
    """
    if one.seconds < (1.0 - _LEAST_SAVING) * other.seconds:
        return True
    if one.seconds > other.seconds:
        return False
    lower = math.isfinite(other.end) and one.end < (1.0 - _LEAST_SAVING) * other.end
    return one.rewrites < other.rewrites or (one.rewrites == other.rewrites == 0 and lower)
