"""A deployment's directory behind a power loss or a driver that was killed as it wrote there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from small import make_place
from tiercel.errors import UserError
from tiercel.runtime.place import SECRET_BYTES, Place
from tiercel.runtime.registry import Address, Registry


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was forced to disk, and what was renamed, in order."""
    seen: list[str] = []
    forced, renamed = os.fsync, Path.replace

    def fsync(handle: int) -> None:
        seen.append(f"forced {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        forced(handle)

    def replace(path: Path, target: Path) -> Path:
        seen.append(f"{path.name} is {Path(target).name}")
        return renamed(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    return seen


@pytest.mark.parametrize("name", ["deployment.json", "instances.json"])
def test_what_runs_here_is_on_disk_before_it_counts(tmp_path: Path, name: str, events: list[str]) -> None:
    """With durability 'disk' a power loss may come at any time; an empty file said nothing any more."""
    place = make_place(tmp_path)
    place.want(["count@cloud#1"])
    (place_of_rename,) = (n for n, event in enumerate(events) if event.endswith(f" is {name}"))
    draft = events[place_of_rename].split()[0]
    assert f"forced {draft}" in events[:place_of_rename]
    assert f"forced {tmp_path.name}" in events[place_of_rename:]


def test_a_driver_that_was_killed_as_it_made_the_secret_leaves_none(tmp_path: Path) -> None:
    """The empty file counted as the secret, for good: whoever knew that could join."""
    tmp_path.joinpath("secret").touch()
    place = make_place(tmp_path)
    assert len(place.secret) == SECRET_BYTES
    before = place.secret
    place.write(place.manifest())
    assert place.secret == before
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob(".secret*"))


def test_an_address_that_a_power_loss_has_left_empty_is_none(tmp_path: Path) -> None:
    """A start looks who is left of the one before: it failed with a DecodeError, each time."""
    registry = Registry(tmp_path)
    registry.publish(Address("cloud", "h", 1, 1, 1))
    (tmp_path / "cloud.address").write_bytes(b"")
    assert registry.find("cloud") is None
    registry.welcome("cloud")
    assert registry.names() == []


def test_a_damaged_list_of_instances_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "instances.json").write_bytes(b"")
    with pytest.raises(UserError, match=r"instances\.json cannot be read"):
        Place(tmp_path).wanted()
