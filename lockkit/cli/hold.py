"""
``lockkit hold``: a co-process that holds a lock for a program in any language.

::

    program                         lockkit hold NAME --json
    --------------------------------------------------------------------
    starts it, with pipes     --->  acquires, and renews
    reads a line              <---  {"event": "granted", "token": 17, …}
    works
    closes its stdin          --->  releases
    reads a line              <---  {"event": "released", …}

It ends with the program: when that dies, the kernel closes the pipe. ``PR_SET_PDEATHSIG`` would not do: it tells of the
end of the *thread* that started this process, whose program may live on. But the parent's id is looked at too, since
another child of the program may have inherited the other end of the pipe.
"""

from __future__ import annotations

import json
import os
import select
import threading
from contextlib import suppress
from typing import Final

from lockkit.cli.app import METADATA, NAME, TTL, OnBackend, command, flag, seconds, time
from lockkit.cli.output import connected, say, settings_told
from lockkit.cli.signals import ENDING, LOOK_EVERY, Interrupted, Signals, wait_in_thread
from lockkit.cli.status import SIGNALLED, Status
from lockkit.cli.supervisor import default_grace, margin
from lockkit.errors import LockLost
from lockkit.runtime import monotonic
from lockkit.sync import Lease

_STDIN: Final = 0
_STDOUT: Final = 1

_TEXT: Final = {"granted": "token", "renewed": "remaining", "lost": "reason", "released": "token"}
"""What a line of plain text says after the event."""


@command("hold", "Hold a lock for a program in another language.")
class Hold(OnBackend):
    """
    Hold a lock for the program that starts this process, in any language: lockkit hold NAME --json.

    When the lock is granted, lockkit writes a line to stdout: granted and the fencing token or, with --json, an object
    with event, name, token, owner, ttl, remaining and deadline. It then holds the lock until stdin ends or has a line
    release, on SIGTERM, SIGINT or SIGHUP, or until the program has ended; and writes released. With --stall, a line
    beat on stdin says that the program makes progress.

    If the lease is lost, or is about to end because it cannot be renewed, lockkit writes lost, with a reason. It ends
    when the program has closed stdin or ended, at the latest at the deadline, and does not free the lock before. Treat
    it as lost too if the output ends without released. deadline is the end of the lease if it is never renewed: seconds
    of CLOCK_BOOTTIME (macOS: CLOCK_MONOTONIC).

    Exit status:

    0        the lock was held, and released because stdin ended or said so
    2        wrong usage
    69       the backend is unavailable; at the release: the lock ends by its ttl
    75       the lock was not granted until the timeout, or until stdin ended
    78       wrong configuration: name, ttl, timeout, URL, option, profile, credentials
    79       the lease was lost
    128 + n  signal n came; the lock was released
    """

    name: str = NAME
    ttl: float | None = TTL
    timeout: float | None = time(None, "How long to wait for the lock; 0 tries once. Default: without limit.")
    stall: float | None = time(
        None, "Give up the lock if stdin has no line beat for this long. Default: never.", seconds
    )
    metadata: str | None = METADATA
    renewals: bool = flag("Write a line renewed, with the new deadline, after each renewal.", "--renewals")
    as_json: bool = flag("Write each line as a JSON object.", "--json")

    def run(self) -> int:
        signals = Signals()
        program = _Program(signals, as_json=self.as_json, renewals=self.renewals)
        try:
            with connected(self, settings_told(self)) as client:
                lock = client.lock(
                    self.name,
                    ttl=self.ttl,
                    timeout=self.timeout,
                    metadata=self.metadata,
                    stall=self.stall,
                    on_lost=lambda _, reason: program.lost(reason),
                )
                return program.hold(wait_in_thread(lock.acquire, signals, gave_up=program.gone))
        except Interrupted as interrupt:
            if interrupt.signum:
                return SIGNALLED + interrupt.signum
            say("stdin ended before the lock was granted")
            return Status.BUSY


