"""Overrides: rollouts that decide otherwise, in one place or about one rule, than the policy does.

A policy's most probable actions are right in most places and wrong in some, and which these are is
seen at the end of a rollout only. Drawn actions err in every place a little, so that in a network
of many blocks one is hardly ever right in all of them. An override leaves all to the policy but one
decision: a rule is not applied, or not at one node, or it is applied at one where it was not.
Overrides of which each by itself saves something are kept together. Where a policy accepts a loss
in places that never repay it, no single override may make up for all of them: a rollout that met
nothing better than its start is judged by where it ended, so that each of these overrides counts.
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
_SLOTS = 64  # for overrides of a rollout
_BARRED, _FIRST = -1e4, 1e4  # added to logits
_SAVES = 1e-4  # share of the time that is more than rounding
_FEW = 512  # decisions that are looked at one by one; of more, only what is done about each rule


class Override(NamedTuple):
    """What is added to the logits of candidates of a rule at one root, or `ANYWHERE`."""

    rule: int  # index
    root: int  # slot
    bias: float


class Overrides(NamedTuple):
    """Overrides of one rollout [E]; the rule is -1 where there is none."""

    rule: jax.Array  # int32
    root: jax.Array  # int32
    bias: jax.Array  # float32


class RolloutOutcome(NamedTuple):
    """What came of a rollout with overrides."""

    seconds: float  # the least it met
    rewrites: int  # that led there
    end: float  # seconds at its end; infinite where it rewrote nothing
    # See `choices`; one rollout's of a round are asked for.
    choices: Callable[[], tuple[Override, ...]]


def packed(overrides: Sequence[Override]) -> Overrides:
    """As arrays of a size that does not change; the last are left out where there are too many."""
    rows = [*overrides[:_SLOTS], *[Override(-1, ANYWHERE, 0.0)] * (_SLOTS - len(overrides))]
    rule, root, bias = (np.array(column) for column in zip(*rows, strict=True))
    return Overrides(jnp.int32(rule), jnp.int32(root), jnp.float32(bias))


def overridden(logits: Logits, state: EnvState, params: EnvParams, overrides: Overrides) -> Logits:
    """The logits with these overrides. A rule that is barred from one root may be taken as a
    macro-action, which passes that root by.
    """
    candidates = state.candidates
    of_rule = rules_of(candidates, params.table)[:, None] == overrides.rule
    anywhere = of_rule & (overrides.root == ANYWHERE)
    here = anywhere | (of_rule & (candidates.root[:, None] == overrides.root))
    once, macro = (jnp.sum(jnp.where(at, overrides.bias, 0.0), axis=1) for at in (here, anywhere))
    index = logits.index + jnp.concatenate([once, macro, jnp.zeros(1)])
    return Logits(index, logits.mask + once)


def choices(start: Start, rules: CompiledRules, trail: Trail) -> tuple[Override, ...]:
    """What else might have been decided in a rollout [T, ...]: to bar a rule that fired, everywhere
    or, where there are not too many, from one of the nodes there were; or to begin with one, of
    those that match where the rollout began, that did not fire there.
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
        *(Override(rule, root, _BARRED) for rule, root in sorted(done) if live[root]),
        *(Override(rule, root, _FIRST) for rule, root in sorted(there - done)),
    ]
    whole = [Override(rule, ANYWHERE, _BARRED) for rule in sorted({rule for rule, _ in done})]
    return (*whole, *(each if len(each) <= _FEW else ()))


@dataclasses.dataclass
class OverrideSearch:
    """Which overrides save something, for rollouts that begin in one way. Of those found at a time
    the best is kept, or all of them together where that takes less, until none saves anything more.
    What is kept first decides where that ends, so it then begins again with another.

    Attributes:
      rng: shuffles what is tried.
      again: how often it may begin again.
      kept: the overrides that are.
      contenders: of these the best becomes `kept`; `kept` is the first.
      untried: overrides to try in addition, each by itself; None before the first rollout.
      changed: `kept` has changed since `untried` was filled.
      firsts: what was kept first, each time.
    """

    rng: np.random.Generator
    again: int = 3
    kept: tuple[Override, ...] = ()
    contenders: tuple[tuple[Override, ...], ...] = ((),)
    untried: tuple[Override, ...] | None = None
    changed: bool = False
    firsts: tuple[Override, ...] = ()

    @property
    def pending(self) -> bool:
        """Whether there is anything left to try."""
        return self.untried is None or bool(self.untried) or len(self.contenders) > 1

    def plan(self, n: int) -> list[tuple[Override, ...]]:
        """Overrides of up to `n` rollouts, which take the most probable actions."""
        room = max(n - len(self.contenders), 0)
        trying = (self.untried or ())[:room]
        self.untried = self.untried and self.untried[room:]
        return [*self.contenders, *((*self.kept, override) for override in trying)]

    def learn(
        self, plan: Sequence[tuple[Override, ...]], outcomes: Sequence[RolloutOutcome]
    ) -> None:
        """What came of the rollouts of the last plan."""
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
        elif not self.pending and self.kept and self.again:
            self.again -= 1
            self.kept, self.contenders, self.untried = (), ((),), None

    def _shuffled(self, found: Sequence[Override]) -> tuple[Override, ...]:
        """What bars whole rules first."""
        wide = [override for override in found if override.root == ANYWHERE]
        narrow = [override for override in found if override.root != ANYWHERE]
        return (*wide, *(narrow[i] for i in self.rng.permutation(len(narrow))))


def _better(one: RolloutOutcome, other: RolloutOutcome) -> bool:
    """Whether it saves time, or as much by fewer rewrites: what does nothing for predictions costs
    what these do not know of. Of two that saved nothing, what ended lower.
    """
    if one.seconds < (1.0 - _SAVES) * other.seconds:
        return True
    if one.seconds > other.seconds:
        return False
    lower = math.isfinite(other.end) and one.end < (1.0 - _SAVES) * other.end
    return one.rewrites < other.rewrites or (one.rewrites == other.rewrites == 0 and lower)
