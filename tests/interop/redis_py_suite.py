"""
Runs redis-py's own tests of its ``Lock`` on lockkit: ``python -m tests.interop.redis_py_suite SDIST [pytest …]``.

The tests are unpacked into a temporary directory and run against a throw-away Redis; nothing of them stays.
`nox -s redis-py-suite` fetches the source distribution.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from lockkit_tools.servers import RedisServer
from tests.interop.redis_py_differences import DIFFERENCES

HERE = Path(__file__).parent
SETTINGS = """
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
markers =
    onlynoncluster
"""


def unpack_tests(sdist: Path, target: Path) -> None:
    """Unpack the tests, and not the package: what is installed is tested."""
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            member.name = member.name.partition("/")[2]
            if member.name.startswith("tests/"):
                archive.extract(member, target, filter="data")
    missing = [file for file in DIFFERENCES if not (target / file).exists()]
    if missing:
        raise SystemExit(f"{sdist.name} has no {', '.join(missing)}: redis-py ships its tests no more, or moved them")


def run(sdist: Path, arguments: list[str]) -> int:
    """Run them; give pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix="lockkit-redis-py-") as folder, RedisServer() as server:
        target = Path(folder)
        unpack_tests(sdist, target)
        # redis-py's own settings; without an ini-file of its own pytest would look for one above.
        (target / "pytest.ini").write_text(SETTINGS)
        command = [sys.executable, "-m", "pytest", "-p", "redis_py_differences", "-p", "no:randomly", "--timeout=60"]
        done = subprocess.run(
            [*command, "-q", "-rx", "--redis-url", server.url, *DIFFERENCES, *arguments],
            cwd=target,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), folder])},
            check=False,
        )
        return done.returncode


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]).resolve(), sys.argv[2:]))
