"""Rules compiled into arrays, which `engine.match` matches.

A rule has one variant for each order of its commutative operators' arguments, and a variant has one
or two pattern trees. Array sizes are bucketed: adding a rule within a bucket recompiles nothing.

Letters: V variants, T trees, P positions of a tree, I instructions, Q new nodes, A arguments, W
words of T bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.language import bytecode
from xrl_jax.language.rule import Pattern, Rule, Term, Var, pattern_text
from xrl_jax.language.sexpr import RuleError
from xrl_jax.lower.table import CHOICE, number_of

P = 10  # positions (operators and variables) of one pattern tree
Q = 10  # new nodes of a right-hand side
A = ops.MAX_ARGS
N_ARG_BITS = 3  # number of arguments whose operators the bit masks test
HEIGHT = 4  # patterns reach at most this many argument steps below their root
_INSTRUCTION_BUCKETS = (64, 96, 128, 192, 256)
_TREE_BUCKETS = (32, 64, 128, 256, 512, 640, 768, 1024)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RuleTable:
    """All rules of a search as arrays; see the module docstring for the letters."""

    root_bits: jax.Array  # [N_OPS, W] uint32, trees whose root may be this operator
    arg_bits: jax.Array  # [N_ARG_BITS, N_OPS, W] uint32, trees whose argument may be this operator
    tall_bits: jax.Array  # [HEIGHT + 2, W] uint32, trees of at least this height
    tree_variant: jax.Array  # [T] int32
    tree_root: jax.Array  # [T] int32, which root of its variant; -1 for unused trees
    pos_op: jax.Array  # [T, P] int32, operator; 0 for a variable; -1 for unused
    pos_parent: jax.Array  # [T, P] int32, an earlier position
    pos_slot: jax.Array  # [T, P] int32, which argument of the parent
    pos_arity: jax.Array  # [T, P] int32
    pos_same: jax.Array  # [T, P] int32, an earlier position that must be the same node; -1 for none
    variant_rule: jax.Array  # [V] int32, index into the list of rules
    variant_choice: jax.Array  # [V] int32, index into `lower.table.CHOICES`; -1 for none
    variant_trees: jax.Array  # [V, 2] int32; -1 for no second root
    symmetric: jax.Array  # [V] bool, the two roots are interchangeable
    shared: jax.Array  # [V, 2] int32, position of the shared operand in either tree
    cross_same: jax.Array  # [V, P] int32, position of tree 0 that one of tree 1 must equal; -1
    code: jax.Array  # [V, I, 6] int32, see `interpreter.run`
    length: jax.Array  # [V] int32
    by_length: jax.Array  # [V] int32, rank of a variant by program length, shortest first
    new_op: jax.Array  # [V, Q] int32; 0 for unused
    new_attrs: jax.Array  # [V, Q] int32, register
    new_lowering: jax.Array  # [V, Q] int32
    new_like: jax.Array  # [V, Q] int32, position of the node whose lowering it may keep; -1
    like_args: jax.Array  # [V, Q, A] int32, positions of that node's arguments; -1 for none
    new_args: jax.Array  # [V, Q, A] int32: binding position, 2P + new node, or -1
    new_dtype: jax.Array  # [V, Q] int32, code (as in new_args) whose dtype a constant has; -1
    new_value: jax.Array  # [V, Q] float32
    root_to: jax.Array  # [V, 2] int32, code (as in new_args) that replaces each root; -1

    @property
    def n_words(self) -> int:
        return self.root_bits.shape[1]


@dataclass(frozen=True)
class CompiledRules:
    """A rule table with the rules it came from; `variant_rule` indexes `rules`."""

    rules: tuple[Rule, ...]
    table: RuleTable


@dataclass(frozen=True)
class _Tree:
    """A flattened pattern tree."""

    ops: list[int]
    parents: list[int]
    slots: list[int]
    arities: list[int]
    same: list[int]
    names: dict[str, int]  # variable or node name -> position
    patterns: list[Pattern | Var]

    @property
    def height(self) -> int:
        """Argument steps from the root to the deepest position."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return max(depths)


