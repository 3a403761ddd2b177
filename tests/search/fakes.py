"""Helpers for searches without a worker: a few rules with a known optimum, and made-up timings."""

from __future__ import annotations

from collections.abc import Callable

from xrl_jax.cost.model import Oracle
from xrl_jax.cost.regions import Region
from xrl_jax.language.rule_parser import parse_rules
from xrl_jax.language.table import CompiledRules, compile_rules
from xrl_jax.measure.store import TimingStore
from xrl_jax.measure.target import Target
from xrl_jax.measure.timing import Timing
from xrl_jax.measure.worker import Worker

MACHINE = Target("cpu", "made up", 1, "jax 0", "")

# A contraction has four lowerings here. The path from 3 ("swapped") to the cheapest, 2
# ("transposed"), leads through 1 ("flat"), which costs a little more than 3: the trap.
RULES = """
(rule lower-swapped (family lowering-dot) (source "test")
  (lhs (dot ?x ?w :as d)) (when (= (lowering d) 0)) (rhs (dot ?x ?w :like d :lowering swapped)))
(rule trap-in (family test) (source "test")
  (lhs (dot ?x ?w :as d)) (when (= (lowering d) 3)) (rhs (dot ?x ?w :like d :lowering flat)))
(rule trap-out (family test) (source "test")
  (lhs (dot ?x ?w :as d)) (when (= (lowering d) 1)) (rhs (dot ?x ?w :like d :lowering transposed)))
(rule turn-twice (family movement) (source "test")
  (lhs (transpose (transpose ?x :perm p) :perm q)) (rhs (transpose ?x :perm (gather p q))))
(rule turn-not (family movement) (source "test")
  (lhs (transpose ?x :perm p)) (when (or (= p (lane)) (>= (lane) 6))) (rhs ?x))
"""
SECONDS = {"dot": (1e-3, 0.82e-3, 0.5e-3, 0.8e-3), "transpose": (2e-4,)}


def compiled_rules() -> CompiledRules:
    return compile_rules(parse_rules(RULES)[0])


def made_up(region: Region) -> Timing:
    """Return the timing given by `SECONDS`, by operator and lowering."""
    seconds = SECONDS[region.node.op][region.node.lowering]
    return Timing(seconds, seconds, seconds, repeats=9)


class FakeOracle(Oracle):
    """An oracle whose measurements are made up by `price`, without a worker process.

    Attributes:
      timed: the regions timed, in order.
    """

    def __init__(
        self, price: Callable[[Region], Timing] = made_up, *, store: TimingStore | None = None
    ) -> None:
        super().__init__(store or TimingStore(None, target=MACHINE), Worker())
        self.price = price
        self.timed: list[Region] = []

    def _time(self, region: Region, timeout: float) -> Timing:
        self.timed.append(region)
        self.spending.measurements += 1
        return self.price(region)
