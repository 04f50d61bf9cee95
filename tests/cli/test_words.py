"""What the commands say: their own options and commands, where the library names parameters and methods; and times."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lockkit
from lockkit import validation
from lockkit.cli.output import in_options
from tests.cli.support import run_here

PYTHON = re.compile(r"\btimeout=|holders\(|client\.|capabilities\.|connect\(|\bprofile= ")


def said(*args: str) -> str:
    """Run ``lockkit``, which fails; gives its one line."""
    done = run_here(*args)
    assert done.exit_code == 78, done.output
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["list", "--profile", "redis://h"], "this looks like a URL: give it as --url"),
        (["ping", "--profile", "redis://h"], "this looks like a URL: give it as --url, or as the argument URL"),
        (["list", "--profile", "nope"], "--profile asks for the profile 'nope'"),
        (["run", "a", "--url", "redis://127.0.0.1:1", "--ttl", "1ms", "--", "true"],
         "--ttl must be 0.01 or more seconds on this backend (see lockkit backends), not 0.001"),
        (["run", "a", "--metadata", "x" * 5000, "--", "true"], "--metadata must have at most 4096 bytes"),
        (["hold", "a", "--ttl", "0"], "--ttl must be more than 0 and less than 1e+09 seconds, not 0.0\n"),
        (["elect", "a", "--ttl", "2", "--grace", "1", "--", "true"], "--grace of election 'a' must be"),
        (["doctor", "--ttl", "0"], "--ttl must be"),
        (["limit", "a", "5000"], "from 0 to 1000, or none, not 5000"),
        (["list", "--url", "sqlite:////nowhere/x?mode=row"], "mode"),
        (["list", "--url", "postgresql://127.0.0.1:1/x?mode=advisory"], "Use lockkit holders NAME, or use mode=table"),
        (["wait", ""], "lock name must not be empty"),
        (["run", "a", "--ttl", "-1", "--", "true"], "--ttl must be more than 0"),
        (["run", "a", "--timeout", "-1", "--", "true"], "--timeout must be 0 or more seconds, not -1.0\n"),
        (["hold", "a", "--ttl", "-1"], "--ttl must be more than 0"),
        (["hold", "a", "--timeout", "nan"], "--timeout must be a finite number of seconds, not nan\n"),
        (["elect", "a", "--ttl", "-1", "--", "true"], "--ttl must be more than 0"),
        (["elect", "a", "--grace", "-1", "--", "true"], "--grace must be 0 or more seconds, not -1.0\n"),
        (["wait", "a", "--timeout", "-1"], "--timeout must be 0 or more seconds, not -1.0\n"),
        (["doctor", "--ttl", "-1"], "--ttl must be more than 0"),
    ],
)  # fmt: skip
def test_errors_are_in_the_words_of_the_command_line(
    args: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in those of Python."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKKIT_URL", f"file:{tmp_path}/locks")

    line = said(*args)

    assert words in line
    assert PYTHON.search(line) is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["demo", "--processes", "abc"], "'--processes': must be a whole number, not 'abc'\n"),
        (["break", "a", "--permit", "1.5"], "'--permit': must be a whole number, not '1.5'\n"),
        (["break", "a", "--permit", "-1"], "'--permit': must be 0 or more, not -1\n"),
        (["run", "a", "--once", "k", "--attempts", "0", "--", "true"], "must be 1 or more, not 0\n"),
        (["demo", "--seats", "0"], "must be 1 or more, not 0\n"),
        (["demo", "--seats", "100001"], "must be 100000 or less, not 100001\n"),
        (["bench", "--rounds", "0"], "must be 1 or more, not 0\n"),
        (["limit", "maps", "-1"], "must be 0 or more permits, or none; not -1\n"),
        (["run", "--", "./job"], "is NAME missing? lockkit run NAME -- ./job\n"),
        (["elect", "--url", "file:", "--", "backup"], "is NAME missing? lockkit elect NAME -- backup\n"),
        (["run", "--", "--on-busy=skip", "a", "echo"], "--on-busy=skip is an option of lockkit run: put it before --"),
        (["run", "a", "--", "--ttl", "5", "echo"], "--ttl is an option of lockkit run: put it before --"),
        (["elect", "--", "a", "--ttl", "5", "echo"], "--ttl is an option of lockkit elect: put it before --"),
        (["unlock", "a"], "No such command 'unlock'. Did you mean 'break'?\n"),
        (["lock", "a"], "No such command 'lock'. Did you mean 'run'?\n"),
        (["status"], "No such command 'status'. Did you mean 'list' or 'holders'?\n"),
        (["help", "run"], "No such command 'help'. Did you mean '--help'?\n"),
    ],
)  # fmt: skip
def test_wrong_form_says_what_is_right(args: list[str], words: str) -> None:
    """With status 2, and the usage of the command."""
    done = run_here(*args)

    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.startswith("Usage: lockkit ")


def test_behind_the_dashes_all_but_options_are_arguments(tmp_path: Path) -> None:
    """A name may look like a number or an option, as long as it is none of the command's; so may COMMAND's words."""
    url = f"file:{tmp_path}/locks"

    assert run_here("limit", "--url", url, "--", "-1", "5").exit_code == 0
    assert run_here("run", "--url", url, "--", "--nightly", "true").exit_code == 0
    assert run_here("run", "--url", url, "--", "a", "true", "--ttl").exit_code == 0
    assert run_here("run", "--url", url, "a", "--", "true", "--ttl").exit_code == 0


def test_busy_lock_names_options_and_commands(tmp_path: Path) -> None:
    """The error that users see most."""
    client, other = lockkit.connect(f"file:{tmp_path}"), lockkit.connect(f"file:{tmp_path}")
    with client, other, client.lock("a"), pytest.raises(lockkit.LockTimeout) as caught:
        other.lock("a").acquire(0)

    words = in_options(str(caught.value))

    assert words.endswith("Wait longer with --timeout, or see who holds it with lockkit holders.")
    assert PYTHON.search(words) is None


def test_urls_and_names_stay_as_they_are() -> None:
    """An option of a URL is no option of the command."""
    message = "lock 'a' at redis://h?socket_timeout=3&timeout=5 is busy; mode=row"

    assert in_options(message) == message
    assert in_options("option timeout='x' for redis://h") == "option timeout='x' for redis://h"
    assert in_options("option timeout=-1 for redis://h") == "option timeout=-1 for redis://h"
    assert in_options("try timeout=0") == "try --timeout 0"
    assert in_options("see client.holders(name)") == "see lockkit holders NAME"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30.0), ("0.5", 0.5), ("-1", -1.0), ("500ms", 0.5), ("30s", 30.0), ("5m", 300.0), ("1.5h", 5400.0),
     ("1d", 86_400.0), ("1h30m", 5400.0), ("0s", 0.0)],
)  # fmt: skip
def test_times(text: str, seconds: float) -> None:
    """As people write them."""
    assert validation.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "1 h", "1w", "h1", "1h 30m", "-5m", "1e3s", "nan", "inf", "1_0", "٣s"])
def test_what_is_no_time(text: str) -> None:
    """Says what is."""
    with pytest.raises(ValueError, match="500ms, 30s, 5m, 1h or 1d"):
        validation.parse_duration(text)


def test_commands_take_times(tmp_path: Path) -> None:
    """Wherever an option is one."""
    url = f"file:{tmp_path}/locks"

    assert run_here("wait", "a", "--url", url, "--timeout", "5m").exit_code == 0
    assert run_here("wait", "a", "--url", url, "--timeout", "5 minutes").exit_code == 2
    assert run_here("doctor", "memory:", "--ttl", "1m").exit_code == 0
    assert run_here("doctor", "memory:", "--ttl", "1ms").exit_code == 1
    assert run_here("bench", "memory:", "--limit", "999ms").exit_code == 2
    assert run_here("bench", "memory:", "--limit", "soon").exit_code == 2
