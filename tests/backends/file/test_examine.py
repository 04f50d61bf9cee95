"""The doctor on backends without a server: memory and file."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest

import lockkit
from lockkit.backends.file import examine as file_examine
from lockkit.backends.file.wakeup import Inotify
from lockkit.doctor import Severity, examine
from tests.doctor.support import found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory as lockkit makes it."""
    path = tmp_path / "locks"
    path.mkdir(mode=0o700)
    return path


def test_memory_is_for_one_process() -> None:
    """Nothing can be misconfigured, and the scope of its locks is reported."""
    findings = found("memory://")

    assert set(findings) == {"memory-process-only"}
    assert findings["memory-process-only"].check.severity is Severity.INFO


def test_silent_on_a_good_directory(directory: Path) -> None:
    """No findings, and no new files."""
    assert found(f"file:{directory}") == {}
    assert list(directory.iterdir()) == []


def test_default_directory_is_examined() -> None:
    """Without a URL the doctor examines the directory that ``connect()`` would use."""
    assert examine().backend == "file:"


def test_missing_directory_is_not_made(directory: Path) -> None:
    """The first lock will make it."""
    assert set(found(f"file:{directory}/a/b")) == {"file-missing"}
    assert list(directory.iterdir()) == []


def test_fix_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    """The default directory of macOS has a space in its path."""
    directory = tmp_path / "Application Support" / "locks"
    url = f"file:{quote(str(directory))}"

    subprocess.run(["sh", "-c", found(url)["file-missing"].fix.partition("; or: ")[2]], check=True)
    assert found(url) == {}
    directory.chmod(0o707)
    subprocess.run(["sh", "-c", found(url)["file-writable-by-others"].fix], check=True)

    assert found(url) == {}


def test_directory_that_others_may_write_to(directory: Path) -> None:
    """The doctor asks what the backend asks."""
    directory.chmod(0o770)

    assert set(found(f"file:{directory}")) == {"file-writable-by-others"}
    assert found(f"file:{directory}?group=1") == {}


def test_something_else_in_the_place_of_the_directory(directory: Path) -> None:
    """In place of the directory, or of one of its parents."""
    (directory / "file").touch()

    for path in (directory / "file", directory / "file" / "locks"):
        assert f"{directory}/file is not a directory" in found(f"file:{path}")["file-unusable"].seen


def test_directory_that_nobody_can_make() -> None:
    """Not even for root: the kernel refuses new directories there."""
    assert "may not write to /proc/self" in found("file:/proc/self/locks")["file-unusable"].seen
    assert set(found("file:/proc/locks")) == {"file-unusable"}


def test_fix_for_a_missing_directory_leaves_the_one_above_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one may be /var/lock, or the root directory: to give it to the user would be worse than no lock."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        fix = found(f"file:{tmp_path}/new/locks")["file-unusable"].fix
    before = tmp_path.stat()

    subprocess.run(["sh", "-c", fix.removeprefix("As root: ").partition("; or")[0]], check=True)

    assert found(f"file:{tmp_path}/new/locks") == {}
    assert (tmp_path.stat().st_mode, tmp_path.stat().st_uid) == (before.st_mode, before.st_uid)


def test_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in many containers: no change of owner or mode would help."""
    flags = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*flags[:8], os.ST_RDONLY, flags[9])))

    for path in (tmp_path, tmp_path / "new"):
        finding = found(f"file:{path}")["file-unusable"]
        assert finding.seen == f"{tmp_path} is on a read-only file system."
        assert "LOCKKIT_STATE_DIR" in finding.fix


def test_network_file_system(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's name for it."""
    monkeypatch.setattr(file_examine, "kind_of_file_system", lambda device: "nfs4")  # noqa: ARG005

    assert "nfs4" in found(f"file:{directory}")["file-network"].seen


def test_no_inotify_left(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another program of this user uses all of them."""

    def refuse(self: Inotify) -> None:  # noqa: ARG001
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Inotify, "__init__", refuse)

    assert "max_user_instances" in found(f"file:{directory}")["file-no-inotify"].fix


def test_wrong_url_is_no_finding(directory: Path) -> None:
    """The same error as everywhere."""
    for url in (f"file://{directory.name}/x", "file:?grup=1", "fiel:"):
        with pytest.raises(lockkit.ConfigurationError):
            examine(url)
    for ttl in (0, -1, float("nan"), float("inf")):
        with pytest.raises(lockkit.ConfigurationError, match="ttl"):
            examine("memory://", ttl=ttl)
