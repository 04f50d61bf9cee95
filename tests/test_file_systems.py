"""Which file systems belong to other machines, too."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockkit import file_systems


def test_kind_is_found_by_the_device() -> None:
    """In the list of mounts."""
    mounts = (
        "22 1 254:0 / / rw,relatime - ext4 /dev/root rw\n"
        "30 22 0:45 / /home rw,relatime shared:7 - nfs4 server:/home rw,addr=10.0.0.1\n"
    )

    assert file_systems.kind_in(mounts, os.makedev(0, 45)) == "nfs4"
    assert file_systems.kind_in(mounts, os.makedev(254, 0)) == "ext4"
    assert file_systems.kind_in(mounts, os.makedev(0, 99)) == ""


def test_file_systems_of_several_machines_are_known_as_the_kernel_names_them() -> None:
    """The client that runs in the kernel has another name than the one in a process of its own."""
    mounts = "30 22 0:45 / /mnt rw - fuse.ceph-fuse ceph-fuse rw,user_id=0\n31 22 0:46 / /srv rw - ceph 10.0.0.1:/ rw\n"

    for device in (os.makedev(0, 45), os.makedev(0, 46)):
        assert file_systems.kind_in(mounts, device) in file_systems.NETWORK_FILE_SYSTEMS


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
def test_kind_is_that_of_the_kernel(tmp_path: Path) -> None:
    """The type of a directory's file system is known."""
    assert file_systems.kind_of_file_system(Path("/proc").stat().st_dev) == "proc"
    assert file_systems.kind_of_file_system(tmp_path.stat().st_dev) not in {"", "proc"}


@pytest.mark.parametrize(
    ("uid", "group", "members", "accepted"),
    [(1234, "ada", [], True), (1234, "ada", ["ben"], False), (1234, "staff", [], False), (0, "ada", [], False)],
)
def test_group_of_one_user_is_not_another_user(  # noqa: PLR0917 - fixtures
    uid: int,
    group: str,
    members: list[str],
    accepted: bool,  # noqa: FBT001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Distributions that give each user a group set a umask of 002: their projects are no danger. Not for root."""
    path = tmp_path / "lockkit.toml"
    path.touch()
    path.chmod(0o664)
    status = os.stat_result((*path.stat()[:4], uid, 1234, *path.stat()[6:]))
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="ada", pw_gid=1234))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=group, gr_mem=members))

    assert (file_systems.find_flaw(str(path), status) is None) == accepted
