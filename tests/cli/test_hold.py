"""``lockkit hold``: a co-process holds a lock for a program in another language, and ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

import lockkit
from lockkit.runtime import monotonic
from tests.cli.support import PATIENCE, Cli
from tests.tries import until

TTL = 9.0


def start(cli: Cli, *options: str, ttl: float = TTL, **keywords: Any) -> subprocess.Popen[str]:
    """Start it with a pipe as its stdin."""
    return cli.start("hold", "a", "--ttl", str(ttl), *options, **({"stdin": subprocess.PIPE} | keywords))


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Read a line of JSON."""
    assert process.stdout is not None
    read = process.stdout.readline()
    assert read, process.stderr and process.stderr.read()
    told: dict[str, Any] = json.loads(read)
    return told


def locks(cli: Cli) -> str:
    """Where the locks are that several processes of a test use."""
    return f"file:{cli.home}/locks"


def test_it_holds_until_stdin_ends(cli: Cli) -> None:
    """And says what it has; its fields have stable names."""
    with lockkit.connect(locks(cli)) as client:
        process = start(cli, "--json", "--metadata", "by node", "--url", locks(cli))
        granted = line(process)
        (holder,) = client.holders("a")

        assert process.stdin is not None
        process.stdin.close()
        released = line(process)

        assert process.wait(PATIENCE) == 0
        assert client.holders("a") == []
    assert list(granted) == ["event", "name", "token", "owner", "ttl", "remaining", "deadline"]
    assert (granted["event"], granted["name"], granted["ttl"]) == ("granted", "a", TTL)
    assert (granted["token"], granted["owner"]) == (holder.token, holder.owner)
    assert 0 < granted["remaining"] <= TTL
    assert granted["deadline"] < monotonic() + TTL
    assert holder.metadata["text"] == "by node"
    assert released == {"event": "released", "name": "a", "token": holder.token, "owner": holder.owner}


def test_line_on_stdin_releases(cli: Cli) -> None:
    """Others are reported; plain text says event and token."""
    process = start(cli, "--url", locks(cli))
    assert process.stdout is not None
    event, token = process.stdout.readline().split()
    released, err = process.communicate("status\nrelease\n", PATIENCE)

    assert event == "granted"
    assert int(token) > 0
    assert released == f"released {token}\n"
    assert "unknown command 'status'" in err
    assert process.returncode == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_releases(cli: Cli, signum: signal.Signals) -> None:
    """The exit status names it."""
    process = start(cli, "--json", "--url", locks(cli))
    line(process)

    process.send_signal(signum)

    assert line(process)["event"] == "released"
    assert process.wait(PATIENCE) == 128 + signum


