"""
Runs another library's own tests of its lock on lockkit.

A source distribution, which `nox` fetches, is unpacked into a temporary directory; nothing of it stays. A plugin gives
the tests our lock, and says which of them differ.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(
    plugin: str, kept: str, tests: Collection[str], *options: str, settings: str = "[pytest]\n", **environment: str
) -> int:
    """
    Run tests of the source distribution ``sys.argv[1]``, with the other arguments for pytest; return its exit status.

    Unpacked is the folder `kept` only. `settings` is an ini-file of its own: without one pytest would look above.
    """
    sdist = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="lockkit-suite-") as folder:
        with tarfile.open(sdist) as archive:
            for member in archive.getmembers():
                member.name = member.name.partition("/")[2]
                if member.name.startswith(kept):
                    archive.extract(member, folder, filter="data")
        missing = [one for one in tests if not Path(folder, one.partition("::")[0]).exists()]
        if missing:
            raise SystemExit(f"{sdist.name} has no {', '.join(missing)}: it ships its tests no more, or moved them")
        Path(folder, "pytest.ini").write_text(settings)
        command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:randomly", "--timeout=90", "-q", "-rx"]
        done = subprocess.run(
            [*command, *options, *tests, *sys.argv[2:]],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), folder]), **environment},
            check=False,
        )
        return done.returncode


def expect(items: Sequence[pytest.Item], differences: Mapping[str, Mapping[str, str]]) -> None:
    """Expect the tests to fail that are named, by file, with the reason; a name without a test is an error."""
    left = {(file, name) for file, reasons in differences.items() for name in reasons}
    for item in items:
        file, name = item.nodeid.partition("::")[0], getattr(item, "originalname", "")
        reason = differences.get(file, {}).get(name)
        if reason is not None:
            left.discard((file, name))
            item.add_marker(pytest.mark.xfail(strict=True, reason=reason))
    if left:
        raise pytest.UsageError(f"there are no such tests: {sorted(left)}")
