"""``lockkit run --once-per`` and ``--once``: one run that succeeds for each slot or key."""

from __future__ import annotations

import json
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import lockkit
from lockkit_tools.servers.redis import RedisServer
from tests.cli.support import Cli
from tests.tries import until

DONE = r"was done already since 20\d\d-\S+ \S+: the command did not run\n"

RAN = ("--", "sh", "-c", 'echo "ran $LOCKKIT_ONCE"')


def test_second_run_of_a_slot_does_nothing(cli: Cli) -> None:
    """It says since when; with --quiet nothing, as cron mails what is printed. The key names lock and slot."""
    first = cli.run("run", "backup", "--once-per", "2w", *RAN)
    second = cli.run("run", "backup", "--once-per", "2w", "--quiet", *RAN)
    third = cli.run("run", "backup", "--once-per", "2w", *RAN)

    assert first.returncode == 0
    assert first.stdout.startswith("ran backup@2")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert (third.returncode, third.stdout) == (0, "")
    assert re.fullmatch(rf"lockkit: 'backup@\S+' {DONE}", third.stderr)
    assert cli.holders("backup") == []


def test_key_is_done_once(cli: Cli) -> None:
    """Each key for itself; --on-done=fail says so."""
    assert cli.run("run", "migrate", "--once", "v42", *RAN).stdout == "ran migrate@v42\n"
    assert cli.run("run", "migrate", "--once", "v43", *RAN).stdout == "ran migrate@v43\n"

    done = cli.run("run", "migrate", "--once", "v42", "--on-done", "fail", *RAN)

    assert (done.returncode, done.stdout) == (76, "")
    assert re.fullmatch(rf"lockkit: 'migrate@v42' {DONE}", done.stderr)


def test_name_and_key_cannot_imitate_others(cli: Cli) -> None:
    """Each pair of them is a record of its own."""
    pairs = [("a@b", "c"), ("a", "b@c"), ("a%40b", "c")]

    done = [cli.run("run", name, "--once", key, "--", "sh", "-c", "echo $LOCKKIT_ONCE") for name, key in pairs]

    assert [one.stdout for one in done] == ["a%40b@c\n", "a@b@c\n", "a%2540b@c\n"]


def test_only_status_0_counts(cli: Cli) -> None:
    """So an hourly cron with --once-per 1d catches up on what failed."""
    for script, status in (("exit 3", 3), ("kill -9 $$", 137), ("exit 0", 0)):
        assert cli.run("run", "a", "--once", "k", "--", "sh", "-c", script).returncode == status

    assert cli.run("run", "a", "--once", "k", *RAN).stdout == ""
    assert cli.run("run", "a", "--once", "missing", "--", "no-such-command").returncode == 127
    assert cli.run("run", "a", "--once", "missing", *RAN).stdout == "ran a@missing\n"


def test_attempts_are_counted_before_the_start(cli: Cli) -> None:
    """After the last one nothing is started; a command that is not found does not count."""
    for _ in range(2):
        assert cli.run("run", "a", "--once", "k", "--attempts", "2", "--", "sh", "-c", "exit 3").returncode == 3

    used_up = cli.run("run", "a", "--once", "k", "--attempts", "2", *RAN)

    assert (used_up.returncode, used_up.stdout) == (76, "")
    assert "no attempt at 'a@k' is left (--attempts 2)" in used_up.stderr
    assert cli.run("run", "a", "--once", "k", "--attempts", "3", "--", "./no-such-program").returncode == 127
    assert cli.run("run", "a", "--once", "k", "--attempts", "3", *RAN).stdout == "ran a@k\n"


def test_killed_run_is_tried_again(cli: Cli) -> None:
    """After lockkit was killed with its command, another run does it after the ttl."""
    first = cli.start("run", "a", "--once", "k", "--ttl", "1", "--", "sh", "-c", "echo began; sleep 60")
    assert first.stdout is not None
    assert first.stdout.readline() == "began\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    until(lambda: cli.holders("a") == [])

    assert cli.run("run", "a", "--once", "k", "--ttl", "1", *RAN).stdout == "ran a@k\n"


@pytest.mark.parametrize(
    ("options", "status"),
    [(["--on-busy=skip"], 0), (["--on-busy=fail"], 75), (["--on-busy=fail", "--timeout", "0.3"], 75)],
)
def test_wait_for_the_record_is_limited_too(
    cli: Cli, url: str, client: lockkit.Client, options: list[str], status: int
) -> None:
    """As that for the lock: the record of a run that was killed counts until its ttl ends."""
    with client.once("a@k", keep=60) as attempt:
        done = cli.run("run", "a", "--url", url, "--once", "k", *options, *RAN)
        assert cli.holders("a", url) == []
        broken = cli.run("break", "a@k", "--url", url, "--yes")
        attempt.done(None)

    assert (done.returncode, done.stdout) == (status, "")
    assert "an earlier run of 'a@k' has not ended, or was killed less than its ttl ago: the command did" in done.stderr
    assert broken.stderr.endswith("that ends when its process does, after a kill when its ttl ends\n")