def test_it_ends_with_its_parent_though_the_pipe_stays_open(cli: Cli) -> None:
    """This process has the other end of the pipe, and the parent is killed."""
    command = [sys.executable, "-m", "lockkit.cli", "hold", "a", "--json", "--url", locks(cli)]
    shell = cli.start_program(
        *("sh", "-c", 'exec 3<&0; "$@" <&3 & wait', "sh", *command), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert line(shell)["event"] == "granted"

    shell.kill()

    assert line(shell)["event"] == "released"
    with lockkit.connect(locks(cli)) as client:
        client.lock("a", timeout=PATIENCE).acquire().release()


def test_nobody_reads_its_lines(cli: Cli) -> None:
    """Then the program is gone, and the lock is released."""
    read, write = os.pipe()
    process = start(cli, "--renewals", "--url", locks(cli), stdout=write)
    os.close(write)
    os.read(read, 7)
    os.close(read)

    with lockkit.connect(locks(cli)) as client:
        client.lock("a", timeout=PATIENCE).acquire().release()
    assert process.wait(PATIENCE) == 0


def test_lost_lease_is_told_and_ends_it(cli: Cli) -> None:
    """With the reason, and the exit status of a loss."""
    process = start(cli, "--json", "--url", locks(cli))
    granted = line(process)

    with lockkit.connect(locks(cli)) as client, client.lock("b"):
        assert client.break_lock("a")
        lost = line(process)

    assert (lost["event"], lost["token"], lost["reason"]) == ("lost", granted["token"], "broken")
    assert process.wait(PATIENCE) == 79
    assert process.stdout is not None
    assert process.stdout.read() == ""


def test_lease_that_cannot_be_renewed_is_told_before_its_deadline(cli: Cli) -> None:
    """The program has time to stop; renewals moved the deadline before."""
    process = start(cli, "--json", "--renewals", "--url", f"faulty:{cli.home}/locks", ttl=3.0)
    granted, renewed = line(process), line(process)
    (cli.home / "locks.renew").touch()
    told = [line(process)]
    while told[-1]["event"] == "renewed":
        told.append(line(process))
    now = monotonic()
    (cli.home / "locks.renew").unlink()

    assert renewed["event"] == "renewed"
    assert renewed["deadline"] > granted["deadline"]
    assert (told[-1]["event"], told[-1]["reason"]) == ("lost", "expired")
    last = [granted, renewed, *told][-2]["deadline"]
    assert told[-1]["deadline"] == pytest.approx(last, abs=TTL)
    assert told[-1]["remaining"] > 0
    assert told[-1]["deadline"] > now - told[-1]["remaining"]
    assert process.wait(PATIENCE) == 79


def lost_without_renewals(cli: Cli) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start one that cannot renew any more once it holds the lock; give what it tells of the loss."""
    process = start(cli, "--json", "--url", f"faulty:{cli.home}/locks", ttl=3.0)
    line(process)
    (cli.home / "locks.renew").touch()
    return process, line(process)


def test_program_that_is_stopping_is_protected_until_the_deadline(cli: Cli) -> None:
    """The server answers again right after the loss was told: the lock is not freed while the program stops."""
    process, lost = lost_without_renewals(cli)
    (cli.home / "locks.renew").unlink()

    with lockkit.connect(locks(cli)) as client, client.lock("a", timeout=PATIENCE):
        granted = monotonic()

    assert (lost["event"], lost["reason"]) == ("lost", "expired")
    assert granted >= lost["deadline"] - 0.01  # which is rounded
    assert process.wait(PATIENCE) == 79


def test_program_that_has_stopped_after_a_loss_frees_the_lock(cli: Cli) -> None:
    """It need not wait for the deadline."""
    process, lost = lost_without_renewals(cli)
    assert lost["event"] == "lost"
    assert process.stdin is not None

    process.stdin.close()

    assert process.wait(PATIENCE) == 79
    with lockkit.connect(locks(cli)) as client:
        assert client.holders("a") == []


def test_busy_lock_ends_it_at_the_timeout(cli: Cli) -> None:
    """Nothing was granted, so nothing is written."""
    with lockkit.connect(locks(cli)) as client, client.lock("a"):
        process = start(cli, "--timeout", "0", "--url", locks(cli))
        assert process.wait(PATIENCE) == 75

    out, err = process.communicate()
    assert out == ""
    assert "busy" in err


def test_program_that_ends_while_it_waits_leaves_no_waiter(cli: Cli) -> None:
    """As `lockkit run`."""
    with lockkit.connect(locks(cli)) as client, client.lock("a"):
        process = start(cli, "--url", locks(cli))
        until(lambda: client.holders("a")[0].waiters == 1)

        assert process.stdin is not None
        process.stdin.close()

        assert process.wait(PATIENCE) == 75
        assert process.stderr is not None
        assert process.stderr.read() == "lockkit: stdin ended before the lock was granted\n"
        until(lambda: client.holders("a")[0].waiters == 0)


def test_signal_while_it_waits_ends_it(cli: Cli) -> None:
    """And leaves nothing."""
    with lockkit.connect(locks(cli)) as client, client.lock("a"):
        process = start(cli, "--url", locks(cli))
        until(lambda: client.holders("a")[0].waiters == 1)

        process.terminate()

        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