def _flatten(root: Pattern) -> _Tree:
    tree = _Tree([], [], [], [], [], {}, [])
    queue: list[tuple[Pattern | Var, int, int]] = [(root, 0, 0)]
    while queue:
        node, parent, slot = queue.pop(0)
        at = len(tree.ops)
        tree.patterns.append(node)
        tree.parents.append(parent)
        tree.slots.append(slot)
        if isinstance(node, Var):
            tree.ops.append(0)
            tree.arities.append(-1)
            tree.same.append(tree.names.get(node.name, -1))
            tree.names.setdefault(node.name, at)
        else:
            tree.ops.append(ops.OPS[node.op].code)
            tree.arities.append(len(node.args))
            tree.same.append(-1)
            if node.name:
                tree.names[node.name] = at
            queue += [(a, at, i) for i, a in enumerate(node.args)]
    return tree


def _commuted(p: Pattern | Var) -> list[Pattern | Var]:
    """Return the pattern with the arguments of its commutative operators in every order."""
    if isinstance(p, Var):
        return [p]
    commuted: list[Pattern | Var] = []
    for args in itertools.product(*(_commuted(a) for a in p.args)):
        commuted.append(replace(p, args=args))
        if ops.OPS[p.op].commutative and args[0] != args[1]:
            commuted.append(replace(p, args=(args[1], args[0])))
    return commuted


def _text(rule: Rule) -> str:
    """Return the text of a rule up to names, by which equal commutative variants are merged."""
    names: dict[str, str] = {}

    def show(t: Pattern | Term | Var) -> str:
        if isinstance(t, Var):
            return names.setdefault(t.name, f"v{len(names)}")
        args = [show(a) for a in t.args]
        if isinstance(t, Term) and ops.OPS[t.op].commutative:
            args.sort()
        extra = (
            f"{t.attrs}{t.name}"
            if isinstance(t, Pattern)
            else f"{t.attrs}{t.like}{t.lowering}{t.value}{t.dtype_of}"
        )
        if isinstance(t, Pattern) and t.name:
            names[t.name] = f"n{len(names)}"
        return f"({t.op} {' '.join(args)} {extra})"

    parts = [show(p) for p in rule.lhs] + [f"{n}={show(t)}" for n, t in rule.nodes]
    text = " | ".join([*parts, *(show(t) for t in rule.rhs)])
    rest = " ".join(str(e) for e in (*rule.conditions, *rule.lets))
    for old, new in names.items():
        rest = rest.replace(f"'{old}'", f"'{new}'")
    return text + rest


def variants(rule: Rule) -> list[Rule]:
    seen: dict[str, Rule] = {}
    for lhs in itertools.product(*(_commuted(p) for p in rule.lhs)):
        variant = replace(rule, lhs=lhs)
        key = min(pattern_text(lhs), pattern_text(lhs[::-1])) if rule.symmetric else _text(variant)
        seen.setdefault(key, variant)
    return list(seen.values())


