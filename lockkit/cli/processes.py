"""
The two processes that ``lockkit run`` forks: the command, and a guard that ends it when lockkit itself cannot.

Both are forked *before* lockkit asks for the lock, while this process has one thread; the command waits on a pipe:

- ``PR_SET_PDEATHSIG`` (Linux) can only be set by the child itself, between fork and exec. Python code there is safe
  only if no other thread holds a lock at the fork; a lease has renewal threads.
- Nothing of the client (connections, lock files, leases) exists yet, so the child inherits nothing of it.

The command has a process group of its own. It and the children that it starts inherit the write end of a pipe, so its
read end reports when the last of them has ended, also one that has left the process group (setsid). flock(1) keeps its
lock in the same way. A daemon that closes inherited descriptors is not waited for: it means to be on its own.

=============================================  ==========================================================
``lockkit run`` …                              the guard kills the command's processes …
=============================================  ==========================================================
is killed (SIGKILL, out of memory) or crashes  at once: renewal has ended, and on some backends the lock
is stopped (SIGSTOP, Ctrl-Z), or starved       just before the last deadline that it received
=============================================  ==========================================================

The guard cannot help when the whole machine, VM or container is paused, and the guard with it. Then it kills the
command as soon as they wake up, and only a fencing token protects what the command does in between.
``PR_SET_PDEATHSIG`` ends no more than the command's first process (for the case that both of lockkit's are killed).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from lockkit.cli.output import say
from lockkit.cli.signals import FORWARDED, LOOK_EVERY
from lockkit.cli.status import SIGNALLED, Status
from lockkit.runtime import monotonic
from lockkit.units import Instant

PROC: Final = Path("/proc")

_PR_SET_PDEATHSIG = 1  # prctl(2)

_PASSED_ON_MIN: Final = 100
"""Number of the descriptor that the command passes on, at least: scripts choose low ones (``exec 5>file``)."""

_DEADLINE = struct.Struct("d")


class CannotExecute(Exception):
    """The command cannot be executed. No OSError: `BackendUnavailable` and `LockTimeout` mean something else."""

    def __init__(self, program: str, code: int) -> None:
        super().__init__(f"cannot execute {program}: {os.strerror(code)}{_advice(program, code)}")
        self.status = Status.NOT_FOUND if code in {errno.ENOENT, errno.ENOTDIR} else Status.NOT_EXECUTABLE


def _advice(program: str, code: int) -> str:
    """Say what else may be wrong, where the kernel's words do not tell."""
    if code == errno.ENOEXEC:
        return ". If it is a script, begin it with a line such as #!/bin/sh"
    if code == errno.ENOENT and (path := shutil.which(program)) is not None:
        return f". {path} exists, but not its interpreter: check the line that begins with #!, also for a CR at its end"
    if code == errno.ENOENT and any(map(str.isspace, program)):
        return ". Its arguments must be words of their own; for a command of the shell, give sh -c before it"
    return ""