def test_runs_at_the_same_time_complete_once(cli: Cli) -> None:
    """The waiter finds it done."""
    counter = cli.home / "runs"
    with ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(cli.run, "run", "a", "--once", "k", "--", "sh", "-c", f"echo x >> {counter}") for _ in range(4)
        ]

    assert [run.result().returncode for run in runs] == [0] * 4
    assert counter.read_text() == "x\n"


def test_command_has_its_status_though_its_success_cannot_be_noted(cli: Cli) -> None:
    """As on a server that is full: 69 is for commands that did not run."""
    url = f"faulty:{cli.home}/locks"
    done = cli.run("run", "a", "--url", url, "--ttl", "4", "--once", "k", "--", "touch", f"{cli.home}/locks.note")

    assert done.returncode == 0
    assert "lockkit: the command ended with status 0, but its success was not recorded: could not write" in done.stderr
    assert cli.holders("a", f"file:{cli.home}/locks") == []


def test_loss_of_everything_names_the_commands_own_status(cli: Cli, url: str) -> None:
    """Not that of lockkit, which could not note its success either."""
    script = f"""import lockkit
from lockkit.backend import apart
from lockkit.runtime import drive
with lockkit.connect({url!r}) as client:
    for name in ("a", apart("once", "a@k")):
        assert drive(client._engine._backend.break_lock(name))"""
    done = cli.run("run", "a", "--url", url, "--once", "k", "--", sys.executable, "-c", script)

    assert done.returncode == 79
    assert "the command had already ended, with status 0\n" in done.stderr


def test_slot_goes_by_the_servers_clock(cli: Cli) -> None:
    """Redis tells its time; the same record is seen through another connection."""
    with RedisServer() as server:
        arguments = ("run", "a", "--url", server.url, "--once-per", "2w", "--tz", "Europe/Berlin")

        assert cli.run(*arguments, *RAN).stdout.startswith("ran a@2")
        assert cli.run(*arguments, *RAN).stdout == ""


# -- lockkit once ------------------------------------------------------------------------------------------------------


def test_key_is_shown_and_forgotten(cli: Cli) -> None:
    """Not done, done since when and until when, forgotten; then it runs again."""
    assert cli.run("once", "migrate@v42").returncode == 1
    assert cli.run("once", "migrate@v42", "--forget").returncode == 1
    assert cli.run("run", "migrate", "--once", "v42", *RAN).stdout == "ran migrate@v42\n"

    shown = cli.run("once", "migrate@v42")
    found = json.loads(cli.run("once", "migrate@v42", "--json").stdout)
    forgotten = cli.run("once", "migrate@v42", "--forget")

    assert shown.returncode == 0
    assert re.match(r"'migrate@v42' is done since 20\d\d-.* until 20\d\d-.* at file:.*; result: null\n", shown.stdout)
    assert (found["state"], found["result"], found["error"], found["forgotten"]) == ("done", None, None, False)
    assert found["since"] < found["until"]
    assert (forgotten.returncode, forgotten.stdout[:6]) == (0, "forgot")
    assert cli.run("once", "migrate@v42").stdout.startswith("'migrate@v42' is not done")
    assert cli.run("run", "migrate", "--once", "v42", *RAN).stdout == "ran migrate@v42\n"


def test_run_under_way_is_shown_and_left_alone(cli: Cli) -> None:
    """With its process, by ``once``, ``list`` and ``holders``."""
    running = cli.start("run", "a", "--once", "k", "--", "sh", "-c", "echo began; cat", stdin=-1)
    assert running.stdout is not None
    assert running.stdout.readline() == "began\n"
    shown, kept = cli.run("once", "a@k"), cli.run("once", "a@k", "--forget", "--json")
    listed, holders = cli.run("list", "a@"), cli.run("holders", "a@k")
    running.communicate(timeout=60)

    assert (running.returncode, shown.returncode, kept.returncode) == (0, 75, 75)
    assert [json.loads(kept.stdout)[key] for key in ("state", "forgotten")] == ["running", False]
    assert re.search(r"a@k .* once ", listed.stdout)
    assert all(re.search(r"kind +. once ", table.stdout) for table in (shown, holders))
    assert json.loads(cli.run("once", "a@k", "--json").stdout)["state"] == "done"
