"""The URL, and the directory: the permissions of new files, and which directories are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockkit.backends.file import directory
from lockkit.backends.file.backend import FileBackend
from lockkit.errors import ConfigurationError
from lockkit.runtime import drive
from lockkit.url import parse
from tests.backends.file.support import Connect, mode
from tests.backends.support import StubHost, granted


def test_url_names_the_directory(host: StubHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute, or the default; opening makes nothing."""
    monkeypatch.setenv("LOCKKIT_STATE_DIR", str(tmp_path / "state"))
    backend = FileBackend.open(parse("file:///a/./b/"), {"group": False}, host)
    default = FileBackend.open(parse("file:"), {"group": False}, host)

    assert backend.url == "file:///a/b"
    assert default.url == f"file://{tmp_path}/state/locks"
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("url", ["file://host/path", "file://user@host/path", "file+x:///path"])
def test_url_that_means_something_else_is_refused(url: str, host: StubHost) -> None:
    """Two slashes instead of three are a common mistake."""
    with pytest.raises(ConfigurationError, match="three slashes"):
        FileBackend.open(parse(url), {"group": False}, host)


def test_only_the_user_may_use_what_is_made(connect: Connect, host: StubHost, tmp_path: Path) -> None:
    """Directories 0700, also the parents; files 0600: whatever the umask."""
    old = os.umask(0)
    try:
        backend = connect(host, path=tmp_path / "a" / "b")
        granted(drive(backend.try_acquire(host.request())))
    finally:
        os.umask(old)

    made = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert {(path.is_dir(), mode(path)) for path in made} == {(True, 0o700), (False, 0o600)}


def test_group_may_use_what_is_shared_with_it(connect: Connect, host: StubHost, directory: Path) -> None:
    """``?group=1``: whatever the umask; the group is the directory's."""
    make(directory, 0o770, -1, STRANGER if os.geteuid() == 0 else -1)  # without setgid, which would do it by itself
    old = os.umask(0o077)
    try:
        backend = connect(host, "?group=1")
        granted(drive(backend.try_acquire(host.request())))
    finally:
        os.umask(old)

    assert mode(directory / "clients") == 0o770
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert {(mode(path), path.stat().st_gid) for path in files} == {(0o660, directory.stat().st_gid)}


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
STRANGER = 12345


def make(path: Path, permissions: int, uid: int = -1, gid: int = -1) -> Path:
    """Make a directory with an owner and a mode."""
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, uid, gid)
    path.chmod(permissions)
    return path


BY_ANYBODY, BY_GROUP = "may be written to by anybody", "may be written to by its group"
OF_ANOTHER = r"belongs to another user \(uid 12345\)"

Made = tuple[str, int, int, int]
"""A directory to make: its path below that of the test, mode, owner and group."""


