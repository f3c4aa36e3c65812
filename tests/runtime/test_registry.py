"""Files and sockets that a killed process leaves in the registry are removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tiercel.runtime.net.registry import Address, Registry

NAME = "op@cloud#1"


def killed(directory: Path, incarnation: int = 1) -> Path:
    """The directory of a process that listened there and could not take it along."""
    home = directory / f"incarnation {incarnation}"
    home.mkdir()
    (home / "socket").touch()
    Registry(directory / "registry").publish(Address(NAME, "h", 1, 1, incarnation, str(home / "socket")))
    return home


@pytest.mark.parametrize(
    "ends",
    [lambda r: r.deregister(NAME), lambda r: r.clear_stop_request(NAME), lambda r: r.clear()],
    ids=["deregistered", "stop request cleared", "cleared"],
)
def test_socket_of_a_killed_process_is_removed_with_its_address(
    tmp_path: Path, ends: Callable[[Registry], None]
) -> None:
    home = killed(tmp_path)
    ends(Registry(tmp_path / "registry"))
    assert not home.exists()
    assert Registry(tmp_path / "registry").names() == []


def test_socket_of_a_killed_process_is_removed_when_its_next_incarnation_registers(tmp_path: Path) -> None:
    first = killed(tmp_path)
    second = killed(tmp_path, incarnation=2)
    assert not first.exists()
    assert (second / "socket").exists()


def test_removing_a_socket_leaves_other_files_alone(tmp_path: Path) -> None:
    home = killed(tmp_path)
    (home / "other").touch()
    Registry(tmp_path / "registry").clear()
    assert [path.name for path in home.iterdir()] == ["other"]


def test_unreadable_address_file_is_removed_too(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    (tmp_path / "a.address").write_bytes(b"{")
    registry.clear()
    assert registry.names() == []
