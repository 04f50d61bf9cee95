"""
Looks after a running command and after the lease that it runs under.

Everything here serves one rule: **no process of the command's group is left when the deadline passes.** ::

    deadline - grace - margin      deadline - margin    deadline - margin/2    deadline
    ------------------------------+--------------------+----------------------+---------
    renewals may still succeed    | SIGTERM was sent   | SIGKILL was sent     | guard kills
                                  | the command ends   | the kernel ends it   | if lockkit did not

If the backend says that the lease is gone, SIGTERM is sent at once, and SIGKILL after the grace, or at the last
``deadline - margin`` if that is sooner.

The lock stays held until the last process that the command left behind has ended, unless the user does not want that.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Final

from lockkit.cli.output import say
from lockkit.cli.processes import CannotExecute, Command, Guard, reap_orphans
from lockkit.cli.signals import ENDING, LOOK_EVERY, WOKEN, Signals
from lockkit.cli.status import SIGNALLED
from lockkit.errors import BackendUnavailable, ConfigurationError, LockLost
from lockkit.runtime import monotonic
from lockkit.sync import Lease
from lockkit.units import Seconds

_GONE_EVERY: Final = 0.02
"""Seconds between two checks whether a group that received SIGTERM or SIGKILL has ended."""

_GONE_WITHIN: Final = 1.0
"""Seconds that a killed group is waited for when the deadline is over already."""

_TELL_AFTER: Final = 1.0
"""Seconds of waiting for processes that the command left behind, until the user is told which."""

_REST_EVERY: Final = 0.25
"""Seconds between two looks at those processes. The end of one that keeps the pipe is noticed at once."""

_NAMED_MAX: Final = 5
"""So many of them are named."""


class Beats:
    """The file that a command touches to say that it makes progress; only this user can write to its directory."""

    def __init__(self, stall: Seconds) -> None:
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="lockkit-beat-")
            self.path = str(Path(self._folder.name) / "beat")
            Path(self.path).touch()
        except OSError as error:
            what = "--stall needs a directory for temporary files: set TMPDIR to one in which this user may write"
            raise ConfigurationError(f"{what} ({error.strerror})") from error
        self._seen = self._touched()
        self.every = min(LOOK_EVERY, stall / 4)

    def _touched(self) -> int:
        try:
            return Path(self.path).stat().st_mtime_ns
        except OSError:
            return 0  # the command has removed it, and may make it anew

    def look(self, lease: Lease) -> None:
        """Pass a beat on. That of a lease that is lost comes too late."""
        touched = self._touched()
        if touched not in {0, self._seen}:
            self._seen = touched
            with suppress(LockLost):
                lease.beat()

    def close(self) -> None:
        """Remove the file. May be called twice."""
        self._folder.cleanup()


def default_grace(ttl: Seconds) -> float:
    """
    Seconds between SIGTERM and SIGKILL by default: a sixth of the ttl, at most 10.

    Longer gives the command more time to tidy up, and renewals less time to succeed after an outage.
    """
    return min(10.0, ttl / 6)


def grace_max(ttl: Seconds) -> float:
    """Give the longest grace: half of the ttl. The first renewal is sent at a third, and needs time for its answer."""
    return ttl / 2


def margin(ttl: Seconds) -> float:
    """Seconds for the kernel and the scheduler to end killed processes: a twentieth of the ttl, at most 1."""
    return min(1.0, ttl / 20)


class Supervisor:
    """A command that is to run under a lease, its guard, and the signals that this process gets."""

    def __init__(self, argv: Sequence[str], *, kill_after: Seconds, wait_children: bool, stall: Seconds | None) -> None:
        """
        Fork the command and its guard. Call it while this process has one thread.

        With `stall`, the lease is renewed only while the command touches the file named by LOCKKIT_BEAT so often.
        """
        self._beats = None if stall is None else Beats(stall)
        self._command = Command(argv)
        self._guard = Guard(self._command)
        self.signals = Signals()
        self._kill_after = kill_after
        self._wait_children = wait_children
        self._interrupted = 0
        self._lost = False
        self._kill_at = inf
        self._killed = False
        self._how = "ended with SIGTERM"
        self._forbidden = False

    def close(self) -> None:
        """Leave no process behind. May be called twice."""
        if self._beats is not None:
            self._beats.close()
        self._command.discard()
        self._guard.dismiss()

    def run(self, lease: Lease, grace: Seconds, more: Mapping[str, str] | None = None) -> int | None:
        """
        Run the command until it or the lease ends; nothing of it outlives the lease, whatever goes wrong here.

        Gives its exit status, as a shell has it; None if it was ended because of the lease.
        """
        self.signals.watch_command()
        self._lease, self._grace, self._margin = lease, grace, margin(lease.ttl)
        self._deadline = monotonic() + lease.remaining()
        try:
            self._guard.tell(self._deadline - self._margin / 2)
            variables = {**_variables(lease), **(more or {})}
            if self._beats is not None:
                variables["LOCKKIT_BEAT"] = self._beats.path
            self._command.start(variables)
            return self._supervise()
        except CannotExecute:
            release(lease)
            raise
        finally:
            self.close()

    def _supervise(self) -> int | None:
        """Return when the command and what it left behind have ended, or all are killed because of the lease."""
        while True:
            stopped_by = self._command.poll()
            reap_orphans(self._command.group, self._guard.pid)
            status = self._command.status
            if status is not None:
                break
            if stopped_by is not None:
                self._on_stopped(stopped_by)
            self._look_at_lease()
            self._kill_when_due()
            for signum in self.signals.wait(self._next_look() - monotonic()):
                self._on_signal(signum)
        self._take_back_terminal()
        if self._wait_children:
            self._wait_for_rest(status)
        self._heed_guard()
        if self._lost:
            self._finish_group()
            return None
        # A command that succeeded, and whose children were ended by a signal, has not done its work.
        return status or (self._interrupted and SIGNALLED + self._interrupted)

    def _heed_guard(self) -> None:
        if self._guard.killed():
            self._lost = True  # and this process has slept through it
            self._kill_at = monotonic()
            self._how = "killed by the guard"

    def _wait_for_rest(self, status: int) -> None:
        """Keep the lock until all processes that the command left behind have ended, or cannot be ended."""
        tell_at = monotonic() + _TELL_AFTER
        while not self._lost and not self._command.gone():
            reap_orphans(self._guard.pid)
            now = monotonic()
            if self._killed and now > self._kill_at + _GONE_WITHIN:
                say(f"{self._rest()} did not end: they go on without the lock")
                return
            if now >= tell_at:
                tell_at = inf
                kept = f"lock {self._lease.name!r} stays held until {self._rest()} have ended too"
                say(f"the command ended with status {status}; {kept} (--no-wait-children does not wait)")
            self._look_at_lease()
            self._kill_when_due()
            due = min(self._next_look(), tell_at, now + _REST_EVERY)
            for signum in self.signals.wait(due - monotonic(), self._command.kept):
                self._on_signal_for_rest(signum)
            self._heed_guard()

    def _rest(self) -> str:
        """Name the processes that the command left behind."""
        processes = self._command.processes()
        if not processes:
            return f"the processes of its group {self._command.group}, and those that inherited its descriptors,"
        names = [f"{process.pid} ({process.name})" for process in processes[:_NAMED_MAX]]
        more = len(processes) - len(names)
        return f"the processes that it left behind, {', '.join(names)}{f' and {more} more' if more else ''},"

    def _on_signal_for_rest(self, signum: int) -> None:
        """Forward a signal to what the command left behind: one that asks for the end as SIGTERM."""
        if signum in ENDING:  # shells have their background jobs ignore SIGINT and SIGQUIT
            self._interrupted = self._interrupted or signum
            self._on_signal(signal.SIGTERM)
        elif signum == signal.SIGTSTP:
            self._send(signum)
            self._stop_myself()
        else:
            self._on_signal(signum)

    def _next_look(self) -> float:
        due = [monotonic() + (LOOK_EVERY if self._beats is None else self._beats.every)]
        if not self._killed:
            due.append(self._kill_at)
        if not self._lost:
            due.append(self._deadline - self._grace - self._margin)
        return min(due)

    # -- the lease ---------------------------------------------------------------------------------------------------

    def _look_at_lease(self) -> None:
        if self._beats is not None:
            self._beats.look(self._lease)
        now = monotonic()
        remaining = self._lease.remaining()
        if remaining > 0:
            self._deadline = now + remaining
            self._guard.tell(self._deadline - self._margin / 2)
        if self._lost or remaining > self._grace + self._margin:
            return
        self._lost = True
        self.signals.forget_survived()  # one that comes from now on is for lockkit
        self._kill_at = min(self._kill_at, now + self._grace, self._deadline - self._margin)
        if remaining > 0:
            why = "makes no progress (--stall)" if self._lease.stalled else "was not renewed"
            say(f"lock {self._lease.name!r} {why} and its lease ends in {remaining:.1f} s: ending the command")
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)  # a stopped process takes SIGTERM only when it goes on

    def _kill_when_due(self) -> None:
        if self._killed or monotonic() < self._kill_at:
            return
        self._killed = True
        self._how = "killed"
        if not self._lost:
            say(f"the command did not end within {self._kill_after:g} s of SIGTERM (--kill-after): killing it")
        self._send(signal.SIGKILL)

    def _finish_group(self) -> None:
        """Wait until nobody of the group is left, and see to it: the command's children may outlive it."""
        while not self._command.gone() and not self._killed:
            self._kill_when_due()
            self.signals.wait(_GONE_EVERY)
        until = max(self._deadline, monotonic() + _GONE_WITHIN)
        while not self._command.gone() and monotonic() < until:
            self.signals.wait(_GONE_EVERY)
        left = self._deadline - monotonic()
        when = f"{left:.2f} s before the deadline" if left >= 0 else f"seen {-left:.2f} s after the deadline"
        what = f"lock {self._lease.name!r} (token {self._lease.token}) was lost: the command and its process group"
        rest = "" if self._command.gone() else "; some of its processes still run"
        say(f"{what} were {self._how}, {when}{rest}")

    # -- signals -----------------------------------------------------------------------------------------------------

    def _on_signal(self, signum: int) -> None:
        if signum in {WOKEN, signal.SIGCHLD}:
            return  # the loop looks at both anyway
        if signum == signal.SIGCONT:
            # Stopped for longer than the lease? Then the command must not take another step: the loop kills it.
            if self._lease.remaining() > 0:
                self._send(signal.SIGCONT)
            return
        self._send(signum)
        if signum == signal.SIGTERM:
            self._send(signal.SIGCONT)
            self._kill_at = min(self._kill_at, monotonic() + self._kill_after)

    def _send(self, signum: int) -> None:
        if not self._command.signal(signum) and not self._forbidden:
            self._forbidden = True
            say("the command runs as another user: lockkit may not signal it, and cannot end it at the deadline")

    # -- job control -------------------------------------------------------------------------------------------------

    def _on_stopped(self, signum: int) -> None:
        """
        Deal with a command that was stopped.

        By the kernel, for using the terminal from the background: lend it the terminal. By Ctrl-Z: stop too, so that
        the shell gets its prompt. By SIGSTOP: the sender meant the command, not lockkit; the lock stays held.
        """
        if signum in {signal.SIGTTIN, signal.SIGTTOU} and self._lend_terminal():
            self._send(signal.SIGCONT)
        elif signum in {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}:
            self._stop_myself()

    def _stop_myself(self) -> None:
        """Stop as the command did; returns after SIGCONT. The renewal stops too: the guard watches the deadline."""
        was_lent = self._take_back_terminal()
        # With the default action, which does nothing where no shell could let us go on (an orphaned process group).
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        if was_lent:
            self._lend_terminal()

    def _lend_terminal(self) -> bool:
        return _hand_over_terminal(os.getpgrp(), self._command.group)

    def _take_back_terminal(self) -> bool:
        return _hand_over_terminal(self._command.group, os.getpgrp())


