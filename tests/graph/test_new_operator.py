"""A new operator needs an entry in the op table, a plain lowering, a translation of its primitive,
and the weight of its work; everything else follows from these.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from tests.graph.parsed import parse_graph
from tests.graph.valid import is_valid
from tests.quick import QUICK
from xrl_jax.frontends import jaxpr
from xrl_jax.graph import attributes, kinds, ops, work
from xrl_jax.graph.check import check
from xrl_jax.graph.graph import GraphError, Node, build, infer, pack_attrs
from xrl_jax.graph.text import GraphTextError, format_graph
from xrl_jax.language.rule_files import load_rules
from xrl_jax.libraries.base import Lowering
from xrl_jax.lower import table
from xrl_jax.program.program import to_jax
from xrl_jax.verify.compare import ill_formed
from xrl_jax.verify.instances import hints_of, propose
from xrl_jax.verify.samplers.base import Rejected
from xrl_jax.verify.samplers.sketch import Sketch

# x / (1 + |x|), and a movement with attributes, which rotates elements along an axis.
ENTRIES: tuple[ops.Entry, ...] = (
    ("softsign", (1, 1), dict(takes=("float",))),
    ("roll", (1, 1), dict(fields=ops.fields(axis=kinds.AXIS, by=kinds.NATURAL), shape="arg0")),
)
PLAIN = {
    "softsign": lambda node, x: x / (1 + jnp.abs(x)),
    "roll": lambda node, x: jnp.roll(x, node.attr("by"), node.attr("axis")),
}
TRANSLATIONS = {
    "softsign": lambda emit, site: emit.node("softsign", site.args),
    "roll": lambda emit, site: emit.node("roll", site.args, **site.params),
}
WEIGHTS = {"softsign": 6.0, "roll": 1.0}

TEXT = """graph {
  %1: float32[2,3] = input() ref=@0
  %2: float32[2,3] = softsign(%1)
  %3: float32[2,3] = roll(%2) {axis=1, by=2}
  return %3
}"""


def primitive(name: str) -> Primitive:
    made = Primitive(name)
    made.def_abstract_eval(lambda x, **params: x)
    return made


SOFTSIGN, ROLL = primitive("softsign"), primitive("roll")


@pytest.fixture(autouse=True)
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the new operators to the tables."""
    specs = ops.table((*ops.ENTRIES, *ENTRIES))
    monkeypatch.setattr(ops, "OPS", specs)
    monkeypatch.setattr(ops, "OP_NAMES", tuple(specs))
    monkeypatch.setattr(ops, "N_OPS", len(specs))
    monkeypatch.setattr(work, "FAMILY", work.families(specs.values()))
    monkeypatch.setattr(work, "WEIGHTS", MappingProxyType({**work.WEIGHTS, **WEIGHTS}))
    plain = {name: (Lowering("plain", fn),) for name, fn in PLAIN.items()}
    monkeypatch.setattr(table, "LOWERINGS", MappingProxyType({**table.LOWERINGS, **plain}))
    translations = MappingProxyType({**jaxpr.TRANSLATIONS, **TRANSLATIONS})
    monkeypatch.setattr(jaxpr, "TRANSLATIONS", translations)


def node(op: str, **attrs: int) -> Node:
    return Node(op, (0,), pack_attrs(op, dict(attrs)), shape=(2, 3))


def test_its_shape_and_dtype_are_inferred():
    x = Node("input", shape=(2, 3), dtype="bfloat16", ref=0)
    for new in (node("softsign"), node("roll", axis=1, by=2)):
        assert infer(new.op, new.attrs, [x]) == ((2, 3), "bfloat16")


def test_it_is_written_and_read_back():
    assert format_graph(parse_graph(TEXT)) == TEXT
    assert attributes.defaults("roll", (2, 3), "float32") == pack_attrs("roll", {})
    with pytest.raises(GraphTextError, match="'roll' has no attribute 'axes'.*axis, by"):
        parse_graph(TEXT.replace("axis", "axes"))


def test_it_is_checked():
    check(parse_graph(TEXT))
    fresh = jax.jit(lambda graph: is_valid(graph), compiler_options=QUICK)
    assert fresh(parse_graph(TEXT))
    for attrs, message in (
        (dict(axis=2), r"roll.*attribute axis=2 is outside 0\.\.1"),
        (dict(by=-1), r"roll.*attribute by=-1 is out of range: at least 0"),
    ):
        nodes = [Node("input", shape=(2, 3), ref=0), node("roll", **attrs)]
        with pytest.raises(GraphError, match=message):
            check(build(nodes, (1,)))


def test_its_random_nodes_are_well_formed():
    ranks, axes = set(), set()
    for seed in range(60):
        drawing = Sketch(np.random.default_rng(seed))
        try:
            made = [drawing.node(op) for op in ("softsign", "roll")]
        except Rejected:  # a scalar has no axis
            continue
        assert ill_formed(drawing.nodes) == ""
        check(build(drawing.nodes, made))
        for i in made:
            (arg,) = (drawing.nodes[a] for a in drawing.nodes[i].args)
            found = jax.eval_shape(
                partial(table.lower, drawing.nodes[i]), jax.ShapeDtypeStruct(arg.shape, arg.dtype)
            )
            assert (found.shape, found.dtype.name) == (arg.shape, arg.dtype)
        ranks.add(len(drawing.nodes[made[0]].shape))
        axes.add(drawing.nodes[made[1]].attr("axis"))
    assert len(ranks) >= 4 and len(axes) >= 3


def test_random_instances_of_its_rules_are_found():
    (rule,) = load_rules(
        '(rule turned (source "s") (evidence field)'
        " (lhs (roll (softsign ?x) :as r)) (rhs (softsign (roll ?x :like r))))"
    )
    rng = np.random.default_rng(0)
    drawn = [propose(rule, hints_of(rule.conditions), rng) for _ in range(60)]
    found = [i for i in drawn if i is not None]
    assert len(found) >= 15
    assert {n.op for i in found for n in i.nodes} >= {"softsign", "roll"}


def test_its_work_is_counted():
    x = Node("input", shape=(2, 3), ref=0)
    assert work.node_work(node("softsign"), [x]) == (36.0, 48.0)
    assert work.node_work(node("roll", axis=1, by=1), [x]) == (0.0, 48.0)


def test_its_primitive_is_translated_and_its_function_computed():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)), "float32")
    program = jaxpr.from_jax(lambda x: ROLL.bind(SOFTSIGN.bind(x), axis=1, by=2), x)
    check(program.graph)
    assert "softsign(%1)" in format_graph(program.graph)
    assert "{axis=1, by=2}" in format_graph(program.graph)
    want = jnp.roll(x / (1 + jnp.abs(x)), 2, 1)
    np.testing.assert_allclose(jax.jit(to_jax(program))(x), want, rtol=1e-6)
