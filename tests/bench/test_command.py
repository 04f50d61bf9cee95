"""The command as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockkit.cli.app import app
from lockkit.testing.fork_servers import environment
from lockkit_tools.bench import catalog, session, throwaway_servers
from lockkit_tools.bench.subject import Role, Subject
from lockkit_tools.servers._process import _has_ended
from tests.bench.fakes import subject
from tests.tries import until

FEW = ["--rounds", "1", "--seconds", "0.05"]


def bench(*arguments: str) -> tuple[int, str]:
    """Exit status and standard output."""
    result = CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout


def broken() -> str | None:
    """The exit status of a run in words, once the witness has seen two inside: not if all but one come too late."""
    status, text = bench("memory://", "--workload", "contention", *FEW)
    return f"status {status}" if "BROKEN: Leaky (blocking) at here" in text else None


def report(*arguments: str) -> dict[str, Any]:
    """The JSON of a run that ends well."""
    status, text = bench(*arguments, "--json")
    assert status == 0
    found: dict[str, Any] = json.loads(text)
    return found


def test_json_says_everything_that_a_reader_needs() -> None:
    """Versions, machine, how to repeat it, every round."""
    found = report("memory://", "--workload", "pair", *FEW, "--seed", "5")

    assert found["machine"]["cores"] >= 1
    assert found["versions"]["lockkit"]
    assert found["seed"] == 5
    assert found["settings"]["seconds"] == 0.05
    (pair,) = found["workloads"]
    by_subject = {row["subject"]: row for row in pair["results"]}
    ours = by_subject["lockkit (blocking) at memory://"]
    assert ours["baseline"] == "threading.Lock (blocking) at memory://"
    assert ours["ratios"]["min_us"][ours["baseline"]]["rounds"][0] > 0
    assert {row["status"] for row in pair["results"]} == {"ok"}
    assert len(pair["rounds"]) == 4


def test_file_backend_is_measured_without_leaving_anything_behind(tmp_path: Path) -> None:
    """All lock files lie in a directory that goes with the run, on the file system of the URL."""
    found = report(f"file://{tmp_path}/locks", "--workload", "pair", *FEW)

    assert list(tmp_path.iterdir()) == []
    labels = {row["subject"].split(" (")[0]: row["status"] for row in found["workloads"][0]["results"]}
    # It asks for an older redis-py than the tests have.
    assert labels.pop("mithril-locks") in {"ok", "skipped"}
    assert labels == dict.fromkeys(["lockkit", "flock + read + write", "portalocker", "filelock", "tooz"], "ok")


def test_same_url_twice_gives_two_entries() -> None:
    """For an A/A run; baselines and libraries stand there once."""
    found = report("memory://", "memory://", "--workload", "pair", "--face", "sync", *FEW)

    assert [row["subject"] for row in found["workloads"][0]["results"]] == [
        "lockkit (blocking) at memory://",
        "lockkit #2 (blocking) at memory://",
        "threading.Lock (blocking) at memory://",
    ]


def test_lockkit_that_lacks_what_is_measured_says_why() -> None:
    """The run ends well, with nothing sent: nobody listens there."""
    nodes = "redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3"
    found = report(nodes, "--workload", "read", "--face", "sync", *FEW)

    (row,) = found["workloads"][0]["results"]
    reason = "the backend has no read locks (capabilities.shared_mode is False)"
    assert (row["status"], row["reason"]) == ("skipped", reason)
    status, text = bench(nodes, "--workload", "read", "--face", "sync", *FEW)
    assert status == 0
    assert f"Uncontended read lock not measured: {reason}" in " ".join(text.split())


@pytest.mark.parametrize(("role", "status"), [("lockkit", 1), ("peer", 0)])
def test_broken_exclusion_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role, status: int) -> None:
    """Of lockkit a CI run must not pass by; of another library it is what the command is there to find out."""
    monkeypatch.setattr(catalog, "subjects", lambda *_, **__: [subject("Leaky", tmp_path, role=role)])

    assert until(broken) == f"status {status}"


def test_wrong_or_silent_url_is_told_before_servers_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a minute later."""

    def start(*_: object, **__: object) -> None:
        pytest.fail("servers are started")

    monkeypatch.setattr(throwaway_servers, "ThrowawayServers", start)

    assert bench("nonsense://h", "--servers", "local") == (78, "")
    assert bench("redis://127.0.0.1:1", "--servers", "local", "--workload", "pair") == (69, "")


def test_no_password_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the command to repeat it nor in the subjects."""
    monkeypatch.setattr(sys, "argv", ["lockkit", "bench", "redis://u:hidden@h/0", "--quick"])
    secret = Subject(
        label="x", target="", url="redis://u:hidden@h/0", group="g", face="blocking", role="peer", scope="network"
    )

    assert session.command(7) == "lockkit bench 'redis://u:***@h/0' --quick --seed 7"
    assert "hidden" not in json.dumps(secret.to_json())
    assert "hidden" not in repr(secret)


def test_help_loads_nothing_that_measures() -> None:
    """``lockkit --help`` asks each command for its help."""
    script = "import sys; import lockkit_tools.bench.command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True, timeout=60)

    loaded = set(done.stdout.split())
    assert loaded.isdisjoint(
        {"asyncio", "rich.progress", "lockkit_tools.bench.catalog", "lockkit_tools.bench.workloads"}
    )


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_shows_what_there_is_and_ends_the_workers(tmp_path: Path, signum: signal.Signals) -> None:
    """The report of a run that was interrupted, status 128 + n, no process left."""
    arguments = ["bench", "memory://", "--workload", "pair", "--rounds", "1000", "--seconds", "0.05", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "lockkit.cli", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**environment(), "TMPDIR": str(tmp_path)},
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    worker = _first_child(children, process)

    os.kill(process.pid, signum)
    text, _ = process.communicate(timeout=60)

    assert process.returncode == 128 + signum
    found = json.loads(text)
    assert found["interrupted"] is True
    assert found["workloads"][0]["results"]
    until(lambda: _has_ended(worker))  # it ends when it finds its socket closed


def _first_child(children: Path, process: subprocess.Popen[str]) -> int:
    """Wait until the run has started a worker."""
    while process.poll() is None:
        if pids := children.read_text().split():
            return int(pids[0])
    pytest.fail("the command ended before it measured")


def test_page_is_written_beside_the_table(tmp_path: Path) -> None:
    """The table is still printed; a directory that is not there is told before anything is measured."""
    few = ["memory://", "--workload", "pair", *FEW]

    status, text = bench(*few, "--html", str(tmp_path / "page.html"))

    assert status == 0
    assert "Uncontended" in text
    assert "Uncontended" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert bench(*few, "--html", str(tmp_path / "none" / "page.html")) == (2, "")
