"""The parser of rule files, with every check that needs no graph.

    (rule NAME
      (family FAMILY) (source "WHERE FROM") (evidence KIND)
      (role NAME ...)             its roles, by which a search selects rules (`rule`)
      (assumes finite)            it may lose NaN, infinities or range (`rule.RULE_ASSUMPTIONS`)
      (symmetric)                 two roots only: they are interchangeable, each pair is found once
      (lhs PATTERN [PATTERN])     one or two roots; two share an operand
      (when CONDITION ...)        all lanes of every condition must be true
      (let NAME EXPRESSION) ...   numbers
      (node NAME TERM) ...        tensors of the right-hand side used more than once
      (rhs TERM [TERM]))          one for each root

A pattern is `?x` or `(op PATTERN ... :attr VALUE ... :as NAME)`. If VALUE is a number, the
attribute must equal it; if it is a name, the attribute is bound to it (or must equal the number it
is bound to). For `:dtype`, VALUE may also be the name of a dtype such as `float32` (`dtype_names`).
`:as` names the node. A term is `?x`, a node's name, `(const NUMBER :dtype-of ?x)` or `(op TERM ...
:like NAME :attr EXPRESSION ...)`: attributes are copied from the node named by `:like`, then those
given are set. A node keeps the lowering of its `:like` if operator, attributes and operand types
are the same. `:lowering NAME` chooses another for an otherwise unchanged node, where the table of
lowerings allows that (`lower.table`):

    (lhs (conv ?x ?w :as d)) (when CONDITION ...) (rhs (conv ?x ?w :like d :lowering matmul))

Expressions are vectors of integers (see `bytecode`); `(define (NAME PARAM ...) EXPRESSION)` at the
top level defines a macro, and `(each $OP (NAME ...) FORM ...)` repeats the forms for every NAME,
which replaces `$OP`, inside of names too. Every variable on the right must be bound on the left.
"""

from __future__ import annotations

from collections.abc import Sequence

from xrl_jax.graph import ops
from xrl_jax.language import bytecode
from xrl_jax.language.dtype_names import CODES, FIELD, code_of, with_codes
from xrl_jax.language.macros import Macros, define, expand, repeated
from xrl_jax.language.rule import (
    EVIDENCE,
    ROLES,
    RULE_ASSUMPTIONS,
    Pattern,
    Rule,
    Term,
    Var,
    pattern_text,
)
from xrl_jax.language.sexpr import (
    Atom,
    Place,
    RuleError,
    SExpr,
    SList,
    integer,
    number,
    read,
    symbol,
)
from xrl_jax.language.vocabulary import ANY, LEAVES, NUMBER, Vocabulary, check_guard, tensors
from xrl_jax.lower.table import number_of


def parse_rules(
    text: str, file: str = "<rules>", macros: Macros | None = None
) -> tuple[list[Rule], Macros]:
    """Parse the rules and macros of a text, in order.

    Args:
      macros: macros defined elsewhere, which the text may use.

    Raises:
      RuleError: a form is refused; the message has line and column of the culprit.
    """
    known = dict(macros or {})
    rules: list[Rule] = []
    for form in repeated(read(text, file)):
        if isinstance(form, Atom):
            raise RuleError(f"expected (rule ...) or (define ...), found {form.text!r}", form.place)
        if form.head == "define":
            name, params, body = define(form)
            known[name] = (params, body)
        elif form.head == "rule":
            rule = parse_rule(form, known)
            if any(r.name == rule.name for r in rules):
                raise RuleError(f"two rules have the name {rule.name!r}", form.place)
            rules.append(rule)
        else:
            raise RuleError(
                f"expected (rule ...) or (define ...), found ({form.head} ...)", form.place
            )
    return rules, known


def parse_rule(
    form: SList, macros: Macros, vocabulary: Vocabulary | None = None, *, source: str = ""
) -> Rule:
    """Parse one rule.

    Args:
      vocabulary: that of tensors by default.
      source: that of a rule which names none.

    Raises:
      RuleError: the rule is refused; the message has line and column of the culprit.
    """
    return _Parser(macros, vocabulary or tensors()).rule(form, source)


_CONSTANT = "const NUMBER :dtype-of ?x"


