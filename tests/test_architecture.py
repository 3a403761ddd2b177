"""The structure of the code base: which layers import which, where side effects are, and what an
import loads.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "xrl_jax"

# The order in which data flows. Each layer may import itself and the layers before it.
LAYERS = (
    *("runtime", "graph", "libraries", "lower", "program", "language", "engine", "transform"),
    *("frontends", "backends", "verify", "measure", "egraph", "cost", "search", "accept", "rl"),
    *("strategies", "precision", "report", "optimize"),
)
MAY_IMPORT = {layer: set(LAYERS[: i + 1]) for i, layer in enumerate(LAYERS)} | {
    "__init__": set(LAYERS),
}

EFFECT_MODULES = {"time", "sqlite3", "subprocess"}
EFFECT_CALLS = {"open", "print", "input"}
EFFECT_METHODS = {"open", "read_text", "read_bytes", "write_text", "write_bytes"}
EFFECTS_ALLOWED = (
    "runtime/",
    "libraries/",
    "frontends/",
    "backends/",
    "language/rule_files",
    "measure/",
    "report/",
    "rl/policy",  # reads and writes trained policies
)
HEAVY = {"onnx", "onnxruntime", "matplotlib"}


class Import(NamedTuple):
    module: str
    line: int
    late: bool  # inside a function, or for type checkers only


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[Import]:
    """Yield every import in a file as absolute module names; `from a import b` gives `a.b`."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]

    def visit(node: ast.AST, late: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(f"{prefix}.{a.name}", node.lineno, late) for a in node.names)
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        late = late or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, late)

    return visit(parsed(path), False)


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_every_module_belongs_to_a_layer() -> None:
    assert {layer_of(path) for path in sources("xrl_jax")} <= MAY_IMPORT.keys()


def test_imports_run_upwards_only() -> None:
    wrong = []
    for path in sources("xrl_jax"):
        for module, line, _ in imports(path):
            top, _, rest = module.partition(".")
            if top in ("experiments", "tests"):
                wrong.append(f"{name_of(path)}:{line} imports {module}")
            if top == "xrl_jax" and rest.partition(".")[0] not in MAY_IMPORT[layer_of(path)]:
                wrong.append(f"{name_of(path)}:{line} imports {module}")
    assert wrong == []


def module_of(path: Path) -> str:
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return name.removesuffix(".__init__")


def test_there_are_no_import_cycles() -> None:
    """Late imports and those for type checkers count too; the package's own lazy names do not."""
    modules = {module_of(p): p for p in sources("xrl_jax") if p.parent != PACKAGE}
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = (i.module for i in imports(path))
        named = (m if m in modules else m.rpartition(".")[0] for m in found)
        edges[name] = {m for m in named if m in modules and m != name}
    while leaves := {m for m, to in edges.items() if not to}:
        edges = {m: to - leaves for m, to in edges.items() if m not in leaves}
    assert sorted(edges) == []


def test_only_a_library_names_itself() -> None:
    own = PACKAGE / "libraries" / "onednn"
    named = [
        f"{name_of(path)}:{number}"
        for path in sources("xrl_jax")
        if own not in path.parents
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search("onednn|dnnl|winograd", line, re.IGNORECASE)
    ]
    assert named == []


LONGEST_FILE, LONGEST_FUNCTION = 400, 80  # lines


def test_files_and_functions_are_short() -> None:
    long: list[str] = []
    for path in sources("xrl_jax"):
        if len(path.read_text(encoding="utf-8").splitlines()) > LONGEST_FILE:
            long.append(name_of(path))
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= LONGEST_FUNCTION:
                    long.append(f"{name_of(path)}:{node.name}")
    assert long == []


def effects(path: Path) -> Iterator[str]:
    for module, line, _ in imports(path):
        if module.partition(".")[0] in EFFECT_MODULES:
            yield f"{name_of(path)}:{line} imports {module}"
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Call(func=ast.Name(id=called)) if called in EFFECT_CALLS:
                yield f"{name_of(path)}:{node.lineno} calls {called}"
            case ast.Call(func=ast.Attribute(attr=called)) if called in EFFECT_METHODS:
                yield f"{name_of(path)}:{node.lineno} calls .{called}"


def test_only_outer_modules_have_side_effects() -> None:
    inner = [
        path
        for path in sources("xrl_jax")
        if not path.relative_to(PACKAGE).as_posix().startswith(EFFECTS_ALLOWED)
    ]
    assert [effect for path in inner for effect in effects(path)] == []


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    early = [
        f"{name_of(path)}:{line} imports {module}"
        for path in sources("xrl_jax", "experiments")
        for module, line, late in imports(path)
        if module.partition(".")[0] in HEAVY and not late
    ]
    assert early == []


@pytest.fixture(scope="module")
def after_import() -> dict[str, list[str]]:
    """Return what `import xrl_jax` adds to `import jax`, in a fresh interpreter."""
    program = """
import json, sys
import jax
before = set(sys.modules)
import xrl_jax
from jax._src import xla_bridge
added = sorted(set(sys.modules) - before)
print(json.dumps({"modules": added, "backends": sorted(xla_bridge._backends)}))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_starts_no_backend(after_import: dict[str, list[str]]) -> None:
    assert after_import["backends"] == []


@pytest.mark.parametrize("heavy", ["flax", "optax", "onnx", "matplotlib", "scipy.optimize"])
def test_import_loads_nothing_heavy(after_import: dict[str, list[str]], heavy: str) -> None:
    assert [m for m in after_import["modules"] if m == heavy or m.startswith(f"{heavy}.")] == []


def test_constraints_hold_names_and_exact_versions_only() -> None:
    pin = re.compile(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*( ; python_version [<>=]+ \"[0-9.]+\")?")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not pin.fullmatch(line)] == []
    assert not any("://" in line for line in lines)
    assert len(pins) > 50


def test_the_package_requires_flatbuffers_for_jax_export() -> None:
    """`jax.export` needs flatbuffers, on which JAX does not depend; where tests run, packages that
    only they need install it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert any(name.startswith("flatbuffers") for name in project["dependencies"])
