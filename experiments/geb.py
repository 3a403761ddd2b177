"""Monte-Carlo tree search over e-graphs (MCTS-GEB) beside plain saturation, on expressions.

  python -m experiments.geb --file=costs.csv           expressions of a file, with published costs
  python -m experiments.geb --language=math --random=10

The cost of an expression is its number of operators and leaves. All searches stop growing an
e-graph that has --nodes e-nodes, and use the rules without conditions:

  turns     plain saturation, one rule after the other, as egg was run for the published costs
  backoff   plain saturation by egg's schedule
  mcts      Monte-Carlo tree search over the order of the rules; one e-graph
  restarts  the same, started again from the expression found; as many simulations in all

Results are checked: no two numbers are equal, and where expressions have values, these agree. Exit
status: 1 where a case is dearer than egg's published cost or a check fails, 2 for bad flags, 130
after Ctrl-C, which prints what was done.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import app, flags

from experiments.geb_cases import Case, CaseError, drawn, read, same_values
from xrl_jax.egraph.limits import Limits
from xrl_jax.egraph.term_saturation import Schedule, saturate_terms
from xrl_jax.egraph.term_search import search_terms
from xrl_jax.egraph.tree_cost import cheapest_now, expression_of
from xrl_jax.language.rule_files import load_language
from xrl_jax.language.terms import Expression, Language
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.runtime.engine_jit import on_cpu

_ITERATIONS = 400
SEARCHES = ("turns", "backoff", "mcts", "restarts")


@dataclass(frozen=True)
class Result:
    """Costs of one case by search; several seeds give several costs.

    Attributes:
      seconds: of the search with restarts, for one seed.
      checked: "values" where values agree, "numbers" where none can be compared and no two numbers
        are equal, or what is wrong.
    """

    case: Case
    costs: dict[str, tuple[float, ...]]
    seconds: float
    checked: str

    @property
    def is_wrong(self) -> bool:
        return self.checked not in ("values", "numbers")

    @property
    def is_dearer(self) -> bool:
        """Whether the search with restarts is dearer than egg, with some seed."""
        return max(self.costs["restarts"]) > self.case.published.get("egg", float("inf"))


@dataclass(frozen=True)
class Settings:
    nodes: int
    simulations: int
    seconds: float
    seeds: int


def run_case(case: Case, language: Language, settings: Settings) -> Result:
    """Simplify one expression by all searches."""
    rules = [r for r in language.rules if not r.conditions]
    folding = language.name == "prop"
    costs: dict[str, tuple[float, ...]] = {}
    found: list[Expression] = []
    for name, schedule in (("turns", Schedule.TURNS), ("backoff", Schedule.BACKOFF)):
        grown = saturate_terms(
            [case.expression],
            language,
            rules,
            limits=Limits(_ITERATIONS, settings.nodes, settings.seconds),
            schedule=schedule,
            folding=folding,
        )
        if grown.is_contradictory:
            raise ValueError("the rules prove that two different numbers are equal")
        choice = cheapest_now(grown.graph, jnp.ones(grown.graph.bucket, jnp.float32))
        root = int(grown.graph.roots[0])
        costs[name] = (float(choice.cost[root]),)
        found.append(expression_of(grown.graph, choice, root, language, grown.symbols))
    # Compiles what is timed below.
    search_terms(
        case.expression, language, rules, key=jax.random.key(0), simulations=1, folding=folding
    )
    for name in ("mcts", "restarts"):
        clock, each = Stopwatch(float("inf")), []
        for seed in range(settings.seeds):
            limit = Stopwatch(settings.seconds)
            result = search_terms(
                case.expression,
                language,
                rules,
                key=jax.random.key(seed),
                nodes=settings.nodes,
                simulations=settings.simulations,
                restarts=name == "restarts",
                folding=folding,
                going=lambda limit=limit: not limit.done,
            )
            each.append(result.cost)
            found.append(result.expression)
        costs[name] = tuple(each)
    seconds = clock.elapsed / settings.seeds
    return Result(case, costs, seconds, _checked(case.expression, found, language))


def _checked(start: Expression, found: Sequence[Expression], language: Language) -> str:
    told = [same_values(start, e, language) for e in found]
    if False in told:
        return f"wrong: {found[told.index(False)]}"
    return "values" if True in told else "numbers"


def table(results: Sequence[Result]) -> str:
    """Return Markdown: a row for each case, then sums by language."""
    solvers = sorted({s for r in results for s in r.case.published})
    header = ["case", *solvers, "turns", "backoff", "mcts", "restarts", "s", "check"]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for r in results:
        published = [_number(r.case.published.get(s)) for s in solvers]
        cells = [f"{r.case.language} {r.case.name}", *published]
        cells += [_spread(r.costs[s]) for s in SEARCHES]
        lines.append(f"| {' | '.join([*cells, f'{r.seconds:.1f}', r.checked])} |")
    for language in dict.fromkeys(r.case.language for r in results):
        of = [r for r in results if r.case.language == language]
        full = [s for s in solvers if all(s in r.case.published for r in of)]
        sums = [_number(sum(r.case.published[s] for r in of)) if s in full else "" for s in solvers]
        cells = [f"{language}: sum of {len(of)}", *sums]
        for s in SEARCHES:
            seeds = zip(*(r.costs[s] for r in of), strict=True)
            cells.append(_spread([sum(costs) for costs in seeds]))
        lines.append(f"| {' | '.join([*cells, '', ''])} |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _spread(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    if len(set(values)) == 1:
        return _number(mean)
    return f"{mean:,.1f} ± {statistics.stdev(values):,.1f}"


def summary(results: Sequence[Result]) -> str:
    """Return the largest gain over plain saturation, and the cases that are dearer than egg's."""
    if not results:
        return "no case was finished"

    def ratio(r: Result) -> float:
        return r.costs["turns"][0] / min(r.costs["restarts"])

    best = max(results, key=ratio)
    lines = [
        f"largest gain over plain saturation: {ratio(best):.1f} times "
        f"({best.case.language} {best.case.name}: {best.costs['turns'][0]:g} -> "
        f"{min(best.costs['restarts']):g})"
    ]
    known = [r for r in results if "egg" in r.case.published]
    met = sum(r.costs["turns"][0] == r.case.published["egg"] for r in known)
    dearer = [f"{r.case.language} {r.case.name}" for r in known if r.is_dearer]
    if known:
        lines.append(f"plain saturation has egg's published cost on {met} of {len(known)} cases")
        lines.append(f"dearer than egg's: {', '.join(dearer) or 'none'}")
    return "\n".join(lines)