class _Variant:
    """One compiled variant, before it is put into the table."""

    def __init__(self, rule: Rule):
        self.rule = rule
        self.trees = [_flatten(p) for p in rule.lhs]
        for tree in self.trees:
            if len(tree.ops) > P:
                raise RuleError(
                    f"rule {rule.name}: a pattern has {len(tree.ops)} positions, at most {P}",
                    rule.place,
                )
            if tree.height > HEIGHT:
                raise RuleError(
                    f"rule {rule.name}: a pattern reaches {tree.height} argument steps below its "
                    f"root, at most {HEIGHT}",
                    rule.place,
                )
        self.positions: dict[str, int] = {}
        named_ops: dict[str, str] = {}
        for t, tree in enumerate(self.trees):
            for name, at in tree.names.items():
                self.positions.setdefault(name, at + t * P)
            named_ops |= {p.name: p.op for p in tree.patterns if isinstance(p, Pattern) and p.name}
        self.assembler = bytecode.Assembler(self.positions, named_ops)
        self._check()
        # Term, arguments, register of the attributes, source of the dtype.
        self.new: list[tuple[Term, list[int], int, int]] = []
        self._codes: dict[str, int] = dict(self.positions)
        for name, term in rule.nodes:
            self._codes[name] = self._term(term)
        self.root_to = [self._term(t) for t in rule.rhs]
        if len(self.new) > Q:
            raise RuleError(
                f"rule {rule.name} makes {len(self.new)} nodes, at most {Q}", rule.place
            )
        self.program = self.assembler.program([attrs for _, _, attrs, _ in self.new])

    def _check(self) -> None:
        asm = self.assembler
        for t, tree in enumerate(self.trees):
            for at, pattern in enumerate(tree.patterns):
                if isinstance(pattern, Var):
                    continue
                for key, wanted in pattern.attrs:
                    spec = ops.OPS[pattern.op].field(key)
                    got = asm.field(at + t * P, spec.offset, spec.width)
                    if isinstance(wanted, int):
                        asm.checked.add(asm.emit("=", got, asm.emit("imm", imm=wanted)))
                    elif wanted in asm.numbers:
                        asm.checked.add(asm.emit("=", got, asm.numbers[wanted]))
                    else:
                        asm.numbers[wanted] = got
        for name, e in self.rule.lets:
            asm.numbers[name] = asm.compile(e)
        for e in self.rule.conditions:
            asm.check(e)

    def _term(self, term: Term | Var) -> int:
        """Return the code of a term: a binding position or 2P + new node."""
        if isinstance(term, Var):
            return self._codes[term.name]
        args = [self._term(a) for a in term.args]
        spec = ops.OPS[term.op]
        asm = self.assembler
        if term.like:
            attrs = asm.load(self.positions[term.like], "attrs")
        else:
            attrs = asm.emit("defaults", imm=spec.code)
        for key, e in term.attrs:
            attrs = asm.put(attrs, spec.field(key), asm.compile(e))
        source = self._codes[term.dtype_of] if term.dtype_of else -1
        made = (term, args, attrs, source)
        if made in self.new:
            return 2 * P + self.new.index(made)
        self.new.append(made)
        return 2 * P + len(self.new) - 1

    def lowering_source(self, term: Term) -> tuple[int, list[int]]:
        """Return the positions of the node whose lowering a new one may keep, and of its arguments;
        -1 and an empty list where there is no such node.
        """
        if not term.like or term.lowering:
            return -1, []
        position = self.positions[term.like]
        t, at = divmod(position, P)
        tree = self.trees[t]
        if tree.ops[at] != ops.OPS[term.op].code:
            return -1, []
        return position, [j + t * P for j in range(1, len(tree.ops)) if tree.parents[j] == at]

    @property
    def shared(self) -> tuple[int, int]:
        """Positions of the shared operand in the two trees: the shallowest common variable."""
        if len(self.trees) == 1:
            return (0, 0)
        common = [n for n in self.trees[0].names if n in self.trees[1].names and n.startswith("?")]
        best = min(common, key=lambda n: self.trees[0].names[n] + self.trees[1].names[n])
        return self.trees[0].names[best], self.trees[1].names[best]


def _bucket(n: int, buckets: Sequence[int], what: str) -> int:
    for b in buckets:
        if n <= b:
            return b
    raise RuleError(f"{n} {what} exceed the largest table, {buckets[-1]}")


def compile_rules(rules: Sequence[Rule], *, min_trees: int = 0, min_code: int = 0) -> CompiledRules:
    """Compile `rules` into a table.

    Args:
      rules: checked rules with distinct names.
      min_trees: minimum room for trees, so that rules can be added without another bucket.
      min_code: the same for instructions.

    Raises:
      RuleError: a rule is too large for the table; the message names it.
    """
    names = [r.name for r in rules]
    twice = {n for n in names if names.count(n) > 1}
    if twice:
        raise RuleError(f"several rules have the name {', '.join(sorted(twice))}")
    compiled = [(i, _Variant(v)) for i, r in enumerate(rules) for v in variants(r)]
    n_trees = sum(len(e.trees) for _, e in compiled)
    t = _bucket(max(n_trees, min_trees, 1), _TREE_BUCKETS, "pattern trees")
    longest = max((len(e.program.code) for _, e in compiled), default=1)
    n_code = _bucket(max(longest, min_code), _INSTRUCTION_BUCKETS, "instructions of a rule")
    a = _blank(t, n_code)
    numbers = itertools.count()
    for v, (rule_index, variant) in enumerate(compiled):
        a["variant_rule"][v] = rule_index
        _put_variant(a, v, variant)
        for which, tree in enumerate(variant.trees):
            _put_tree(a, next(numbers), v, which, tree)
    a["by_length"] = np.argsort(np.argsort(a["length"], kind="stable")).astype(np.int32)
    arrays = {f.name: jnp.asarray(a[f.name]) for f in fields(RuleTable)}
    return CompiledRules(tuple(rules), RuleTable(**arrays))


