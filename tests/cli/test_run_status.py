"""The exit statuses of ``lockkit run``, which scripts and cron rely on, and what the command is given."""

from __future__ import annotations

import json
import re
import shutil
import sys
from subprocess import Popen

import pytest

from lockkit.runtime import monotonic
from tests.cli.support import Cli


def hold(cli: Cli, name: str = "a") -> Popen[str]:
    """Starts a run that holds a lock until its standard input ends."""
    holder = cli.start("run", name, "--", "sh", "-c", "echo holding; cat", stdin=-1)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holding\n"
    return holder


@pytest.mark.parametrize(
    ("end", "status"),
    [("exit 0", 0), ("exit 75", 75), ("exit 255", 255), ("kill -9 $$", 137), ("kill -13 $$; exit 1", 141)],
)
def test_status_is_the_commands_own(cli: Cli, end: str, status: int) -> None:
    """Also where lockkit uses that number itself; 128 + n of a signal, also SIGPIPE, which Python ignores."""
    done = cli.run("run", "a", "--", "sh", "-c", end)

    assert (done.returncode, done.stdout) == (status, "")
    assert "lockkit" not in done.stderr  # the shell may tell of itself


@pytest.mark.parametrize(
    ("program", "text", "mode", "status", "why"),
    [
        ("no-such-command", None, 0, 127, "No such file or directory\n"),
        ("echo one | wc -l", None, 0, 127, "No such file or directory. Its arguments must be words of their own; for "),
        ("./program", "", 0o600, 126, "Permission denied\n"),
        # A shell, and programs such as env, execute this one; an editor on Windows makes the next.
        (
            "./program",
            "echo hello\n",
            0o700,
            126,
            "Exec format error. If it is a script, begin it with a line such as ",
        ),
        ("./program", "#!/bin/sh\r\necho hello\r\n", 0o700, 127, "program exists, but not its interpreter: check "),
    ],
)
def test_what_cannot_be_executed_has_the_status_of_shells(
    cli: Cli, program: str, text: str | None, *, mode: int, status: int, why: str
) -> None:
    """It is told why, and the lock is free."""
    if text is not None:
        (cli.home / "program").write_text(text, newline="")
        (cli.home / "program").chmod(mode)

    done = cli.run("run", "a", "--", program)

    assert done.returncode == status
    assert done.stderr.startswith(f"lockkit: cannot execute {program}: ")
    assert why in done.stderr
    assert cli.holders("a") == []


def test_unavailable_backend_is_69(cli: Cli) -> None:
    """With a timeout that is over, and with a try."""
    (cli.home / "locks.acquire").touch()

    for options in (["--timeout", "0.2"], ["--on-busy=skip"]):
        done = cli.run("run", "a", "--url", f"faulty://{cli.home}/locks", *options, "--", "touch", "ran")

        assert done.returncode == 69, done.stderr
        assert "no answer to acquire" in done.stderr
        assert not (cli.home / "ran").exists()


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--on-busy=fail"], 75),
        (["--timeout", "0.2"], 75),
        (["--on-busy=fail", "--timeout=0.1"], 75),
        (["--on-busy=skip"], 0),
        (["--on-busy=skip", "--quiet"], 0),
    ],
)
def test_busy_has_its_status_and_says_who_holds_the_lock(cli: Cli, options: list[str], status: int) -> None:
    """At once with fail and skip, after the timeout with wait. With --quiet nothing, so that cron sends no mail."""
    holder = hold(cli)
    pid = cli.holders("a")[0].metadata["pid"]

    done = cli.run("run", "a", *options, "--", "touch", "ran")

    assert (done.returncode, done.stdout) == (status, "")
    held = rf"lockkit: lock 'a' is busy \(held by \S+ {pid} since 20\d\d-\S+ \S+\): the command did not run\n"
    assert re.fullmatch("" if "--quiet" in options else held, done.stderr)
    assert not (cli.home / "ran").exists()
    assert holder.poll() is None


def test_wrong_grace_is_told_though_the_lock_is_busy(cli: Cli) -> None:
    """With --on-busy=skip it might be told in a month, when the lock happens to be free."""
    holder = hold(cli)

    for ttl in (["--ttl", "10"], []):
        done = cli.run("run", "a", *ttl, "--signal-grace", "16", "--on-busy=skip", "--", "true")

        assert done.returncode == 2
        assert "half of the ttl" in done.stderr
    assert holder.poll() is None


def test_command_knows_its_lease(cli: Cli) -> None:
    """Name, token, owner and deadline stand in the environment; token, owner and metadata are those of `holders`."""
    name = "größe /{}% 日本"
    script = 'printf "%s\\n" "$LOCKKIT_NAME" $LOCKKIT_TOKEN $LOCKKIT_OWNER $LOCKKIT_DEADLINE; cat'
    began = monotonic()
    running = cli.start("run", name, "--ttl", "20", "--metadata", "nightly", "--", "sh", "-c", script, stdin=-1)
    assert running.stdout is not None
    lines = [running.stdout.readline().rstrip("\n") for _ in range(4)]

    (holder,) = cli.holders(name)
    running.communicate(timeout=60)

    assert lines[:3] == [name, str(holder.token), holder.owner]
    assert began + 18 < float(lines[3]) < monotonic() + 20
    assert holder.metadata["text"] == "nightly"
    assert holder.metadata["pid"] == running.pid


