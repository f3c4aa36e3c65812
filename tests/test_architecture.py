"""ARCHITECTURE.md and docs/ agree with the code: names, glossary, phases, messages, packages.

Responsible for: texts about the code that would drift.
Not responsible for: rules about the code itself (test_house.py, test_repository.py, pyproject.toml).
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

import pytest

from tiercel.core import messages
from tiercel.core.machine import events
from tiercel.core.migration import phases
from tiercel.core.migration.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tiercel"
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
ROLES = [value for value in vars(phases).values() if isinstance(value, phases.Role)]
PHASES: dict[str, type[enum.Enum]] = {role.phases.__name__: role.phases for role in ROLES}
BYTES_MAX = 25 * 1024
ELSEWHERE = {"StatefulProcessor"}  # PySpark's
OTHER_CODE = {"os", "disk"}  # values of settings


@functools.cache
def names_of_the_code() -> dict[str, set[str]]:
    """Every name that a module of ours defines -> the names defined inside it, by base classes too."""
    inside: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                inside.setdefault(node.name, set()).update(_members(node))
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside.setdefault(node.name, set())
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name | ast.Attribute):
                        inside.setdefault(target.id if isinstance(target, ast.Name) else target.attr, set())
    for name in list(bases):
        waiting = list(bases[name])
        while waiting:
            base = waiting.pop()
            inside[name] |= inside.get(base, set())
            waiting += bases.get(base, [])
    return inside


def _members(node: ast.ClassDef) -> set[str]:
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(inner.name)
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            found.add(inner.target.id)
        elif isinstance(inner, ast.Assign):
            found.update(target.id for target in inner.targets if isinstance(target, ast.Name))
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            found.add(inner.attr)
    return found


def without_diagrams(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def diagrams(kind: str) -> list[str]:
    return re.findall(rf"```mermaid\n{kind}\n(.*?)```", ARCHITECTURE, flags=re.DOTALL)


def code_in(text: str) -> set[str]:
    """What stands in backticks and is a name: `Name`, `name`, `Name.name`, `name.name`."""
    spans = re.findall(r"`([^`\n]+)`", without_diagrams(text))
    return {span for span in spans if re.fullmatch(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", span)}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_known(name: str) -> bool:
    known = names_of_the_code()
    if name in ELSEWHERE | OTHER_CODE:
        return True
    if name.startswith("tiercel."):
        return importlib.util.find_spec(name) is not None
    if (PACKAGE / name).is_dir():  # a package
        return True
    owner, _, member = name.partition(".")
    if not member:
        return owner in known or owner in STRATEGIES
    return owner in known and member in known[owner]


@pytest.mark.parametrize("name", sorted(n for n in code_in(ARCHITECTURE) if not n.endswith((".py", ".toml"))))
def test_every_name_in_the_architecture_exists_in_the_code(name: str) -> None:
    assert is_known(name), f"ARCHITECTURE.md names `{name}`, which the code does not have"


def test_the_names_of_the_architecture_are_found_at_all() -> None:
    names = code_in(ARCHITECTURE)
    assert {"Dispatch", "Flip", "SiteFrame", "send_durable"} <= names
    assert not is_known("Router.on_teleport")
    assert not is_known("MoveTeleported")


@pytest.mark.parametrize("text", diagrams("sequenceDiagram"))
def test_every_arrow_of_a_sequence_is_a_message(text: str) -> None:
    arrows = re.findall(r"^\s*\w+-{1,2}>>\w+: (\w+)", text, flags=re.MULTILINE)
    assert arrows
    assert [name for name in arrows if not hasattr(messages, name)] == []


@pytest.mark.parametrize("path", sorted(PHASES))
def test_a_state_diagram_has_every_phase_and_no_other(path: str) -> None:
    drawn = [text for text in diagrams("stateDiagram-v2") if f"%% {path}\n" in text]
    assert len(drawn) == 1, f"expected one diagram with the line %% {path}"
    ends = re.findall(r"^\s*(\S+) --> ([^\s:]+)", drawn[0], flags=re.MULTILINE)
    states = {state for pair in ends for state in pair} - {"[*]"}
    assert states == set(PHASES[path].__members__)


def test_each_of_the_four_roles_of_a_move_has_one_diagram() -> None:
    assert len(ROLES) == 4
    assert len(diagrams("stateDiagram-v2")) == len(PHASES) == 4


def test_every_message_is_described() -> None:
    reference = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
    described = code_in(ARCHITECTURE) | code_in(reference)
    ours = set(messages.__all__) - {"Message", "AnyNotice", "MoveOutcome"}
    assert sorted(ours - described) == []


def between(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n(.*?)<!-- end -->", ARCHITECTURE, re.DOTALL)
    assert found, f"ARCHITECTURE.md has no part <!-- {marker} -->"
    return found[1]


def test_every_package_says_in_one_line_what_it_holds() -> None:
    page = (ROOT / "docs" / "packages.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([\w/]+)` \| (.+) \|$", page, re.MULTILINE))
    packages = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")} - {"."}
    assert set(listed) == packages
    assert [place for place, summary in listed.items() if not summary.endswith(".")] == []


def test_every_file_that_the_architecture_names_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", ARCHITECTURE))
    folders = (PACKAGE, PACKAGE / "core" / "migration", ROOT)
    missing = [name for name in sorted(named) if not any((folder / name).exists() for folder in folders)]
    assert missing == []


@functools.cache
def source_text() -> str:
    """All source as lower-case words: `DispatchCursor` and `dispatch_cursor` read `dispatch cursor`."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))
    return re.sub(r"[\s_]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)).lower()


def glossary() -> list[str]:
    """The words of the glossary; `source, destination` are two."""
    cells = re.findall(r"^\| ([^|]+) \|", between("glossary"), re.MULTILINE)
    return [word.strip() for cell in cells[1:] for word in cell.split(",")]


def test_the_glossary_is_complete_enough_to_be_read() -> None:
    words = glossary()
    assert len(words) == len(set(words)) > 50


@pytest.mark.parametrize("word", glossary())
def test_every_word_of_the_glossary_is_used_in_the_code(word: str) -> None:
    assert re.search(rf"\b{re.escape(word)}", source_text()), f"no module of src uses the word {word!r}"


def test_the_architecture_can_be_read_in_one_go() -> None:
    assert len(ARCHITECTURE.encode()) < BYTES_MAX


def test_the_core_has_no_reader_of_stored_state() -> None:
    """A driver reads state before the event that needs it; no event hands the core anything it could call."""
    readers = [
        f"{path.relative_to(PACKAGE)}: {node.name}.{method.name}"
        for path in sorted((PACKAGE / "core").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name.startswith(("read", "load", "get"))
        if method.returns is None or ast.unparse(method.returns) != "None"  # a reader returns something
    ]
    assert readers == []
    for event in get_args(events.Event):
        for name, kind in get_type_hints(event).items():
            found = {kind, *get_args(kind)}
            assert not any(getattr(one, "_is_protocol", False) for one in found), f"{event.__name__}.{name}"


def test_the_generated_pages_are_up_to_date() -> None:
    assert generator().outdated() == [], "run: python docs/generate.py"


def test_a_rule_has_at_most_twenty_words() -> None:
    rules = generator().RULES
    assert list(rules) == [f"R{n}" for n in (*range(1, 37), 40, 45, 46, 47)]
    assert [name for name, rule in rules.items() if len(rule.text.split()) > 20] == []


TEXTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_the_documents_lead_somewhere(path: Path) -> None:
    text = without_diagrams(path.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    broken = [t for t in targets if "://" not in t and not (path.parent / t).exists()]
    assert broken == []


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_diagrams(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_to_a_section_find_its_heading(path: Path) -> None:
    text = without_diagrams(path.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text)
    broken = [
        f"{file}#{anchor}"
        for file, anchor in targets
        if "://" not in file and anchor not in anchors(path.parent / file if file else path)
    ]
    assert broken == []
