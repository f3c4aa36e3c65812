"""The deployment file: sites as applications of their own, and what is wrong in a file is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercel.errors import UserError
from tiercel.runtime.config import parse_sites
from tiercel.runtime.deployment import installed_version
from tiercel.runtime.sites.deployment_file import DeploymentFile
from tiercel.runtime.sites.site_application import check_clock, check_version

FILE = """
name = "traffic"
secret_file = "secret"

[sites.cloud]
listen = "10.0.0.5:7400"

[sites.edge-1]
parent = "cloud"
listen = "0.0.0.0:7400"
advertise = "edge1.example:7400"

[sites.edge-2]
parent = "cloud"
listen = "[::1]:7400"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(b"s" * 32)
    return tmp_path / "traffic.toml"


def test_file_names_the_sites_their_parents_and_where_each_is_reached(path: Path) -> None:
    path.write_text(FILE, encoding="utf-8")
    file = DeploymentFile.read(path)
    assert file.root == "cloud"
    assert file.sites == {"cloud": None, "edge-1": "cloud", "edge-2": "cloud"}
    assert file.listen["edge-1"] == ("0.0.0.0", 7400)
    assert file.elsewhere("edge-2") == {"cloud": ("10.0.0.5", 7400), "edge-1": ("10.0.0.5", 7400)}
    assert file.elsewhere("cloud") == {"edge-1": ("edge1.example", 7400), "edge-2": ("::1", 7400)}
    assert file.reached["edge-2"] == ("::1", 7400)
    assert file.secret == b"s" * 32


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "traffic"', "", "missing required field `name`"),
        ("[sites.cloud]", "[sites.cloud", "Expected"),
        ('listen = "10.0.0.5:7400"', 'listen = "10.0.0.5"', "the address '10.0.0.5' of site 'cloud'"),
        ('listen = "10.0.0.5:7400"', 'listen = "10.0.0.5:99999"', "of site 'cloud'"),
        ('listen = "10.0.0.5:7400"', 'listen = "10.0.0.5:7400"\nprot = 1', "unknown field `prot`"),
        ('advertise = "edge1.example:7400"', "", "others cannot dial 'edge-1'"),
        ('advertise = "edge1.example:7400"', 'advertise = "10.0.0.5:7400"', "are both at 10.0.0.5:7400"),
        ('parent = "cloud"\nlisten = "0', 'parent = "clod"\nlisten = "0', "the parent 'clod'"),
        ('parent = "cloud"\nlisten = "0', 'listen = "0', "2 sites have no parent"),
        (
            'listen = "10.0.0.5:7400"',
            'listen = "10.0.0.5:7400"\nparent = "edge-1"',
            "lead in a circle: cloud -> edge-1 -> cloud",
        ),
        ('secret_file = "secret"', 'secret_file = "secrets"', "cannot be read: No such file"),
    ],
)
def test_a_mistake_in_the_file_is_named(path: Path, old: str, new: str, said: str) -> None:
    assert FILE.count(old) == 1
    path.write_text(FILE.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        DeploymentFile.read(path)
    assert said in str(caught.value)


def test_parents_in_a_circle_beside_a_root_are_named(path: Path) -> None:
    circle = FILE.replace('parent = "cloud"\nlisten = "0', 'parent = "edge-2"\nlisten = "0')
    path.write_text(circle.replace('parent = "cloud"\nlisten = "[', 'parent = "edge-1"\nlisten = "['))
    with pytest.raises(UserError, match="lead in a circle"):
        DeploymentFile.read(path)


def test_a_short_secret_and_a_missing_file_are_refused(path: Path) -> None:
    with pytest.raises(UserError, match=r"traffic\.toml cannot be read"):
        DeploymentFile.read(path)
    path.write_text(FILE, encoding="utf-8")
    (path.parent / "secret").write_bytes(b"short")
    with pytest.raises(UserError, match="has 5 bytes"):
        DeploymentFile.read(path)


def test_a_site_that_is_not_in_the_file_is_named(path: Path) -> None:
    path.write_text(FILE, encoding="utf-8")
    with pytest.raises(UserError, match="site 'edge-9' is not in the deployment file of 'traffic'"):
        DeploymentFile.read(path).check_site("edge-9")


def test_links_follow_the_tree_of_the_sites_unless_two_sites_reach_each_other_directly(path: Path) -> None:
    more = """
        [sites.pole]
        parent = "edge-2"
        listen = "10.0.0.9:7400"
        direct = ["edge-1"]
    """
    path.write_text(FILE + more, encoding="utf-8")
    file = DeploymentFile.read(path)
    hops = {(a, b): file.next_hop(a, b) for a in file.sites for b in file.sites if a != b}
    assert hops["cloud", "pole"] == "edge-2"
    assert hops["pole", "cloud"] == "edge-2"
    assert hops["edge-1", "edge-2"] == hops["edge-2", "edge-1"] == "cloud"
    assert hops["pole", "edge-1"] == "edge-1", "the file says so"
    assert hops["edge-1", "pole"] == "pole", "a connection has two directions"
    path.write_text(FILE + more.replace("edge-1", "edge-9"), encoding="utf-8")
    with pytest.raises(UserError, match="site 'pole' would reach 'edge-9' directly"):
        DeploymentFile.read(path)


def test_another_version_or_a_clock_that_is_far_off_is_named() -> None:
    with pytest.raises(UserError, match=r"site 'cloud' has version 0\.0\.9"):
        check_version("cloud", "0.0.9")
    check_version("cloud", installed_version())
    check_clock("cloud", 1_005.0, 1_000.0, 1_000.1)
    with pytest.raises(UserError, match="the clock of site 'cloud' is 60 s ahead"):
        check_clock("cloud", 1_060.1, 1_000.0, 1_000.1)
    with pytest.raises(UserError, match="the clock of site 'cloud' is 40 s behind"):
        check_clock("cloud", 960.0, 1_000.0, 1_000.1)


def test_parents_in_a_circle_are_named_also_for_sites_of_one_application() -> None:
    with pytest.raises(UserError, match="the parents of 'a' lead in a circle: a -> b -> a"):
        parse_sites({"root": None, "a": "b", "b": "a"})