class Command:
    """A command, forked and waiting to be started."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Fork. Call it while this process has one thread."""
        self._argv = list(argv)
        self.status: int | None = None  # once its first process has ended, as a shell has it: its own, or 128 + n
        self._group_ended = False
        go_read, self._go = os.pipe()
        self._report, report_write = os.pipe()
        self.kept, kept_write = os.pipe()  # which its processes pass on; -1 once the last of them has ended
        with suppress(OSError):
            if b"\0LC_CTYPE=" not in b"\0" + (PROC / "self" / "environ").read_bytes():
                os.environ.pop("LC_CTYPE", None)  # which Python has set (PEP 538), as under cron: grep heeds it
        parent = os.getpid()
        self.spared = {parent}  # lockkit's own processes: they have that pipe too
        sys.stdout.flush()
        sys.stderr.flush()
        self.group = os.fork()  # also the id of its process group
        if self.group == 0:
            os.close(self._go)
            os.close(self._report)
            _become(self._argv, go_read, report_write, kept_write, parent)
        os.close(go_read)
        os.close(report_write)
        os.close(kept_write)
        os.set_blocking(self.kept, False)
        # Both sides do it, so that neither can run ahead of the other. Refused only if the child has ended.
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(self.group, self.group)

    def start(self, variables: Mapping[str, str]) -> None:
        """Execute it. If somebody has killed its process, that is how it has ended: see `poll`."""
        with suppress(BrokenPipeError):
            os.write(self._go, json.dumps(dict(variables)).encode())  # below PIPE_BUF: written as a whole
        os.close(self._go)
        self._go = -1
        report = os.read(self._report, 16)
        if report:
            raise CannotExecute(self._argv[0], int(report))

    def poll(self) -> int | None:
        """Look at its first process, see `status`; gives the signal that has stopped it since the last call."""
        pid, status = os.waitpid(self.group, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            return os.WSTOPSIG(status)
        code = os.waitstatus_to_exitcode(status)
        self.status = code if code >= 0 else SIGNALLED - code
        return None

    def signal(self, signum: int) -> bool:
        """Send a signal to the whole group; SIGTERM and SIGKILL also to processes that have left it (Linux)."""
        allowed = True
        if not self._group_ended:
            try:
                os.killpg(self.group, signum)
            except ProcessLookupError:
                self._group_ended = True
            except PermissionError:
                allowed = False
        reached: set[int] = set()
        while signum in {signal.SIGTERM, signal.SIGKILL} and self.passed_on():
            new = {process.pid for process in self.processes() if process.group != self.group} - reached
            for pid in new:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signum)
            reached |= new
            if not new or signum == signal.SIGTERM:
                break  # else again: those that were killed may have forked after the list was made
        return allowed

    def gone(self) -> bool:
        """Tell whether no process of the command is left. Only when it has ended, as `group_gone`."""
        return not self.passed_on() and self.group_gone()

    def group_gone(self) -> bool:
        """
        Tell whether the group has no process left. Only when it has ended: until then its first process counts.

        Its id cannot have passed to another group while it has members, and hardly in the moment since the last look:
        the kernel gives ids out in turn.
        """
        if self._group_ended:
            return True
        try:
            os.killpg(self.group, 0)
        except ProcessLookupError:
            self._group_ended = True
            return True
        except PermissionError:
            return False
        # Process 1 reaps orphans, but in many containers late or never: then each loss would take the whole grace.
        return _has_proc() and all(process.group != self.group for process in _living())

    def passed_on(self) -> bool:
        """Tell whether a process still has the descriptor that the command passes on."""
        if self.kept < 0:
            return False
        with suppress(BlockingIOError):
            while os.read(self.kept, 4096):
                pass  # nobody has a reason to write there
            os.close(self.kept)
            self.kept = -1
            return False
        return True

    def processes(self) -> list[Process]:
        """Find the living processes of the group, and those that have the descriptor; none without /proc."""
        pipe = f"pipe:[{os.fstat(self.kept).st_ino}]" if self.kept >= 0 else None
        return [
            process
            for process in _living()
            if process.group == self.group
            or (pipe is not None and process.pid not in self.spared and _has_open(process.pid, pipe))
        ]

    def discard(self) -> None:
        """Leave no process behind that was not started, or that is still running because lockkit failed."""
        if self._go >= 0:
            os.close(self._go)
            self._go = -1
        if self.status is None:
            self.signal(signal.SIGKILL)
            os.waitpid(self.group, 0)
            self.status = SIGNALLED + signal.SIGKILL


def reap_orphans(*waited_for: int) -> None:
    """
    As process 1, which the kernel makes the parent of orphans, take the ends of those that nobody waits for.

    In a container without an init they would fill its process table.
    """
    while os.getpid() == 1:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in waited_for:
            return
        os.waitpid(ended.si_pid, 0)


class Process(NamedTuple):
    """A living process."""

    pid: int
    name: str  # at most 15 bytes
    group: int  # its process group's id


def _has_proc() -> bool:
    """Tell whether processes can be listed: on Linux with /proc, which a chroot may lack."""
    return sys.platform == "linux" and (PROC / "self").exists()


def _living() -> Iterator[Process]:
    """List the processes but zombies, which accept signals too; none if that cannot be told."""
    if not _has_proc():
        return
    for path in PROC.glob("[0-9]*/stat"):
        try:
            text = path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since
        # After the command name, which may hold anything: state, parent, process group … (proc_pid_stat(5)).
        head, _, tail = text.rpartition(b")")
        fields = tail.split()
        if fields[0] not in {b"Z", b"X"}:
            name = head.partition(b"(")[2].decode(errors="replace")
            yield Process(int(path.parent.name), name, int(fields[2]))


