"""Reading rule files, selecting rules, and applying chains of them to networks as JAX users write
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xrl_jax.engine.apply import apply
from xrl_jax.engine.match import candidates, match
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import nodes_of
from xrl_jax.language.rule import ROLES
from xrl_jax.language.rule_files import all_rules, load_rules, select_rules, standard_rules
from xrl_jax.language.rule_parser import parse_rules
from xrl_jax.language.sexpr import RuleError
from xrl_jax.language.table import compile_rules
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.verify.verify import CODE, ROWS

SHIFT = '(rule shift (source "s") (lhs (add ?x ?y)) (when (is-scalar ?y)) (rhs (add ?y ?x)))'


def test_the_library_has_many_rules_of_every_family() -> None:
    rules = all_rules()
    families = Counter(r.family for r in rules)
    assert len(rules) >= 75
    assert set(families) >= {
        "activation", "associativity", "distributivity", "enlarge", "fold", "group", "identity",
        "layout", "merge", "movement", "pool", "reduction", "lowering_conv", "lowering_dot",
        "lowering_reduce_sum", "lowering_softmax", "lowering_window_max", "lowering_window_min",
        "lowering_window_sum",
    }  # fmt: skip


def test_the_library_leaves_room_for_a_users_patterns() -> None:
    roles = compile_rules(all_rules()).table.tree_root
    assert roles.shape == (640,)
    assert int((roles < 0).sum()) >= 50  # beyond these the engine compiles for a larger table


def test_a_pattern_deeper_than_the_matcher_supports_is_refused() -> None:
    tall = '(rule tall (source "test") (lhs (neg (neg (neg (neg (neg ?x)))))) (rhs (neg ?x)))'
    with pytest.raises(RuleError, match=r"rule tall: .* reaches 5 argument steps .* at most 4"):
        compile_rules(parse_rules(tall)[0])


def test_rules_that_need_finite_values_are_used_only_under_that_assumption() -> None:
    cautious, bold = standard_rules(), standard_rules(("finite",))
    assert set(bold) == set(all_rules()) and set(cautious) < set(bold)
    assert "tanh-by-logistic" in {r.name for r in set(bold) - set(cautious)}
    with pytest.raises(ValueError, match=r"'mul-factor' assumes that .* are finite"):
        select_rules(cautious, ["mul-factor"])
    with pytest.raises(ValueError, match="known: 'finite', 'in-domain'"):
        standard_rules(("positive",))


def test_a_rule_declares_its_assumptions() -> None:
    (rule,) = load_rules(SHIFT.replace("(when", "(assumes finite) (when"))
    assert rule.assumes == ("finite",)
    with pytest.raises(RuleError, match="a rule may assume one of finite, finite-operands"):
        load_rules(SHIFT.replace("(when", "(assumes luck) (when"))


def test_a_rule_declares_its_roles() -> None:
    (rule,) = load_rules(SHIFT.replace("(when", "(role sink-transpose sink-broadcast) (when"))
    assert rule.roles == ("sink-transpose", "sink-broadcast")


def test_a_role_applies_to_every_rule_of_a_repetition() -> None:
    rules = load_rules(
        '(each $op (exp tanh) (rule $op-down (role sink-transpose) (source "s")'
        " (lhs ($op (transpose ?x :as t))) (rhs (transpose ($op ?x) :like t))))"
    )
    assert [(r.name, r.roles) for r in rules] == [
        ("exp-down", ("sink-transpose",)), ("tanh-down", ("sink-transpose",)),
    ]  # fmt: skip


def test_searches_find_the_rules_of_every_role() -> None:
    of_role = {role: [r.name for r in all_rules() if role in r.roles] for role in ROLES}
    assert {role: len(names) for role, names in of_role.items()} == {
        "fold-into-weights": 24,
        "sink-broadcast": 16,
        "to-bias-or-scale": 2,
        "to-features-last": 1,
        "transpose-product": 1,
        "sink-transpose": 39,
        "cancel-transpose": 2,
        "absorb-transpose": 2,
        "merge-siblings": 3,
        "join-slices": 10,
    }
    assert set(of_role["fold-into-weights"]) == {r.name for r in all_rules() if r.family == "fold"}
    assert {"broadcast-broadcast", "exp-of-broadcast", "add-of-broadcasts"} < set(
        of_role["sink-broadcast"]
    )
    assert of_role["merge-siblings"] == [
        "merge-convs-enlarged", "merge-dots-by-left", "merge-convs-by-input",
    ]  # fmt: skip
    assert {"merge-biases-of-slices", "slice-slice"} < set(of_role["join-slices"])
    assert of_role["to-bias-or-scale"] == ["sub-bias", "div-scale"]
    assert of_role["to-features-last"] == ["conv-to-nhwc"]
    assert of_role["transpose-product"] == ["dot-swap-operands"]
    assert {
        "window_max-of-transpose", "cast-pull-transpose", "add-pull-transposes",
        "min-pull-transpose-scalar", "sub-transpose-broadcast", "split-of-transpose",
    } < set(of_role["sink-transpose"])  # fmt: skip
    assert of_role["cancel-transpose"] == ["transpose-away", "transpose-transpose"]
    assert of_role["absorb-transpose"] == ["dot-of-transpose-left", "dot-of-transpose-right"]


def test_rule_text_may_use_the_macros_of_the_prelude() -> None:
    (rule,) = load_rules(SHIFT)
    assert rule.name == "shift"


def test_rules_are_read_from_a_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.rules").write_text(SHIFT)
    (tmp_path / "a.rules").write_text(SHIFT.replace("rule shift", "rule first"))
    assert [r.name for r in load_rules(tmp_path)] == ["first", "shift"]
    assert [r.name for r in load_rules(tmp_path / "b.rules")] == ["shift"]


def test_an_error_in_a_file_names_the_file_and_the_place(tmp_path: Path) -> None:
    (tmp_path / "bad.rules").write_text('(rule r (source "s")\n  (lhs (neg ?x)) (rhs ?y))')
    with pytest.raises(RuleError, match=r"bad\.rules:2:23: '\?y' is not bound"):
        load_rules(tmp_path / "bad.rules")


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.rules").write_text(SHIFT)
    (tmp_path / "b.rules").write_text(SHIFT)
    with pytest.raises(
        RuleError,
        match=r"b\.rules:1:1: two rules have the name 'shift' \(the first: a\.rules:1:1\)",
    ):
        load_rules(tmp_path)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_rules("nowhere.rules")


def test_rules_are_chosen_by_name_family_and_object() -> None:
    library = standard_rules()
    own = load_rules(SHIFT)[0]
    assert select_rules(library, None) == library
    assert [r.name for r in select_rules(library, ["neg-neg"])] == ["neg-neg"]
    assert {r.family for r in select_rules(library, "layout")} == {"layout"}
    assert select_rules(library, [own]) == (own,)
    without = select_rules(library, ["-layout", "-neg-neg"])
    assert len(without) == len(library) - len(select_rules(library, ["layout", "neg-neg"]))
    some = select_rules(library, ["layout", "-conv-to-nhwc"])
    assert "conv-to-nhwc" not in [r.name for r in some] and some


def test_the_error_for_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no rule or family 'neg-ngg'; similar names: neg-neg"):
        select_rules(standard_rules(), ["neg-ngg"])


def test_suggested_names_include_rules_that_need_an_assumption() -> None:
    with pytest.raises(ValueError, match="similar names: tanh-by-logistic"):
        select_rules(standard_rules(), ["tanh-by-logistik"])


def test_the_error_for_a_file_name_explains_how_to_load_rules() -> None:
    with pytest.raises(ValueError, match=r"rules=xrl_jax.load_rules\('mine.rules'\)"):
        select_rules(standard_rules(), ["mine.rules"])


@engine_jit
def find(table: Any, graph: Any) -> Any:
    return candidates(table, graph, match(table, graph), size=64)


change = engine_jit(apply)


def rewritten(
    fn: Callable[..., Any], *args: Any, rules: list[str], weights: tuple[int, ...] = ()
) -> Any:
    """Return the program, and the program after its first candidate was applied until none was
    left.
    """
    program = from_jax(fn, *args, weights=weights)
    table = compile_rules(select_rules(all_rules(), rules), min_trees=ROWS, min_code=CODE).table
    graph = program.graph
    for _ in range(40):
        found = find(table, graph)
        for k in range(min(int(found.count), 64)):
            done = change(table, graph, found.variant[k], found.root[k], found.partner[k])
            if bool(done.ok):
                graph = done.graph
                break
        else:
            return program, program.with_graphs([graph, *program.graphs[1:]])
    raise AssertionError("the rules do not come to an end")


def live_ops(program: Any) -> list[str]:
    """Return the operators of the main graph that are not weight-only."""
    graph = program.graph
    nodes, _, slots = nodes_of(graph)
    return [n.op for n, s in zip(nodes, slots, strict=True) if not bool(graph.nodes.weight_only[s])]


@pytest.mark.slow
def test_batch_norm_as_jax_users_write_it_becomes_a_convolution_and_a_bias() -> None:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    layer = {
        "mean": normal(4),
        "var": jnp.abs(normal(4)) + 1,
        "scale": normal(4),
        "bias": normal(4),
        "w": normal(4, 3, 3, 3),
    }

    def fn(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(
            x, layer["w"], (1, 1), [(1, 1)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        mean, var, scale, bias = (layer[k][:, None, None] for k in ("mean", "var", "scale", "bias"))
        return jax.nn.relu((y - mean) * lax.rsqrt(var + 1e-5) * scale + bias)

    x = normal(1, 3, 8, 8)
    rules = [
        "broadcast-broadcast", "add-of-broadcast-scalar", "rsqrt-of-broadcast", "sub-bias",
        "conv-batch-norm", "conv-bias-scale", "conv-scale", "scale-join", "bias-join",
    ]  # fmt: skip
    program, folded = rewritten(fn, layer, x, rules=rules, weights=(0,))
    assert live_ops(folded) == ["input", "conv", "add", "max"]
    np.testing.assert_allclose(folded(layer, x), program(layer, x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_softmax_of_jax_nn_becomes_one_node() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5)), jnp.float32)
    rules = ["max-lowest", "broadcast-broadcast", "softmax-form", "softmax-shift"]
    program, named = rewritten(jax.nn.softmax, x, rules=rules)
    assert live_ops(named) == ["input", "softmax"]
    np.testing.assert_allclose(named(x), program(x), rtol=1e-6)
