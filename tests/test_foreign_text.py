"""Text of other clients and of servers in messages, logs and on terminals: on one line, harmless, and not too long."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lockkit
from lockkit.backend import Holder, Unknown
from lockkit.backends.memory.backend import MemoryBackend
from lockkit.errors import BackendUnavailable, LockHolder, LockTimeout, StoredError
from lockkit.validation import plain
from tests.engine.scripted import MovableClock, ScriptedBackend, fail, pass_time, scripted
from tests.tries import until

FORGED = [
    "\x1b[2J\r\nERROR root: forged",
    "user\u202egnp.exe\u2066",
    "nul\0 and bell\x07 and \x9b31m",
    "\u2028line\u2029paragraph\x85next",
    "x" * 1_000_000,
    "\n" * 1_000_000,
]


class Odd(Exception):
    """An error of the application."""


def harmless(text: str) -> bool:
    """What may go into a log or to a terminal."""
    return text.isprintable() and len(text) < 50_000


@pytest.mark.parametrize("text", FORGED, ids=["escape", "bidi", "controls", "separators", "long", "long-lines"])
class TestEachPlace:
    """Where foreign text becomes a message."""

    def test_function(self, text: str) -> None:
        """Other characters stay as they are."""
        assert harmless(plain(text))
        assert len(plain(text, 10)) <= 10 * len("\\U0010ffff")
        assert plain(f"zażółć 錠 🔒 {text[:0]}") == "zażółć 錠 🔒 "

    def test_errors(self, text: str) -> None:
        """Whoever raises them."""
        for kind in (BackendUnavailable, LockTimeout, StoredError):
            assert harmless(str(kind(f"the server said {text}")))

    def test_holder(self, text: str) -> None:
        """Each of its facts."""
        holders = (LockHolder(text), LockHolder("o", host=text), LockHolder("o", pid=1, text=text))
        assert all(harmless(str(holder)) and len(str(holder)) < 1500 for holder in holders)


# -- where it is shown -----------------------------------------------------------------------------------------------

ALL = "".join(FORGED)
"""What is kept of it has all that is short."""


def test_warning_of_a_long_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The log names who holds the lock."""
    client, _ = scripted(space="foreign-holder")
    other, _ = scripted(space="foreign-holder")

    async def holders(self: MemoryBackend, name: str) -> list[Holder]:
        del self, name
        return [Holder(ALL, 1, 5.0, {"host": ALL, ALL: ALL})]

    monkeypatch.setattr(ScriptedBackend, "holders", holders)
    with caplog.at_level(logging.DEBUG, "lockkit"):
        lease = other.lock("x", ttl=60).acquire()
        with pytest.raises(LockTimeout):
            client.lock("x", ttl=0.1).acquire(timeout=0.4)
        until(lambda: any("longer than its ttl" in line for line in tuple(caplog.messages)))
        lease.release()
    assert all(harmless(line) for line in caplog.messages)


def test_driver_error_in_the_log_of_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    """Renewals and acquisitions: error texts come from servers."""
    client, backend = scripted(MovableClock())
    with caplog.at_level(logging.DEBUG, "lockkit"):
        lease = client.lock("x", ttl=60).acquire()
        backend.before["renew"] = fail(RuntimeError(ALL))
        pass_time(client, 25.0)
        until(lambda: any("renewal of lock" in line for line in tuple(caplog.messages)))
        backend.before["try_acquire"] = fail(BackendUnavailable(ALL))
        with pytest.raises(BackendUnavailable) as caught:
            client.lock("y").acquire(timeout=0.05)
        lease.release()
        client.close()
    assert harmless(str(caught.value))
    assert len(caplog.messages) >= 2
    assert all(harmless(line) for line in caplog.messages)


def test_stored_error_of_once() -> None:
    """The attribute has the text as it was stored."""
    with lockkit.connect("memory://stored-text") as client:

        @client.once("key", keep=60, store_errors=(Odd,))
        def work() -> None:
            raise Odd(ALL[:2000])

        with pytest.raises(Odd):
            work()
        with pytest.raises(StoredError) as caught:
            work()
    assert harmless(str(caught.value))
    assert caught.value.text == ALL[:2000]


def test_command_line(tmp_path: Path) -> None:
    """Tables, errors and the lines of the log."""
    from lockkit.cli.app import app  # noqa: PLC0415 - typer is an extra

    url = f"file://{tmp_path}/locks"
    with lockkit.connect(url) as client, client.lock("x", metadata={"text": ALL[:1000], "more": ALL[:50]}):
        for command in (["holders", "x"], ["list"], ["hold", "x", "--timeout", "0.1"], ["watch", "--once"]):
            done = CliRunner().invoke(app, [*command, "--url", url])
            for line in (done.output + getattr(done, "stderr", "")).splitlines():
                assert harmless(line.rstrip("\n")), (command, line)
            assert "\x1b[2J" not in done.output
            assert "\nERROR root" not in done.output


def test_log_lines_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever logs them."""
    from lockkit.cli.output import reporting, say  # noqa: PLC0415 - typer is an extra

    with reporting():
        logging.getLogger("lockkit").warning("the server said %s", ALL)
    say(ALL)
    lines = capsys.readouterr().err.split("\n")
    assert all(map(harmless, lines))
    # Of these two alone: what an earlier test has left may be logged meanwhile.
    assert len([line for line in lines if "forged" in line]) == 2


def test_unknown_answer_keeps_its_error() -> None:
    """Only messages are made plain; what a program reads stays as it was."""
    holder: Any = LockHolder("\x1b[2J", metadata={"text": "\n"})
    assert holder.owner == "\x1b[2J"
    assert json.dumps(holder.metadata) == '{"text": "\\n"}'
    assert str(Unknown(ValueError("\n")).error) == "\n"
