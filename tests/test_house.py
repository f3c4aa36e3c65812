"""Rules of the house: one word for one thing, small rooms, no test code in production, one table of phases.

Responsible for: rules about names, folders and imports that hold for the whole repository.
Not responsible for: what the documents say about the code (test_architecture.py), the content of a single
    module (test_repository.py), which package may import which (pyproject.toml).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tiercel"
MODULES = sorted(PACKAGE.rglob("*.py"))
TEXTS = [
    *MODULES,
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "docs").glob("*.py")),
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
]
MODULES_PER_FOLDER_MAX = 15
PRODUCT = ("core", "control", "runtime", "spark", "admin")
PHASE_TABLES = "core/migration/phases.py"

# Words that meant something only here -> the word of the field. `\\b` does not see `_` and capitals inside a
# name as borders, so texts are split into words first: `IsHeirOf` and `is_heir_of` read `is heir of`.
OLD_WORDS = {
    r"heirs?": "successor",
    r"inherit(s|ed|ing|ance)? (?=a dead|its share|from a dead|from one that)": "take over",
    r"heritages?": "share of a takeover",
    r"succession": "takeover request",
    r"lives (?=that|of an?|are|were|claimed)": "incarnation",
    r"(earlier|later|older|newer|next|previous|latest|its|each|one|another|this) life": "incarnation",
    r"life (?!cycle)(?=of an? (instance|process|router)|number|that|fences)": "incarnation",
    r"wish(es|ed)?": "request",
    r"vigils?": "liveness monitor",
    r"keeping (?=config|option|plan)": "durability config",
    r"safekeeping": "durability config",
    r"keepers?": "replica",
    r"(an|the|of) away|aways": "lazy restore",
    r"borders?(?! (color|style|radius|box|collapse|bottom))": "processor adapter",
    r"lanes?": "site outbox",
    r"move ?desks?": "coordinator",
    r"desks?": "coordinator",
    r"shel(f|ves)": "state reader",
    r"spill(s|ed|ing)?": "evict",
    r"(?<!dead )letters?": "message",
    r"owed": "deferred",
    r"chill(s|ed|ing)?": "evict",
    r"last word": "last offset",
    r"bells?": "waiters",
}
ALLOWED = {  # where an old word is the right one: PySpark's, Spark's or English in another sense
    "border=": "an attribute of HTML",
    "lower-case letter": "characters of a name",
    "capital letter": "characters of a name",
    "letters, digits": "characters of a name",
    "letters and digits": "characters of a name",
    'name="letters"': "a field of stored topologies",
}


# No name of ours is made of these words. In prose some of them are ordinary English: "keeping it short".
OLD_NAMES = re.compile(
    r"\b(heirs?|heritage|inherit(ed|ing|ance)?|succession|life|lives|wish(es)?|vigil|(safe)?keeping|keeper|away"
    r"|border|lanes?|(move)?desk|shelf|shelves|spill(s|ed)?|(?<!dead )letters?|owed|told|said|heard|bell"
    r"|chill)\b"
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def words(line: str) -> str:
    """A line as lower-case words: names in the forms `SomeName` and `some_name` are split."""
    for phrase in ALLOWED:
        line = line.replace(phrase, "")
    return re.sub(r"[\s_-]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", line)).lower()


ROADS = ("src/tiercel/apps/", "docs/apps.md")  # a road has lanes
OLD = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in OLD_WORDS))


def on_roads(path: Path, text: str) -> str:
    """The text without lanes, where they are those of a road."""
    return re.sub(r"\blanes?\b", "", text) if name_of(path).startswith(ROADS) else text


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_no_old_word_is_left(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [
        f"{name_of(path)}:{number}: {match[0].strip()!r} in: {line.strip()}"
        for number, line in enumerate(lines, 1)
        if (match := OLD.search(on_roads(path, words(line))))
    ]
    assert not found, "\n".join(found)


def defined_names(tree: ast.Module) -> set[str]:
    """Names that a module gives to classes, functions, arguments, variables and attributes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_name_is_made_of_an_old_word(path: Path) -> None:
    names = sorted(defined_names(parsed(path)))
    assert [name for name in names if OLD_NAMES.search(on_roads(path, words(name)))] == []


