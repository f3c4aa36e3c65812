"""The deployment directory after a power loss, or after a driver was killed while it wrote there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deployment_in_process import make_place
from tiercel.errors import UserError
from tiercel.runtime.deployment import SECRET_BYTES, DeploymentDir
from tiercel.runtime.net.registry import Address, Registry


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
def test_manifest_is_forced_to_disk_before_it_replaces_the_old_one(
    tmp_path: Path, name: str, events: list[str]
) -> None:
    """With durability 'disk' a power loss may come at any time; an empty file said nothing any more."""
    place = make_place(tmp_path)
    place.set_desired_instances(["count@cloud#1"])
    (place_of_rename,) = (n for n, event in enumerate(events) if event.endswith(f" is {name}"))
    draft = events[place_of_rename].split()[0]
    assert f"forced {draft}" in events[:place_of_rename]
    assert f"forced {tmp_path.name}" in events[place_of_rename:]


def test_empty_secret_of_a_killed_driver_is_replaced(tmp_path: Path) -> None:
    """The empty file counted as the secret, for good: a process that knew that could join."""
    tmp_path.joinpath("secret").touch()
    place = make_place(tmp_path)
    assert len(place.secret) == SECRET_BYTES
    before = place.secret
    place.write(place.manifest())
    assert place.secret == before
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob(".secret*"))


def test_empty_address_file_counts_as_no_address(tmp_path: Path) -> None:
    """A start looks who is left of the one before: it failed with a DecodeError, each time."""
    registry = Registry(tmp_path)
    registry.publish(Address("cloud", "h", 1, 1, 1))
    (tmp_path / "cloud.address").write_bytes(b"")
    assert registry.find("cloud") is None
    registry.clear_stop_request("cloud")
    assert registry.names() == []


def test_damaged_instance_list_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "instances.json").write_bytes(b"")
    with pytest.raises(UserError, match=r"instances\.json cannot be read"):
        DeploymentDir(tmp_path).desired_instances()
