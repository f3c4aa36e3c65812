"""The rules of this repository that no linter knows.

Responsible for: rules about source files as texts. Imports between our packages: pyproject.toml.
"""

from __future__ import annotations

import ast
import functools
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tiercel.core.machine import effects

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tiercel"
MODULES = sorted(PACKAGE.rglob("*.py"))
PURE_MODULES = [path for name in ("core", "control") for path in sorted((PACKAGE / name).rglob("*.py"))]

LINES_WANTED = 500
LINES_MAX = 700

IMPURE_IMPORTS = {
    "asyncio",
    "logging",
    "multiprocessing",
    "os",
    "random",
    "socket",
    "subprocess",
    "threading",
    "time",
}
IMPURE_BUILTINS = {"__import__", "breakpoint", "input", "open", "print"}  # I/O that needs no import

# Absolute paths that exist on one machine only. A path inside an address or a longer path is not one.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|tmp|home|root|Users|farm)/")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Every module a file imports, at the top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def used_names(paths: Iterable[Path]) -> set[str]:
    """Names that code refers to. Being imported, or named in a comment, is not being used."""
    names: set[str] = set()
    for path in paths:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
    return names


def drivers() -> dict[str, list[Path]]:
    """The modules of each driver that exists: it does from its first import of the effects on."""
    candidates = {
        "sim": [path for path in [PACKAGE / "sim" / "process.py"] if path.exists()],
        "runtime": sorted((PACKAGE / "runtime").rglob("*.py")),
    }
    return {
        name: paths
        for name, paths in candidates.items()
        if any("tiercel.core.machine.effects" in imported_names(parsed(path)) for path in paths)
    }


def texts() -> list[Path]:
    docs = [path for path in sorted((ROOT / "docs").rglob("*")) if path.suffix in {".md", ".rst", ".txt"}]
    top = [path for path in sorted(ROOT.iterdir()) if path.suffix in {".md", ".toml", ".lock"}]
    return [*MODULES, *docs, *top, ROOT / "Makefile", ROOT / ".ci" / "run"]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_opens_with_a_docstring(path: Path) -> None:
    assert ast.get_docstring(parsed(path)), f"{name_of(path)}: say what this module is responsible for"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_is_too_long_to_read(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LINES_MAX, (
        f"{name_of(path)} has {lines} lines; split it (wanted: {LINES_WANTED}, limit: {LINES_MAX})"
    )


def test_every_driver_performs_every_effect() -> None:
    wanted = {effect.__name__ for effect in typing.get_args(effects.Effect)}
    assert wanted, "tiercel.core.machine.effects.Effect is not a union of effect types"
    forgotten = {name: sorted(wanted - used_names(paths)) for name, paths in drivers().items()}
    assert not any(forgotten.values()), f"effects no driver code mentions: {forgotten}"


def test_every_effect_that_is_defined_belongs_to_the_union() -> None:
    defined = {
        node.name
        for node in parsed(PACKAGE / "core" / "machine" / "effects.py").body
        if isinstance(node, ast.ClassDef)
    }
    assert defined == {effect.__name__ for effect in typing.get_args(effects.Effect)}


@pytest.mark.parametrize("path", PURE_MODULES, ids=name_of)
def test_the_core_has_no_clock_no_randomness_and_no_io(path: Path) -> None:
    tree = parsed(path)
    imported = {name.partition(".")[0] for name in imported_names(tree)}
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    impure = sorted((imported & IMPURE_IMPORTS) | (called & IMPURE_BUILTINS))
    assert not impure, (
        f"{name_of(path)} uses {', '.join(impure)}: take it as an event, ask for it as an effect"
    )


@pytest.mark.parametrize("path", texts(), ids=name_of)
def test_no_text_names_a_path_of_one_machine(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [
        f"{name_of(path)}:{number}: {line}"
        for number, line in enumerate(lines, 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)
