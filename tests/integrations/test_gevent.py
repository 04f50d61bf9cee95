"""Programs on gevent, on every backend: what ``docs/integrations/gevent.md`` says works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockkit_tools.servers import (
    EtcdServer,
    MariaServer,
    PostgresServer,
    RedisServer,
    Service,
    ZooKeeperServer,
    require,
)
from tests.conventions.sources import ROOT

PROGRAM = Path(__file__).with_name("gevent_program.py")
PATIENCE = 100.0

SERVERS: dict[str, Callable[[], Service]] = {
    "redis": RedisServer,
    "postgresql": PostgresServer,
    "mariadb": MariaServer,
    "zookeeper": ZooKeeperServer,
    "etcd": EtcdServer,
}
FORMS = {
    "postgresql": ["postgresql", "postgresql?mode=advisory", "postgresql?mode=row"],
    "mariadb": ["mariadb", "mariadb?mode=advisory", "mariadb?mode=row"],
}


def run(*urls: str) -> None:
    """Run a program on each URL, at the same time, and look at what it saw."""
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), url],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for url in urls
    ]
    for url, process in zip(urls, running, strict=True):
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, f"{url}: {err}"
        assert json.loads(out) == {
            "exclusion": {"count": 8, "most": 1},
            "waiting": ["released", "granted"],
            "renewal": {"confirmed": True, "free": False},
            "loss": {"lost": True, "told": 1},
            "timeout": "LockTimeout",
            "reentrancy": [True, False],
            "killed": 1,
        }, f"{url}: {err}"


def test_embedded_backends_on_gevent(tmp_path: Path) -> None:
    """Memory, files, SQLite."""
    run("memory://", f"file:{tmp_path}/locks", f"sqlite:///{tmp_path}/locks.db")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVERS)
def test_servers_on_gevent(kind: str) -> None:
    """Each driver that the page names, with all modes of a database."""
    require(kind, local=True)
    with SERVERS[kind]() as server:
        scheme, _, rest = server.url.partition("://")
        forms = [form.partition("?") for form in FORMS.get(kind, [scheme])]
        run(*(f"{form}://{rest}{'&' if '?' in rest and query else mark}{query}" for form, mark, query in forms))


def test_page_names_what_is_tested() -> None:
    """No more and no less."""
    page = (ROOT / "docs" / "integrations" / "gevent.md").read_text()
    named = set(re.findall(r"^\| `([^`]+)`", page, re.MULTILINE))

    forms = {form for kind in SERVERS for form in FORMS.get(kind, [kind])} | {"memory", "file", "sqlite"}
    assert named == {form.replace("?", "://?") if "?" in form else f"{form}://" for form in forms}