def _variables(lease: Lease) -> dict[str, str]:
    """What a command learns of its lease, as environment variables."""
    return {
        "LOCKKIT_NAME": lease.name,
        "LOCKKIT_TOKEN": str(lease.token),
        "LOCKKIT_OWNER": lease.owner,
        "LOCKKIT_DEADLINE": f"{monotonic() + lease.remaining():.3f}",
    }


def release(lease: Lease) -> bool:
    """Give the lock back after the command has ended; False if it was lost before."""
    try:
        lease.release()
    except LockLost:
        return False
    except BackendUnavailable as error:
        # The lock protected the command to its end; it expires after its ttl.
        say(str(error))
    return True


def _hand_over_terminal(group: int, to: int) -> bool:
    """
    Hand the foreground of the controlling terminal from one process group to another. False: the first has it not.

    The command starts in the background of the terminal, because lockkit may be one part of a pipeline
    (``lockkit run … | less``) whose other parts need the foreground. A command that reads from the terminal, or changes
    its mode, is stopped by the kernel with SIGTTIN or SIGTTOU; the supervisor sees that, lends, and lets it go on.
    """
    try:
        fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return False  # no controlling terminal, as under cron
    # From the background the call itself would stop this process with SIGTTOU (tcsetpgrp(3)).
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        has_it = os.tcgetpgrp(fd) == group
        if has_it:
            os.tcsetpgrp(fd, to)
        return has_it
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(fd)
