"""What a process that was killed leaves in the registry, and beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tiercel.runtime.registry import Address, Registry

NAME = "op@cloud#1"


def killed(directory: Path, life: int = 1) -> Path:
    """The directory of a process that listened there and could not take it along."""
    home = directory / f"life {life}"
    home.mkdir()
    (home / "socket").touch()
    Registry(directory / "registry").publish(Address(NAME, "h", 1, 1, life, str(home / "socket")))
    return home


@pytest.mark.parametrize(
    "ends",
    [lambda r: r.withdraw(NAME), lambda r: r.welcome(NAME), lambda r: r.clear()],
    ids=["withdrawn", "welcomed", "cleared"],
)
def test_its_socket_is_gone_when_it_is_forgotten(tmp_path: Path, ends: Callable[[Registry], None]) -> None:
    home = killed(tmp_path)
    ends(Registry(tmp_path / "registry"))
    assert not home.exists()
    assert Registry(tmp_path / "registry").names() == []


def test_its_socket_is_gone_when_its_next_life_listens(tmp_path: Path) -> None:
    first = killed(tmp_path)
    second = killed(tmp_path, life=2)
    assert not first.exists()
    assert (second / "socket").exists()


def test_what_else_is_there_stays(tmp_path: Path) -> None:
    home = killed(tmp_path)
    (home / "other").touch()
    Registry(tmp_path / "registry").clear()
    assert [path.name for path in home.iterdir()] == ["other"]


def test_a_file_that_cannot_be_read_is_forgotten_too(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    (tmp_path / "a.address").write_bytes(b"{")
    registry.clear()
    assert registry.names() == []