def _blank(t: int, n_code: int) -> dict[str, np.ndarray]:
    """Return the fields of an empty table with room for `t` variants of `n_code` instructions."""
    w = t // 32
    return {
        "root_bits": np.zeros((ops.N_OPS, w), np.uint32),
        "arg_bits": np.zeros((N_ARG_BITS, ops.N_OPS, w), np.uint32),
        "tall_bits": np.zeros((HEIGHT + 2, w), np.uint32),
        "tree_variant": np.zeros(t, np.int32),
        "tree_root": np.full(t, -1, np.int32),
        "pos_op": np.full((t, P), -1, np.int32),
        "pos_parent": np.zeros((t, P), np.int32),
        "pos_slot": np.zeros((t, P), np.int32),
        "pos_arity": np.full((t, P), -1, np.int32),
        "pos_same": np.full((t, P), -1, np.int32),
        "variant_rule": np.full(t, -1, np.int32),
        "variant_choice": np.full(t, -1, np.int32),
        "variant_trees": np.full((t, 2), -1, np.int32),
        "symmetric": np.zeros(t, bool),
        "shared": np.zeros((t, 2), np.int32),
        "cross_same": np.full((t, P), -1, np.int32),
        "code": np.zeros((t, n_code, 6), np.int32),
        "length": np.zeros(t, np.int32),
        "new_op": np.zeros((t, Q), np.int32),
        "new_attrs": np.zeros((t, Q), np.int32),
        "new_lowering": np.zeros((t, Q), np.int32),
        "new_like": np.full((t, Q), -1, np.int32),
        "like_args": np.full((t, Q, A), -1, np.int32),
        "new_args": np.full((t, Q, A), -1, np.int32),
        "new_dtype": np.full((t, Q), -1, np.int32),
        "new_value": np.zeros((t, Q), np.float32),
        "root_to": np.full((t, 2), -1, np.int32),
    }


def _put_variant(a: Mapping[str, np.ndarray], v: int, variant: _Variant) -> None:
    if variant.rule.lowering is not None:
        op, name = variant.rule.lowering
        a["variant_choice"][v] = CHOICE[op, number_of(op, name)]
    lhs = variant.rule.lhs
    a["symmetric"][v] = variant.rule.symmetric and pattern_text(lhs[:1]) == pattern_text(lhs[1:])
    a["shared"][v] = variant.shared
    if len(variant.trees) == 2:
        for name, at in variant.trees[1].names.items():
            if name in variant.trees[0].names:
                a["cross_same"][v, at] = variant.trees[0].names[name]
    for i, (c, checked) in enumerate(
        zip(variant.program.code, variant.program.checked, strict=True)
    ):
        a["code"][v, i] = (c.code, c.a, c.b, c.c, c.imm, checked)
    a["length"][v] = len(variant.program.code)
    a["root_to"][v, : len(variant.root_to)] = variant.root_to
    for q, (term, args, _, source) in enumerate(variant.new):
        a["new_op"][v, q] = ops.OPS[term.op].code
        a["new_attrs"][v, q] = variant.program.results[q]
        a["new_lowering"][v, q] = number_of(term.op, term.lowering) if term.lowering else 0
        a["new_like"][v, q], like_args = variant.lowering_source(term)
        a["like_args"][v, q, : len(like_args)] = like_args
        a["new_args"][v, q, : len(args)] = args
        a["new_dtype"][v, q] = source
        a["new_value"][v, q] = term.value


def _put_tree(a: Mapping[str, np.ndarray], number: int, v: int, which: int, tree: _Tree) -> None:
    n = len(tree.ops)
    a["tree_variant"][number] = v
    a["tree_root"][number] = which
    a["variant_trees"][v, which] = number
    for name, values in (
        ("pos_op", tree.ops),
        ("pos_parent", tree.parents),
        ("pos_slot", tree.slots),
        ("pos_arity", tree.arities),
        ("pos_same", tree.same),
    ):
        a[name][number, :n] = values
    word, bit = number // 32, np.uint32(1 << (number % 32))
    a["tall_bits"][: tree.height + 1, word] |= bit
    a["root_bits"][tree.ops[0], word] |= bit
    for slot in range(N_ARG_BITS):
        child = [j for j in range(1, n) if tree.parents[j] == 0 and tree.slots[j] == slot]
        if not child:
            a["arg_bits"][slot, ops.HOLE, word] |= bit
        elif tree.ops[child[0]] == 0:
            a["arg_bits"][slot, 1:, word] |= bit
        else:
            a["arg_bits"][slot, tree.ops[child[0]], word] |= bit