class _Program:
    """The program that started this process: what it says on stdin, and what it reads from stdout."""

    def __init__(self, signals: Signals, *, as_json: bool, renewals: bool) -> None:
        self._signals = signals
        self._reason = "gone"
        self._reason_known = threading.Event()
        self._as_json = as_json
        self._renewals = renewals
        self._pid = os.getppid()
        self._ended = False
        self._lease: Lease | None = None
        # A daemon: nothing ends a read from a pipe. Not from sys.stdin, whose lock it would keep at the exit.
        threading.Thread(target=self._read, name="lockkit-stdin", daemon=True).start()

    def _read(self) -> None:
        """Read commands up to ``release`` or the end."""
        text = b""
        try:
            while not self._ended and (more := os.read(_STDIN, 4096)):
                *lines, text = (text + more).split(b"\n")
                for line in filter(None, map(bytes.strip, lines)):
                    if line == b"release":
                        self._ended = True
                    elif line != b"beat":
                        say(f"unknown command {line.decode(errors='replace')!r}: give release or beat")
                    elif self._lease is not None:
                        with suppress(LockLost):  # too late
                            self._lease.beat()
        except OSError as error:
            say(f"cannot read stdin: {error}")
        self._ended = True
        self._signals.post()

    def gone(self) -> bool:
        """Tell whether it wants no more of the lock: it said so, closed the pipe, or has ended."""
        return self._ended or os.getppid() != self._pid

    def lost(self, reason: str) -> None:
        """Keep why the lease was lost. From any thread."""
        self._reason = reason
        self._reason_known.set()
        self._signals.post()

    def _reads(self) -> bool:
        """Tell whether a line can be written without waiting for it."""
        poll = select.poll()
        poll.register(_STDOUT, select.POLLOUT)
        return bool(poll.poll(0))

    def _tell(self, event: str, lease: Lease, **more: object) -> None:
        """Write a line at once; if nobody can read it, the program counts as gone."""
        fields: dict[str, object] = {"event": event, "name": lease.name, "token": lease.token, "owner": lease.owner}
        if event != "released":
            remaining = round(lease.remaining(), 3)
            fields |= {"ttl": lease.ttl, "remaining": remaining, "deadline": round(monotonic() + remaining, 3), **more}
        # ASCII only: the name may contain any character.
        line = json.dumps(fields) if self._as_json else f"{event} {fields[_TEXT[event]]}"
        try:
            os.write(_STDOUT, f"{line}\n".encode())  # below PIPE_BUF: written as a whole
        except BrokenPipeError:
            self._ended = True
        except OSError as error:
            say(f"cannot write to stdout: {error.strerror}")
            self._ended = True

    def hold(self, lease: Lease) -> int:
        """Tell of the grant, and hold until somebody ends it; gives the exit status."""
        # As `lockkit run`, which ends its command so much earlier: the program needs time to stop before the deadline.
        grace = default_grace(lease.ttl) + margin(lease.ttl)
        if lease.remaining() <= lease.ttl / 2:
            lease.extend()  # the grant took long
        self._lease = lease
        self._tell("granted", lease)
        told = monotonic() + lease.remaining()
        while not self.gone():
            for signum in self._signals.wait(min(LOOK_EVERY, lease.remaining() - grace)):
                if signum in ENDING:
                    return self._release(lease) or SIGNALLED + signum
            if lease.remaining() <= grace:
                reason = "stalled" if lease.stalled else "expired"
                return self._wait_after(reason if lease.held else None, lease)
            deadline = monotonic() + lease.remaining()
            # Computed from the time left, the same deadline differs by microseconds from one look to the next.
            if self._renewals and deadline > told + 0.001 and self._reads():
                self._tell("renewed", lease)
                told = deadline
        return self._release(lease)

    def _release(self, lease: Lease) -> int:
        try:
            lease.release()
        except LockLost:
            return self._wait_after(None, lease)
        self._tell("released", lease)
        return Status.OK

    def _wait_after(self, reason: str | None, lease: Lease) -> int:
        """
        Tell of the loss, and wait until the program has stopped; gives the exit status.

        A lease that was not renewed is still held, and the program may use its rest to stop. Closing the client
        releases it, so that waits until the program has ended, or that rest has: the server may answer again, and grant
        the lock to another client at once.
        """
        if reason is None:
            self._reason_known.wait(LOOK_EVERY)  # the loss may be seen before its callback has run, in another thread
            reason = self._reason
        until = monotonic() + lease.remaining()
        self._tell("lost", lease, reason=reason)
        while not self.gone() and (left := until - monotonic()) > 0:
            if ENDING.intersection(self._signals.wait(min(LOOK_EVERY, left))):
                break
        return Status.LOST
