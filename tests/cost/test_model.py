"""The oracle: which regions are worth timing, what the store knows, and what was spent."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from xrl_jax.cost import model
from xrl_jax.cost.config import CostConfig
from xrl_jax.cost.model import Oracle, without_overhead
from xrl_jax.cost.regions import region_key
from xrl_jax.cost.roofline import cost_table
from xrl_jax.cost.view import CostView, signature, view_graph
from xrl_jax.graph.graph import Node, build, pack_attrs
from xrl_jax.measure.base import Job
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.store import TimingStore
from xrl_jax.measure.target import Target
from xrl_jax.measure.timing import Timing
from xrl_jax.measure.worker import Worker
from xrl_jax.runtime.engine_jit import engine_jit

MACHINE = Target("cpu", "made up", 1, "jax 0", "")
SUM = pack_attrs("reduce_sum", {"axes": 1})
SHARING = cost_table({}).sharing
VIEW = engine_jit(lambda graph: view_graph(SHARING, graph))
SECONDS = engine_jit(lambda costs, view: costs.seconds(view))
LONG = Stopwatch(1e6)  # starts when tests are collected, perhaps an hour before they run


class FakeWorker(Worker):
    """A worker that returns the given timings in turn, and then timings of a millisecond.

    Attributes:
      asked: (key, timeout) of every job.
      references: keys of the references.
    """

    overhead_seconds = 1e-5  # type: ignore[assignment]

    def __init__(self, *answers: Timing) -> None:
        super().__init__()
        self.answers = list(answers)
        self.asked: list[tuple[str, float]] = []
        self.references: list[str] = []

    def submit(self, jobs, *, reference=None, timeout=60.0, **_):  # type: ignore[override]
        self.asked += [(job.key, timeout) for job in jobs]
        self.references += [] if reference is None else [reference.key]
        return [self.answers.pop(0) if self.answers else timing(1e-3) for _ in jobs]


def timing(seconds: float) -> Timing:
    return Timing(seconds, 0.9 * seconds, 1.1 * seconds, repeats=9, compile_seconds=0.5)


def oracle(*answers: Timing, store: TimingStore | None = None) -> tuple[Oracle, FakeWorker]:
    worker = FakeWorker(*answers)
    return Oracle(store or TimingStore(None, target=MACHINE), worker), worker


def sums(*widths: int, op: str = "input"):
    """Return a graph with one sum over [4, width] for each width."""
    nodes: list[Node] = []
    for i, width in enumerate(widths):
        nodes.append(Node(op, shape=(4, width), ref=i))
        nodes.append(Node("reduce_sum", (2 * i,), SUM, shape=(width,)))
    return build(nodes, range(1, len(nodes), 2), bucket=64)


def untimed(oracle: Oracle, *widths: int, **options):
    return oracle.untimed_regions(VIEW(sums(*widths, **options)))


def costs(oracle: Oracle, *widths: int) -> list[float]:
    priced = SECONDS(oracle.costs, VIEW(sums(*widths)))
    return [float(c) for c in priced[2 : 2 * len(widths) + 1 : 2]]


def test_each_distinct_region_is_listed_once():
    found = untimed(oracle()[0], 3, 5, 3)
    assert [r.node.shape for r in found.values()] == [(3,), (5,)]


def test_elementwise_and_weight_only_work_is_not_timed():
    o, _ = oracle()
    nodes = (Node("input", shape=(4,), ref=0), Node("tanh", (0,), shape=(4,)))
    assert o.untimed_regions(VIEW(build(nodes, [1], bucket=64))) == {}
    assert untimed(o, 3, op="weight") == {}


def test_operators_without_a_plain_dtype_are_not_timed():
    keys = Node("input", shape=(4, 3), dtype="extended", ref=0)
    attrs = pack_attrs("slice", {"start": (0, 0), "limit": (2, 3), "stride": (1, 1)})
    graph = build(
        (keys, Node("slice", (0,), attrs, shape=(2, 3), dtype="extended")), [1], bucket=64
    )
    assert oracle()[0].untimed_regions(VIEW(graph)) == {}


def test_a_measured_region_costs_its_timing_without_the_launch():
    o, _ = oracle(timing(2e-3))
    assert o.measure(untimed(o, 3), clock=LONG) == 1
    # 2 ms less 10 us of launch for 16 copies; wrapping moves 120 bytes: 8 ns at 15 GB/s.
    assert costs(o, 3) == pytest.approx([1.99e-3 / 16 - 8e-9], rel=1e-5)


def test_timings_are_normalised_by_how_busy_the_machine_was():
    store = TimingStore(None, target=MACHINE)
    quiet, _ = oracle(replace(timing(2e-3), reference_seconds=1e-3), store=store)
    quiet.measure(untimed(quiet, 3), clock=LONG)
    busy, _ = oracle(replace(timing(4e-3), reference_seconds=2e-3), store=store)
    busy.measure(untimed(busy, 5), clock=LONG)
    of_3, of_5 = (t.seconds for _, _, t in store.items() if t.repeats)
    assert of_3 == of_5 == pytest.approx((2e-3 - 1e-5) / 16)


def test_a_measured_region_is_no_longer_untimed():
    o, _ = oracle()
    o.measure(untimed(o, 3), clock=LONG)
    assert [r.node.shape for r in untimed(o, 3, 5).values()] == [(5,)]


def test_stored_timings_give_the_same_cost_without_a_worker():
    store = TimingStore(None, target=MACHINE)
    first, _ = oracle(timing(2e-3), store=store)
    first.measure(untimed(first, 3), clock=LONG)
    second, worker = oracle(store=store)
    # Another worker launches more slowly: that must not matter.
    worker.overhead_seconds = 1e-3  # type: ignore[misc]
    assert second.measure(untimed(second, 3), clock=LONG) == 1
    assert worker.asked == []
    assert (second.spending.from_store, second.spending.measurements) == (1, 0)
    assert costs(second, 3) == costs(first, 3)


def test_stored_timings_are_used_even_when_the_budget_is_spent():
    store = TimingStore(None, target=MACHINE)
    first, _ = oracle(store=store)
    first.measure(untimed(first, 3), clock=LONG)
    second, _ = oracle(store=store)
    assert second.measure(untimed(second, 3, 5), clock=Stopwatch(-1.0), limit=0) == 1


@pytest.mark.parametrize("status", ["failed", "timeout", "killed"])
def test_a_region_that_cannot_be_timed_costs_a_thousand_seconds(status):
    o, _ = oracle(Timing.without(status, "no"))
    o.measure(untimed(o, 3), clock=LONG)
    assert costs(o, 3) == [1000.0]
    assert o.spending.failures == 1


@pytest.mark.parametrize(
    ("status", "kept"), [("failed", True), ("timeout", True), ("killed", False)]
)
def test_failures_caused_by_the_region_are_stored(status, kept):
    o, _ = oracle(Timing.without(status, "no"))
    wanted = untimed(o, 3)
    o.measure(wanted, clock=LONG)
    (region,) = wanted.values()
    assert bool(o.store.get([region_key(region, ())])) is kept


def test_a_timeout_cut_short_by_the_budget_is_not_stored():
    o, worker = oracle(Timing.without("timeout", "no"))
    wanted = untimed(o, 3)
    o.measure(wanted, clock=Stopwatch(6.0))
    (region,) = wanted.values()
    assert worker.asked[0][1] < 6.0 < o.config.region_timeout
    assert o.store.get([region_key(region, ())]) == {}


def test_a_timeout_under_a_shorter_limit_is_not_stored():
    o, _ = oracle(Timing.without("timeout", "no"))
    o.config = CostConfig(region_timeout=5.0)
    wanted = untimed(o, 3)
    assert o.measure(wanted, clock=LONG) == 1  # here it counts as too slow
    (region,) = wanted.values()
    assert o.store.get([region_key(region, ())]) == {}


def test_a_region_cut_short_by_the_budget_is_priced_as_untried():
    o, _ = oracle(Timing.without("timeout", "no"))
    before = costs(o, 3)
    assert o.measure(untimed(o, 3), clock=Stopwatch(6.0)) == 0
    assert costs(o, 3) == before
    assert untimed(o, 3) == {}


def test_a_region_that_cannot_be_traced_does_not_affect_others():
    o, worker = oracle()
    attrs = pack_attrs("reduce_sum", {"axes": 1})
    nodes = (
        Node("input", shape=(4, 3), ref=0),
        Node("reduce_sum", (0,), attrs, lowering=99, shape=(3,)),
        Node("reduce_sum", (0,), attrs, shape=(3,)),
    )
    wanted = o.untimed_regions(VIEW(build(nodes, [1, 2], bucket=64)))
    assert o.measure(wanted, clock=LONG) == 2
    assert (o.spending.failures, len(worker.asked)) == (1, 1)


@pytest.mark.parametrize("status", ["failed", "timeout", "killed"])
def test_a_program_that_cannot_be_timed_is_tried_and_counted_once(status):
    o, worker = oracle(Timing.without(status, "no"))
    program, other = Job("program", b"1"), Job("other", b"2")
    again = Job("the same under another key", b"1")
    assert o.time_against(program, other).status == status
    assert o.time_against(program, other, turn=1).status == status
    assert o.time_job(again, timeout=5.0).status == status
    assert [key for key, _ in worker.asked] == ["program"]
    assert (o.spending.failures, o.spending.measurements) == (1, 1)
    assert o.store.items() == []


def test_a_reference_that_cannot_be_timed_is_tried_and_counted_once():
    o, worker = oracle()  # its answers have no time relative to the reference
    lost = Job("lost", b"0")
    assert o.time_against(Job("a", b"1"), lost).relative is None
    assert o.time_against(Job("b", b"2"), lost).relative is None
    assert not o.time_job(lost).ok
    assert worker.references == ["lost"]
    assert (o.spending.failures, o.spending.measurements) == (1, 3)  # reference and two jobs
    assert o.store.items() == []


def test_no_more_than_the_limit_is_measured():
    o, worker = oracle()
    assert o.measure(untimed(o, 3, 5, 7), clock=LONG, limit=2) == 2
    assert (len(worker.asked), o.spending.measurements) == (2, 2)
    assert o.measure(untimed(o, 9), clock=LONG, limit=2) == 0


def test_nothing_is_measured_when_time_is_over():
    o, worker = oracle()
    assert o.measure(untimed(o, 3), clock=Stopwatch(-1.0)) == 0
    assert worker.asked == []


def test_the_limit_on_new_measurements_excludes_stored_ones():
    o, _ = oracle()
    o.measure(untimed(o, 5), clock=LONG)
    again, _ = oracle(store=o.store)
    assert again.measure(untimed(again, 3, 4, 5), clock=LONG, new=1) == 2
    assert again.spending.measurements == 1 and again.spending.from_store == 1


def test_spending_adds_up():
    o, _ = oracle()
    o.measure(untimed(o, 3, 5), clock=LONG)
    spent = o.spending.as_dict()
    assert spent["measurements"] == 2 and spent["compile_seconds"] == 1.0


def test_the_roofline_learns_from_four_timings_of_a_class():
    o, _ = oracle(*(timing(t) for t in (1e-3, 1e-3, 1e-3, 1e-3)))
    before = costs(o, 100)
    o.measure(untimed(o, 3, 5, 7, 9), clock=LONG)
    assert costs(o, 100)[0] > 50 * before[0]  # these sums took long for so few bytes


def test_whole_program_timings_correct_the_cost_table():
    o, _ = oracle(timing(2e-3))
    o.measure(untimed(o, 3), clock=LONG)
    (before,) = costs(o, 3)
    o.correct([{"reduce": before}], [2 * before])
    assert costs(o, 3) == pytest.approx([2 * before], rel=1e-4)


def test_no_timing_falls_below_the_clocks_resolution():
    assert without_overhead(timing(1e-6), 1e-3).seconds == 2e-7


def test_varying_numbers_of_views_are_compiled_once(monkeypatch):
    traced: list[int] = []

    def counting(view: CostView) -> jax.Array:
        traced.append(view.op.shape[0])
        return signature(view)

    monkeypatch.setattr(model, "_signature", jax.jit(counting))
    found = [untimed(oracle()[0], *range(2, 2 + n)) for n in (1, 5, 17)]
    assert [len(each) for each in found] == [1, 5, 17]
    assert traced == [64]