@pytest.mark.parametrize(
    ("made", "query", "match"),
    [
        # The directory: they could remove records of locks that are held.
        ([("up/locks", 0o777, -1, -1)], "", f"locks {BY_ANYBODY}.*chmod g?o-w"),
        ([("up/locks", 0o770, -1, -1)], "", f"locks {BY_GROUP}.*chmod g-w.*group=1"),
        ([("up/locks", 0o702, -1, -1)], "", f"locks {BY_ANYBODY}.*chmod g?o-w"),
        ([("up/locks", 0o777, -1, -1)], "?group=1", f"locks {BY_ANYBODY}.*chmod g?o-w"),
        ([("up/locks", 0o1777, -1, -1)], "?group=1", f"locks {BY_ANYBODY}.*chmod g?o-w"),
        # A sticky directory protects its entries, but not the files in a folder that another user made there.
        ([("up/locks", 0o1777, -1, -1), ("up/locks/clients", 0o777, -1, -1)], "", f"clients {BY_ANYBODY}"),
        ([("up/locks", 0o755, -1, -1), ("up/locks/clients", 0o777, -1, -1)], "", f"clients {BY_ANYBODY}"),
        # The owner of a folder may remove any file in it, even if it is sticky.
        ([("up/locks", 0o1777, STRANGER, -1)], "", f"locks {OF_ANOTHER}"),
        ([("up/locks", 0o755, STRANGER, -1)], "", f"locks {OF_ANOTHER}"),
        ([("up/locks", 0o1777, -1, -1), ("up/locks/clients", 0o755, STRANGER, -1)], "", f"clients {OF_ANOTHER}"),
        # Above: who could replace the directory would choose what root works in, and the group that is trusted there.
        ([("up", 0o755, STRANGER, STRANGER)], "", f"up {OF_ANOTHER}"),
        ([("up", 0o777, -1, -1)], "", f"up {BY_ANYBODY}"),
        ([("up", 0o777, -1, -1)], "?group=1", f"up {BY_ANYBODY}"),
        ([("up/locks", 0o2770, 0, STRANGER), ("up", 0o755, STRANGER, STRANGER)], "?group=1", f"up {OF_ANOTHER}"),
        ([("up/locks", 0o2770, 0, STRANGER), ("up", 0o775, 0, STRANGER)], "?group=1", f"up {BY_GROUP}"),
        ([("up/locks", 0o2770, 0, STRANGER), ("up", 0o755, STRANGER, 0)], "?group=1", f"up {OF_ANOTHER}"),
    ],
)
def test_directory_that_other_users_could_change_is_refused(  # noqa: PLR0917 - fixtures
    made: list[Made], query: str, match: str, connect: Connect, host: StubHost, tmp_path: Path
) -> None:
    """Nothing is made there."""
    if os.geteuid() != 0 and any(uid != -1 or gid != -1 for _, _, uid, gid in made):
        pytest.skip("only root can give a directory to another user")
    for path, *rights in made:
        make(tmp_path / path, *rights)
    before = set(tmp_path.rglob("*"))

    with pytest.raises(ConfigurationError, match=match):
        drive(connect(host, query, path=tmp_path / "up" / "locks").try_acquire(host.request()))

    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("link", [".", "clients"])
def test_link_is_refused(connect: Connect, host: StubHost, directory: Path, link: str) -> None:
    """The user who made it could point it elsewhere while locks are held; nothing is made behind it."""
    elsewhere = make(directory.with_name("elsewhere"), 0o700)
    if link == "clients":
        make(directory, 0o700)
    (directory / link).symlink_to(elsewhere)

    with pytest.raises(ConfigurationError, match="is a symbolic link"):
        drive(connect(host).try_acquire(host.request()))

    assert list(elsewhere.iterdir()) == []


@ROOT
def test_record_that_another_user_made_is_refused(connect: Connect, host: StubHost, directory: Path) -> None:
    """In a sticky directory of root: the owner of the record could write that the lock is free."""
    make(directory, 0o1777)
    granted(drive(connect(host).try_acquire(host.request())))
    os.chown(directory / "x.lock", STRANGER, -1)
    (directory / "x.lock").chmod(0o666)

    with pytest.raises(ConfigurationError, match=r"x.lock belongs to another user \(uid 12345\)"):
        drive(connect(host).try_acquire(host.request()))


@pytest.mark.parametrize(("permissions", "query"), [(0o666, ""), (0o660, ""), (0o666, "?group=1")])
def test_record_that_others_may_write_to_is_refused(
    permissions: int, query: str, connect: Connect, host: StubHost, directory: Path
) -> None:
    """As one of another user."""
    granted(drive(connect(host, query).try_acquire(host.request())))
    (directory / "x.lock").chmod(permissions)

    with pytest.raises(ConfigurationError, match=r"x.lock may be written to by (anybody|its group)"):
        drive(connect(host, query).try_acquire(host.request()))


