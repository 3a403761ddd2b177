"""The documents are right: their Python code runs, and the commands, files, names and links in them
exist.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from absl import flags

from experiments import optimize, train_flags
from experiments.readme_table import filled

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
)
LONGEST = {"README.md": 200, "BUILD_NOTES.md": 160, "docs/outside.md": 60}  # lines; else PAGE
PAGE = 150

every_page = pytest.mark.parametrize("page", PAGES)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def python_of(page: str) -> str:
    """Return the Python blocks of a page, in order and at the line numbers that they have in the
    page.
    """
    lines, inside = [], False
    for line in text_of(page).splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            lines.append("")
        else:
            lines.append(line if inside else "")
    return "\n".join(lines)


SLOW = {"docs/searches.md": [pytest.mark.slow]}  # most of its time is tracing the engine


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=SLOW.get(p, [])) for p in PAGES if python_of(p).strip()]
)
def test_the_python_of_a_page_runs_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Budgets of minutes are for readers; two seconds are enough to see that the code runs.
    code = re.sub(r"seconds=\d\d+", "seconds=2", python_of(page))
    if "onnx" in code:
        pytest.importorskip("onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XRL_JAX_CACHE", str(tmp_path / "cache"))
    exec(compile(code, page, "exec"), {"__name__": "page"})


def commands_of(page: str) -> list[list[str]]:
    """Return the words of each command that runs an experiment: its module, then its flags."""
    text = text_of(page).replace("\\\n", " ")
    found = re.findall(r"python -m (experiments\.\w+)((?:\s+--[^\s`]+)*)", text)
    return [[module, *given.split()] for module, given in found]


def strings_of(module: str) -> set[str]:
    """Return the strings in an experiment's source and in those of the experiments it imports."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("experiments"):
            for file in (f"{node.module}", *(f"{node.module}.{a.name}" for a in node.names)):
                source = ROOT / f"{file.replace('.', '/')}.py"
                if source.is_file():
                    nodes += ast.walk(ast.parse(source.read_text(encoding="utf-8")))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def parse_optimize(words: list[str], values: flags.FlagValues) -> None:
    optimize.define_flags(values)
    values(words)
    optimize.config_of(values)


def parse_train(words: list[str], values: flags.FlagValues) -> None:
    train_flags.define_flags(values)
    train_flags.chosen(values(words), values)


PARSERS: dict[str, Callable[[list[str], flags.FlagValues], None]] = {
    "experiments.optimize": parse_optimize,
    "experiments.train": parse_train,
}


@every_page
def test_its_commands_have_flags_that_exist(page: str) -> None:
    for words in commands_of(page):
        module, *given = words
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
        if not given or given == ["--help"]:
            continue
        if module in PARSERS:
            PARSERS[module](words, flags.FlagValues())
            continue
        known = strings_of(module)
        for flag in given:
            name = flag.removeprefix("--").partition("=")[0]
            assert {name, name.removeprefix("no")} & known, f"{module} has no {flag}"


@every_page
def test_the_make_targets_it_names_exist(page: str) -> None:
    makefile = text_of("Makefile")
    for target in re.findall(r"(?:^|`)make ([\w-]+)", text_of(page), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@every_page
def test_the_files_it_names_exist(page: str) -> None:
    """Paths are relative to the repository or to `xrl_jax`; * may stand for a name."""
    named = re.findall(
        r"`([\w/*.-]+\.(?:py|toml)|(?:xrl_jax|docs|rules|tests)/[\w/*.-]+)`", text_of(page)
    )
    missing = [n for n in named if not (list(ROOT.glob(n)) or list(ROOT.glob(f"xrl_jax/{n}")))]
    assert missing == []


@every_page
def test_the_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text_of(page))
    here = (ROOT / page).parent
    assert [to for to in links if "://" not in to and not (here / to).exists()] == []


@every_page
def test_the_names_in_modules_that_it_gives_exist(page: str) -> None:
    for name in sorted(set(re.findall(r"`(xrl_jax(?:\.\w+)+)", text_of(page)))):
        parts = name.split(".")
        found = importlib.import_module(parts[0])
        for i, part in enumerate(parts[1:], 2):
            if not hasattr(found, part):
                importlib.import_module(".".join(parts[:i]))
            found = getattr(found, part)


@every_page
def test_a_page_is_short(page: str) -> None:
    exempt = page == "CHANGELOG.md" or page.startswith("docs/measurements/")
    assert exempt or len(text_of(page).splitlines()) <= LONGEST.get(page, PAGE)


def test_the_results_of_the_readme_can_be_filled_in() -> None:
    assert filled(text_of("README.md"), "| a row |").count("| a row |") == 1