class _Parser:
    """Parses one rule; `tensors` and `numbers` are the names bound so far."""

    def __init__(self, macros: Macros, vocabulary: Vocabulary):
        self.macros = macros
        self.vocabulary = vocabulary
        self.tensors: set[str] = set()
        self.numbers: set[str] = set()
        self.ops_named: dict[str, str] = {}

    def rule(self, form: SList, source: str) -> Rule:
        if len(form.items) < 3:
            raise RuleError("a rule needs a name and clauses", form.place)
        name = symbol(form.items[1])
        single: dict[str, str] = {"family": "", "source": source, "evidence": "float64"}
        lhs: tuple[Pattern, ...] = ()
        rhs: tuple[Term | Var, ...] = ()
        conditions: list[SExpr] = []
        lets: list[tuple[str, SExpr]] = []
        nodes: list[tuple[str, Term]] = []
        symmetric = False
        assumes: tuple[str, ...] = ()
        roles: tuple[str, ...] = ()
        for clause in form.items[2:]:
            if isinstance(clause, Atom):
                raise RuleError(
                    f"rule {name}: expected a clause, found {clause.text!r}", clause.place
                )
            body = clause.items[1:]
            match clause.head:
                case "family" | "source" | "evidence" if len(body) == 1 and isinstance(
                    body[0], Atom
                ):
                    single[clause.head] = body[0].text
                case "symmetric" if not body:
                    symmetric = True
                case "assumes":
                    assumes = tuple(
                        self.one_of(RULE_ASSUMPTIONS, e, "a rule may assume") for e in body
                    )
                case "role" if body and not roles:
                    roles = tuple(self.one_of(ROLES, e, "a role must be") for e in body)
                case "lhs" if not lhs:
                    lhs = tuple(self.root(e) for e in body)
                case "when":
                    conditions += [self.expression(e) for e in body]
                case "let" if len(body) == 2:
                    expression = self.expression(body[1])
                    lets.append((symbol(body[0]), expression))
                    self.numbers.add(symbol(body[0]))
                case "node" if len(body) == 2:
                    nodes.append((symbol(body[0]), self.root_term(body[1])))
                    self.tensors.add(symbol(body[0]))
                case "rhs" if not rhs:
                    rhs = tuple(self.term(e) for e in body)
                case _:
                    raise RuleError(
                        f"rule {name}: cannot read clause ({clause.head} ...)", clause.place
                    )
        if not single["source"]:
            raise RuleError(f'rule {name}: its clause (source "...") is missing', form.place)
        if single["evidence"] not in EVIDENCE:
            raise RuleError(f"rule {name}: evidence must be {' or '.join(EVIDENCE)}", form.place)
        if not 1 <= len(lhs) <= 2 or len(rhs) != len(lhs):
            raise RuleError(
                f"rule {name}: it needs one or two roots, and as many right-hand sides", form.place
            )
        if len(lhs) == 2 and not _variables(lhs[0]) & _variables(lhs[1]):
            raise RuleError(f"rule {name}: two roots must share an operand", form.place)
        _check_lowerings(lhs, (*rhs, *(t for _, t in nodes)), form.place)
        if symmetric and (len(lhs) != 2 or pattern_text(lhs[:1]) != pattern_text(lhs[1:])):
            raise RuleError(f"rule {name}: only two equal patterns can be symmetric", form.place)
        return Rule(
            name,
            single["family"] or "other",
            single["source"],
            single["evidence"],
            lhs,
            rhs,
            tuple(conditions),
            tuple(lets),
            tuple(nodes),
            symmetric,
            assumes,
            roles,
            form.place,
        )

    def one_of(self, known: Sequence[str], e: SExpr, says: str) -> str:
        if symbol(e) not in known:
            raise RuleError(f"{says} one of {', '.join(known)}", e.place)
        return symbol(e)

    def root(self, e: SExpr) -> Pattern:
        pattern = self.pattern(e)
        if isinstance(pattern, Pattern):
            return pattern
        if self.vocabulary.of_terms:
            return Pattern(ANY, (), name=pattern.name)
        raise RuleError("a root must be an operator, not a variable", e.place)

    def value(self, e: SExpr) -> float | None:
        """Return the value of a number in a term; None for anything else."""
        if not self.vocabulary.of_terms or not isinstance(e, Atom):
            return None
        return self.vocabulary.constants.get(e.text, number(e))

    def pattern(self, e: SExpr) -> Pattern | Var:
        value = self.value(e)
        if value is not None:
            return Pattern(NUMBER, (), value=value)
        if number(e) is not None or (isinstance(e, SList) and e.head == "const"):
            raise RuleError(
                "match a number by a variable and a condition: ?c and (when (is-value ?c 2))",
                e.place,
            )
        if isinstance(e, Atom):
            if not e.text.startswith("?"):
                raise RuleError(f"expected ?variable or (op ...), found {e.text!r}", e.place)
            self.tensors.add(e.text)
            return Var(e.text)
        spec, positional, named = self.call(e)
        self.arity(spec, len(positional), e)
        args = tuple(self.pattern(a) for a in positional)
        name, attrs = "", []
        for key, value in named:
            if key == "as":
                name = symbol(value)
                if name in self.ops_named:
                    raise RuleError(f"two nodes have the name {name!r}", value.place)
                self.ops_named[name] = spec.name
                self.tensors.add(name)
                continue
            self.known_field(spec, key, value)
            text = symbol(value)
            code = CODES.get(text) if key == FIELD else None
            code = integer(text) if code is None else code
            attrs.append((key, text if code is None else code))
            if code is None:
                self.numbers.add(text)
        return Pattern(spec.name, args, tuple(attrs), name)

    def root_term(self, e: SExpr) -> Term:
        term = self.term(e)
        if isinstance(term, Var):
            raise RuleError("a named node must be an operator", e.place)
        return term

    def term(self, e: SExpr) -> Term | Var:
        value = self.value(e)
        if value is not None:
            return Term(NUMBER, (), value=value)
        if number(e) is not None:
            raise RuleError(f"write a number as ({_CONSTANT})", e.place)
        if isinstance(e, Atom):
            if e.text not in self.tensors:
                raise RuleError(f"{e.text!r} is not bound on the left-hand side", e.place)
            return Var(e.text)
        if e.head == "const":
            return self.constant(e)
        spec, positional, named = self.call(e)
        if spec.shape == "given":
            raise RuleError(f"a rewrite cannot create a {spec.name!r} node", e.place)
        self.arity(spec, len(positional), e)
        args = tuple(self.term(a) for a in positional)
        like, lowering, attrs = "", "", []
        for key, value in named:
            if key == "like":
                like = symbol(value)
                if like not in self.ops_named:
                    raise RuleError(
                        f":like {like!r}: no node of the left-hand side has this name", value.place
                    )
                if self.vocabulary.operators[self.ops_named[like]].fields != spec.fields:
                    raise RuleError(
                        f":like {like!r}: {self.ops_named[like]} and {spec.name} "
                        "differ in attributes",
                        value.place,
                    )
            elif key == "lowering":
                lowering = symbol(value)
                try:
                    number_of(spec.name, lowering)
                except KeyError as error:
                    raise RuleError(str(error.args[0]), value.place) from None
            else:
                self.known_field(spec, key, value)
                given = code_of(value, self.numbers) if key == FIELD else value
                attrs.append((key, self.expression(given)))
        return Term(spec.name, args, like, tuple(attrs), lowering)

    def constant(self, e: SList) -> Term:
        items = e.items
        if len(items) != 4 or not isinstance(items[2], Atom) or items[2].text != ":dtype-of":
            raise RuleError(f"write a number as ({_CONSTANT})", e.place)
        try:
            value = float(symbol(items[1]))
        except ValueError:
            raise RuleError(f"{symbol(items[1])!r} is not a number", items[1].place) from None
        dtype_of = symbol(items[3])
        if dtype_of not in self.tensors:
            raise RuleError(f"{dtype_of!r} is not bound on the left-hand side", items[3].place)
        return Term("const", (), value=value, dtype_of=dtype_of)

    def expression(self, e: SExpr) -> SExpr:
        if self.vocabulary.of_terms:
            check_guard(e, self.tensors)
            return e
        full = with_codes(expand(e, self.macros), self.numbers)
        bytecode.check(full, self.tensors, self.numbers, self.ops_named)
        return full

    def call(self, e: SList) -> tuple[ops.OpSpec, list[SExpr], list[tuple[str, SExpr]]]:
        operators = self.vocabulary.operators
        if e.head not in operators or e.head in LEAVES:
            raise RuleError(f"there is no operator {e.head!r}", e.place)
        positional: list[SExpr] = []
        named: list[tuple[str, SExpr]] = []
        items = iter(e.items[1:])
        for item in items:
            if isinstance(item, Atom) and item.text.startswith(":"):
                value = next(items, None)
                if value is None:
                    raise RuleError(f"{item.text} has no value", item.place)
                named.append((item.text[1:], value))
            else:
                positional.append(item)
        return operators[e.head], positional, named

    def arity(self, spec: ops.OpSpec, n: int, e: SList) -> None:
        low, high = spec.arity
        if not low <= n <= high:
            takes = low if low == high else f"{low} to {high}"
            raise RuleError(f"{spec.name} takes {takes} arguments, got {n}", e.place)

    def known_field(self, spec: ops.OpSpec, key: str, value: SExpr) -> None:
        try:
            spec.field(key)
        except KeyError as error:
            raise RuleError(str(error.args[0]), value.place) from None


def _check_lowerings(
    lhs: Sequence[Pattern], terms: Sequence[Term | Var], place: Place | None
) -> None:
    """Refuse a lowering of anything but the unchanged root, on which its conditions are tested."""
    for term in terms:
        if not isinstance(term, Term):
            continue
        _check_lowerings((), term.args, place)
        root = lhs[0] if len(lhs) == 1 else None
        as_it_is = root is not None and (term.op, term.args, term.like, term.attrs) == (
            root.op,
            root.args,
            root.name,
            (),
        )
        if term.lowering and not as_it_is:
            raise RuleError(
                "a rule can choose a lowering only for its otherwise unchanged root: "
                "(lhs (op ?x ... :as d)) (rhs (op ?x ... :like d :lowering name))",
                place,
            )


def _variables(p: Pattern | Var) -> set[str]:
    return {p.name} if isinstance(p, Var) else set().union(*(_variables(a) for a in p.args))