@ROOT
@pytest.mark.parametrize("what", ["link", "directory behind a link"])
def test_link_above_whose_owner_is_another_user_is_refused(
    what: str, connect: Connect, host: StubHost, tmp_path: Path
) -> None:
    """As a directory above."""
    theirs, link = tmp_path / "theirs", tmp_path / "link"
    (theirs / "ours").mkdir(parents=True)
    link.symlink_to("theirs/../theirs/ours")
    os.chown(link if what == "link" else theirs, STRANGER, STRANGER, follow_symlinks=False)

    with pytest.raises(ConfigurationError, match=OF_ANOTHER):
        drive(connect(host, path=link / "locks").ping())

    assert not (theirs / "ours" / "locks").exists()


@ROOT
def test_directory_of_another_user_and_of_a_group_that_this_user_is_not_in_is_refused(
    connect: Connect, host: StubHost, directory: Path
) -> None:
    """``?group=1``: he may have put it in the place of the shared one. A member's files in a shared one are trusted."""
    make(directory, 0o2770, STRANGER, STRANGER)
    with pytest.raises(ConfigurationError, match=r"belongs to another user \(uid 12345\)"):
        drive(connect(host, "?group=1").ping())
    make(directory, 0o2770, 0, STRANGER)
    granted(drive(connect(host, "?group=1").try_acquire(host.request("a"))))
    for made in directory.rglob("*"):
        os.chown(made, STRANGER, STRANGER)

    granted(drive(connect(host, "?group=1").try_acquire(host.request("b"))))


def test_links_of_this_user_above_are_followed(connect: Connect, host: StubHost, tmp_path: Path) -> None:
    """As /var/lock, or a home directory on another disk; a circle is an error."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to("disk")
    (tmp_path / "circle").symlink_to("circle")

    drive(connect(host, path=tmp_path / "home" / "locks").ping())
    with pytest.raises(ConfigurationError, match="symbolic link"):
        drive(connect(host, path=tmp_path / "circle" / "locks").ping())

    assert (tmp_path / "disk" / "locks").is_dir()


@ROOT
@pytest.mark.parametrize("made_by_another", ["", "clients"])
def test_folder_that_a_member_of_the_group_made_is_shared(
    made_by_another: str, connect: Connect, host: StubHost, directory: Path
) -> None:
    """``?group=1``: the first member made it."""
    make(directory, 0o2770)
    make(directory / "clients", 0o2770)
    os.chown(directory / made_by_another, STRANGER, -1)

    granted(drive(connect(host, "?group=1").try_acquire(host.request())))


@pytest.mark.parametrize(("permissions", "query"), [(0o1777, ""), (0o770, "?group=1"), (0o755, "")])
def test_directory_that_other_users_cannot_damage_is_accepted(
    permissions: int, query: str, connect: Connect, host: StubHost, directory: Path
) -> None:
    """Sticky, or shared on purpose; as /tmp above it."""
    directory.parent.chmod(0o1777)
    make(directory, permissions)

    drive(connect(host, query).ping())

    assert mode(directory) == permissions


def test_network_file_system_is_refused(connect: Connect, host: StubHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other machines have another clock."""
    monkeypatch.setattr(directory, "kind_of_file_system", lambda _: "nfs4")

    with pytest.raises(ConfigurationError, match=r"network file system \(nfs4\)"):
        drive(connect(host).ping())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no new directories")
def test_file_system_that_refuses_new_directories_is_an_error(host: StubHost) -> None:
    """The parent exists but nothing can be made in it: an error, not an endless search for a missing parent."""
    backend = FileBackend.open(parse("file:///proc/nope"), {"group": False}, host)

    with pytest.raises(ConfigurationError, match="/proc/nope cannot be made in /proc "):
        drive(backend.try_acquire(host.request()))


def test_parent_that_another_process_makes_at_the_same_time(
    connect: Connect, host: StubHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of one crontab, the first on this machine: A finds no parent, B makes it, A goes on."""
    mkdir = os.mkdir

    def interrupted(path: Path, mode: int = 0o777) -> None:
        if Path(path).name == "state":
            mkdir(path, 0o700)
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", interrupted)
    backend = connect(host, path=tmp_path / "state" / "locks")

    granted(drive(backend.try_acquire(host.request())))
