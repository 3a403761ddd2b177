"""Search by a trained policy: rollouts under predicted costs, whose best programs are timed.

Each round follows the policy in several rollouts: with its most probable actions, with these except
for one decision (`rl.overrides`), and with sampled actions. Up to three rounds in a row explore,
fewer if they take long: untimed lowerings have an optimistic estimate, and some operators of the
programs found are timed, a few at a time, those of the currently cheapest program first. In the
next round untimed lowerings have a pessimistic estimate, and the cheapest programs found so far are
timed whole, interleaved with the original. Each timing corrects the costs by which the next program
is chosen.

That round and the third exploring one begin from the best program so far; the first to do so times
programs found before, so that there is a best one. The other two exploring rounds begin anew, since
what was learned may make another path better: in turn from the original, and from the original with
images features last where they cross the boundaries of folded bodies, where no rewrite can
transpose them. Nothing else is tried: the policy has found every result. The gain of a step is
reported as predicted when the step was made.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax

from xrl_jax.cost.programs import job_or_failure
from xrl_jax.graph.graph import GraphError
from xrl_jax.measure.base import Job
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.rl.finetune import FineTune
from xrl_jax.rl.policy import Policy, load_policy, shipped
from xrl_jax.rl.rollouts import Decoder, RolloutConfig
from xrl_jax.rl.rounds import Rounds, RoundsConfig
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.search.base import Budget, Found, Problem, SearchResult, StopReason
from xrl_jax.search.run import Run


@dataclasses.dataclass(frozen=True)
class XRLflow:
    """Search by rollouts of a policy.

    Attributes:
      policy: None for the one that comes with the package for the platform.
      finetune: trains the policy further on the program first; None for no such training.
      time_programs: whether programs are timed whole; else the search relies on predictions alone.
      rounds: hyperparameters of the rounds.
      rollouts: hyperparameters of the rollouts in a round.
    """

    policy: Policy | None = None
    finetune: FineTune | None = None
    time_programs: bool = True
    rounds: RoundsConfig = dataclasses.field(default_factory=RoundsConfig)
    rollouts: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        """Return the best programs that rounds have found.

        Raises:
          PolicyError: the policy does not fit this version.
        """
        policy = self.policy or load_policy(shipped(problem.oracle.target.platform))
        config, weights = policy.fitted(problem.rules)
        notes = [f"the policy was trained on {policy.trained or 'unknown networks'}"]
        to_tune, key = jax.random.split(key)
        if self.finetune is not None:
            clock = Stopwatch(budget.seconds)
            weights, updates = self.finetune(config, weights, problem, budget, to_tune)
            plural = "" if updates == 1 else "s"
            notes.append(f"then on this program for {updates} update{plural}")
            budget = dataclasses.replace(budget, seconds=max(clock.left, 1e-3))
        run, decoder = Run(problem, budget), Decoder(config, weights, problem.rules, self.rollouts)
        rounds = Rounds(self.rounds, decoder, run, Found(problem.program, 0.0))
        best = _run_rounds(rounds, key, time_programs=self.time_programs)
        run.note = "; ".join(filter(None, (*notes, run.note)))
        return run.result(best)


def _run_rounds(search: Rounds, key: jax.Array, *, time_programs: bool) -> tuple[Found, ...]:
    """Run rounds until the search ends; return the best programs found, the original last."""
    run, config, original = search.run, search.config, search.original
    rounds_without_gain = 0
    try:
        with plain_ctrl_c():
            search.measure(
                original.program, run.clock.part(config.start_share), search.limit_of_regions()
            )
            run.start((1.0,), (search.predicted(),))
            run.report("measured the original")
            if time_programs:
                oracle = search.oracle
                job = job_or_failure(original.program, oracle.options, constants=oracle.constants)
                search.reference = job if isinstance(job, Job) else None
            explored, anew = 0, itertools.cycle(search.starts)
            while not run.out_of_budget():
                key, now = jax.random.split(key)
                explores = search.may_explore(explored)
                begins_anew = explores and explored % config.n_exploring + 1 < config.n_exploring
                begun = next(anew) if begins_anew else None
                learned = search.run_round(begun, now, explores=explores)
                explored = explored + 1 if explores else 0
                rounds_without_gain = 0 if learned else rounds_without_gain + 1
                run.parts[0] = search.best() * search.predicted()
                run.report("xrlflow")
                if rounds_without_gain >= config.patience and not search.pending:
                    run.stalled()
                    break
    except GraphError as error:
        run.note = f"no rewrite was tried: {error}"
    except KeyboardInterrupt:
        run.stop = StopReason.INTERRUPTED
    return (*search.results(), dataclasses.replace(original, seconds=search.predicted()))
