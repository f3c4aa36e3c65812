"""The fields that docs/benchmarks.md documents, for tests that compare results with it."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
EVERY_FILE = "What every results file has"


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^###? {re.escape(title)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{PAGE.name} has no section {title!r}"
    return found.group(1)


def named(text: str) -> set[str]:
    """All words in backticks."""
    return set(re.findall(r"`([^`]+)`", text))


def fields(title: str) -> set[str]:
    """The names in the first column of a section's table of fields."""
    first = re.findall(r"^\|([^|]+)\|", section(title), re.MULTILINE)
    assert first[:2] == [" field ", "---"], f"{title}: no table of fields"
    return set().union(*map(named, first[2:]))