def _has_open(pid: int, file: str) -> bool:
    """Tell whether a process has a file open, by the name that /proc gives it; False if this user may not look."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for path in (PROC / str(pid) / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed after it was listed
                if str(path.readlink()) == file:
                    return True
    return False


def _become(argv: list[str], go: int, report: int, kept: int, parent: int) -> NoReturn:
    """In the child: wait for the start message, then execute the command."""
    code = errno.EINVAL
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":  # have the kernel kill this process when its parent dies, even without the guard
            import ctypes  # noqa: PLC0415 - only in the child

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(0)  # it died before that
        fcntl.fcntl(kept, fcntl.F_DUPFD, _PASSED_ON_MIN)  # without FD_CLOEXEC: what is executed inherits it
        # Python ignores these two, and ignored signals stay so in what is executed; lockkit's others raise.
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        message = os.read(go, 65536)
        if not message:
            os._exit(0)  # no lock, no command
        # As bytes: a name may hold what the encoding of the locale does not have.
        added = {key.encode(): value.encode() for key, value in json.loads(message).items()}
        os.execvpe(argv[0], argv, {**os.environb, **added})
    except OSError as error:
        code = error.errno or code
    finally:
        os.write(report, str(code).encode())
        os._exit(Status.NOT_FOUND)


class Guard:
    """The guard of one command. Before the first `tell` it does nothing."""

    def __init__(self, command: Command) -> None:
        """Fork. Call it while this process has one thread."""
        self._told = -inf
        control, self._control = os.pipe()
        self._report, report = os.pipe()
        self.pid = os.fork()
        command.spared.add(self.pid or os.getpid())
        if self.pid == 0:
            _stand(control, report, command)
        os.close(control)
        os.close(report)
        os.set_blocking(self._control, False)
        os.set_blocking(self._report, False)

    def tell(self, deadline: Instant) -> None:
        """
        Have the command killed at `deadline` (client monotonic time) or when this process ends, until told otherwise.

        From the first call on; cheap when the deadline has not moved.
        """
        if self._control < 0:
            return
        # Computed from the time left, the same deadline differs by microseconds from one look to the next.
        if deadline <= self._told + 0.001:
            return
        self._told = deadline
        try:
            os.write(self._control, _DEADLINE.pack(deadline))
        except BlockingIOError:
            self._told = -inf  # somebody has stopped it for hours: try again at the next look
        except BrokenPipeError:
            self._told = inf
            say("the guard process was killed: if lockkit is stopped or killed too, the command keeps running")

    def killed(self) -> bool:
        """Tell whether it has killed the command, since the last call, because a deadline passed."""
        if self._control < 0:
            return False
        try:
            return bool(os.read(self._report, 1))
        except BlockingIOError:
            return False

    def dismiss(self) -> None:
        """End it without harm to the command. May be called twice."""
        if self._control < 0:
            return
        # Killed, not asked: it then ends even if somebody has stopped it.
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._control)
        os.close(self._report)
        self._control = -1


def _stand(control: int, report: int, command: Command) -> NoReturn:
    """Be the guard, in the child."""
    try:
        # Keep nothing but the pipes: no terminal, no files of the caller, no signals meant for lockkit or its command.
        os.setsid()
        for signum in FORWARDED:
            signal.signal(signum, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nowhere, fd)
        start = 3
        for fd in sorted((control, report, command.kept)):
            os.closerange(start, fd)
            start = fd + 1
        # In many containers a process may open a billion: without close_range(2), to close each number takes minutes.
        try:
            end = max(int(path.name) for path in (PROC / "self" / "fd").iterdir()) + 1
        except OSError:
            end = os.sysconf("SC_OPEN_MAX")
        os.closerange(start, end)
        if _watch(control, report, command):
            command.signal(signal.SIGKILL)
    finally:
        os._exit(0)


def _watch(control: int, report: int, command: Command) -> bool:
    """Kill at the deadline; True when lockkit has ended and the command is to go too."""
    deadline = inf
    armed = False
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        command.signal(0)  # notes when the group has ended: the kernel may then give its id to another one
        left = max(0.0, deadline - monotonic())
        # A message first: lockkit may have renewed in time, and this process have slept.
        if poll.poll(int(min(left, LOOK_EVERY) * 1000) + 1 if left < inf else None):
            message = os.read(control, 4096)
            if not message:
                return armed
            (deadline,) = _DEADLINE.unpack(message[-_DEADLINE.size :])
            armed = True
        elif monotonic() >= deadline:
            # Said first: lockkit may go on at this moment, and renew, before it asks how the command ended.
            with suppress(BrokenPipeError):  # or it was killed at this moment
                os.write(report, b"k")
            command.signal(signal.SIGKILL)
            deadline = inf