def test_command_inherits_nothing_of_lockkit(cli: Cli) -> None:
    """Its own three files are open, and one that its children pass on; no variable is added but lockkit's four."""
    script = "import os, json; print(json.dumps([sorted(os.listdir('/dev/fd')), sorted(os.environ)]))"
    done = cli.run("run", "a", "--", "python3", "-c", script)
    plain = cli.start_program("python3", "-c", script).communicate(timeout=60)[0]

    added = {"LOCKKIT_NAME", "LOCKKIT_TOKEN", "LOCKKIT_OWNER", "LOCKKIT_DEADLINE"}
    fds, names = json.loads(done.stdout)
    plain_fds, plain_names = json.loads(plain)
    assert fds == sorted([*plain_fds, "100"])
    assert set(names) == set(plain_names) | added


def test_min_hold_keeps_out_a_host_whose_clock_is_late(cli: Cli) -> None:
    """A short job does not run again on the next host; the wait ends with a signal."""
    first = cli.start("run", "a", "--min-hold", "60", "--", "sh", "-c", "echo ran; exit 3")
    assert first.stdout is not None
    assert first.stdout.readline() == "ran\n"

    second = cli.run("run", "a", "--on-busy=skip", "--", "echo", "ran")
    first.terminate()

    assert (second.returncode, second.stdout) == (0, "")
    assert first.wait(timeout=60) == 3
    assert cli.holders("a") == []


def test_path_without_home_and_locale(cli: Cli) -> None:
    """Cron's poor environment is enough."""
    cli.env = {name: cli.env[name] for name in ("PATH", "PYTHONPATH")} | {"LOCKKIT_URL": f"file:{cli.home}/locks"}
    cli.env["LC_ALL"] = "C"

    done = cli.run("run", "größe", "--", "printenv", "LOCKKIT_NAME")

    assert done.stdout == "größe\n", done.stderr
    assert (cli.home / "locks").is_dir()


@pytest.mark.parametrize(
    "words",
    [("run", "a", "--on-busy=skip", "--", "true"), ("elect", "a", "--", "true"), ("hold", "a")],
    ids=lambda words: words[0],
)
def test_locks_of_this_machine_are_not_used_in_silence(cli: Cli, words: tuple[str, ...]) -> None:
    """Once, also for cron: where nothing names a backend, other machines are not locked out."""
    told = (
        f"lockkit: nothing names a backend, so locks are files in {cli.home}/state/locks, which lock out this user's "
        "processes on this machine only. To choose one, give a URL, set LOCKKIT_URL or write a lockkit.toml\n"
    )
    assert "this machine" not in cli.run(*words).stderr
    del cli.env["LOCKKIT_URL"]

    done = cli.run(*words)

    assert done.stderr.startswith(told)
    assert cli.run("-v", *words).stderr.count("this machine only") == 1


@pytest.mark.parametrize("command", ["run", "elect"])
def test_configuration_without_default_is_78(cli: Cli, command: str) -> None:
    """Nothing runs, and nothing falls back on files."""
    del cli.env["LOCKKIT_URL"]
    (cli.home / "lockkit.toml").write_text('[profiles.prod]\nurl = "redis://h"')

    done = cli.run(command, "a", "--", "echo", "ran")

    assert (done.returncode, done.stdout) == (78, "")
    assert "choose one with LOCKKIT_ENV or --profile, or add [profiles.default]" in done.stderr


def test_verbose_run_names_its_backend(cli: Cli) -> None:
    """Who forgot the URL sees that other machines are not locked out."""
    done = cli.run("-v", "run", "a", "--", "true")

    assert done.returncode == 0
    assert re.fullmatch(r"lockkit: lock 'a' on file:\S*: locks out processes of this machine only\n", done.stderr)


def test_verbose_error_names_its_page(cli: Cli) -> None:
    """What leads to the error, and what to do."""
    url = "redis://127.0.0.1:1"
    quiet, verbose = cli.run("holders", "a", "--url", url), cli.run("-v", "holders", "a", "--url", url)

    assert (quiet.returncode, verbose.returncode) == (69, 69)
    assert "https://" not in quiet.stderr
    assert verbose.stderr.splitlines()[-1].endswith("/reference/errors/#backendunavailable")


ZOMBIES = """
(sleep 0.2 &)
(sleep 0.4 &)
sleep 1
for _ in $(seq 100); do
    left=$(cat /proc/[0-9]*/stat 2>/dev/null | grep -c ' Z ')
    test "$left" = 0 && break
    sleep 0.2
done
echo "$left"
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare (Linux)")
def test_process_1_reaps_orphans(cli: Cli) -> None:
    """In a container without an init; the command's own status counts."""
    alone = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
    lockkit = (sys.executable, "-m", "lockkit.cli", "run", "a", "--", "sh", "-c", f"{ZOMBIES}exit 7")
    running = cli.start_program(*alone, *lockkit)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (7, "0\n"), err
