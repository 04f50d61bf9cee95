"""What the commands say: their own options and commands, where the library names parameters and methods; and times."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import lockkit
from lockkit import validation
from lockkit.cli.output import in_options
from tests.cli.support import run_here

PYTHON = re.compile(r"\btimeout=|holders\(|client\.|capabilities\.|connect\(|\bprofile= ")


REFUSED = r"""
78 list --profile redis://h  # this looks like a URL: give it as --url
78 ping --profile redis://h  # this looks like a URL: give it as --url, or as the argument URL
78 list --profile nope  # --profile asks for the profile 'nope'
78 run a --url redis://127.0.0.1:1 --ttl 1ms -- touch ran  # on this backend (see lockkit backends), not 0.001
78 hold a --ttl 0  # --ttl must be more than 0 and less than 1e+09 seconds, not 0.0\n
78 hold a --ttl -1  # --ttl must be more than 0
78 hold a --timeout nan  # --timeout must be a finite number of seconds, not nan\n
78 hold a --url memory://  # only within one process
78 elect a --ttl 2 --grace 1 -- touch ran  # --grace of election 'a' must be
78 elect a --grace -1 -- touch ran  # --grace must be 0 or more seconds, not -1.0\n
78 elect a --ttl -1 -- touch ran  # --ttl must be more than 0
78 elect a --url memory:// -- touch ran  # only within one process
78 doctor --ttl 0  # --ttl must be
78 doctor --ttl -1  # --ttl must be more than 0
69 doctor redis://user:hunter2@127.0.0.1:1/0  # 127.0.0.1:1
78 doctor redsi://user:hunter2@host/0  # did you mean 'redis'
78 doctor redis://user:hun/ter2@host  # URL
78 doctor redis://:hunter2@host/0?prefiks=x  # did you mean 'prefix'
78 doctor --profile none  # --profile asks for the profile 'none'
2 verify memory:// --face=green  # 'green' is not one of
2 doctor memory: --fail-on=info  # 'info' is not one of
2 doctor memory: --ttl long  # not 'long'
2 doctor memory: file:  # unexpected extra argument
78 limit a 5000  # from 0 to 1000, or none, not 5000
78 list --url sqlite:////nowhere/x?mode=row  # mode
78 list --url postgresql://127.0.0.1:1/x?mode=advisory  # Use lockkit holders NAME, or use mode=table
78 wait ''  # lock name must not be empty
78 wait a --timeout -1  # --timeout must be 0 or more seconds, not -1.0\n
78 list --url memory://  # only within one process
78 wait a --url memory://  # only within one process
78 holders a --url memory://  # only within one process
78 holders a --url redis://user:hun/ter2@host  # URL
78 demo --url file:/x?password=hunter2  # unknown option 'password'
78 break a --yes --url redsi://user:hunter2@host/0  # did you mean 'redis'
78 break a --url memory://  # only within one process
69 ping redis://127.0.0.1:1  # 127.0.0.1:1
78 ping redsi://h  # did you mean 'redis'
78 ping file:/x?q=1  # unknown option 'q'
78 run a --ttl -1 -- touch ran  # --ttl must be more than 0
78 run a --timeout -1 -- touch ran  # --timeout must be 0 or more seconds, not -1.0\n
78 run '' -- touch ran  # must not be empty
78 run a --url nonsense -- touch ran  # url
78 run a --url redsi://user:hunter2@host/0 -- touch ran  # did you mean 'redis'
78 run a --url fiel: -- touch ran  # did you mean 'file'
78 run a --url file:?tll=3 -- touch ran  # did you mean 'ttl'
78 run a --url memory:// -- touch ran  # only within one process
78 run a --once-per 36h -- touch ran  # at most a day or whole days
78 run a --once-per 1d --tz Nowhere -- touch ran  # must be a time zone such as Europe/Berlin
78 run a --once '' -- touch ran  # --once must name
78 run a --once k --url redlock://localhost:1,localhost:2,localhost:3 -- touch ran  # notes on locks
2 run a --once-per 1d --once k -- touch ran  # not both
2 run a --tz UTC -- touch ran  # --tz needs
2 run a --attempts 2 -- touch ran  # need --once-per or --once
2 run a --on-done fail -- touch ran  # need --once-per or --once
2 run a --once k --attempts 0 -- touch ran  # must be 1 or more, not 0\n
2 run a --tll 3 -- touch ran  # --tll
2 run a --on-busy perhaps -- touch ran  # 'perhaps' is not one of
2 run a --signal-grace nan -- touch ran  # 0 or more seconds, not nan
2 run a --kill-after -1 -- touch ran  # 0 or more seconds, not -1
2 run a --ttl 10 --signal-grace 6 -- touch ran  # half of the ttl
2 run  # NAME
2 run a  # COMMAND
2 run -- ./job  # is NAME missing? lockkit run NAME -- ./job\n
2 elect --url file: -- backup  # is NAME missing? lockkit elect NAME -- backup\n
2 run -- touch ran  # is NAME missing? touch is a program, and would be the name: lockkit run NAME -- touch …\n
2 elect -- touch ran  # is NAME missing? touch is a program, and would be the name: lockkit elect NAME -- touch …\n
2 run a touch --ttl 30 ran  # COMMAND is followed by --ttl. If it is an option of COMMAND, put -- before COMMAND
2 run a --ttl 9 touch --kill-after=30  # COMMAND is followed by --kill-after=30. If
2 run a --ttl=9 touch --help  # COMMAND is followed by --help. If
2 run a touch - -- ran  # COMMAND is followed by --. If
2 elect a touch --url x -- ran  # COMMAND is followed by --url. If
2 run -- --on-busy=skip a echo  # --on-busy=skip is an option of lockkit run: put it before --
2 run a -- --ttl 5 echo  # --ttl is an option of lockkit run: put it before --
2 elect -- a --ttl 5 echo  # --ttl is an option of lockkit elect: put it before --
2 demo --processes abc  # '--processes': must be a whole number, not 'abc'\n
2 demo --seats 0  # must be 1 or more, not 0\n
2 demo --seats 100001  # must be 100000 or less, not 100001\n
2 break a --permit 1.5  # '--permit': must be a whole number, not '1.5'\n
2 break a --permit -1  # '--permit': must be 0 or more, not -1\n
2 bench --rounds 0  # must be 1 or more, not 0\n
2 limit api x  # must be 0 or more permits, or none; not x\n
2 limit api 1.5  # must be 0 or more permits, or none; not 1.5\n
78 limit api 1 --url redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3  # native permits (see lockkit backends)
78 note a --url redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3  # notes on locks
2 break a --permit 1000  # must be 999 or less, not 1000\n
69 wait a --timeout 0 --url redis://127.0.0.1:1  # 127.0.0.1:1
78 migrate memory:  # has no tables
69 migrate postgresql://u:hunter2@127.0.0.1:9/x  # cannot be reached
78 migrate sqlite:///x.db?mode=row  # mode=table
2 limit maps -1  # must be 0 or more permits, or none; not -1\n
69 watch redis://127.0.0.1:1  # 127.0.0.1:1
78 watch memory:  # only within one process
78 watch sqlite:////nowhere/x?mode=row  # mode
78 watch postgresql://127.0.0.1:1/x?mode=advisory  # give the names of the locks
78 watch file:/x?nope=1  # nope
2 watch file:/x --interval 0  # 0.1 or more seconds
2 watch file:/x --interval inf  # 0.1 or more seconds
2 list redis://user:hunter2@h  # 'PREFIX': this looks like a URL: give it with --url\n
2 holders --json redis://user:hun/ter2@h  # 'NAME': this looks like a URL: give it with --url\n
2 run redis://:hunter2@h -- touch ran  # this looks like a URL
2 run a --once redis://:hunter2@h -- touch ran  # this looks like a URL
2 elect redis://hunter2@h -- touch ran  # this looks like a URL
2 once redis://:hunter2@h  # this looks like a URL
2 limit redis://:hunter2@h  # this looks like a URL
2 unlock a  # No such command 'unlock'. Did you mean 'break'?\n
2 lock a  # No such command 'lock'. Did you mean 'run'?\n
2 brake a  # No such command 'brake'. Did you mean 'break'?\n
2 status  # No such command 'status'. Did you mean 'list' or 'holders'?\n
2 help run  # No such command 'help'. Did you mean '--help'?\n
"""
"""Status, arguments, and a part of what is said."""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_what_cannot_be_done_is_told_with_its_status(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, or below the usage; in the words of the command line, without a password, and nothing has run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKKIT_URL", f"file:{tmp_path}/locks")
    given, _, words = row.partition("  # ")
    status, *args = shlex.split(given)

    done = run_here(*args)

    said = " ".join(done.stderr.split()) + "\n"
    assert (done.exit_code, done.stdout) == (int(status), "")
    assert words.replace("\\n", "\n") in said
    assert done.stderr.startswith("Usage: lockkit ") if status == "2" else done.stderr.count("\n") == 1
    assert PYTHON.search(said) is None
    assert "hun" not in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("option", "words"), [("--metadata", "at most 4096 bytes"), ("--once", "255 UTF-8 bytes")])
def test_text_that_is_too_long_is_told(option: str, words: str, tmp_path: Path) -> None:
    """Metadata, and a key."""
    done = run_here("run", "a", "--url", f"file:{tmp_path}/locks", option, "x" * 5000, "--", "true")

    assert done.exit_code == 78
    assert words in done.stderr


def test_name_that_looks_like_the_url_of_a_page_is_no_url(tmp_path: Path) -> None:
    """``lockkit run NAME --once-per 1d`` appends the slot."""
    done = run_here("once", "https://example.com:8443/job@2026-01-01", "--url", f"file:{tmp_path}")

    assert (done.exit_code, done.stderr) == (1, "")


def test_behind_the_dashes_all_but_options_are_arguments(tmp_path: Path) -> None:
    """A name may look like a number or an option, as long as it is none of the command's; so may COMMAND's words."""
    url = f"file:{tmp_path}/locks"

    assert run_here("limit", "--url", url, "--", "-1", "5").exit_code == 0
    assert run_here("run", "--url", url, "--", "--nightly", "true").exit_code == 0
    assert run_here("run", "--url", url, "--", "seat:12A", "true").exit_code == 0
    assert run_here("run", "--url", url, "--", "https://example.com/@user", "true").exit_code == 0
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
