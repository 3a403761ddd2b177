"""The time that lower precisions save, as the cost model prices it after timing the operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax

from xrl_jax.cost.view import view_graph
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node
from xrl_jax.libraries.base import Library
from xrl_jax.libraries.xla.plain import conv_layouts
from xrl_jax.lower.table import lower
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.program.host import disassemble, reassemble
from xrl_jax.program.program import Program
from xrl_jax.search.base import Oracle, predicted
from xrl_jax.transform.narrow import Site, narrowed

_Priced = tuple[Program, Site, float]  # a program with a site, and how often it runs


def seconds_saved(
    oracle: Oracle,
    program: Program,
    places: Mapping[Site, Sequence[str]],
    library: Library,
    clock: Stopwatch,
) -> dict[Site, dict[str, float]]:
    """Return the seconds of a run of the program that each precision saves, where it does, after
    timing what is not timed yet.

    Convolutions are timed alone, on arrays with their features last: inside of the library's calls
    they are, but an operator that is timed in the layout of the network pays for the conversion.
    """
    host = disassemble(program)
    graphs = (host.main, *host.bodies)
    priced: dict[Site, _Priced] = {}
    for site in places:
        nodes = graphs[site.graph].nodes
        node = nodes[site.index]
        if node.op == "conv":
            alone = features_last(node, [nodes[a] for a in node.args])
            priced[site] = *alone, program.counts[site.graph]
        else:
            priced[site] = program, site, 1.0
    wanted = {}
    for site, (of, at, _) in priced.items():
        for chosen in ({}, *({at: p} for p in places[site])):
            for graph in narrowed(of, chosen, library).graphs:
                wanted |= oracle.untimed_regions(view_graph(oracle.costs.sharing, graph))
    oracle.measure(wanted, clock=clock)
    programs = {id(of): of for of, _, _ in priced.values()}
    before = {key: predicted(of, oracle.costs) for key, of in programs.items()}
    gains: dict[Site, dict[str, float]] = {}
    for site, (of, at, runs) in priced.items():
        for precision in places[site]:
            saved = before[id(of)] - predicted(narrowed(of, {at: precision}, library), oracle.costs)
            if saved > 0:
                gains.setdefault(site, {})[precision] = runs * saved
    return gains


def features_last(node: Node, args: Sequence[Node]) -> tuple[Program, Site]:
    """Return a convolution as a program of its own, and where it is there: images [N, spatial.., C]
    and kernels [spatial.., I, O] of the same sizes, and the same lowering.
    """
    image, kernel, _ = conv_layouts(node)
    n = len(image) - 2
    last, kernel_last = (0, n + 1, *range(1, n + 1)), (n + 1, n, *range(n))
    attrs = list(node.attrs)
    layouts = {"lhs_layout": last, "rhs_layout": kernel_last, "out_layout": last}
    for name, layout in layouts.items():
        attrs[node.spec.field(name).attr_slice] = [ops.LAYOUT_CODE[layout]]
    plain = replace(node, attrs=tuple(attrs), lowering=0)
    x, w = (
        jax.ShapeDtypeStruct(tuple(arg.shape[old[new.index(d)]] for d in range(n + 2)), arg.dtype)
        for arg, old, new in zip(args, (image, kernel), (last, kernel_last), strict=True)
    )
    program = from_jax(lambda w, x: lower(plain, x, w), w, x, weights=0)
    host = disassemble(program)
    (at,) = (i for i, own in enumerate(host.main.nodes) if own.op == "conv")
    nodes = list(host.main.nodes)
    nodes[at] = replace(nodes[at], lowering=node.lowering)
    main = replace(host.main, nodes=tuple(nodes))
    return reassemble(program, replace(host, main=main)), Site(0, at)
