"""Servers that the command starts for itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lockkit
from lockkit.configuration import registry
from lockkit.testing.fork_servers import environment
from lockkit.url import parse
from lockkit_tools.bench import throwaway_servers
from lockkit_tools.bench.throwaway_servers import SPECS, ServerSpec, ThrowawayServers
from lockkit_tools.servers.kinds import KINDS, Kind, Need
from tests.bench.test_command import report


def start(*, docker: bool = False) -> ThrowawayServers:
    """Servers that has not been entered."""
    return ThrowawayServers(docker=docker, several=True, tell=lambda _: None)


def test_servers_run_while_they_are_needed_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the backends that need no server beside them."""
    monkeypatch.setattr(throwaway_servers, "SPECS", (ServerSpec("redis"), ServerSpec("redlock", {"count": 3})))

    with start() as servers:
        urls = servers.urls
        for url in urls:
            with lockkit.connect(url) as client:
                client.ping()
        assert servers.missing == {}

    assert {"memory", "file", "sqlite", "redis", "redlock"} <= {parse(url).scheme for url in urls}
    gone = next(url for url in urls if url.startswith("redis:"))
    with lockkit.connect(gone) as client, pytest.raises(lockkit.BackendUnavailable):
        client.ping()


def test_server_that_cannot_be_had_or_does_not_start_is_told_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reason stands in the report."""
    absent = Kind("absent", "Nothing", "nowhere:Nothing", (Need(("no-such-program-here",)),), ())
    monkeypatch.setitem(KINDS, "absent", absent)
    wrong = ServerSpec("redis", {"settings": {"no-such-directive": "1"}})
    monkeypatch.setattr(throwaway_servers, "SPECS", (ServerSpec("absent"), wrong, ServerSpec("redlock", {"count": 3})))

    few = ["--workload", "pair", "--face", "sync", "--no-peers", "--rounds", "1", "--seconds", "0.05"]
    found = report("--servers", "local", *few)

    assert "no-such-program-here" in found["not_started"]["absent"]
    assert "ended with status" in found["not_started"]["redis"]
    measured = {row["subject"].partition(" at ")[2].partition(":")[0] for row in found["workloads"][0]["results"]}
    assert {"memory", "file", "redlock"} <= measured
    assert "redis" not in measured


def test_every_backend_is_measured_on_some_server() -> None:
    """A backend that is registered and has no server here would be missed without a word."""
    schemes = {"memory", "file", "sqlite", *(spec.kind.partition("-")[0] for spec in SPECS)}

    measured = {registry.find(scheme, mode) for scheme in schemes for mode in registry.modes(scheme)}

    registered = {registry.find(scheme, mode) for scheme in registry.BUILTIN for mode in registry.modes(scheme)}
    assert registered <= measured


def test_ctrl_c_ends_the_servers_too(tmp_path: Path) -> None:
    """The report of what there is, and every file of theirs gone."""
    program = (
        "from lockkit_tools.bench import throwaway_servers as servers\n"
        "servers.SPECS = (servers.ServerSpec('redis'),)\n"
        "from lockkit.cli import main\nmain()"
    )
    arguments = ["bench", "--servers", "local", "--workload", "pair", "--rounds", "1000", "--seconds", "0.05", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-X", "faulthandler", "-c", program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**environment(), "TMPDIR": str(tmp_path)},
    )
    # A worker's complaints go to a file without a name, so the server's directory is how far it has come.
    while not any(tmp_path.glob("lockkit-redis-*/server.log")):
        assert process.poll() is None

    try:
        try:
            process.send_signal(signal.SIGINT)
            text, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:  # Python loses an interrupt that strikes in the callback of a weak reference
            process.send_signal(signal.SIGINT)
            text, _ = process.communicate(timeout=60)
    finally:
        process.send_signal(signal.SIGABRT)  # one that still runs shows where it hangs
        process.wait()

    assert process.returncode == 130
    assert not text or json.loads(text)["interrupted"] is True
    assert not [path for path in tmp_path.iterdir() if "ports" not in path.name]  # those are all servers' together
