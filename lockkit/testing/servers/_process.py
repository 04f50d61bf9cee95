"""One child process that cannot outlive this interpreter, and the processes below it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lockkit.units import Seconds

LAUNCHER = Path(__file__).with_name("_launch.py")

# A process in an uninterruptible system call stops only after it; not worth waiting for.
STOP_TREE_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True)
class User:
    """An account to run a server as."""

    name: str
    uid: int
    gid: int


class Process:
    """
    A running program, ended by SIGKILL when this interpreter dies (on Linux).

    Args:
        command: Absolute path of the program, and its arguments.
        log: File to which its output is added.
        cwd: Its working directory.
        env: Its whole environment.
        user: Account to run as; None: ours.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        cwd: Path,
        env: Mapping[str, str],
        user: User | None = None,
    ) -> None:
        uid, gid = (user.uid, user.gid) if user else (-1, -1)
        # -I -S: no site-packages, no PYTHON* variables; half the start-up time.
        launch = [sys.executable, "-I", "-S", str(LAUNCHER)]

        def spawn() -> subprocess.Popen[bytes]:
            with log.open("ab") as output:
                return subprocess.Popen(
                    [*launch, str(os.getpid()), str(uid), str(gid), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=cwd,
                    env=dict(env),
                    # Ctrl-C in the terminal is for the tests; they end their servers.
                    start_new_session=True,
                )

        self._popen = _spawn_in_lasting_thread(spawn)

    @property
    def pid(self) -> int:
        """Process id of the server itself (the launcher became it)."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal, None while it runs."""
        return self._popen.poll()

    def wait(self, timeout: Seconds) -> bool:
        """Waits for the end, at most `timeout` seconds; tells whether it came."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, number: int) -> None:
        """Sends a signal to the main process only; nothing happens after its end."""
        self._popen.send_signal(number)

    def pause(self) -> None:
        """Stops the process and all below it with SIGSTOP; on return all have stopped."""
        self._stop_tree()

    def resume(self) -> None:
        """Lets the process and all below it go on."""
        for pid in reversed([entry.pid for entry in tree(self.pid)]):
            _kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Ends the process and all below it with SIGKILL, as a power cut would."""
        if self.returncode is None:
            # Stopped first, so that none forks another while the others are killed.
            for pid in reversed(self._stop_tree()):
                _kill(pid, signal.SIGKILL)
        self._popen.wait()

    def _stop_tree(self) -> list[int]:
        """
        Stops the whole tree and gives its process ids, parents first.

        Looks again until nothing runs: a child may be born between listing and stopping
        its parent (PostgreSQL forks for each connection), and a signal only *asks* the
        kernel: a server may answer one more request before it stops.
        """
        deadline = time.monotonic() + STOP_TREE_TIMEOUT
        while self.returncode is None:
            found = tree(self.pid)
            running = [entry.pid for entry in found if not entry.stopped]
            if not running or time.monotonic() > deadline:
                return [entry.pid for entry in found]
            for pid in running:
                _kill(pid, signal.SIGSTOP)
        return []


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the system's process table."""

    pid: int
    parent: int
    state: str

    @property
    def stopped(self) -> bool:
        """Whether it executes nothing: stopped by a signal, or dead already."""
        return self.state[0] in "TtZX"


def tree(root: int) -> list[Entry]:
    """The process `root` and all processes below it, parents before their children."""
    below: dict[int, list[Entry]] = {}
    found: list[Entry] = []
    for entry in process_table():
        below.setdefault(entry.parent, []).append(entry)
        if entry.pid == root:
            found.append(entry)
    for entry in found:  # grows while it is walked
        found += below.get(entry.pid, [])
    return found


def process_table() -> list[Entry]:
    """All processes of this machine that we can see."""
    if not sys.platform.startswith("linux"):
        columns = ["ps", "-axo", "pid=,ppid=,state="]
        lines = subprocess.run(columns, check=True, capture_output=True, text=True).stdout
        return [Entry(int(pid), int(parent), state) for pid, parent, state in map(str.split, lines.splitlines())]
    table = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            stat = (directory / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        # The second field is the name in parentheses, and may itself hold ") R 1".
        state, parent = stat.rpartition(")")[2].split()[:2]
        table.append(Entry(int(directory.name), int(parent), state))
    return table


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself, which is what any signal may race with


class _Spawner(threading.Thread):
    """
    Starts processes, and lives as long as the interpreter.

    PR_SET_PDEATHSIG counts from the *thread* that forked, not from its process: a server
    started by a fixture in a worker thread would be killed when that thread ends.
    """

    def __init__(self) -> None:
        super().__init__(name="lockkit-servers", daemon=True)
        self.jobs: queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]] = (
            queue.SimpleQueue()
        )

    def run(self) -> None:
        while True:
            job, answer = self.jobs.get()
            try:
                answer.set_result(job())
            except BaseException as error:  # noqa: BLE001 - handed to who asked
                answer.set_exception(error)


_spawners: dict[int, _Spawner] = {}
_spawners_lock = threading.Lock()


def _spawn_in_lasting_thread(
    job: Callable[[], subprocess.Popen[bytes]],
) -> subprocess.Popen[bytes]:
    with _spawners_lock:
        # By pid, because a forked child has a copy of this table but not of the thread.
        if (spawner := _spawners.get(os.getpid())) is None:
            spawner = _spawners[os.getpid()] = _Spawner()
            spawner.start()
    answer: Future[subprocess.Popen[bytes]] = Future()
    spawner.jobs.put((job, answer))
    return answer.result()
