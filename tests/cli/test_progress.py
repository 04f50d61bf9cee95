"""``--stall``: a command, a leader or a program that makes no progress gives up its lock; and ``lockkit note``."""

from __future__ import annotations

import json
import stat
import tempfile
from pathlib import Path

import pytest

import lockkit
from tests.cli.support import Cli, run_here

BEATS = 'for i in 1 2 3 4 5 6; do sleep 0.5; touch "$LOCKKIT_BEAT"; done; echo worked'


def test_command_that_touches_its_file_keeps_the_lock(cli: Cli) -> None:
    """For longer than `--stall` and the ttl together."""
    done = cli.run("run", "a", "--ttl", "1.2", "--stall", "1.5", "--", "sh", "-c", BEATS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "worked\n", "")


def test_command_without_progress_is_ended_before_the_deadline(cli: Cli) -> None:
    """With the status of a loss; it says why."""
    # SIGTERM comes 8 s before the deadline: for so long may the machine stand still.
    options = ("--ttl", "16", "--stall", "0.5", "--signal-grace", "8")
    done = cli.run("run", "a", *options, "--", "sh", "-c", "sleep 60; echo never")

    assert done.returncode == 79
    assert done.stdout == ""
    assert "lock 'a' makes no progress (--stall)" in done.stderr
    assert "before the deadline" in done.stderr
    assert cli.holders("a") == []


def test_file_is_the_users_alone_and_goes_with_the_command(cli: Cli) -> None:
    """Nobody else's touch counts; a file that the command removes may come back."""
    script = 'ls -ld "$(dirname "$LOCKKIT_BEAT")" >&2; rm "$LOCKKIT_BEAT"; touch "$LOCKKIT_BEAT"; echo "$LOCKKIT_BEAT"'
    done = cli.run("run", "a", "--stall", "60", "--", "sh", "-c", script)

    assert done.returncode == 0
    assert done.stderr.startswith(stat.filemode(stat.S_IFDIR | 0o700))
    path = Path(done.stdout.strip())
    assert not path.exists()
    assert not path.parent.exists()


def test_no_attempt_is_counted_without_a_directory_for_the_file(
    cli: Cli, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose file system is read-only."""
    run = ("run", "a", "--url", url, "--once", "k", "--attempts", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(cli.home / "missing"))
    done = run_here(*run, "--stall", "60", "--", "touch", str(cli.home / "ran"))

    assert (done.exit_code, done.stderr.count("\n")) == (78, 1)
    assert "--stall needs a directory for temporary files: set TMPDIR to one" in done.stderr
    assert cli.run(*run, "--", "echo", "ran").stdout == "ran\n"


def test_leader_without_progress_is_replaced(cli: Cli) -> None:
    """Lockkit campaigns again, and the command of the next term begins anew."""
    script = 'echo "$LOCKKIT_TOKEN" >> terms; test $(wc -l < terms) -ge 2 || sleep 60'
    done = cli.run("elect", "fleet", "--ttl", "2", "--stall", "0.5", "--", "sh", "-c", script)

    assert done.returncode == 0
    first, second = map(int, (cli.home / "terms").read_text().split())
    assert second > first


def test_program_that_holds_beats_on_stdin(cli: Cli) -> None:
    """And is told the reason of the loss when it stops."""
    holding = cli.start("hold", "a", "--ttl", "2", "--stall", "1", "--json", stdin=-1)
    assert holding.stdin is not None
    assert holding.stdout is not None
    granted = json.loads(holding.stdout.readline())
    for command in ("beat", "nonsense", "beat"):
        holding.stdin.write(f"{command}\n")
        holding.stdin.flush()
    lost = json.loads(holding.stdout.readline())
    holding.stdin.close()

    assert holding.wait(timeout=60) == 79
    assert (lost["event"], lost["reason"], lost["token"]) == ("lost", "stalled", granted["token"])
    assert holding.stderr is not None
    assert "unknown command 'nonsense': give release or beat" in holding.stderr.read()


def test_note_is_printed_as_json(tmp_path: Path) -> None:
    """Held or free; status 1 without one."""
    url = f"file:{tmp_path}/locks"
    none = run_here("note", "a", "--url", url)
    with lockkit.connect(url) as client, client.lock("a") as lease:
        lease.write_note({"row": 5})
    found = run_here("note", "a", "--url", url)

    assert (none.exit_code, none.stdout) == (1, "")
    assert "lock 'a' at file:" in none.stderr
    assert "has no note" in none.stderr
    note = json.loads(found.stdout)
    assert (found.exit_code, note["value"], note["token"]) == (0, {"row": 5}, lease.token)