def run(cases: Sequence[Case], settings: Settings, tell: Callable[[str], None]) -> int:
    """Run all cases, print the table and return the exit status."""
    results: list[Result] = []
    status = 0
    try:
        with on_cpu():
            for n, case in enumerate(cases, start=1):
                tell(f"[{n}/{len(cases)}] {case.language} {case.name}")
                try:
                    results.append(run_case(case, load_language(case.language), settings))
                except ValueError as error:
                    tell(f"error: {case.language} {case.name}: {error}")
                    status = 1
    except KeyboardInterrupt:
        status = 130
    if results:
        print(table(results))
    print(summary(results))
    bad = any(r.is_dearer or r.is_wrong for r in results)
    return status or int(bad)


def define_flags() -> None:
    flags.DEFINE_string("file", "", "CSV file of expressions with published costs.")
    flags.DEFINE_multi_enum("language", [], ["math", "prop"], "Only these languages.")
    flags.DEFINE_integer("random", 0, "Number of random expressions of each language.")
    flags.DEFINE_integer("nodes", 500, "E-nodes at which an e-graph is not grown further.")
    flags.DEFINE_integer("simulations", 1000, "Simulations of a search.")
    flags.DEFINE_float("seconds", 20.0, "Time limit of a search, compiling excluded.")
    flags.DEFINE_integer("seeds", 1, "Number of seeds of the tree search.")


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        print(f"error: unexpected argument {argv[1]!r}", file=sys.stderr)
        return 2
    f = flags.FLAGS
    try:
        if bool(f.file) == bool(f.random):
            raise CaseError("give either --file or --random")
        if min(f.nodes, f.simulations, f.seeds) < 1:
            raise CaseError("--nodes, --simulations and --seeds are at least 1")
        languages = f.language or ["math", "prop"]
        cases = (
            [c for c in read(Path(f.file)) if c.language in languages]
            if f.file
            else [
                Case(name, f"random {seed}", drawn(load_language(name), seed))
                for name in languages
                for seed in range(f.random)
            ]
        )
    except (CaseError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = Settings(f.nodes, f.simulations, f.seconds, f.seeds)
    return run(cases, settings, lambda text: print(text, file=sys.stderr))


if __name__ == "__main__":
    define_flags()
    app.run(main)
