"""Temporary directories, and what becomes of those whose process was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockkit.errors import ConfigurationError
from lockkit.testing.fork_servers import environment
from lockkit_tools.servers.temporary import remove_abandoned, shared_directory

HOLDER = """
import sys
from pathlib import Path
from lockkit_tools.servers.temporary import TemporaryDirectory
directory = TemporaryDirectory("redis", Path(sys.argv[1]))
(directory.path / "data").mkdir()
print(directory.path, flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that has a temporary directory."""

    def __init__(self, parent: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", HOLDER, str(parent)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        assert self._process.stdout is not None
        self.path = Path(self._process.stdout.readline().strip())

    def end(self, signum: signal.Signals) -> None:
        """End it by a signal."""
        self._process.send_signal(signum)
        self._process.communicate(timeout=60)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    """A process that lives until the end of the test, unless it ends it."""
    holder = Holder(tmp_path)
    yield holder
    holder.end(signal.SIGKILL)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_directory_of_a_killed_process_is_removed_by_the_next(
    tmp_path: Path, holder: Holder, signum: signal.Signals
) -> None:
    """Another process makes a directory beside it."""
    holder.end(signum)
    assert holder.path.is_dir()

    next_one = Holder(tmp_path)

    assert not holder.path.exists()
    next_one.end(signal.SIGKILL)
    assert next_one.path.is_dir()
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_there_stays(tmp_path: Path) -> None:
    """A directory without the file that tells whose it is, a file without a directory, a link."""
    elsewhere = tmp_path / "elsewhere"
    for name in ("elsewhere", "lockkit-mine", "other-one", "lockkit-linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "other-one.in-use").touch()
    (tmp_path / "lockkit-alone.in-use").touch()
    (elsewhere / "file").touch()
    (tmp_path / "lockkit-linked.in-use").symlink_to(elsewhere / "file")
    before = sorted(tmp_path.rglob("*"))

    remove_abandoned(tmp_path)

    assert sorted(tmp_path.rglob("*")) == before


def test_directory_of_a_fixed_name_must_be_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can make a directory or a link in /tmp before us."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = shared_directory("ports")
    assert shared_directory("ports") == path

    path.chmod(0o777)
    with pytest.raises(ConfigurationError, match="remove it"):
        shared_directory("ports")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to("elsewhere")
    with pytest.raises(ConfigurationError, match="remove it"):
        shared_directory("ports")
