"""
Runs kazoo's own tests of its ``Lock`` on lockkit: ``python -m tests.interop.kazoo_suite SDIST [pytest …]``.

The source distribution is unpacked into a temporary directory and its tests run against a throw-away ZooKeeper; nothing
of them stays. `nox -s kazoo-suite` fetches it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from lockkit_tools.servers import ZooKeeperServer
from tests.interop.kazoo_differences import CASES, FILE

HERE = Path(__file__).parent


def unpack(sdist: Path, target: Path) -> None:
    """Unpack the package: its tests are a part of it, and import their neighbours."""
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            member.name = member.name.partition("/")[2]
            if member.name.startswith("kazoo/"):
                archive.extract(member, target, filter="data")
    if not (target / FILE).exists():
        raise SystemExit(f"{sdist.name} has no {FILE}: kazoo ships its tests no more, or moved them")


def run(sdist: Path, arguments: list[str]) -> int:
    """Run them; give pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix="lockkit-kazoo-") as folder, ZooKeeperServer() as server:
        target = Path(folder)
        unpack(sdist, target)
        # Without an ini-file of its own pytest would look for one above.
        (target / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-p", "kazoo_differences", "-p", "no:randomly", "--timeout=90"]
        done = subprocess.run(
            [*command, "-q", "-rx", f"{FILE}::{CASES}", *arguments],
            cwd=target,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([folder, str(HERE)]),
                "LOCKKIT_KAZOO_SUITE_SERVER": server.address,
            },
            check=False,
        )
        return done.returncode


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]).resolve(), sys.argv[2:]))