def test_no_file_of_tests_or_source_has_an_old_word_in_its_name() -> None:
    paths = [*MODULES, *sorted((ROOT / "tests").rglob("*.py"))]
    assert [name_of(path) for path in paths if OLD.search(words(path.stem))] == []


@pytest.mark.parametrize(
    "line", ["class Heir:", "its_wishes", "a SiteLane", "an early letter", "moveDesk", "is owed"]
)
def test_an_old_word_is_noticed(line: str) -> None:
    assert OLD.search(words(line))


@pytest.mark.parametrize(
    "line", ["a dead letter", "dead_letters", "DeadLetter", "delivered", "followed by", "plane"]
)
def test_a_good_word_is_left_alone(line: str) -> None:
    assert not OLD.search(words(line))


def test_no_folder_has_too_many_modules() -> None:
    counts = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    crowded = {name_of(path): count for path, count in counts.items() if count > MODULES_PER_FOLDER_MAX}
    assert crowded == {}, f"at most {MODULES_PER_FOLDER_MAX} modules in a folder: make a sub-package"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=name_of)
def test_every_package_says_what_lives_there(path: Path) -> None:
    text = ast.get_docstring(parsed(path)) or ""
    assert len(text.splitlines()) >= 3 or len(text) > 150, (
        "say in 3 to 10 lines what lives here and who may call it"
    )
    assert "TODO" not in text


@pytest.mark.parametrize(
    "path", [p for name in PRODUCT for p in sorted((PACKAGE / name).rglob("*.py"))], ids=name_of
)
def test_no_planted_bug_is_in_production_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = [
        f"{number}: {line}" for number, line in enumerate(text.splitlines(), 1) if "mutant" in line.lower()
    ]
    assert found == [], f"{name_of(path)}: planted bugs belong to sim/explore/mutants.py"


def test_the_transitions_of_a_move_are_in_one_file() -> None:
    declaring = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
        and re.fullmatch(r"(Source|Destination)(Router|Instance)Phase", node.name)
    }
    building = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and _called(node) == "Role"
    }
    assert declaring == building == {PHASE_TABLES}


def _called(node: ast.Call) -> str:
    function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    return function.id if isinstance(function, ast.Name) else ""


def imports(path: Path, only_for_types: bool) -> set[str]:
    """Modules of ours that a module imports at its top, or only if type checkers read it."""
    found: set[str] = set()
    for node in parsed(path).body:
        is_guard = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if is_guard and only_for_types:
            found |= _imported([inner for inner in ast.walk(node)])
        elif not is_guard and not only_for_types:
            found |= _imported([node])
    return found


def _imported(nodes: list[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found & set(by_name())


@functools.cache
def by_name() -> dict[str, Path]:
    names = {}
    for path in MODULES:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@functools.cache
def reached(name: str) -> frozenset[str]:
    """Modules that a module imports, directly or by others, at run time or for types."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        path = by_name()[waiting.pop()]
        for module in imports(path, only_for_types=False) | imports(path, only_for_types=True):
            if module not in found:
                found.add(module)
                waiting.append(module)
    return frozenset(found)


def test_no_cycle_of_imports_hides_behind_type_checking() -> None:
    cycles = [
        f"{name} <-> {other}"
        for name, path in by_name().items()
        for other in sorted(imports(path, only_for_types=True))
        if other != name and name in reached(other)
    ]
    assert cycles == [], "use a small Protocol instead of a TYPE_CHECKING import"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documents_show_the_measured_results() -> None:
    measure = script("measure")
    for document in measure.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert measure.filled(text) == text, f"{document.name}: run python docs/measure.py --fill"


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 170
